"""Where a large target's weights go: over several devices and memories, or over several processes.

With a device map, layers lie on the devices in turn and what does not fit is brought in for each pass. With several
processes (torchrun), each holds a part of every layer, by the plans that the model's class declares.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ecospec.errors import UserError
from ecospec.harness.config import RunConfig
from ecospec.harness.processes import local_rank, process_count
from ecospec.harness.sharding import is_split

MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
TENSOR, EXPERT = PARALLEL = ("tensor", "expert")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_LAYER = re.compile(r"(.*\blayers\.\d+)\.")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)?", re.IGNORECASE)


@dataclass(frozen=True)
class Placement:
    """Where the weights of a target go; one of ``device_map`` and ``parallel`` is given.

    Attributes:
        device_map: one of `MAPS`, or the device of each module by its name.
        max_memory: bytes by device: GPU number, or ``cpu``. Devices without a bound have what is free.
        offload_folder: where weights for which no memory is left are put; None where there is to be none.
        parallel: ``tensor`` or ``expert``, over all processes.
    """

    device_map: str | Mapping[str, Any] | None = None
    max_memory: Mapping[int | str, int] | None = None
    offload_folder: str | None = None
    parallel: str | None = None

    def arguments(self) -> dict[str, Any]:
        """What ``from_pretrained`` is told."""
        if self.parallel is not None:
            return {"distributed_config": _distributed_config(self.parallel)}
        memory = None
        if self.max_memory is not None and isinstance(self.device_map, str):
            from accelerate.utils import get_max_memory

            memory = {**get_max_memory(), **self.max_memory}
        device_map = self.device_map if isinstance(self.device_map, str) else dict(self.device_map or {})
        return {"device_map": device_map, "max_memory": memory, "offload_folder": self.offload_folder}

    def check(self, name: str, model: Any) -> None:
        """Refuse a model that has come out otherwise than it was asked for.

        Raises:
            UserError: weights on a disk without a folder to put them into; no weight is split over the processes, or
                heads are cut in two.
        """
        if self.parallel is not None and not is_split(model):
            raise UserError(f"target {name}: {type(model).__name__} is not split by --parallel {self.parallel}")
        if self.parallel is not None and any(type(module).__name__ == "Llama4TextMoe" for module in model.modules()):
            raise UserError(
                f"target {name}: the experts of {type(model).__name__} are reached here by other code than the plans "
                "of the library split; expected one process, with --device-map"
            )
        heads, count = getattr(model.config, "num_key_value_heads", None), process_count()
        if self.parallel is not None and heads and heads % count and _splits_keys(model):
            raise UserError(
                f"target {name}: {heads} key-value heads in {count} processes; expected a number of processes that "
                f"divides {heads}"
            )
        if "disk" in map(str, getattr(model, "hf_device_map", {}).values()) and self.offload_folder is None:
            raise self.too_small(name)

    def too_small(self, name: str) -> UserError:
        """What to say where the memories that may be used do not hold the target."""
        return UserError(
            f"target {name}: does not fit into the memories that --device-map may use; expected more in "
            "--max-memory, a smaller --dtype, or --offload-folder for what is to stay on the disk"
        )

    def refused(self, name: str, error: Exception) -> UserError | None:
        """What to say of what the library refuses about this placement; None where it speaks of something else."""
        text = str(error)
        if "offload_folder" in text:  # which it asks for
            return self.too_small(name)
        if self.parallel is not None and ("ep_plan" in text or "tp_plan" in text):
            return UserError(
                f"target {name}: transformers has no plan by which to split it with --parallel {self.parallel}; "
                f"expected --parallel {TENSOR if self.parallel == EXPERT else EXPERT}, or one process with --device-map"
            )
        if "does not give any device" in text:
            missing = text.partition("parameters: ")[2].split(",")[0].strip(" .") or "some parameters"
            return UserError(f"target {name}: --device-map has no device for {missing}; expected one for every module")
        return None

    @staticmethod
    def layers(model: Any) -> dict[str, int]:
        """Decoder layers by the device that the resolved device map has them on; none of a model on one device.

        A layer whose parts are on several devices counts for each.
        """
        places: dict[str, Any] = getattr(model, "hf_device_map", {})
        found: Counter[str] = Counter()
        for layer in {match[1] for name, _ in model.named_parameters() if (match := _LAYER.match(name))}:
            within = {str(device) for part, device in places.items() if part == layer or part.startswith(f"{layer}.")}
            around = [part for part in places if part == "" or layer.startswith(f"{part}.")]
            found.update(within or {str(places[part]) for part in sorted(around, key=len)[-1:]})
        return dict(found)


def _distributed_config(parallel: str) -> Any:
    """The library's own description of a split over all processes."""
    from transformers.distributed import DistributedConfig

    count = process_count()
    if parallel == TENSOR:
        return DistributedConfig(tp_size=count, tp_plan="auto")
    if "ep_size" in {field.name for field in fields(DistributedConfig)}:
        # The experts by number, all else by the tensor-parallel plan: an empty one is refused.
        return DistributedConfig(tp_size=count, tp_plan="auto", ep_size=count)
    return DistributedConfig(tp_size=count, enable_expert_parallel=True)  # before transformers 5.18: all else whole


def _splits_keys(model: Any) -> bool:
    """Whether each process has the keys of some heads only."""
    return any(name.endswith("k_proj.weight") and hasattr(p, "placements") for name, p in model.named_parameters())


def placement_of(config: RunConfig) -> Placement | None:
    """What a run's options say; None for one device and one process.

    Raises:
        UserError: options that exclude each other, or cannot be.
    """
    count = process_count()
    if config.parallel is not None and config.parallel not in PARALLEL:
        raise UserError(f"--parallel {config.parallel}: expected {' or '.join(PARALLEL)}")
    if config.parallel is not None and count == 1:
        raise UserError(
            f"--parallel {config.parallel} in one process: expected "
            "torchrun --nproc-per-node N -m ecospec.harness, with N of at least 2"
        )
    if config.device_map is None:
        for option in ("max_memory", "offload_folder"):
            if getattr(config, option) is not None:
                raise UserError(f"--{option.replace('_', '-')} without --device-map: expected --device-map auto")
        if count == 1:
            return None
        asked = f"{count} processes"
    else:
        asked = f"--device-map {config.device_map}"
        if count > 1:
            raise UserError(f"{asked} in {count} processes: expected one process, or no --device-map")
        if config.device != "auto":
            raise UserError(f"--device {config.device} with {asked}: expected one of the two")
        if importlib.util.find_spec("accelerate") is None:
            raise UserError(f"{asked}: accelerate is not installed; expected pip install accelerate")
    if config.target is None:
        raise UserError(f"{asked} with the embedded model, which fits one device: expected --target")
    if config.widen is not None and config.widen > 1:
        raise UserError(f"--widen {config.widen} with {asked}: widened experts stay on one device; expected --widen 1")
    if config.device_map is None:
        return Placement(parallel=config.parallel or TENSOR)
    device_map = _device_map(config.device_map)
    if isinstance(device_map, dict) and config.max_memory is not None:
        raise UserError(f"--max-memory with {asked}, which says where every module goes: expected one of the two")
    if isinstance(device_map, dict) and "disk" in device_map.values() and config.offload_folder is None:
        raise UserError(f"{asked} leaves modules on the disk: expected --offload-folder to put them into")
    memory = None if config.max_memory is None else parse_memory(config.max_memory, torch.cuda.device_count())
    return Placement(device_map, memory, config.offload_folder)


def own_device(device: str) -> str:
    """``--device`` for this one of several processes.

    Raises:
        UserError: a device that all would share, or more processes on this machine than GPUs.
    """
    count, gpus = process_count(), torch.cuda.device_count()
    if device not in ("auto", "cuda" if gpus else "cpu"):
        expected = "auto: each process has a GPU of its own" if gpus else "cpu: no CUDA device is present"
        raise UserError(f"--device {device} in {count} processes: expected {expected}")
    if not gpus:
        return "cpu"
    if local_rank() >= gpus:
        raise UserError(f"{count} processes on a machine with {gpus} GPUs: expected --nproc-per-node {gpus}")
    return f"cuda:{local_rank()}"


def _device_map(text: str) -> str | dict[str, Any]:
    """``--device-map``: a name, or a JSON file with the device of each module."""
    if text in MAPS:
        return text
    path = Path(text)
    if not path.is_file():
        raise UserError(
            f"--device-map {text}: expected {', '.join(MAPS)}, or a JSON file of module: device; there is no such file"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--device-map {text}: not readable as JSON ({error})") from error
    if not isinstance(found, dict) or not found:
        raise UserError(f"--device-map {text}: expected a JSON object of module: device")
    gpus = torch.cuda.device_count()
    for module, device in found.items():
        number = isinstance(device, int) and not isinstance(device, bool) and 0 <= device < gpus
        if not number and device not in ("cpu", "disk"):
            raise UserError(f"--device-map {text}: {module} on {device!r}; expected cpu, disk{_numbers(gpus)}")
    return found


def parse_memory(text: str, gpus: int) -> dict[int | str, int]:
    """``0=70GiB,cpu=200GiB`` as bytes by device.

    Args:
        gpus: how many there are.

    Raises:
        UserError: another form, a device that is not there, or one that is named twice.
    """
    bounds: dict[int | str, int] = {}
    for part in text.split(","):
        name, _, amount = (each.strip() for each in part.partition("="))
        size = _AMOUNT.fullmatch(amount)
        if size is None:
            raise UserError(f"--max-memory {part.strip()}: expected DEVICE=SIZE such as 0=70GiB or cpu=200GiB")
        number = name.isdecimal() and int(name) < gpus
        if not number and name != "cpu":
            raise UserError(f"--max-memory {part.strip()}: no such device; expected cpu{_numbers(gpus)}")
        device: int | str = int(name) if number else name
        if device in bounds:
            raise UserError(f"--max-memory {text}: {name} is bounded twice")
        bounds[device] = int(float(size[1]) * _UNITS[(size[2] or "").upper()])
    return bounds


def _numbers(gpus: int) -> str:
    return "" if gpus == 0 else " or 0" if gpus == 1 else f" or a GPU from 0 to {gpus - 1}"
