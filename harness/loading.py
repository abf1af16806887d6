"""Loading a target with its tokenizer, and what belongs to it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ecospec.errors import UserError
from ecospec.harness.experts import find_experts, widen_experts
from ecospec.harness.hub import find_checkpoint
from ecospec.harness.placement import Placement
from ecospec.harness.quantized import settle, unpacked_method, whole_blocks
from ecospec.harness.target import Target
from ecospec.predictors.contract import TargetView
from ecospec.predictors.pretrained import UNLOADABLE, check_complete, check_folder

logger = logging.getLogger("ecospec")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedTarget:
    """A target, its tokenizer, and where it came from.

    Attributes:
        name: as it was given.
        folder: where its files are.
        commit: of the repository on the hub; None for a folder of the user's.
        unpacked: the quantisation that the weights have on disk but not in memory, for want of a kernel here.
    """

    target: Target
    tokenizer: Any
    name: str
    widened: int
    folder: Path
    commit: str | None = None
    unpacked: str | None = None


def load_target(
    name: str,
    *,
    dtype: torch.dtype,
    device: str,
    feature_layers: Sequence[int] = (),
    widen: int = 1,
    revision: str | None = None,
    trust_remote_code: bool = False,
    placement: Placement | None = None,
) -> LoadedTarget:
    """Load a local checkpoint folder, or a hub name, as a `Target`.

    Args:
        widen: factor by which `widen_experts` widens the routed experts.
        revision: of a hub name: branch, tag or commit; None for the newest.
        trust_remote_code: whether Python files of the checkpoint's may run.
        placement: where a large target's weights go, in place of ``device``.

    Raises:
        UserError: nothing there, not a causal LM, or no Mixture of Experts.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    found = find_checkpoint("target", name, revision, code=trust_remote_code)
    check_folder("target", str(found.folder))
    wrong: list[str] = []
    try:
        tokenizer = AutoTokenizer.from_pretrained(found.folder, trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(found.folder, trust_remote_code=trust_remote_code)
        quantization = getattr(config, "quantization_config", None)
        with whole_blocks() as wrong:
            model, report = AutoModelForCausalLM.from_pretrained(
                found.folder,
                trust_remote_code=trust_remote_code,
                dtype=dtype,
                attn_implementation="eager",  # which all have; `Target` puts ours in its place
                ignore_mismatched_sizes=True,  # refused below, with the tensor's name
                output_loading_info=True,
                **({} if placement is None else placement.arguments()),
            )
    except UNLOADABLE as error:
        refused = None if placement is None else placement.refused(name, error)
        if refused is not None:
            raise refused from error
        if "trust_remote_code" in str(error):
            raise needs_code("target", name) from error
        first = wrong[0] if wrong else (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"target {name}: not loadable as a causal LM with a tokenizer ({first}); "
            "expected a local checkpoint folder or a hub name that is cached or reachable"
        ) from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):  # what a missing file leaves
        raise UserError(f"target {name}: its tokenizer has no vocabulary; expected tokenizer files in the folder")
    check_complete("target", name, report)
    left = sorted(key for key in report.get("unexpected_keys", ()) if not _is_known(key, config))
    if left:
        logger.warning(
            "target %s: its config has no place for %s and %d more of the checkpoint's tensors; they are not used",
            name,
            left[0],
            len(left) - 1,
        )
    unpacked = unpacked_method(quantization, model)
    if unpacked:
        settle(find_experts(model), dtype)
    widen_experts(model, widen)
    try:
        if placement is None:
            model.to(device)
        else:
            placement.check(name, model)
    except torch.OutOfMemoryError as error:
        raise UserError(f"target {name}: out of memory on {device}; try a smaller --dtype") from error
    target = Target(model, feature_layers=feature_layers)
    return LoadedTarget(target, tokenizer, name, widen, found.folder, found.commit, unpacked)


def _is_known(key: str, config: Any) -> bool:
    """Whether a tensor that the library leaves is one that it is known to leave: of a layer that predicts further
    tokens, or frequencies that are computed."""
    layers = int(getattr(config, "num_hidden_layers", 0))
    further = range(layers, layers + int(getattr(config, "num_nextn_predict_layers", 0) or 0))
    return key.endswith("rotary_emb.inv_freq") or any(f".layers.{each}." in f".{key}" for each in further)


def needs_code(what: str, name: str) -> UserError:
    """The error of a checkpoint that only Python files of its own can load."""
    return UserError(
        f"{what} {name}: transformers does not know its model or tokenizer, and its own Python files are not run; "
        "expected a checkpoint of a known family, or --trust-remote-code if you trust whoever wrote them"
    )


def target_view(target: Target, bundle: Path | None = None) -> TargetView:
    """What predictors may know of a target.

    Raises:
        UserError: it is dense.
    """
    check_experts(target, "a predictor")
    geometry = target.geometry
    return TargetView(
        moe_layers=geometry.moe_layers,
        experts=geometry.experts,
        top_k=geometry.top_k,
        vocab_size=geometry.vocab_size,
        hidden_size=geometry.hidden_size,
        embedding=target.embedding,
        bundle=bundle,
    )


def check_experts(target: Target, what: str) -> None:
    """Refuse what needs experts where there are none.

    Args:
        what: begins the message, such as ``policy 'oracle'``.

    Raises:
        UserError: the target is dense.
    """
    if not target.geometry.moe_layers:
        raise UserError(
            f"{what} needs a target with experts, and {type(target.model).__name__} is dense; "
            "expected a Mixture-of-Experts target, or a policy such as confidence, which needs none"
        )


def embedded_folder() -> Path:
    """Folder of the model that ships with the package: ``target``, ``drafter``, ``predictor``.

    Raises:
        UserError: this installation has no weights.
    """
    folder = Path(__file__).resolve().parent / "embedded"
    if not (folder / "target" / "config.json").is_file():
        raise UserError("the embedded model is missing from this installation; give --target and --drafter")
    return folder


def embedded_facts() -> dict[str, Any]:
    """``bundle.json`` of the embedded model: the widening factor and the files' hashes."""
    facts: dict[str, Any] = json.loads((embedded_folder() / "bundle.json").read_text(encoding="utf-8"))
    return facts
