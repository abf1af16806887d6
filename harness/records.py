"""What a run writes down per prompt and method, and how it is read back: one JSON object a line."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from ecospec.errors import UserError
from ecospec.harness.writing import append_text

AR = "AR"
"""The label of plain decoding, the baseline of every ratio."""
PHASES = ("draft", "predict", "estimate", "select", "verify", "commit")
"""What the time of a step is split into."""


@dataclass(frozen=True)
class PromptRecord:
    """One prompt decoded by one method. Sums are over the prompt's decode steps.

    What was done for a batch of n prompts at once counts 1/n for each of them: seconds, expert pairs and
    ``step_share``.

    Attributes:
        method: label of the method, `AR` for plain decoding.
        tokens: every emitted token id, the first one (from the prefill) included.
        reason: why the output ended: eos, stop or length.
        prefill_seconds: from the request to the first emitted token, drafter and predictor included.
        decode_seconds: from the first emitted token to the last.
        steps: verification (or AR) steps; ``emitted`` tokens came from them, so α = emitted / steps.
        selected: tokens verified.
        expert_pairs: unique (layer, expert) pairs read, so E = expert_pairs / step_share / MoE layers.
        phase_seconds: by phase, see `PHASES`.
        predicted_overlap: mean share of the verified nodes' true experts that were predicted, or None.
        verdict: exact, ties, violated, or unchecked.
        ties: differences from AR at positions where its two best choices are within numeric noise.
        largest_gap: the largest such gap, in logits (scores, when sampling).
        score: of the text, by the suite's metric, from 0 to 1; None where the suite has none or it was not run.
        batch: id of the first of the prompts that were decoded together; empty for a prompt by itself.
        step_share: the steps, each divided by the number of prompts in it; None for a prompt by itself.
        reached_by_depth: entry d − 1 has the steps in which a draft token of depth d was verified behind an accepted
            path of depth d − 1; empty for plain decoding.
        accepted_by_depth: those of them in which such a token was accepted and emitted.
    """

    prompt_id: str
    method: str
    prompt_tokens: int
    tokens: list[int]
    text: str
    reason: str
    prefill_seconds: float
    decode_seconds: float
    steps: int
    emitted: int
    selected: int
    expert_pairs: float
    phase_seconds: dict[str, float]
    predicted_overlap: float | None = None
    verdict: str = "unchecked"
    ties: int = 0
    largest_gap: float = 0.0
    score: float | None = None
    batch: str = ""
    step_share: float | None = None
    reached_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)

    @property
    def whole_steps(self) -> float:
        """Steps that this prompt stands for: all of its own, or its share of a batch's."""
        return self.steps if self.step_share is None else self.step_share


VERDICTS = ("unchecked", "exact", "ties", "violated")
"""From nothing known to worst."""
LARGEST = 1e15
"""What a number in a record can be at most."""
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("prompt_id", "method", "text", "reason", "verdict", "batch"), (str,)),
    **dict.fromkeys(("prompt_tokens", "steps", "emitted", "selected", "ties"), (int,)),
    **dict.fromkeys(("prefill_seconds", "decode_seconds", "largest_gap", "expert_pairs"), (int, float)),
    **dict.fromkeys(("tokens", "reached_by_depth", "accepted_by_depth"), (list,)),
    "phase_seconds": (dict,),
    **dict.fromkeys(("predicted_overlap", "score", "step_share"), (int, float, type(None))),
}
"""What JSON type each field of a record has."""


def records_text(records: Sequence[PromptRecord]) -> str:
    """The lines of some records."""
    return "".join(json.dumps(asdict(record)) + "\n" for record in records)


def append_records(path: Path, records: Sequence[PromptRecord]) -> None:
    """Append the records of one finished prompt in a single write."""
    text = records_text(records)
    append_text(path, text)


def read_records(path: Path) -> list[PromptRecord]:
    """Read what a run wrote; a last line cut short by a kill is dropped.

    Raises:
        UserError: another line is not a record.
    """
    return list(_parse(path))


def _parse(path: Path) -> Iterator[PromptRecord]:
    names = {each.name for each in fields(PromptRecord)}
    # A kill can cut a character; the line it is in is then no JSON, and is judged as any other.
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"{path}: not readable ({error.strerror})") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            raw = json.loads(line)
            if not isinstance(raw, dict) or set(raw) != names:
                raise ValueError("its keys are not a record's")
            for name, kinds in KINDS.items():
                if not _fits(name, raw[name], kinds):
                    raise ValueError(f"{name} is {reprlib.repr(raw[name])}")
            yield PromptRecord(**raw)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # no newline after it: the write was cut short
                return
            raise UserError(f"{path}, line {number}: not a record of this version ({error})") from error


def _fits(name: str, value: object, kinds: tuple[type, ...]) -> bool:
    """Whether a field can have been written by a run: of its type, finite, not negative, in bearable size."""
    if not isinstance(value, kinds) or isinstance(value, bool):
        return False
    if isinstance(value, dict):
        return all(_fits(key, entry, (int, float)) for key, entry in value.items())
    if isinstance(value, list):
        return all(_fits(name, entry, (int,)) for entry in value)
    if name == "verdict":
        return value in VERDICTS
    if name == "step_share" and value == 0.0:
        return False
    return not isinstance(value, int | float) or 0 <= value <= LARGEST
