"""Several runs as one page: a verdict for each, their speed-ups in one plot, a table a method, and links to each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ecospec.harness.pairs import TITLE, pair_rows, pairs_of
from ecospec.harness.plots import INK, Plot, drawn, method_entry, shortened
from ecospec.harness.records import AR
from ecospec.harness.report_html import environment
from ecospec.harness.report_notes import headline
from ecospec.harness.report_plots import LABEL, interval
from ecospec.harness.run_reading import RunData
from ecospec.harness.summary import summary_header, summary_lines, summary_methods
from ecospec.harness.verdict import BAD, GOOD, OPEN, Claim, Verdict, ratio_words, verdict_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class RunLine:
    """A run on the page: its name, the page of its own relative to this one, and its verdict."""

    name: str
    page: str
    headline: str
    verdict: Verdict


def summary_html(runs: Sequence[RunData], title: str, average: bool, folder: Path) -> str:
    """The whole page.

    Args:
        average: whether the runs differ in nothing but the suite, so that a mean over them says something.
        folder: where the page will lie, for links to the runs' own pages.
    """
    reports = {run.name: run.report for run in runs}
    methods = summary_methods(reports)
    pairs = pairs_of(runs) if average else []
    return (
        environment()
        .get_template("summary.html")
        .render(
            title=title,
            headline=f"{len(runs)} runs · {_shared(runs)}",
            verdict=summary_verdict(runs),
            plots=[plot for plot in (speed_by_run(runs, methods),) if plot is not None],
            runs=[_line(run, folder) for run in runs],
            header=summary_header(),
            tables=[(method, summary_lines(reports, method, average)) for method in methods],
            pairs=pair_rows(pairs) if pairs else None,
            pairs_title=TITLE,
            average=average,
            notes=[f"{run.name}: {run.unfinished}" for run in runs if run.missing],
        )
    )


def _line(run: RunData, folder: Path) -> RunLine:
    # Relative, so that a folder and the runs in it can be moved together.
    page = Path(os.path.relpath(run.folder.resolve() / "report.html", folder.resolve()))
    link = quote(page.as_posix())
    return RunLine(
        run.name, link, headline(run.report, run.manifest), verdict_of(run.report, run.manifest, run.missing)
    )


def _shared(runs: Sequence[RunData]) -> str:
    parts = []
    for key, words in (("target", "target"), ("budget", "γ ="), ("temperature", "T ="), ("device", "on")):
        found = [run.manifest.get(key) for run in runs]
        values = dict.fromkeys(f"{value:g}" if isinstance(value, float) else str(value) for value in found)
        parts.append(f"{words} {', '.join(values)}")
    return " · ".join(parts)


def summary_verdict(runs: Sequence[RunData]) -> Verdict:
    """The runs' verdicts in three sentences: in how many a method pays, the worst on losslessness, the doubts."""
    verdicts = {run.name: verdict_of(run.report, run.manifest, run.missing) for run in runs}
    pays = {kind: [name for name, found in verdicts.items() if found.pays.grade == kind] for kind in (GOOD, OPEN, BAD)}
    said = [
        f"{words} in {len(pays[kind])} of {len(runs)} runs ({', '.join(pays[kind])})"
        for kind, words in (
            (GOOD, "the fastest policy pays"),
            (OPEN, "the fastest policy cannot be told to pay"),
            (BAD, "the fastest policy does not pay"),
        )
        if pays[kind]
    ]
    worst = BAD if pays[BAD] else OPEN if pays[OPEN] else GOOD
    text = "; ".join(said)
    lossless = _worst([found.lossless for found in verdicts.values()], list(verdicts))
    doubts: dict[str, list[str]] = {}
    for name, found in verdicts.items():
        for doubt in found.doubts:
            doubts.setdefault(doubt.kind, []).append(name)
    told = [f"{kind}{_of(names, runs)}" for kind, names in doubts.items()]
    trust = (
        Claim(OPEN, f"How far to trust it: {'; '.join(told)}.")
        if told
        else Claim(GOOD, "Nothing in the runs speaks against the figures.")
    )
    return Verdict(Claim(worst, f"{text[:1].upper()}{text[1:]}."), lossless, trust, None)


def _of(names: Sequence[str], runs: Sequence[RunData]) -> str:
    return "" if len(names) == len(runs) else f" ({', '.join(names)})"


def _worst(claims: Sequence[Claim], names: Sequence[str]) -> Claim:
    for kind in (BAD, OPEN):
        found = [name for name, claim in zip(names, claims, strict=True) if claim.grade == kind]
        if found:
            text = next(claim.text for claim in claims if claim.grade == kind)
            return Claim(kind, f"{', '.join(found)}: {text}" if len(found) < len(names) else text)
    return Claim(GOOD, "Lossless: every token that was checked equals plain decoding's, in all runs.")


def speed_by_run(runs: Sequence[RunData], methods: Sequence[str]) -> Plot | None:
    """Decode-only speed-up of every method in every run, with intervals."""
    found: dict[str, list[tuple[int, str, Any]]] = {}
    for run in runs:
        rows = [row for row in run.report.rows if row.label != AR and row.decode_speedup is not None]
        known = [
            (methods.index(row.label), row.label, row.decode_speedup) for row in rows if _value(row.decode_speedup)
        ]
        if known:
            found[run.name] = known
    if not found:
        return None
    drawn_methods = sorted({(index, label) for each in found.values() for index, label, _ in each})
    order = {index: place for place, (index, _) in enumerate(drawn_methods)}
    step = 0.16
    height = 0.32 + step * len(order)

    def draw(figure: Figure) -> None:
        axes: Any = figure.add_subplot()
        axes.grid(True, axis="x")
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_ylim(height * len(found) - 0.1, -0.1)
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        for number, (name, known) in enumerate(found.items()):
            top = number * height
            where = axes.get_yaxis_transform()
            axes.text(0.0, top + 0.11, shortened(name), transform=where, weight="bold", **LABEL)
            for index, _, ratio in known:
                interval(axes, top + 0.24 + step * order[index], index, ratio, filled=True)
        axes.set_xlabel("decode-only speed-up over plain decoding")

    words = [
        f"{name}: {', '.join(f'{label} {ratio_words(ratio)}' for _, label, ratio in known)}"
        for name, known in found.items()
    ]
    return Plot(
        "speed-by-run",
        "Speed-up by run",
        "Decode only, with 95 % intervals over prompts; an interval across the dashed line at 1 cannot be told from no "
        "change.",
        "; ".join(words),
        drawn("speed-by-run", 0.55 + 0.9 * height * len(found), draw),
        tuple(method_entry(index, label) for index, label in drawn_methods),
    )


def _value(ratio: Any) -> bool:
    return ratio is not None and ratio.value is not None
