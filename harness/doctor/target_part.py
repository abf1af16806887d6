"""What can be said of a target without its weights: it is built from its config, with no memory behind its tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ecospec.errors import UserError, one_line
from ecospec.harness.doctor.findings import Diagnosis, size_text
from ecospec.harness.doctor.headers import Header, has_weights, read_headers
from ecospec.harness.doctor.scales import look_at_scales
from ecospec.harness.doctor.storage import (
    ExpertStorage,
    checkpoint_tensors,
    declared_bytes,
    declared_experts,
    quantization_of,
    stored_experts,
)
from ecospec.harness.experts import find_experts, is_plain_swiglu, widen_experts
from ecospec.harness.hub import Checkpoint
from ecospec.harness.loading import needs_code
from ecospec.harness.target import Geometry, Target, decoder_of
from ecospec.predictors.kv_cache import SlotCache
from ecospec.predictors.pretrained import UNLOADABLE

PART = "target"
MOST_NAMED = 3


@dataclass(frozen=True)
class TargetPart:
    """A target without weights.

    Attributes:
        target: None where a run would refuse it.
        geometry: of the model as a run would hold it; also of one that is refused, where its config gives it.
        stored_bytes: of the whole checkpoint.
        run_bytes: of the weights as a run holds them.
        kv_bytes_per_token: of one request; None where a pass without weights does not tell.
    """

    model: Any
    target: Target | None
    geometry: Geometry | None
    stored_bytes: int
    run_bytes: int
    kv_bytes_per_token: int | None


@dataclass(frozen=True)
class Wanted:
    """How a run would load the target."""

    device: str
    dtype: torch.dtype
    widen: int
    trust_remote_code: bool


def look_at_target(said: Diagnosis, name: str, found: Checkpoint, wanted: Wanted) -> TargetPart | None:
    """Build, describe and check a target; None where its config describes no model."""
    label = f"target {name}"
    config = _read_config(said, label, found.folder, wanted)
    if config is None:
        return None
    model = _build(said, label, config, wanted)
    if model is None:
        return None
    stored_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else wanted.dtype
    _look_at_tokenizer(said, label, found.folder, wanted)
    headers = _look_at_tensors(said, label, found, model)
    look_at_scales(said, label, headers, quantization_of(config))
    # Before the experts are widened; those of some families can be told only when `Target` has adopted them.
    plain = find_experts(model)
    storage = _storage(said, label, model, headers, stored_dtype) if plain else None
    parameters = sum(p.numel() for p in model.parameters())
    target = None
    try:
        widen_experts(model, wanted.widen)
        target = Target(model)
        geometry: Geometry | None = target.geometry
    except UserError as error:
        said.problem(f"{label}: {error}")
        geometry = _declared_geometry(model)
    if not plain:
        storage = _storage(said, label, model, headers, stored_dtype)
    stored = sum(header.bytes for header in headers.values())
    if not stored:
        stored = declared_bytes(model, storage, stored_dtype)
    _describe(said, name, found, model, parameters, geometry)
    if storage is not None:
        _describe_experts(said, storage)
    if wanted.widen > 1 and geometry is not None:
        widened = f"{geometry.expert_bytes / 1e6:,.2f} MB, widened {wanted.widen} times when it is loaded"
        said.fact(PART, "bytes per expert, in the run", geometry.expert_bytes, widened)
    where = "by its files" if headers else "estimated from its config"
    said.fact(PART, "checkpoint bytes", stored, f"{size_text(stored)} ({where})")
    quantised = bool(quantization_of(config)) and not _dequantised(said, label, model, wanted)
    run_bytes = stored if quantised else _bytes_of(model)
    kv = kv_elements_per_token(model)
    if kv is None:
        said.note(f"{label}: a pass without weights does not tell the memory of its KV cache")
    _describe_execution(said, model, wanted, str(quantization_of(config).get("quant_method")) if quantised else "")
    return TargetPart(model, target, geometry, stored, run_bytes, kv and kv * wanted.dtype.itemsize)


def _read_config(said: Diagnosis, label: str, folder: Path, wanted: Wanted) -> Any | None:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        said.problem(f"{label}: no config.json; expected a transformers checkpoint folder")
        return None
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=wanted.trust_remote_code)
    except UNLOADABLE as error:
        _not_built(said, label, error)
        return None


def _not_built(said: Diagnosis, label: str, error: Exception) -> None:
    if "trust_remote_code" in str(error):
        said.problem(str(needs_code("target", label.removeprefix("target "))))
    else:
        said.problem(f"{label}: its config.json describes no causal LM ({one_line(error)})")


def _build(said: Diagnosis, label: str, config: Any, wanted: Wanted) -> Any | None:
    from transformers import AutoModelForCausalLM

    options = {"dtype": wanted.dtype, "trust_remote_code": wanted.trust_remote_code}
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager", **options)
    except UNLOADABLE as error:
        _not_built(said, label, error)
        return None


def _look_at_tokenizer(said: Diagnosis, label: str, folder: Path, wanted: Wanted) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=wanted.trust_remote_code)
        empty = not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    except UNLOADABLE as error:
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
            said.problem(f"{label}: its tokenizer cannot be loaded ({one_line(error)})")
            return
        empty = True
    if empty:
        said.problem(f"{label}: no tokenizer; expected tokenizer files in the folder")


def _declared_geometry(model: Any) -> Geometry | None:
    """Of a model that a run refuses; None where it has no routed experts or its config does not say enough."""
    modules = find_experts(model)
    config = model.config.get_text_config(decoder=True)
    top_k = getattr(config, "num_experts_per_tok", None)
    if not modules or top_k is None:
        return None
    head = model.get_output_embeddings().weight
    return Geometry(
        vocab_size=int(head.shape[0]),
        hidden_size=int(config.hidden_size),
        layers=len(decoder_of(model).layers),
        moe_layers=len(modules),
        experts=int(modules[0].num_experts),  # type: ignore[arg-type]
        top_k=int(top_k),
        context=int(config.max_position_embeddings),
        expert_bytes=_bytes_of(modules[0]) // int(modules[0].num_experts),  # type: ignore[arg-type]
        always_read_bytes=0,
    )


def _describe(
    said: Diagnosis, name: str, found: Checkpoint, model: Any, parameters: int, geometry: Geometry | None
) -> None:
    said.fact(PART, "checkpoint", name)
    if found.commit is not None:
        said.fact(PART, "commit", found.commit)
    said.fact(PART, "family", model.config.model_type, f"{model.config.model_type} ({type(model).__name__})")
    said.fact(PART, "parameters", parameters, f"{parameters / 1e6:,.1f} million")
    if geometry is None:
        return
    shared = _shared_experts(model)
    said.fact(PART, "layers", geometry.layers)
    said.fact(PART, "MoE layers", geometry.moe_layers)
    said.fact(PART, "dense layers", geometry.layers - geometry.moe_layers)
    said.fact(PART, "experts per MoE layer", geometry.experts)
    said.fact(PART, "shared experts", shared)
    said.fact(PART, "K, experts per token", geometry.top_k)
    said.fact(PART, "hidden size", geometry.hidden_size)
    said.fact(PART, "vocabulary", geometry.vocab_size)
    said.fact(PART, "context", geometry.context, f"{geometry.context:,} tokens")


def _shared_experts(model: Any) -> int:
    """Experts of a MoE layer that every token goes through, as its config counts them."""
    layer = next((m for m in model.modules() if any("shared_expert" in name for name, _ in m.named_children())), None)
    return 0 if layer is None else int(getattr(model.config, "n_shared_experts", None) or 1)


def _look_at_tensors(said: Diagnosis, label: str, found: Checkpoint, model: Any) -> Mapping[str, Header]:
    """The headers, compared with the tensors that checkpoints of this model have."""
    if found.commit is not None and not has_weights(found.folder):
        said.note(f"{label}: its weights are not here yet, so its tensors are not checked; a run downloads them")
        return {}
    headers, wrong = read_headers(label, found.folder)
    for line in wrong:
        said.problem(line)
    if not headers or wrong:
        return headers
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # A checkpoint has the published names, or those of the model where it was saved as it stands in memory.
    expected = min((checkpoint_tensors(model), own), key=lambda names: len(names.keys() - headers.keys()))
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = sorted(name for name in expected.keys() - tied if not _stored(name, headers))
    if missing:
        more = f", and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        said.problem(f"{label}: the checkpoint lacks {missing[0]}{more}; expected all of the model's")
    for name in sorted(expected.keys() & headers.keys()):
        if headers[name].shape != expected[name]:
            said.problem(f"{label}: tensor {name} has shape {headers[name].shape}, expected {expected[name]}")
            break
    return headers


def _stored(name: str, headers: Mapping[str, Header]) -> bool:
    return name in headers or (f"{name}_blocks" in headers and f"{name}_scales" in headers)


def _storage(
    said: Diagnosis, label: str, model: Any, headers: Mapping[str, Header], dtype: torch.dtype
) -> ExpertStorage | None:
    """One expert as stored; None where there is none, or nothing tells."""
    modules = find_experts(model)
    if not modules:
        return None
    quantization = quantization_of(model.config)
    kind = str(quantization.get("quant_method") or "")
    path = next(name for name, module in model.named_modules() if module is modules[0])
    storage = stored_experts(headers, checkpoint_tensors(model, f"{path}."), modules[0], kind) if headers else None
    storage = storage or declared_experts(modules[0], quantization, dtype)
    if storage is None:
        said.problem(f"{label}: bytes per expert in the format {kind} are told by tensors only, and there are none")
    return storage


def _describe_experts(said: Diagnosis, storage: ExpertStorage) -> None:
    nominal = round(storage.nominal_bytes)
    said.fact(PART, "bytes per expert", nominal, f"{nominal / 1e6:,.2f} MB ({storage.format}, without scales)")
    parts = (("weights", storage.weight_bytes), ("scales", storage.scale_bytes), ("biases", storage.bias_bytes))
    for name, count in parts:
        said.fact(PART, f"  {name}, stored", count, f"{count / 1e6:,.3f} MB")
    text = f"{storage.stored_bytes / 1e6:,.2f} MB (by its {storage.source})"
    said.fact(PART, "bytes per expert, stored", storage.stored_bytes, text)


def _dequantised(said: Diagnosis, label: str, model: Any, wanted: Wanted) -> bool:
    """Whether transformers, asked here and now, would load a quantised checkpoint into plain weights."""
    from transformers.quantizers.auto import AutoHfQuantizer

    raw = quantization_of(model.config)
    kind, dtype = raw.get("quant_method"), str(wanted.dtype).removeprefix("torch.")
    try:
        quantizer = AutoHfQuantizer.from_config(raw, pre_quantized=True)
        quantizer.validate_environment(device_map=None if wanted.device == "cpu" else {"": wanted.device})
    except (*UNLOADABLE, ImportError) as error:
        said.problem(f"{label}: its {kind} weights cannot be loaded here ({one_line(error)})")
        return False
    plain = bool(getattr(quantizer.quantization_config, "dequantize", False))
    what = f"are turned into {dtype}, as their kernels do not run here" if plain else "stay as they are stored"
    said.note(f"{label}: its {kind} weights {what}")
    return plain


def kv_elements_per_token(model: Any) -> int | None:
    """Measured: how many numbers one token of one request leaves in a KV memory, over all layers.

    The model is of another type afterwards: products of groups are known to a device without memory in bfloat16 only.
    """
    model.to(torch.bfloat16)
    cache = SlotCache(len(decoder_of(model).layers), 1)
    parameters = inspect.signature(model.forward).parameters
    argument = "cache" if "cache" in parameters else "past_key_values"
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device="meta"), use_cache=True, **{argument: cache})
    except (*UNLOADABLE, NotImplementedError):
        return None
    memories = [memory for memory in (*cache._keys, *cache._values) if memory is not None]
    return sum(memory.numel() for memory in memories) or None


def _describe_execution(said: Diagnosis, model: Any, wanted: Wanted, quantised: str) -> None:
    said.fact(PART, "attention", str(model.config.get_text_config(decoder=True)._attn_implementation))
    modules = find_experts(model)
    if not modules:
        return
    if quantised:
        said.fact(PART, "experts", quantised, f"transformers' own for {quantised}, where they stay packed")
        return
    union = wanted.device == "cpu" and all(is_plain_swiglu(module) for module in modules)
    reason = "one read per activated expert" if union else "transformers' own, one pass over the union"
    said.fact(PART, "experts", "union" if union else "grouped_mm", f"{'union' if union else 'grouped_mm'} ({reason})")


def _bytes_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
