"""One command in several processes, each with a part of the target (``torchrun -m ecospec.harness``).

Every process runs the whole command: it drafts, predicts and selects for itself, from the same seed and from logits
that the library leaves equal in all of them, so nothing but the parts of the target's layers has to be sent. What
would make them part (a policy that is not deterministic, unequal devices) is noticed before a pass: `Lockstep`
compares what the processes are about to verify. Only rank 0 speaks and writes; the others write what they would into a
temporary folder. The first process that fails says why, and all end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from ecospec.errors import UserError
from ecospec.harness.config import RunConfig
from ecospec.harness.processes import local_rank, process_count, process_rank
from ecospec.harness.sharding import is_split

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others; loading a large checkpoint can part them by minutes."""
RANK_0_FIRST = 1.0
"""Seconds that the others leave rank 0 to say what is wrong, when it is wrong for all."""
EXIT_USER, EXIT_BUG = 2, 1
_FAILED = "ecospec/failed"
_control: Any = None
"""Group of all processes over the CPU, for what is about the run and not of the model."""
_folder: Path | None = None
"""Where a process that is not rank 0 writes."""


def together(answer: Callable[[], tuple[int, str]]) -> NoReturn:
    """Run a command in this and all other processes, and end this one.

    Args:
        answer: runs it; gives the exit code and, for a mistake of the user's, what to say of it.
    """
    global _folder
    said = sys.stderr
    if process_rank() > 0:
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the process ends
    _folder = Path(tempfile.mkdtemp(prefix="ecospec-"))
    signal.signal(signal.SIGTERM, _stopped)
    store = None
    try:
        store = _join()
        code, line = answer()
        bug = ""
    except (UserError, torch.OutOfMemoryError) as error:
        code, line, bug = EXIT_USER, f"error: {' '.join(str(error).split())}", ""
    except Exception as error:
        code, line, bug = EXIT_BUG, f"error: {_first_line(error)}", traceback.format_exc()
    finally:
        shutil.rmtree(_folder, ignore_errors=True)
    if line:
        if process_rank() > 0:
            time.sleep(RANK_0_FIRST)  # what all are told is said by rank 0
        # Where one process fails, those that wait for it fail after it: the first tells.
        try:
            first = store is None or store.add(_FAILED, 1) == 1
        except RuntimeError:  # the store is gone with the launcher, and so is who would read this
            first = False
        if first:
            rank = process_rank()
            where = f" (process {rank} of {process_count()})" if rank or bug else ""
            print(f"{bug if bug and not _lost(bug) else ''}ecospec-bench: {line}{where}", file=said, flush=True)
        _end(code)
    try:
        dist.destroy_process_group()
    except RuntimeError:
        _end(code or EXIT_BUG)
    sys.stdout.flush()
    sys.exit(code)


def _stopped(number: int, frame: object) -> None:
    """The launcher ends the other processes when one has failed."""
    if _folder is not None:
        shutil.rmtree(_folder, ignore_errors=True)
    _end(128 + number)


def _end(code: int) -> NoReturn:
    """End without waiting for a collective that is under way, which others may never join."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _first_line(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"another process has ended, or cannot be reached ({text})" if _lost(text) else text


def _lost(text: str) -> bool:
    """Whether an error is that another process is gone, in the words of the libraries that carry the messages."""
    return any(sign in text.lower() for sign in ("gloo", "connection closed by peer", "nccl", "connection reset"))


def _join() -> Any:
    """Open the group of all processes; returns the store that outlives a process."""
    global _control
    if not dist.is_available():
        raise UserError("several processes: this torch is built without torch.distributed")
    if "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"WORLD_SIZE={process_count()} in the environment and no MASTER_ADDR: expected "
            "torchrun --nproc-per-node N -m ecospec.harness, or no WORLD_SIZE"
        )
    store, rank, count = next(rendezvous("env://", timeout=PATIENCE))
    if torch.cuda.is_available():
        device = torch.device("cuda", min(local_rank(), torch.cuda.device_count() - 1))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=count, timeout=PATIENCE, device_id=device)
        _control = dist.new_group(backend="gloo", timeout=PATIENCE)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=PATIENCE)
        _control = dist.group.WORLD
    return store


class Lockstep:
    """Compares what the processes are about to do; a pass over different tokens would hang, or mix them up."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def check(self, ids: Tensor, positions: Tensor | None, mask: Tensor | None) -> None:
        """Stop all processes unless they are about to run the same pass.

        Args:
            ids: [n]. positions: [n]. mask: [.., n, t]; of it the last n columns are compared.

        Raises:
            UserError: in every process, where two differ.
        """
        own = None if mask is None else mask[..., -mask.shape[-2] :].to(torch.uint8)
        digest = hashlib.blake2b(digest_size=7)
        for part in (ids, positions, own):
            digest.update(b"-" if part is None else part.cpu().contiguous().numpy().tobytes())
        number = int.from_bytes(digest.digest(), "big")
        bounds = torch.tensor([number, -number])
        dist.all_reduce(bounds, dist.ReduceOp.MIN, group=self._group)
        if int(bounds[0]) != -int(bounds[1]):
            raise UserError(
                "the processes have parted: they are about to verify different tokens; expected a policy, a drafter "
                "and a predictor that do the same from the same seed, on devices that are alike"
            )


def lockstep_of(model: Any) -> Lockstep | None:
    """The comparison that passes of this model need; None for a model of one process."""
    if not is_split(model):
        return None
    return Lockstep(dist.group.WORLD if _control is None else _control)


def own_output(config: RunConfig) -> RunConfig:
    """The run as this process is to write it: rank 0 as asked for, the others into a folder that is thrown away."""
    if _folder is None or process_rank() == 0:
        return config
    return dataclasses.replace(config, output=_folder / "run", resume=False)


def share_records(path: Path) -> None:
    """Give all processes the finished prompts of the run that rank 0 goes on with."""
    if process_count() == 1:
        return
    text = [path.read_text(encoding="utf-8") if process_rank() == 0 and path.exists() else None]
    dist.broadcast_object_list(text, src=0, group=_control)
    if process_rank() > 0 and text[0] is not None:
        path.write_text(text[0], encoding="utf-8")


def from_rank_0(make: Callable[[], T]) -> T:
    """What ``make`` gives in rank 0, in all processes; every one runs it, since it may run the target."""
    made = make()
    if process_count() == 1:
        return made
    shared = [made if process_rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0, group=_control)
    found: T = shared[0]  # type: ignore[assignment]
    return found


def summed(value: float) -> float:
    """The sum of a number over all processes: the memory that is read in parallel."""
    if process_count() == 1:
        return value
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total, group=_control)
    return float(total)
