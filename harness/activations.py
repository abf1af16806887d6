"""Which experts the steps of a run read: one line a finished prompt beside its records, and the sums over prompts.

A step counts 1 for every (MoE layer, expert) pair that its pass read, however many of its tokens were routed there. A
step of a batch of n prompts counts 1/n for each of them, so that sums over prompts are steps of the hardware, and the
sum of a prompt's counts is the ``expert_pairs`` of its record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ecospec.errors import UserError
from ecospec.harness.writing import append_text, write_text

ACTIVATIONS = "activations.jsonl"
"""In the run folder; of a dense target there is none."""
Counts = list[list[float]]
"""[MoE layers][E]; whole numbers are JSON integers."""


@dataclass(frozen=True)
class PromptActivations:
    """One prompt's line.

    Attributes:
        steps: by method, the steps that the counts are of: all of a prompt by itself, its share of a batch's.
        counts: by method, of those steps the ones in which each expert was active.
    """

    prompt_id: str
    steps: dict[str, float]
    counts: dict[str, Counts]


@dataclass(frozen=True)
class Activations:
    """The sums of one method.

    Attributes:
        counts: float64 [MoE layers, E], steps in which each expert was active.
        steps: of the hardware; a batch's counts once.
        prompts: that the sums are over.
    """

    counts: npt.NDArray[np.float64]
    steps: float
    prompts: int

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """[MoE layers, E], the share of the steps in which each expert was active."""
        return self.counts / self.steps

    @property
    def load_curve(self) -> npt.NDArray[np.float64]:
        """[E], the same share by an expert's rank in its layer, busiest first, mean over layers; its sum is E."""
        busiest_first: npt.NDArray[np.float64] = -np.sort(-self.shares, axis=1)
        return np.asarray(busiest_first.mean(axis=0), dtype=np.float64)


def as_counts(activations: npt.NDArray[np.float64]) -> Counts:
    """An array [MoE layers, E] as JSON values."""
    return [[int(value) if value.is_integer() else value for value in row] for row in activations.tolist()]


def activations_text(prompts: Iterable[PromptActivations]) -> str:
    """The lines of some prompts."""
    return "".join(json.dumps(asdict(prompt), separators=(",", ":")) + "\n" for prompt in prompts)


def append_activations(path: Path, prompts: Iterable[PromptActivations]) -> None:
    """Append one line a prompt in a single write; without prompts no file is made."""
    text = activations_text(prompts)
    if not text:
        return
    append_text(path, text)


def keep_activations(path: Path, prompt_ids: Collection[str]) -> None:
    """Leave only the lines of some prompts in the file, so that a resumed run appends to a clean one."""
    if not path.exists():
        return
    kept = {each.prompt_id: each for each in read_activations(path) if each.prompt_id in prompt_ids}
    write_text(path, activations_text(kept.values()))


def read_activations(path: Path) -> Iterator[PromptActivations]:
    """Read what a run wrote; a last line cut short by a kill is dropped.

    Raises:
        UserError: another line is not one of a run's.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield _parse(line)
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    if not line.endswith("\n"):
                        return
                    raise UserError(f"{path}, line {number}: not a line of this version ({error!r:.200})") from error
    except OSError as error:
        raise UserError(f"{path}: not readable ({error.strerror})") from error


def total_activations(path: Path, methods: Collection[str], prompt_ids: Collection[str]) -> dict[str, Activations]:
    """The sums over some prompts, by method; empty where the run has none of them.

    Args:
        prompt_ids: prompts that the sums are over, so far as the file has them.

    Raises:
        UserError: see `read_activations`.
    """
    if not path.exists():
        return {}
    chosen = {each.prompt_id: each for each in read_activations(path) if each.prompt_id in prompt_ids}
    found = {}
    for method in methods:
        known = [each for each in chosen.values() if each.steps.get(method, 0)]
        if known:
            counts = np.sum([np.asarray(each.counts[method], dtype=np.float64) for each in known], axis=0)
            found[method] = Activations(counts, sum(each.steps[method] for each in known), len(known))
    return found


def _parse(line: str) -> PromptActivations:
    raw = json.loads(line)
    found = PromptActivations(raw["prompt_id"], dict(raw["steps"]), dict(raw["counts"]))
    if len(raw) != 3 or not isinstance(found.prompt_id, str) or set(found.steps) != set(found.counts):
        raise ValueError("its keys are not those of a prompt's activations")
    _check(found.steps, found.counts)
    return found


def _check(steps: Mapping[str, float], counts: Mapping[str, Counts]) -> None:
    shapes = set()
    for method, rows in counts.items():
        array = np.asarray(rows, dtype=np.float64)  # refuses ragged rows and what is no number
        limit = steps[method] * (1 + 1e-9)
        if not (math.isfinite(limit) and array.size and bool(((array >= 0) & (array <= limit)).all())):
            raise ValueError(f"the counts of {method!r} are not between 0 and its steps")
        shapes.add(array.shape)
    if len(shapes) > 1 or any(len(shape) != 2 for shape in shapes):
        raise ValueError("the counts are not a table by layer and expert, the same for every method")
