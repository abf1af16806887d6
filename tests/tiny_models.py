"""Random models of a few thousand parameters, trees and requests, for the tests of the engine.

Everything is a function of its seed. Weights are drawn ten times wider than the library does, so that logits
differ by whole units and a wrong mask or position shows far above float noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ecospec.harness.choosing import Sampling, TokenChooser
from ecospec.harness.decoding import Generation, Speculation, decode_ar, decode_speculative
from ecospec.harness.eagle3 import Eagle3Config, Eagle3Head
from ecospec.harness.loading import target_view
from ecospec.harness.stopping import StopRule, token_limit
from ecospec.harness.target import Target
from ecospec.policies import DraftTree
from ecospec.predictors.backbone import backbone_config
from ecospec.predictors.contract import PredictionRequest
from ecospec.predictors.learned import BoundLearned, ExpertPredictor

torch.set_num_threads(1)

FAMILIES = ("qwen3_moe", "mixtral", "olmoe")
VOCAB, HIDDEN, LAYERS, EXPERTS, TOP_K, CONTEXT = 64, 32, 3, 8, 2, 96
FEATURE_LAYERS = (0, 1, 2)
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_FAMILY: dict[str, Any] = {
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            "head_dim": 8,
            "num_experts": EXPERTS,
            "moe_intermediate_size": 16,
            "intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig,
        {"num_local_experts": EXPERTS, "intermediate_size": 16, "sliding_window": None},
    ),
    "olmoe": (
        OlmoeForCausalLM,
        OlmoeConfig,
        {"num_experts": EXPERTS, "intermediate_size": 16, "norm_topk_prob": False},
    ),
    "llama": (LlamaForCausalLM, LlamaConfig, {"intermediate_size": 64}),
}


def tiny_model(family: str = "qwen3_moe", seed: int = 0, **overrides: Any) -> Any:
    """The library's own model in float32, with eager experts and sdpa attention: what a user would run."""
    model_class, config_class, particular = _FAMILY[family]
    given = {**_COMMON, **particular, **overrides}
    if family == "llama":
        del given["num_experts_per_tok"]
    torch.manual_seed(seed)
    model = model_class._from_config(
        config_class(**given),
        dtype=torch.float32,
        attn_implementation="sdpa",
        **({} if family == "llama" else {"experts_implementation": "eager"}),
    )
    return model.eval().requires_grad_(False)


def tiny_target(
    family: str = "qwen3_moe",
    seed: int = 0,
    *,
    feature_layers: Sequence[int] = FEATURE_LAYERS,
    **overrides: Any,
) -> Target:
    """The same model under our adapter."""
    return Target(tiny_model(family, seed, **overrides), feature_layers=feature_layers)


def head_facts(target_vocab: int = VOCAB, draft_vocab: int | None = None, **overrides: Any) -> dict[str, Any]:
    """A head's ``config.json`` in the published layout, fitting `tiny_target`."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "vocab_size": target_vocab,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS),
            "use_aux_hidden_state": True,
        },
        **overrides,
    }


def tiny_head(seed: int = 1, *, target_vocab: int = VOCAB, draft_vocab: int | None = None, **facts: Any) -> Eagle3Head:
    """A random head; with a smaller draft vocabulary its ids are spread over the target's."""
    torch.manual_seed(seed)
    head = Eagle3Head(Eagle3Config.from_dict(head_facts(target_vocab, draft_vocab, **facts)))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.25)
    if draft_vocab is not None:
        ids = torch.randperm(target_vocab)[:draft_vocab].sort().values
        head.d2t = ids - torch.arange(draft_vocab)
    return head.eval().requires_grad_(False)


def random_tokens(rng: np.random.Generator, count: int, vocab: int = VOCAB) -> list[int]:
    """Token ids."""
    return [int(token) for token in rng.integers(0, vocab, count)]


def random_tree(rng: np.random.Generator, size: int, vocab: int = VOCAB) -> DraftTree:
    """A tree of any shape."""
    parents = [-1, *(int(rng.integers(0, node)) for node in range(1, size))]
    probs = rng.random(size)
    probs[0] = 1.0
    return DraftTree(rng.integers(0, vocab, size), parents, probs)


def random_selection(rng: np.random.Generator, tree: DraftTree, count: int) -> npt.NDArray[np.int64]:
    """A prefix-closed selection of ``count`` nodes, ascending."""
    selected = [0]
    while len(selected) < count:
        open_nodes = [n for n in range(1, tree.size) if n not in selected and tree.parents[n] in selected]
        if not open_nodes:
            break
        selected.append(int(rng.choice(open_nodes)))
    return np.array(sorted(selected))


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Node indices from the root to ``node``."""
    path = [node]
    while path[0] != 0:
        path.insert(0, int(tree.parents[path[0]]))
    return path


@torch.no_grad()
def plain_forward(model: Any, tokens: Sequence[int], **options: Any) -> Any:
    """One full forward pass of the library's model over a whole sequence."""
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False, **options)


def plain_routing(model: Any, tokens: Sequence[int]) -> Tensor:
    """Experts [L, n, K], ascending, from the router logits that the library reports."""
    logits = plain_forward(model, tokens, output_router_logits=True).router_logits
    return torch.stack([layer.topk(TOP_K, dim=-1).indices.sort(-1).values for layer in logits])


class Letters:
    """A tokenizer of single characters: token i is the i-th of this alphabet, which begins anew where it ends."""

    alphabet = "".join(chr(code) for code in range(48, 48 + VOCAB))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.alphabet[token % VOCAB] for token in tokens)


def rule_for(
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    eos: Sequence[int] = (),
    stop: Sequence[str] = (),
    context: int = CONTEXT,
) -> StopRule:
    """A stop rule as a run makes it."""
    limit = token_limit(len(prompt), max_new_tokens, context, "prompt")
    return StopRule(Letters(), limit, frozenset(eos), tuple(stop))


def run_ar(
    target: Target, prompt: Sequence[int], sampling: Sampling | None = None, n: int = 40, **rule: Any
) -> Generation:
    """Plain decoding of one prompt."""
    chooser = TokenChooser(sampling or Sampling(), "r")
    return decode_ar(target, prompt, chooser, rule_for(prompt, n, context=target.context, **rule))


def run_speculative(
    target: Target,
    method: Speculation,
    prompt: Sequence[int],
    sampling: Sampling | None = None,
    n: int = 40,
    **rule: Any,
) -> Generation:
    """Speculative decoding of one prompt."""
    chooser = TokenChooser(sampling or Sampling(), "r")
    return decode_speculative(target, method, prompt, chooser, rule_for(prompt, n, context=target.context, **rule))


def trees(seed: int, count: int, largest: int = 12) -> Iterator[tuple[DraftTree, npt.NDArray[np.int64]]]:
    """Random trees with random selections."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        tree = random_tree(rng, int(rng.integers(1, largest + 1)))
        yield tree, random_selection(rng, tree, int(rng.integers(1, tree.size + 1)))


def asked(prompt: Sequence[int], capacity: int, truth: Any = None, states: Any = None) -> PredictionRequest:
    """A request to a predictor that has, unless they are given, no use for true routing and drafter's states."""
    return PredictionRequest(prompt, capacity, truth, states)


def tiny_predictor(target: Target, seed: int = 2) -> BoundLearned:
    """A random learned predictor for a target."""
    geometry = target.geometry
    torch.manual_seed(seed)
    backbone = backbone_config(width=16, layers=2, heads=2, context=geometry.context)
    model = ExpertPredictor(geometry.hidden_size, geometry.moe_layers, geometry.experts, backbone)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.4)
    return BoundLearned(model.eval().requires_grad_(False), target_view(target))
