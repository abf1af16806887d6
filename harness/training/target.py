"""Train the embedded target: a Qwen3-MoE with many small experts, and its byte-level BPE.

``ecospec-bench train target`` calls `train_target`. The result is an ordinary transformers checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecospec.errors import UserError
from ecospec.harness.training.corpus import LICENSES, Corpus, build_corpus, grouped_documents, read_records
from ecospec.harness.training.experts import TRAIN_EXPERTS
from ecospec.predictors.training import LoopConfig, refuse_another_run, train

EOS = "<|endoftext|>"


@dataclass(frozen=True)
class TargetShape:
    """Geometry of the embedded target; about 12M parameters, an eighth of the experts active a token."""

    vocab_size: int = 4096
    hidden_size: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 64
    top_k: int = 8
    expert_size: int = 32
    context: int = 2048


@dataclass(frozen=True)
class TargetRecipe:
    """Batches are ``tokens_per_batch`` tokens: short windows first, whole-context windows for the last
    ``long_share`` of the run, so that a 5-shot prompt is well inside what was trained. Experts are balanced
    over each batch with ``aux_coefficient`` for the first ``balance_share`` of the run, so that none dies, and
    with ``aux_relaxed`` after it, so that they may specialise in a kind of text, as in large models."""

    steps: int = 3000
    seconds: float = 0.0
    learning_rate: float = 3e-3
    tokens_per_batch: int = 4096
    short_window: int = 512
    long_share: float = 0.2
    aux_coefficient: float = 0.01
    aux_relaxed: float = 0.001
    balance_share: float = 0.56
    seed: int = 0


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """A byte-level BPE with single-digit number tokens, as a transformers fast tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False)


def build_target(shape: TargetShape, tokenizer: Any, *, experts_implementation: str) -> Any:
    """A randomly initialised Qwen3-MoE of the given shape."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=shape.expert_size,
        intermediate_size=shape.expert_size * shape.top_k,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=shape.context,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    return Qwen3MoeForCausalLM._from_config(
        config, experts_implementation=experts_implementation, attn_implementation="sdpa"
    )


def train_target(
    corpus_path: Path,
    output: Path,
    *,
    shape: TargetShape | None = None,
    recipe: TargetRecipe | None = None,
    device: str = "cpu",
    resume: bool = False,
) -> dict[str, Any]:
    """Train a target on a corpus and save it, with its tokenizer, under ``output``.

    Raises:
        UserError: the corpus is unusable, or ``output`` holds another run.
    """
    from transformers import AutoTokenizer

    shape, recipe = shape or TargetShape(), recipe or TargetRecipe()
    torch.manual_seed(recipe.seed)
    if (output / "tokenizer.json").exists() and resume:
        tokenizer = AutoTokenizer.from_pretrained(output)
    else:
        records = list(read_records(corpus_path))
        if not records:
            raise UserError(f"corpus {corpus_path}: no record with a licence among {', '.join(LICENSES)}")
        documents = grouped_documents(records, recipe.seed)
        tokenizer = train_tokenizer([text for _, text in documents], shape.vocab_size)
    if len(tokenizer) > shape.vocab_size:
        raise UserError(f"{output}: the tokenizer has {len(tokenizer)} tokens, the target {shape.vocab_size}")
    corpus = build_corpus(corpus_path, tokenizer, piece=shape.context, seed=recipe.seed)
    model = build_target(shape, tokenizer, experts_implementation=TRAIN_EXPERTS).to(device)
    held_out = torch.from_numpy(corpus.held_out_windows(16, min(1024, shape.context))).to(device)
    refuse_another_run(output, resume=resume)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(output)  # a run that is gone on with has the same one

    def forward(ids: Tensor) -> Any:
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            return model(input_ids=ids, labels=ids, output_router_logits=True)

    def loss(step: int, progress: float) -> tuple[Tensor, Mapping[str, float]]:
        window = shape.context if progress >= 1 - recipe.long_share else recipe.short_window
        count = max(1, recipe.tokens_per_batch // window)
        ids = torch.from_numpy(corpus.windows(count, window, seed=recipe.seed, step=step)).to(device)
        coefficient = recipe.aux_coefficient if progress < recipe.balance_share else recipe.aux_relaxed
        model.router_aux_loss_coef = coefficient
        out = forward(ids)
        aux = float(out.aux_loss.detach())
        return out.loss, {"loss": float(out.loss.detach()) - coefficient * aux, "aux": aux}

    def evaluate() -> dict[str, float]:
        values = []
        for row in held_out.split(4):
            out = forward(row)
            values.append(float(out.loss) - model.router_aux_loss_coef * float(out.aux_loss))
        return {"held_out_loss": sum(values) / len(values)}

    loop = LoopConfig(steps=recipe.steps, learning_rate=recipe.learning_rate, seconds=recipe.seconds, weight_decay=0.1)
    figures = train(model, loss, loop, output, evaluate=evaluate, resume=resume, title="target")
    save_target(model, tokenizer, output)
    write_training_record(output, "target", asdict(shape), asdict(recipe), figures, corpus)
    return figures


def save_target(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save an ordinary checkpoint in bfloat16 with its tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_training_record(
    folder: Path,
    kind: str,
    shape: Mapping[str, Any],
    recipe: Mapping[str, Any],
    figures: Mapping[str, Any],
    corpus: Corpus,
    start: str = "",
) -> None:
    """``training.json`` of a training from a corpus, with the record of the part that was gone on from."""
    facts: dict[str, Any] = {"corpus_sha256": corpus.sha256, "train_tokens_by_source": corpus.sources}
    earlier = Path(start) / "training.json"
    if start and earlier.is_file():
        facts["started_from"] = json.loads(earlier.read_text(encoding="utf-8"))
    write_record(folder, kind, shape, recipe, figures, facts)


def write_record(
    folder: Path,
    kind: str,
    shape: Mapping[str, Any],
    recipe: Mapping[str, Any],
    figures: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> None:
    """``training.json``: what the card is made from; ``facts`` say what was trained on."""
    record = {"kind": kind, "shape": dict(shape), "recipe": dict(recipe), "figures": dict(figures), **facts}
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
