"""Finished runs in the layout of the EcoSpec paper's tables (arXiv 2607.12696), as Markdown.

Three lines a method: Spd, the speed-up over plain decoding (end to end); Len, the acceptance length α; Exp, the active
experts E. Other tables have other figures. Those whose axes are known to be a table's of the paper bear its number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ecospec.harness.paper_rows import PaperRow, Setting, methods_of, paper_rows
from ecospec.harness.report import YARDSTICKS, MethodRow
from ecospec.harness.report_markdown import markdown_table
from ecospec.harness.report_notes import NONE
from ecospec.harness.run_reading import RunData
from ecospec.harness.summary import ratio_value

AVERAGE = "Avg."


@dataclass(frozen=True)
class Figure:
    """A line of a table: its name there and what it is of a method.

    Attributes:
        of_some: not every method has it; those that have it in no column have no line.
    """

    label: str
    value: Callable[[MethodRow], float | None]
    digits: int
    of_some: bool = False


SPD = Figure("Spd", lambda row: ratio_value(row.speedup), 2)
LEN = Figure("Len", lambda row: row.acceptance_length, 2)
EXP = Figure("Exp", lambda row: row.active_experts, 2)
RHO = Figure("ρ", lambda row: row.rho, 3)
GAIN = Figure("α·ρ", lambda row: ratio_value(row.verification_speedup), 3)
OVERLAP = Figure(
    "overlap, %", lambda row: None if row.predicted_overlap is None else 100 * row.predicted_overlap, 1, of_some=True
)


@dataclass(frozen=True)
class Axis:
    """What a table's columns differ in, besides the suites.

    Attributes:
        name: of the setting's attribute.
        title: of the table in the paper's layout, suite by suite, with its figures; None where there is none.
        mean_title: of the table with all figures, mean over suites.
        left_out: what columns can differ in as well.
    """

    name: str
    title: str | None
    figures: tuple[Figure, ...]
    mean_title: str
    column: Callable[[Setting], str]
    left_out: tuple[str, ...] = ()


AXES = (
    Axis(
        "target",
        None,
        (),
        "Targets",
        lambda setting: setting.target,
        ("acceptance", "of_target"),
    ),
    Axis("temperature", None, (), "Temperatures", lambda setting: f"T = {setting.temperature:g}"),
    Axis(
        "batch_size",
        "Tables 6 to 8, batch sizes",
        (SPD, EXP, RHO),
        "Batch sizes",
        lambda setting: str(setting.batch_size),
    ),
    Axis(
        "budget",
        "Tables 11 and 12, budgets γ",
        (SPD, LEN, EXP),
        "Budgets γ",
        lambda setting: str(setting.budget),
    ),
)


def paper_tables(runs: Sequence[RunData]) -> str:
    """All tables that the runs have figures for."""
    rows, left_out = paper_rows(runs)
    blocks = ["# Tables in the paper's layout"]
    for setting in dict.fromkeys(each.setting for each in rows):
        blocks += _by_suite([each for each in rows if each.setting == setting], setting.words())
    for axis in AXES:
        blocks += _over_axis(rows, axis)
    blocks += [_legend(rows, runs)]
    blocks += [f"- {run.name}: {run.unfinished}" for run in runs if run.missing]
    blocks += [f"- {line}" for line in left_out]
    return "\n\n".join(blocks) + "\n"


def _by_suite(rows: Sequence[PaperRow], words: str) -> list[str]:
    """The tables of one setting, a suite a column; their mean is over the suites that have a value."""

    def table(*figures: Figure) -> str:
        return _table(rows, figures, _suite, average=True)

    phases = [_phase(name) for name in _phases(rows)]
    headroom = _headroom(rows)
    several_suites = len({each.suite for each in rows}) > 1
    several_predictors = len({each.predictor for each in rows} - {None}) > 1
    return [
        *(f"## Table 1: {words}", table(SPD, LEN, EXP)),
        *(f"## Verification: {words}", table(LEN, EXP, RHO, GAIN, OVERLAP)),
        *((f"## Headroom closed in %: {words}", table(*headroom)) if headroom else ()),
        *(f"## Time of a step in ms, mean over suites: {words}", _time_table(rows)),
        *((f"## Time of a step in ms by suite: {words}", table(*phases)) if several_suites else ()),
        *((f"## Tables 9 and 10, predictors: {words}", table(OVERLAP, SPD, LEN, EXP)) if several_predictors else ()),
    ]


def _over_axis(rows: Sequence[PaperRow], axis: Axis) -> list[str]:
    """Where runs differ in an axis: in the paper's layout suite by suite, then all figures as means over suites."""
    groups: dict[str, list[PaperRow]] = {}
    for each in rows:
        groups.setdefault(each.setting.words(axis.name, *axis.left_out), []).append(each)
    blocks = []
    for words, group in groups.items():
        if len({getattr(each.setting, axis.name) for each in group}) < 2:
            continue
        if axis.name != "target":
            group.sort(key=lambda each: getattr(each.setting, axis.name))
        if axis.title:
            for suite in dict.fromkeys(map(_suite, group)):
                own = [each for each in group if each.suite == suite]
                if len({each.setting for each in own}) > 1:
                    table = _table(own, axis.figures, lambda each: axis.column(each.setting))
                    blocks += [f"## {axis.title}: {suite}, {words}", table]
        blocks += _mean_table(group, axis, words)
    return blocks


def _mean_table(rows: Sequence[PaperRow], axis: Axis, words: str) -> list[str]:
    """All figures, each the mean over the suites that every column has; a dash where one of them has none."""
    settings = list(dict.fromkeys(each.setting for each in rows))
    # Two settings of one target are two columns, named by what they differ in.
    plain = len({axis.column(setting) for setting in settings}) == len(settings)
    named = {setting: axis.column(setting) if plain else _named(setting, axis) for setting in settings}
    suites = [
        suite
        for suite in dict.fromkeys(map(_suite, rows))
        if {each.setting for each in rows if each.suite == suite and each.row.steps} == set(settings)
    ]
    if not suites:
        return [f"## {axis.mean_title}: {words}", "No suite has figures for every column."]
    common = [each for each in rows if each.suite in suites]
    figures = (SPD, LEN, EXP, RHO, GAIN, OVERLAP, *_headroom(common, "headroom, "))
    table = _table(common, figures, lambda each: named[each.setting], suites=len(suites))
    over = f"mean over {', '.join(suites)}" if len(suites) > 1 else suites[0]
    return [f"## {axis.mean_title}, {over}: {words}", table]


def _named(setting: Setting, axis: Axis) -> str:
    more = (f"acceptance {setting.acceptance}" if setting.acceptance else "", *setting.of_target)
    return ", ".join((axis.column(setting), *filter(None, more)))


def _table(
    rows: Sequence[PaperRow],
    figures: Sequence[Figure],
    column: Callable[[PaperRow], str],
    *,
    average: bool = False,
    suites: int = 1,
) -> str:
    """A block of lines a method, a line a figure.

    Args:
        average: a last column has the mean over those that have a value.
        suites: how many rows a method has in a column; their mean is its value, if all have one.
    """
    columns = list(dict.fromkeys(map(column, rows)))
    lines = []
    for method in methods_of(rows):
        own = [each for each in rows if each.method == method]
        name = method
        for figure in figures:
            values = [
                _whole_mean([figure.value(each.row) for each in own if column(each) == head], suites)
                for head in columns
            ]
            known = [value for value in values if value is not None]
            if figure.of_some and not known:
                continue
            mean = [_cell(fmean(known) if known else None, figure)] if average else []
            lines.append([name, figure.label, *(_cell(value, figure) for value in values), *mean])
            name = ""
    return markdown_table(["", "", *columns, *([AVERAGE] if average else [])], lines)


def _whole_mean(values: Sequence[float | None], expected: int) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == expected else None


def _time_table(rows: Sequence[PaperRow]) -> str:
    phases = _phases(rows)
    lines = []
    for method in methods_of(rows):
        found = [each.row for each in rows if each.method == method]
        times = [_mean([row.phase_ms.get(phase) for row in found], 3) for phase in phases]
        lines.append([method, *times, *(_mean(list(map(f.value, found)), f.digits) for f in (RHO, GAIN, SPD))])
    return markdown_table(["", *(f"T_{phase}" for phase in phases), RHO.label, GAIN.label, SPD.label], lines)


def _phases(rows: Sequence[PaperRow]) -> list[str]:
    return list(dict.fromkeys(phase for each in rows for phase in each.row.phase_ms))


def _phase(name: str) -> Figure:
    return Figure(f"T_{name}", lambda row: row.phase_ms.get(name), 3, of_some=True)


def _headroom(rows: Sequence[PaperRow], before: str = "") -> list[Figure]:
    """A figure a yardstick, of those that any run has."""

    def figure(name: str) -> Figure:
        def share(row: MethodRow) -> float | None:
            found = row.headroom.get(name)
            return None if found is None else 100 * found

        return Figure(f"{before}{name}, %" if before else name, share, 1, of_some=True)

    known = {name for each in rows for name, share in each.row.headroom.items() if share is not None}
    return [figure(name) for name in YARDSTICKS if name in known]


def _legend(rows: Sequence[PaperRow], runs: Sequence[RunData]) -> str:
    said = (
        "Spd: speed-up over plain decoding, end to end. Len: acceptance length α. Exp: active experts E per MoE "
        "layer and step. ρ = T_AR / T_verify. α·ρ: the speed-up if all but the target's passes took no time."
    )
    if _headroom(rows):
        baselines = ", ".join(dict.fromkeys(run.report.baseline for run in runs))
        said += (
            f" Headroom closed: of the way from the α·ρ of {baselines} to that of the yardstick, the method's share."
        )
    return (
        f"{said} {AVERAGE}: plain mean over the suites that have a value. A dash: not measured, or not to be had (what "
        "looks at the target's true routing, or at what it will accept, has no speed-up)."
    )


def _suite(row: PaperRow) -> str:
    return row.suite


def _mean(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.{digits}f}" if known else NONE


def _cell(value: float | None, figure: Figure) -> str:
    return NONE if value is None else f"{value:.{figure.digits}f}"
