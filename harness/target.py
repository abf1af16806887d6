"""The adapter over a transformers MoE causal LM: prefill, decode, verify a tree, commit.

AR and speculative decoding go through the same `Target`; a `TargetSession` is one request's KV memory, and
`target_batch.TargetBatch` several requests' that are decoded together.
After every step the memory holds exactly the emitted tokens but the last one (the bonus token, whose row
the next pass writes).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ecospec.errors import UserError, one_line
from ecospec.harness.distributed import lockstep_of
from ecospec.harness.experts import expert_bytes, install
from ecospec.harness.sharding import expert_count, is_spread, stored_bytes, whole_embedding
from ecospec.harness.supported import check_config
from ecospec.policies import DraftTree
from ecospec.predictors.attention import ATTENTION
from ecospec.predictors.kv_cache import SlotCache, tree_mask
from ecospec.predictors.layout import lay_out_linears
from ecospec.predictors.packing import PackedPass
from ecospec.predictors.pass_mask import for_several_devices, is_copy
from ecospec.predictors.pretrained import UNLOADABLE
from ecospec.predictors.sight import Sight, passing

FINAL: Final = "final"
"""In place of a feature layer: the decoder's last state, behind its final norm, which the language-model head reads."""


@dataclass(frozen=True)
class Pass:
    """What one forward pass over n tokens gave.

    Attributes:
        logits: [m, V] float32; m = n, except after a prefill, where m = 1 (the last token's).
        features: [n, F · Ht] outputs of the F feature layers, concatenated; empty without feature layers.
        routing: int64 [MoE layers, n, K], the experts each token was sent to in exactly this pass.
    """

    logits: Tensor
    features: Tensor
    routing: Tensor


@dataclass(frozen=True)
class Geometry:
    """The sizes a drafter, a predictor and a report need to know of a target."""

    vocab_size: int
    hidden_size: int
    layers: int
    moe_layers: int
    experts: int
    top_k: int
    context: int
    expert_bytes: int
    always_read_bytes: int


class Target:
    """A transformers causal LM, in evaluation mode, with its experts and attention routed through us.

    Attributes:
        windowed: whether some layers see less than the context.
    """

    def __init__(self, model: Any, *, feature_layers: Sequence[int | str] = ()) -> None:
        """Take over ``model``.

        Args:
            model: a causal LM whose routed experts go through the transformers experts interface.
            feature_layers: indices of decoder layers whose *outputs* are the drafter's features.

        Raises:
            UserError: the model has no such experts, or a feature layer does not exist.
        """
        self.model: Any = model.eval().requires_grad_(False)
        self.config = self.model.config.get_text_config(decoder=True)
        check_config(type(model).__name__, self.config)
        self.model.config.output_router_logits = False  # its auxiliary loss does not know a 4-D mask
        self._tap = install(model)
        lay_out_linears(model)
        self.config._attn_implementation = ATTENTION
        self._embedding = whole_embedding(model)
        self._spread = is_spread(model)
        self._lockstep = lockstep_of(model)
        self._decoder = decoder_of(self.model)
        self._layers: Any = self._decoder.layers
        self.feature_layers: tuple[int | str, ...] = ()
        self._features: dict[int | str, Tensor] = {}
        self._features_hooked: set[int | str] = set()
        self.read_features(feature_layers)
        parameters = inspect.signature(type(self.model).forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.windowed = False
        self.geometry = self._measure_geometry(self._try())

    def _try(self) -> Pass:
        """A pass over a draft tree, which gives what no config tells: K, whether all layers attend through us with
        the masks that they are given, and how far each sees.

        Raises:
            UserError: a layer does not attend so, or the routing of one is not captured.
        """
        name = type(self.model).__name__
        cache = SlotCache(len(self._layers), 5)
        device = self.device
        try:
            with torch.inference_mode(), passing(None) as passed:
                self.forward(cache, torch.arange(2, device=device), None, None)
            cache.advance(2)
            if any(span < 1 for span in passed.spans):
                raise ValueError("a sliding window of no token")
            self.windowed = any(span < self.context for span in passed.spans)
            tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=device)
            mask = tree_mask(tree, cache.length)
            with torch.inference_mode(), passing(None) as passed:
                result = self.forward(cache, torch.zeros(3, dtype=torch.int64, device=device), tree[0] + 2, mask)
        except UNLOADABLE as error:
            raise UserError(
                f"{name}: a pass over a draft tree fails ({one_line(error)}); it is not supported"
            ) from error
        made = [mask, *passed.given]
        came = [any(is_copy(brought, each) for each in made) for _, brought in passed.attended]
        if came != [True] * len(self._layers):
            raise UserError(
                f"{name}: of its {len(self._layers)} layers {sum(came)} attend to a draft tree through the "
                "transformers attention interface; expected all, with the mask of the tree; it is not supported"
            )
        return result

    def read_features(self, layers: Sequence[int | str]) -> None:
        """Return the outputs of these decoder layers, or `FINAL`, in this order, as `Pass.features` from now on.

        Raises:
            UserError: a layer does not exist.
        """
        wrong = [i for i in layers if i != FINAL and not (isinstance(i, int) and 0 <= i < len(self._layers))]
        if wrong:
            raise UserError(f"feature layers {wrong} do not exist; the target has {len(self._layers)} layers")
        for index in set(layers) - self._features_hooked:
            module = self._layers[index] if isinstance(index, int) else self._decoder
            module.register_forward_hook(self._keep_features(index))
            self._features_hooked.add(index)
        self.feature_layers = tuple(layers)

    def _keep_features(self, index: int | str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._features[index] = output if isinstance(output, Tensor) else output[0]

        return hook

    def _measure_geometry(self, tried: Pass) -> Geometry:
        modules = self._tap.modules
        routed = sum(p.numel() * p.element_size() for m in modules for p in m.parameters())
        each = expert_bytes(modules[0]) if modules else 0
        head = self.model.get_output_embeddings().weight
        total, untied = stored_bytes(self.model)
        always = total - routed - untied  # of an untied input embedding a step reads a few rows only
        return Geometry(
            vocab_size=int(head.shape[0]),
            hidden_size=int(self.config.hidden_size),
            layers=len(self._layers),
            moe_layers=len(modules),
            experts=expert_count(modules[0]) if modules else 0,
            top_k=tried.routing.shape[-1],
            context=self.context,
            expert_bytes=each,
            always_read_bytes=always,
        )

    @property
    def context(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return int(self.config.max_position_embeddings)

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.embedding.device

    @property
    def embedding(self) -> Tensor:
        """The input embedding [V, Ht], whole and where token ids go."""
        own: Tensor = self.model.get_input_embeddings().weight
        return own if self._embedding is None else self._embedding

    def forcing(self, experts: Tensor) -> AbstractContextManager[None]:
        """In this block every pass uses these experts, int64 [MoE layers, tokens, K]; see `RoutingTap.forcing`."""
        return self._tap.forcing(experts)

    def new_session(self, capacity: int) -> TargetSession:
        """KV memory for one request of at most ``capacity`` tokens."""
        return TargetSession(self, SlotCache(len(self._layers), capacity))

    def forward(
        self,
        cache: SlotCache | PackedPass,
        ids: Tensor,
        positions: Tensor | None,
        mask: Tensor | None,
        *,
        last_logits_only: bool = False,
    ) -> Pass:
        """One pass over ids [n]; keys and values land behind those kept in ``cache``."""
        self._tap.clear()
        if positions is None:  # said in any case: some models otherwise count from 0 in every pass
            assert isinstance(cache, SlotCache)
            positions = torch.arange(cache.length, cache.length + len(ids), device=ids.device)
        if self._lockstep is not None:
            self._lockstep.check(ids, positions, mask)
        if self._spread and mask is not None:
            mask = for_several_devices(mask)
        arguments: dict[str, Any] = {self._cache_argument: cache, "attention_mask": mask}
        seeing: AbstractContextManager[Any] = nullcontext()
        if mask is not None and self.windowed:  # then the model makes its masks itself, one for each kind of layer
            arguments["attention_mask"] = None
            seeing = passing(_sight(cache, mask, positions))
        with seeing:
            out = self.model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=True,
                logits_to_keep=1 if last_logits_only else 0,
                **arguments,
            )
        features = [self._features[i][0].to(ids.device) for i in self.feature_layers]
        return Pass(
            logits=out.logits[0].to(ids.device).float(),
            features=torch.cat(features, dim=-1) if features else out.logits.new_zeros(ids.shape[0], 0),
            routing=self._tap.read() if self._tap.modules else ids.new_zeros(0, len(ids), 0),
        )

    @torch.no_grad()
    def teach(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits [B, S, V], features [B, S, F · Ht] and routing [L, B·S, K] of whole sequences, for training.

        The routing is None where the experts do not go through the tap.
        """
        self._tap.clear()
        out = self.model(input_ids=ids, use_cache=False)
        features = [self._features[i] for i in self.feature_layers]
        joined = torch.cat(features, dim=-1) if features else out.logits.new_zeros(*ids.shape, 0)
        return out.logits, joined, self._tap.read() if self._tap.reported else None


def decoder_of(model: Any) -> Any:
    """The part of a causal LM that has the decoder layers, as ``layers``, and gives the last state.

    Raises:
        UserError: there is none in the usual place.
    """
    for owner in (model.get_decoder(), getattr(model, "model", None)):
        if getattr(owner, "layers", None) is not None:
            return owner
    raise UserError(f"{type(model).__name__} has no list of decoder layers; it is not supported")


def _sight(cache: SlotCache | PackedPass, mask: Tensor, positions: Tensor) -> Sight:
    """Who sees whom in a pass over tokens at these positions."""
    if isinstance(cache, PackedPass):
        return Sight(mask, *cache.positions(positions), cache.least)
    past = torch.arange(cache.length, device=mask.device)
    return Sight(mask, positions[None], torch.cat((past, positions))[None], cache.length)


class TargetSession:
    """One request: a target and the KV memory of its prompt and emitted tokens."""

    def __init__(self, target: Target, cache: SlotCache) -> None:
        self.target = target
        self.cache = cache

    @property
    def length(self) -> int:
        """Number of tokens whose keys and values are kept."""
        return self.cache.length

    def _ids(self, tokens: Sequence[int] | npt.NDArray[np.int64]) -> Tensor:
        return torch.as_tensor(np.asarray(tokens, dtype=np.int64), device=self.target.device)

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> Pass:
        """Process tokens into the memory, empty or not; logits are of the last one only."""
        ids = self._ids(tokens)
        mask = None
        if self.length:
            causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=ids.device).tril()
            mask = tree_mask(causal, self.length)
        result = self.target.forward(self.cache, ids, None, mask, last_logits_only=True)
        self.cache.advance(len(tokens))
        return result

    @torch.inference_mode()
    def decode(self, token: int) -> Pass:
        """Process one token and keep it: an AR step."""
        result = self.target.forward(self.cache, self._ids([token]), None, None)
        self.cache.advance(1)
        return result

    @torch.inference_mode()
    def verify(self, tree: DraftTree, nodes: npt.NDArray[np.int64]) -> Pass:
        """Process the selected nodes (ascending, prefix-closed, root first) in one pass; nothing is kept.

        Row i of the result belongs to ``nodes[i]``. A node sits at the position of its depth behind the
        kept tokens and sees these and its own ancestors.
        """
        device = self.target.device
        ids = self._ids(tree.tokens[nodes])
        positions = torch.as_tensor(tree.depths[nodes] + self.length, device=device)
        if len(nodes) == 1:
            return self.target.forward(self.cache, ids, positions, None)
        ancestors = torch.as_tensor(tree.ancestors[np.ix_(nodes, nodes)], device=device)
        return self.target.forward(self.cache, ids, positions, tree_mask(ancestors, self.length))

    def commit(self, rows: Sequence[int]) -> None:
        """Keep the accepted path of the last `verify`: its row indices, root first."""
        self.cache.keep(rows)
