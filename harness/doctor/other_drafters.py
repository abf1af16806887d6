"""What can be said of drafters other than EAGLE-3 heads without their weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ecospec.errors import UserError, one_line
from ecospec.harness.doctor.drafter_part import PART, DrafterPart
from ecospec.harness.doctor.findings import Diagnosis
from ecospec.harness.doctor.headers import has_weights, read_headers
from ecospec.harness.doctor.target_part import TargetPart, kv_elements_per_token
from ecospec.harness.drafters.contract import Drafter
from ecospec.harness.drafters.language_model import WHAT as LM
from ecospec.harness.drafters.language_model import check_tokenizer
from ecospec.harness.drafters.mtp_files import SCALE
from ecospec.harness.drafters.mtp_loading import COMPUTED, WHAT, check_shapes, find_layer
from ecospec.harness.hub import Checkpoint
from ecospec.harness.target import Geometry
from ecospec.predictors.backbone import UnusableBackboneError, check_config, reach
from ecospec.predictors.pretrained import UNLOADABLE


def look_at_layer(said: Diagnosis, found: Checkpoint, target: TargetPart, geometry: Geometry) -> DrafterPart | None:
    """Describe a multi-token-prediction layer, and check all its tensors' shapes."""
    said.fact(PART, "drafter", "mtp", "mtp: the target's multi-token-prediction layer")
    if not has_weights(found.folder):
        said.note(f"{WHAT}: {found.folder}: no weights here yet, so that its layer is not looked for")
        return None
    try:
        layer = find_layer(found.folder, target.model.config, geometry.layers, geometry.vocab_size)
        headers, wrong = read_headers(WHAT, found.folder)
        for line in wrong:
            said.problem(line)
        shapes = {
            name.removeprefix(layer.prefix): header.shape
            for name, header in headers.items()
            if name.startswith(layer.prefix) and not name.endswith(SCALE) and name != layer.prefix + COMPUTED
        }
        if not wrong:
            check_shapes(layer, shapes)
    except UserError as error:
        said.problem(str(error))
        return None
    elements = sum(parameter.numel() for parameter in layer.head.parameters())
    said.fact(PART, "parameters", elements, f"{elements:,}, with {len(shapes)} tensors in the target's files")
    size = geometry.hidden_size
    per_layer = (target.kv_bytes_per_token or 0) // geometry.layers // 2
    return DrafterPart(size, found.folder, elements, per_layer)


def look_at_language_model(
    said: Diagnosis, found: Checkpoint, geometry: Geometry, target: Checkpoint
) -> DrafterPart | None:
    """Describe a small causal LM by its config, and compare its tokenizer with the target's."""
    said.fact(PART, "drafter", "lm", "lm: a small causal language model")
    said.fact(PART, "checkpoint", str(found.folder))
    try:
        config = AutoConfig.from_pretrained(found.folder, trust_remote_code=False)
        check_config(config, geometry.context)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)
        vocab = int(model.get_output_embeddings().weight.shape[0])
    except UnusableBackboneError as error:
        said.problem(f"{LM}: {found.folder}: {error}")
        return None
    except (*UNLOADABLE, ImportError) as error:
        said.problem(f"{LM}: {found.folder}: not loadable as a causal LM ({one_line(error)})")
        return None
    said.fact(PART, "vocabulary", vocab)
    if vocab != geometry.vocab_size:
        said.problem(
            f"{LM}: {found.folder}: its vocabulary has {vocab} tokens, the target's {geometry.vocab_size}; expected a "
            "model with the target's vocabulary"
        )
    elements = sum(parameter.numel() for parameter in model.parameters())
    said.fact(PART, "parameters", elements)
    _compare_tokenizers(said, found.folder, target.folder)
    most = reach(config)
    if most < geometry.context:
        said.note(
            f"{LM}: {found.folder}: it reads at most {most} tokens, and the target's context is {geometry.context}; a "
            "longer text ends a run"
        )
    if not has_weights(found.folder):
        said.problem(f"{LM}: {found.folder}: it has no weights; expected a checkpoint")
    return DrafterPart(int(config.hidden_size), found.folder, elements, kv_elements_per_token(model) or 0)


TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


def _compare_tokenizers(said: Diagnosis, folder: Path, target: Path) -> None:
    try:
        if not any((folder / name).is_file() for name in TOKENIZERS):  # the library may make one up
            raise OSError
        own = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (*UNLOADABLE, ImportError):
        said.problem(f"{LM}: {folder}: no tokenizer; expected tokenizer files in the folder")
        return
    try:
        theirs = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    except (*UNLOADABLE, ImportError):
        return  # said of the target
    try:
        check_tokenizer(str(folder), own, theirs)
    except UserError as error:
        said.problem(str(error))


def look_at_any(said: Diagnosis, drafter: Drafter) -> None:
    """Name a drafter of which nothing is known before it is loaded."""
    said.fact(PART, "drafter", drafter.name)
    if drafter.name != "ngram":
        said.note(f"drafter {drafter.name!r}: nothing of it is checked before a run loads it")


def own_folder(path: Path | None, target: Checkpoint) -> Checkpoint:
    """Where a layer is read from: the target's checkpoint, unless another is named."""
    return target if path is None else Checkpoint(path, None)
