"""What the doctor says: facts in rows, and findings of one line each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PROBLEM, NOTE = "problem", "note"


@dataclass(frozen=True)
class Finding:
    """One line. A ``problem`` is what a run would stop at, or what cannot be told; a ``note`` is not."""

    level: str
    text: str


@dataclass(frozen=True)
class Fact:
    """One row: a value for a program, and its text for a reader."""

    part: str
    name: str
    value: Any
    text: str


@dataclass
class Diagnosis:
    """All that was found, in the order in which it was looked at."""

    facts: list[Fact] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether a run would have nothing to stop at."""
        return all(finding.level != PROBLEM for finding in self.findings)

    def fact(self, part: str, name: str, value: Any, text: str | None = None) -> None:
        """Add a row; whole numbers are written with separators where no text is given."""
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        self.facts.append(Fact(part, name, value, shown if text is None else text))

    def problem(self, text: str) -> None:
        """Add what a run would stop at."""
        self.findings.append(Finding(PROBLEM, " ".join(text.split())))

    def note(self, text: str) -> None:
        """Add what is good to know."""
        self.findings.append(Finding(NOTE, " ".join(text.split())))


def size_text(count: float) -> str:
    """Bytes in decimal units, MB = 10⁶ bytes."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count:,.0f} bytes"
