"""Deterministic figures of two runs: the same on the same machine, or within a stated tolerance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ecospec.errors import UserError, nearest
from ecospec.harness.comparing.runs import Output, Run
from ecospec.harness.records import VERDICTS
from ecospec.harness.stats import Ratio, paired_ratio

SAME, WITHIN, DIFFERS = "same", "within tolerance", "differs"
TOKENS, LOSSLESS, SCORE = "tokens", "lossless", "score"


@dataclass(frozen=True)
class Figure:
    """A ratio of sums over prompts: Σ top / Σ bottom / scale.

    Attributes:
        scale: what the ratio is divided by as well, given the MoE layers.
        own: what must be the same prompt by prompt; by default top and bottom.
    """

    name: str
    title: str
    top: Callable[[Output], float]
    bottom: Callable[[Output], float]
    scale: Callable[[int], float] = lambda moe_layers: 1.0
    own: Callable[[Output], object] | None = None


FIGURES = (
    Figure("steps", "steps a prompt", lambda o: o.steps, lambda o: 1),
    Figure("alpha", "acceptance length α", lambda o: o.emitted, lambda o: o.steps),
    Figure("active-experts", "active experts E", lambda o: o.expert_pairs, lambda o: o.whole_steps, lambda n: n or 1),
    Figure("verified-tokens", "verified tokens per step", lambda o: o.selected, lambda o: o.steps),
    Figure(
        "overlap",
        "predicted overlap",
        lambda o: (o.overlap or 0.0) * o.steps,
        lambda o: 0 if o.overlap is None else o.steps,
        own=lambda o: o.overlap,
    ),
)
"""`TOKENS`, `SCORE` and `LOSSLESS` are compared besides."""

TOLERATED = (TOKENS, *(figure.name for figure in FIGURES), SCORE)
"""What a tolerance can be stated for. Lossless verdicts have none: they may not get worse."""


@dataclass(frozen=True)
class Compared:
    """One figure of one method in two runs.

    Attributes:
        base, new: None where there is nothing to divide by.
        change: new / base, with its interval over prompts; None of figures that are no such ratio.
        prompts: how many prompts have another value.
        of: of how many.
        first: the first of these.
        tolerance: that was stated; 0 for exactly.
        verdict: `SAME`, `WITHIN` or `DIFFERS`.
    """

    run: str
    method: str
    figure: str
    base: float | str | None
    new: float | str | None
    change: Ratio | None
    prompts: int
    of: int
    first: str | None
    tolerance: float
    verdict: str


def tolerances_of(texts: Sequence[str]) -> dict[str, float]:
    """Tolerances from ``alpha=0.01,tokens=0.05``; ``all`` stands for those that are not named.

    Raises:
        UserError: an unknown figure, or no number from 0 to below 1.
    """
    found: dict[str, float] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, _, number = part.partition("=")
        if name not in (*TOLERATED, "all"):
            raise UserError(f"tolerance {part!r}: unknown figure {name!r}; {nearest(name, (*TOLERATED, 'all'))}")
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = -1.0
        if not 0 <= found[name] < 1:
            raise UserError(f"tolerance {part!r}: expected {name}=NUMBER, from 0 to below 1")
    rest = found.pop("all", 0.0)
    return {name: found.get(name, rest) for name in TOLERATED}


def compare_figures(base: Run, new: Run, method: str, tolerances: Mapping[str, float]) -> list[Compared]:
    """All deterministic figures of a method, over the prompts of two comparable runs."""
    before, now = base.outputs[method], new.outputs[method]
    pairs = [(before[prompt], now[prompt]) for prompt in before]
    found = [_tokens(base.name, method, pairs, tolerances[TOKENS])]
    for figure in FIGURES:
        compared = _figure(base, method, figure, pairs, tolerances[figure.name])
        if compared is not None:
            found.append(compared)
    return [*found, *_score(base.name, method, pairs, tolerances[SCORE]), _lossless(base.name, method, pairs)]


Pairs = Sequence[tuple[Output, Output]]


def _differing(pairs: Pairs, value: Callable[[Output], object]) -> list[str]:
    return [a.prompt_id for a, b in pairs if value(a) != value(b)]


def _tokens(run: str, method: str, pairs: Pairs, tolerance: float) -> Compared:
    different = _differing(pairs, lambda o: (o.tokens, o.length, o.reason))
    verdict = DIFFERS if len(different) > tolerance * len(pairs) else WITHIN if different else SAME
    sums = [float(sum(each)) for each in zip(*((a.length, b.length) for a, b in pairs), strict=True)]
    first = different[0] if different else None
    return Compared(run, method, TOKENS, sums[0], sums[1], None, len(different), len(pairs), first, tolerance, verdict)


def _figure(base: Run, method: str, figure: Figure, pairs: Pairs, tolerance: float) -> Compared | None:
    different = _differing(pairs, figure.own or (lambda o: (figure.top(o), figure.bottom(o))))
    units: dict[str, list[float]] = {}
    for a, b in pairs:
        sums = units.setdefault(a.unit, [0.0] * 4)
        for i, value in enumerate((figure.top(b), figure.top(a), figure.bottom(b), figure.bottom(a))):
            sums[i] += value
    totals = [sum(each) for each in zip(*units.values(), strict=True)]
    if not any(totals):
        return None  # no method of this kind has it
    scale = figure.scale(base.moe_layers)
    values = [
        top / bottom / scale if bottom else None for top, bottom in ((totals[1], totals[3]), (totals[0], totals[2]))
    ]
    counted = [unit for unit in units.values() if unit[2] and unit[3]]
    columns = list(zip(*counted, strict=True)) if counted else [()] * 4
    change = Ratio(1.0, why="the same for every prompt")
    if different:
        change = paired_ratio(columns[0], columns[1], numerator_per=columns[2], denominator_per=columns[3])
    moved = None if values[0] is None or values[1] is None or not values[0] else abs(values[1] / values[0] - 1)
    return Compared(
        *(base.name, method, figure.name, values[0], values[1], change, len(different), len(pairs)),
        different[0] if different else None,
        tolerance,
        _verdict(bool(different), moved, tolerance),
    )


def _verdict(any_different: bool, moved: float | None, tolerance: float) -> str:
    if not any_different:
        return SAME
    # Exactly means prompt by prompt: differences that cancel in a sum are differences.
    return WITHIN if tolerance and moved is not None and moved <= tolerance else DIFFERS


def _score(run: str, method: str, pairs: Pairs, tolerance: float) -> list[Compared]:
    """The mean score; its tolerance is a difference, since a score can be 0."""
    if all(a.score is None and b.score is None for a, b in pairs):
        return []
    different = _differing(pairs, lambda o: o.score)
    known = [[o.score for o in side if o.score is not None] for side in zip(*pairs, strict=True)]
    values = [fmean(side) if side else None for side in known]
    moved = None if values[0] is None or values[1] is None else abs(values[1] - values[0])
    verdict = _verdict(bool(different), moved, tolerance)
    first = different[0] if different else None
    return [
        Compared(run, method, SCORE, values[0], values[1], None, len(different), len(pairs), first, tolerance, verdict)
    ]


def _lossless(run: str, method: str, pairs: Pairs) -> Compared:
    """The worst verdicts; no prompt may have a worse one than before."""
    different = _differing(pairs, lambda o: o.verdict)
    worse = [a.prompt_id for a, b in pairs if VERDICTS.index(b.verdict) > VERDICTS.index(a.verdict)]
    worst = [max((o.verdict for o in side), key=VERDICTS.index) for side in zip(*pairs, strict=True)]
    verdict = DIFFERS if worse else WITHIN if different else SAME
    first = next(iter([*worse, *different]), None)
    return Compared(run, method, LOSSLESS, worst[0], worst[1], None, len(different), len(pairs), first, 0.0, verdict)
