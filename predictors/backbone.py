"""The learned predictor's backbone: a small decoder-only language model of the transformers library.

It may be fresh or pretrained, and of any architecture that tree passes come out right with. It is fed embeddings
from outside, so that its own embedding table is cut down to one unused row; it has no language-model head. What
cannot work is refused by its config, and what a config does not tell is found by trying: see `check_tree_passes`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING

from ecospec.errors import UserError, one_line
from ecospec.predictors.attention import ATTENTION
from ecospec.predictors.kv_cache import SlotCache, tree_mask
from ecospec.predictors.packing import PackedPass, SlotPool
from ecospec.predictors.pretrained import UNLOADABLE, check_complete, check_folder

FRESH_TYPE = "llama"
"""The ``model_type`` of a fresh backbone, and of a description without one."""

_UNSAVED = ("_name_or_path", "auto_map", "dtype")
_ATTENDS = ("full_attention", "sliding_attention")
TOLERANCE = 1e-3
"""Largest difference that `check_tree_passes` takes for rounding, as a share of the largest state. A token more
or less in sight makes far more, also in a model whose weights are as small as the library draws them."""


class UnusableBackboneError(Exception):
    """Why a model cannot be a backbone; the text goes on from the model's name."""


def backbone_config(width: int, layers: int, heads: int, context: int) -> dict[str, Any]:
    """A fresh small decoder-only backbone, as a LlamaConfig's arguments."""
    return {
        "model_type": FRESH_TYPE,
        "vocab_size": 1,  # it is fed embeddings; its own table is one unused row
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": None,
    }


def read_config(described: Any) -> Any:
    """The transformers config that `describe` or `backbone_config` wrote down.

    Raises:
        UnusableBackboneError: no such model can be a backbone.
        Exception: whatever the library raises on what is no config.
    """
    if not isinstance(described, Mapping):
        raise TypeError(f"a {type(described).__name__}, expected an object")
    arguments = dict(described)
    config = AutoConfig.for_model(arguments.pop("model_type", FRESH_TYPE), **arguments)
    check_config(config)
    return config


def build(config: Any) -> Any:
    """A backbone with random weights, float32, on the CPU."""
    model = AutoModel.from_config(config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=False)
    model.config._attn_implementation = ATTENTION  # asking for it above is refused for want of a claim to have sdpa
    return model


def load_pretrained(name: str, context: int) -> Any:
    """The decoder of a pretrained causal LM, float32, on the CPU, its embedding table cut down to one row.

    Args:
        name: a checkpoint folder or a hub name.
        context: the longest sequence that the target can have, in tokens.

    Raises:
        UserError: there is nothing that can be loaded without running code of its own, or it cannot be a backbone.
    """
    what = "--backbone"
    check_folder(what, name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        check_config(config, context)
        model, report = AutoModel.from_pretrained(
            name,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # refused below, with the tensor's name
            output_loading_info=True,
        )
        model.config._attn_implementation = ATTENTION
        _drop_embedding(model)
        check_tree_passes(model)
        check_complete(what, name, report)  # last: what has no decoder lacks tensors, which is not the reason
    except UnusableBackboneError as error:
        raise UserError(f"{what} {name}: {error}") from error
    except (*UNLOADABLE, ImportError) as error:
        reason = one_line(error) or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = "it runs code of its own, which is never done here"
        raise UserError(
            f"{what} {name}: not loadable as a causal LM ({reason}); "
            "expected a local checkpoint folder or a hub name that is cached or reachable"
        ) from error
    return model


def _drop_embedding(model: Any) -> None:
    table = model.get_input_embeddings().weight
    if table.shape[1] != model.config.hidden_size:
        raise UnusableBackboneError(
            f"its embeddings are {table.shape[1]} wide and its states {model.config.hidden_size}; expected one width"
        )
    model.set_input_embeddings(nn.Embedding(1, table.shape[1]))
    model.config.vocab_size = 1
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):  # of a vocabulary that is gone
        with suppress(StrictDataclassError):  # a config may insist on one; it is as unused as the table
            setattr(model.config, key, None)


def embedding_name(model: Any) -> str:
    """Name of the one tensor that a backbone does not use: its own embedding table."""
    table = model.get_input_embeddings().weight
    found: str = next(name for name, parameter in model.named_parameters() if parameter is table)
    return found


def describe(model: Any) -> dict[str, Any]:
    """All of a backbone's config, from which `read_config` makes it again."""
    found: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return {key: value for key, value in found.items() if key not in _UNSAVED}


def reach(config: Any) -> int:
    """Most tokens of a sequence that a backbone can read with every token in sight of all before it."""
    return min(_positions(config), _window(config) or _positions(config))


def _positions(config: Any) -> int:
    return int(config.max_position_embeddings)


def _window(config: Any) -> int | None:
    """Its sliding window in tokens, if any layer has one."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    on = getattr(config, "use_sliding_window", True) and (not layers or "sliding_attention" in layers)
    return int(window) if window and on else None


def check_config(config: Any, context: int = 0) -> None:
    """Refuse what a config says cannot work.

    Args:
        context: the longest sequence that the target can have, where that is known.

    Raises:
        UnusableBackboneError: why not.
    """
    kind = config.model_type
    if getattr(config, "quantization_config", None):
        raise UnusableBackboneError("its weights are quantised; expected floating-point weights, which can be trained")
    if config.is_encoder_decoder:
        raise UnusableBackboneError(f"{kind} is an encoder-decoder; expected a decoder-only causal LM")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnusableBackboneError(f"{kind} is no causal LM of the library; expected a decoder-only causal LM")
    if config.get_text_config() is not config:
        raise UnusableBackboneError(f"{kind} has other parts than a text decoder; expected a decoder-only causal LM")
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - set(_ATTENDS))
    if odd:
        raise UnusableBackboneError(
            f"it has {odd[0]} layers, which cannot take a draft tree; expected attention over all tokens in every layer"
        )
    if getattr(MODEL_MAPPING[type(config)], "_is_stateful", False):
        raise UnusableBackboneError(
            f"{kind} keeps a running state, which cannot take a draft tree; expected attention in every layer"
        )
    if getattr(config, "max_position_embeddings", None) is None:
        raise UnusableBackboneError(f"the config of {kind} does not say max_position_embeddings")
    window = _window(config)
    if window is not None and window < min(context, _positions(config)):
        raise UnusableBackboneError(
            f"it has a sliding window of {window} tokens under a context of {min(context, _positions(config))}; "
            "expected attention over all tokens in every layer"
        )
    rotary = str(getattr(config, "rope_parameters", None))
    for name in ("longrope", "dynamic"):
        if f"'{name}'" in rotary:
            raise UnusableBackboneError(
                f"it has {name} positions, whose scale depends on the longest row of a pass: what a token gives "
                "would depend on what else is in its tree"
            )


def states(
    model: Any,
    inputs: Tensor,
    *,
    cache: SlotCache | PackedPass | None = None,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """A backbone's last hidden states [B, n, H] for inputs [B, n, H], behind what ``cache`` keeps."""
    argument = {} if cache is None else {_cache_argument(model): cache}
    found: Tensor = model(
        inputs_embeds=inputs,
        attention_mask=mask,
        position_ids=positions,
        use_cache=cache is not None,
        **argument,
    ).last_hidden_state
    return found


def _cache_argument(model: Any) -> str:
    """transformers renamed ``past_key_values`` to ``cache``."""
    name: str | None = getattr(model, "_ecospec_cache_argument", None)
    if name is None:
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        model._ecospec_cache_argument = name
    return name


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


@contextmanager
def _attending(model: Any) -> Iterator[set[int]]:
    """Collect the identities of the modules that attend through our function."""
    ours, probe, found = ALL_ATTENTION_FUNCTIONS[ATTENTION], f"{ATTENTION}_noted", set[int]()

    def noting(module: Any, *args: Any, **kwargs: Any) -> Any:
        found.add(id(module))
        return ours(module, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(probe, noting)
    with _attention(model, probe):
        yield found


@torch.no_grad()
def check_tree_passes(model: Any) -> None:
    """Try whether tree passes give what plain causal passes over every path give.

    A tree of four nodes and what follows it, alone and packed with another request, through the KV memories that
    decoding uses, against the library's own eager attention over whole sequences. It takes a dozen passes over at
    most six tokens.

    Args:
        model: a backbone in float32 on the CPU, with the weights it will have.

    Raises:
        UnusableBackboneError: they do not, or it cannot take them.
    """
    model.eval()
    inputs = 0.05 * torch.randn(1, 10, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    alone, other = [0, 1], [7]  # prompts of two requests
    tree, chain = {2: [2], 3: [2, 3], 4: [2, 4], 5: [2, 4, 5]}, {8: [8], 9: [8, 9]}  # nodes with their paths
    after = 6  # comes behind the path of node 5
    kind, layers = model.config.model_type, int(model.config.num_hidden_layers)
    modules: set[int] | None = None

    def plain(tokens: list[int]) -> Tensor:
        return states(model, inputs[:, tokens])[0]

    try:
        with _attention(model, "eager"):
            expected = {node: plain([*alone, *path])[-1] for node, path in tree.items()}
            expected |= {node: plain([*other, *path])[-1] for node, path in chain.items()}
            whole = plain([*alone, 2, 4, 5, after])
            expected[after] = whole[-1]
        with _attending(model) as modules:
            found = list(zip((2, 4, 5, after), plain([*alone, 2, 4, 5, after])[2:], strict=True))
            found += _in_trees(model, inputs, alone, other, tree, chain, after)
    except UserError as error:
        raise UnusableBackboneError(one_line(error)) from error
    except UNLOADABLE as error:
        if modules == set():
            raise UnusableBackboneError(_not_ours(kind, layers, 0)) from error
        raise UnusableBackboneError(
            f"{kind} cannot take a draft tree ({type(error).__name__}: {one_line(error)})"
        ) from error
    bound = TOLERANCE * max(float(state.abs().max()) for state in expected.values())

    def differ(pairs: Iterable[tuple[int, Tensor]]) -> bool:
        return not all(float((state - expected[node]).abs().max()) <= bound for node, state in pairs)

    if differ(zip((2, 4, 5), whole[2:5], strict=True)):
        raise UnusableBackboneError(f"in {kind} a token sees those behind it; expected a decoder-only causal LM")
    if len(modules) != layers:
        raise UnusableBackboneError(_not_ours(kind, layers, len(modules)))
    if differ(found):
        raise UnusableBackboneError(f"in {kind} a draft token's states are not those of a plain pass over its path")


def _not_ours(kind: str, layers: int, ours: int) -> str:
    return (
        f"of the {layers} layers of {kind} {ours} attend through the library's attention functions; expected all, "
        "since what a draft token may see is decided there"
    )


def _in_trees(
    model: Any,
    inputs: Tensor,
    alone: list[int],
    other: list[int],
    tree: Mapping[int, list[int]],
    chain: Mapping[int, list[int]],
    after: int,
) -> Iterator[tuple[int, Tensor]]:
    """Nodes with their states as decoding gets them: of a request alone, and of two in one pass."""
    layers, capacity = int(model.config.num_hidden_layers), 8
    seen, positions = torch.zeros(2, len(tree), len(tree), dtype=torch.bool), []
    for row, (prompt, nodes) in enumerate(((alone, tree), (other, chain))):
        for at, path in enumerate(nodes.values()):
            seen[row, at, [list(nodes).index(node) for node in path]] = True
            positions.append(len(prompt) + len(path) - 1)
    cache = SlotCache(layers, capacity)
    states(model, inputs[:, alone], cache=cache)
    cache.advance(len(alone))
    mask, given = tree_mask(seen[0], cache.length), torch.tensor([positions[: len(tree)]])
    yield from zip(tree, states(model, inputs[:, list(tree)], cache=cache, positions=given, mask=mask)[0], strict=True)
    cache.keep([0, 2, 3])
    mask, given = tree_mask(torch.ones(1, 1, dtype=torch.bool), cache.length), torch.tensor([[cache.length]])
    yield after, states(model, inputs[:, [after]], cache=cache, positions=given, mask=mask)[0, 0]
    pool = SlotPool(layers, capacity, 2)
    for prompt, row in zip((alone, other), pool.caches, strict=True):
        states(model, inputs[:, prompt], cache=row)
        row.advance(len(prompt))
    both, given = PackedPass(pool, [len(tree), len(chain)], seen), torch.tensor([positions])
    every = [*tree, *chain]
    yield from zip(every, states(model, inputs[:, every], cache=both, positions=given, mask=both.mask)[0], strict=True)
