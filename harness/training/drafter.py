"""Train an EAGLE-3 head for a target with training-time test: the head sees its own states, as at run time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from ecospec.errors import UserError
from ecospec.harness.eagle3 import Eagle3Config, Eagle3Head
from ecospec.harness.eagle3_loading import load_eagle3
from ecospec.harness.loading import load_target
from ecospec.harness.training.corpus import build_corpus
from ecospec.harness.training.experts import use_training_experts
from ecospec.harness.training.own_text import own_text, real_tokens
from ecospec.harness.training.target import write_training_record
from ecospec.predictors.attention import grouped_sdpa
from ecospec.predictors.training import LoopConfig, refuse_another_run, train


@dataclass(frozen=True)
class DrafterShape:
    """Geometry of the head; hidden size and head size are the target's."""

    draft_vocab_size: int = 2048
    intermediate_size: int = 768
    heads: int = 4
    kv_heads: int = 2
    feature_layers: tuple[int, int, int] = (1, 3, 5)


@dataclass(frozen=True)
class DrafterRecipe:
    """How a head is trained.

    Attributes:
        test_steps: draft steps unrolled in training, each weighted by ``decay`` more.
        own_text: windows of the target's own greedy text to train on as well (see `own_text`); 0 for none.
        own_share: share of a batch that comes from them.
        start: folder of a head to go on from, or empty; its vocabulary is kept.
        evaluate_every: steps from one evaluation to the next.
        patience: evaluations in a row without a better share of first guesses that are the target's, after which
            to stop; 0 for never. Whenever it stops, the weights of the best evaluation are the ones kept.
    """

    steps: int = 800
    seconds: float = 0.0
    learning_rate: float = 2e-3
    tokens_per_batch: int = 4096
    window: int = 512
    test_steps: int = 3
    decay: float = 0.8
    seed: int = 1
    own_text: int = 0
    own_share: float = 0.75
    start: str = ""
    evaluate_every: int = 50
    patience: int = 8


def draft_vocabulary(counts: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """The ``size`` most frequent token ids, ascending; ties go to the lower id."""
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def unrolled_states(head: Eagle3Head, embeddings: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """The head's states when it drafts ``steps`` tokens after every position at once.

    Entry t holds the embedding of token t+1. In step 0 its hidden state is fused from the target's; in step
    k it is the head's own output of step k−1 at entry t−1. It sees step-0 entries up to t−k and, for
    i = 1..k, the step-i entry at t−k+i: exactly what a draft node of depth k sees at run time. Entries
    t < k of step k have no such past and are to be ignored.

    Args:
        embeddings: [B, n, H]. features: [B, n, 3·Ht].

    Returns:
        ``steps`` tensors [B, n, H].
    """
    layer, attention = head.midlayer, head.midlayer.self_attn
    n = embeddings.shape[1]
    positions = torch.arange(n, device=embeddings.device)[None]
    hidden = head.fuse(features)
    rotary = head.rotary(hidden, positions)
    causal = torch.ones(n, n, dtype=torch.bool, device=embeddings.device).tril()
    own = torch.eye(n, dtype=torch.bool, device=embeddings.device)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    for k in range(steps):
        entered, residual = layer.enter(embeddings, hidden)
        query, key, value = attention.project(entered, rotary)
        keys.append(key)
        values.append(value)
        seen = [causal.tril(-k), *(_below(own, k - i) for i in range(1, k + 1))]
        attended = grouped_sdpa(
            query, torch.cat(keys, dim=2), torch.cat(values, dim=2), torch.cat(seen, dim=1)[None, None], None
        )
        state = head.recurrent(residual, attended)
        outputs.append(state)
        hidden = torch.cat((torch.zeros_like(state[:, :1]), state[:, :-1]), dim=1)
    return outputs


def _below(own: Tensor, by: int) -> Tensor:
    """The identity mask [n, n] moved down: entry t sees entry t − by."""
    return own.roll(by, dims=0).tril()


def train_drafter(
    target_path: Path,
    corpus_path: Path,
    output: Path,
    *,
    shape: DrafterShape | None = None,
    recipe: DrafterRecipe | None = None,
    device: str = "cpu",
    resume: bool = False,
) -> dict[str, Any]:
    """Train a head on what the target would say next, and save it in the published layout."""
    shape, recipe = shape or DrafterShape(), recipe or DrafterRecipe()
    torch.manual_seed(recipe.seed)
    loaded = load_target(str(target_path), dtype=torch.float32, device=device, feature_layers=shape.feature_layers)
    target, tokenizer = loaded.target, loaded.tokenizer
    geometry = target.geometry
    corpus = build_corpus(corpus_path, tokenizer, piece=geometry.context, seed=0)
    if recipe.start:
        head, raw, vocabulary = _started_head(Path(recipe.start), target)
    else:
        size = min(shape.draft_vocab_size, geometry.vocab_size)
        vocabulary = draft_vocabulary(np.bincount(corpus.train, minlength=geometry.vocab_size), size)
        raw = head_config(shape, target.config, geometry.hidden_size, size)
        head = Eagle3Head(Eagle3Config.from_dict(raw))
        head.d2t = torch.from_numpy(vocabulary) - torch.arange(size)
    head = head.to(device)
    draft_ids = torch.from_numpy(vocabulary).to(device)
    embedding = target.embedding.float()
    window = min(recipe.window, geometry.context)
    held_out = torch.from_numpy(corpus.held_out_windows(8, window)).to(device)
    refuse_another_run(output, resume=resume)
    own = None
    if recipe.own_text:
        own = own_text(
            target.model, corpus, output, windows=recipe.own_text, length=window, seed=recipe.seed, device=device
        )
        held_out_own, own = torch.from_numpy(own[-8:]).to(device), own[:-8]
    use_training_experts(target.model)  # the head learns from logits and features; routing is not read

    def losses(ids: Tensor, first: int = 0) -> tuple[Tensor, dict[str, float]]:
        """The loss, and how often the head's first guess is the target's from position ``first`` on."""
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            logits, features = target.teach(ids)[:2]
        wanted = logits[:, 1:].float().index_select(-1, draft_ids)
        goal, goal_id = wanted.softmax(-1), draft_ids[wanted.argmax(-1)]
        inside = goal_id == logits[:, 1:].argmax(-1)  # whether the head can say what the target would
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            states = unrolled_states(head, embedding[ids[:, 1:]], features[:, :-1], recipe.test_steps)
            drafted = [head.logits(state) for state in states]
        total, figures = torch.zeros((), device=device), {}
        for k, guess in enumerate(drafted):
            guess = guess[:, k:].float()
            cross = F.cross_entropy(guess.flatten(0, 1), goal[:, k:].flatten(0, 1))
            total = total + recipe.decay**k * cross
            right = (draft_ids[guess.argmax(-1)] == goal_id[:, k:]) & inside[:, k:]
            figures[f"top1_{k}"] = float(right[:, max(0, first - k) :].float().mean())
        return total, {"loss": float(total.detach()), **figures}

    def loss(step: int, progress: float) -> tuple[Tensor, Mapping[str, float]]:
        count = max(1, recipe.tokens_per_batch // window)
        ids = corpus.windows(count, window, seed=recipe.seed, step=step)
        if own is not None:
            rng = np.random.default_rng((recipe.seed, step, 1))
            taken = rng.choice(len(own), size=round(count * recipe.own_share))
            ids[: len(taken)] = own[taken]
        return losses(torch.from_numpy(ids).to(device))

    def evaluate() -> dict[str, float]:
        figures = {f"held_out_{name}": value for name, value in losses(held_out)[1].items()}
        if own is not None:
            figures |= {
                f"own_text_{name}": value for name, value in losses(held_out_own, real_tokens(window))[1].items()
            }
        return figures

    loop = LoopConfig(
        steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        seconds=recipe.seconds,
        weight_decay=0.01,
        evaluate_every=recipe.evaluate_every,
        patience=recipe.patience,
    )
    judged_by = "held_out_top1_0" if own is None else "own_text_top1_0"  # what it will read at run time
    figures = train(head, loss, loop, output, evaluate=evaluate, resume=resume, title="drafter", keep_best=judged_by)
    save_head(head, raw, vocabulary, geometry.vocab_size, output)
    told = {**asdict(recipe), "start": Path(recipe.start).name}
    write_training_record(output, "drafter", asdict(shape), told, figures, corpus, recipe.start)
    return figures


def _started_head(folder: Path, target: Any) -> tuple[Eagle3Head, dict[str, Any], npt.NDArray[np.int64]]:
    """A head to go on from, its ``config.json``, and the target ids of its vocabulary."""
    geometry = target.geometry
    head = load_eagle3(
        folder,
        target_vocab=geometry.vocab_size,
        target_hidden=geometry.hidden_size,
        target_layers=geometry.layers,
    )
    if head.config.feature_layers != target.feature_layers or head.own_embedding is not None:
        raise UserError(
            f"--start {folder}: it reads layers {head.config.feature_layers}; expected {target.feature_layers} "
            "and no embedding of its own"
        )
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ids = head.to_target_ids(torch.arange(head.config.draft_vocab_size))
    return head, raw, ids.numpy()


def head_config(shape: DrafterShape, target: Any, hidden_size: int, draft_vocab_size: int) -> dict[str, Any]:
    """A head's ``config.json`` in the published layout."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "target_hidden_size": hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": hidden_size // shape.heads,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": int(target.max_position_embeddings),
        "vocab_size": int(target.vocab_size),
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(shape.feature_layers),
            "use_aux_hidden_state": True,
        },
    }


def save_head(
    head: Eagle3Head,
    raw: Mapping[str, Any],
    vocabulary: npt.NDArray[np.int64],
    target_vocab: int,
    folder: Path,
) -> None:
    """Write ``config.json`` and ``model.safetensors``, bfloat16, with d2t and t2d."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to(torch.bfloat16).cpu() for name, p in head.named_parameters()}
    tensors["d2t"] = torch.from_numpy(vocabulary - np.arange(len(vocabulary)))
    tensors["t2d"] = torch.zeros(target_vocab, dtype=torch.bool)
    tensors["t2d"][torch.from_numpy(vocabulary)] = True
    (folder / "model.safetensors").write_bytes(save(tensors))
    (folder / "config.json").write_text(json.dumps(dict(raw), indent=1) + "\n", encoding="utf-8")
