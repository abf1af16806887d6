"""A report in words: the table's lines, and the table with its notes on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ecospec.harness.records import AR
from ecospec.harness.report import Lossless, MethodRow, Report
from ecospec.harness.report_notes import NONE, NOT_APPLICABLE, headline, notes, percent
from ecospec.harness.stats import Ratio

SCORE_MEANING = "mean over prompts of the suite's own metric; where the output is lossless, all methods have AR's"


@dataclass(frozen=True)
class Line:
    """One line of the table: a metric over all methods.

    Attributes:
        cell: what stands under a method.
        meaning: its definition; empty for a line that belongs to the one above.
        ends_group: a gap follows.
    """

    label: str
    cell: Callable[[MethodRow], str]
    meaning: str = ""
    ends_group: bool = False


def table_lines(report: Report) -> list[Line]:
    """Every line of the table, top to bottom; the terminal, Markdown and the definitions all read it."""
    return [
        *_speed_lines(report),
        *_verification_lines(report),
        *_time_lines(report),
        *_byte_lines(report),
        *_lossless_lines(report),
    ]


def _speed_lines(report: Report) -> list[Line]:
    per_token = "AR's seconds per token over the method's, each Σ seconds / Σ tokens over prompts"
    return [
        Line("speed-up, end to end", lambda r: _value(r.speedup), f"{per_token}; prefill included"),
        Line("  95 % interval", lambda r: interval_text(r.speedup)),
        Line(
            "speed-up, decode only",
            lambda r: _value(r.decode_speedup),
            f"{per_token}; the tokens after the first",
        ),
        Line("  95 % interval", lambda r: interval_text(r.decode_speedup)),
        Line(
            f"over {report.baseline}, decode only",
            lambda r: _value(r.over_baseline),
            f"the decode-only speed-up with {report.baseline} in AR's place",
        ),
        Line("  95 % interval", lambda r: interval_text(r.over_baseline), ends_group=True),
        Line(
            "tokens/s, end to end",
            lambda r: _number(r.tokens_per_second, 1),
            "Σ tokens / Σ (prefill + decode seconds)",
        ),
        Line(
            "tokens/s, decode only",
            lambda r: _number(r.decode_tokens_per_second, 1),
            "Σ tokens after the first / Σ decode seconds",
            ends_group=True,
        ),
    ]


def _verification_lines(report: Report) -> list[Line]:
    rows_per_step = Line(
        "prompts per step",
        lambda r: _number(r.rows_per_step, 2),
        "prompts decoded in a step, on average; a batch gets smaller as its prompts end. A step of a batch counts "
        "once in E, every T and the bytes, and α and verified tokens are per prompt",
    )
    return [
        Line(
            "acceptance length α",
            lambda r: _number(r.acceptance_length, 3),
            "Σ emitted tokens / Σ steps; AR has 1",
        ),
        Line("  mean over prompts", lambda r: _number(r.acceptance_length_prompt_mean, 3)),
        Line(
            "active experts E",
            lambda r: _of_experts(report, _number(r.active_experts, 3)),
            "Σ unique (layer, expert) pairs / Σ steps / MoE layers; AR has K, and more in batches",
        ),
        Line("  mean over prompts", lambda r: _of_experts(report, _number(r.active_experts_prompt_mean, 3))),
        Line(
            "verified tokens per step",
            lambda r: _number(r.verified_tokens, 2),
            "Σ selected nodes / Σ steps, root included",
        ),
        *([rows_per_step] if report.in_batches else []),
        Line(
            "predicted overlap",
            lambda r: percent(r.predicted_overlap),
            "share of the verified nodes' true experts that were predicted, mean over steps",
            ends_group=True,
        ),
    ]


def _time_lines(report: Report) -> list[Line]:
    def phase(name: str) -> Callable[[MethodRow], str]:
        return lambda row: _number(row.phase_ms.get(name), 3)

    yardsticks = list(dict.fromkeys(name for row in report.rows for name in row.headroom))
    return [
        Line("T_draft, ms per step", phase("draft"), "Σ seconds of the phase / Σ steps; so for every T"),
        Line("T_predict", phase("predict")),
        Line("T_estimate", phase("estimate"), "estimates of acceptance, for the policies that look at them"),
        Line("T_select", phase("select")),
        Line("T_verify", phase("verify")),
        Line("T_commit", phase("commit")),
        Line(
            "outside the target's pass",
            lambda r: percent(r.outside_target),
            "1 − T_verify / the sum of all T",
        ),
        Line(
            "ρ = T_AR / T_verify",
            lambda r: _number(r.rho, 3),
            "AR's mean forward pass over the mean verification pass",
        ),
        Line(
            "α · ρ",
            lambda r: _value(r.verification_speedup),
            "the speed-up if all but the target's passes took no time; yardsticks have it too",
        ),
        Line("  95 % interval", lambda r: interval_text(r.verification_speedup), ends_group=not yardsticks),
        *(
            Line(
                f"headroom closed, {name}",
                lambda r, name=name: percent(r.headroom.get(name)),  # type: ignore[misc]
                f"(α · ρ − {report.baseline}'s) / ({name}'s − {report.baseline}'s)",
                ends_group=name == yardsticks[-1],
            )
            for name in yardsticks
        ),
    ]


def _of_experts(report: Report, cell: str) -> str:
    """A figure about experts; a dense target has none."""
    return cell if report.moe_layers else NOT_APPLICABLE


def _byte_lines(report: Report) -> list[Line]:
    return [
        Line(
            "expert MB per step",
            lambda r: _of_experts(report, _number(r.expert_bytes_per_step, 2, 1e-6)),
            "Σ unique pairs / Σ steps · bytes of one expert (MB = 10⁶ bytes)",
        ),
        Line(
            "all MB per step",
            lambda r: _number(r.bytes_per_step, 2, 1e-6),
            "the same plus the bytes that every step reads: attention, shared experts, routers, head",
        ),
        Line(
            "achieved GB/s",
            lambda r: _number(r.achieved_gb_per_second, 2),
            "all bytes per step / T_verify (GB = 10⁹ bytes)",
        ),
        Line(
            "share of copy bandwidth",
            lambda r: percent(r.bandwidth_share),
            "achieved GB/s over what the device copies, bytes read and written, measured before the run",
            ends_group=True,
        ),
    ]


def _lossless_lines(report: Report) -> list[Line]:
    def is_reference(row: MethodRow) -> bool:
        # In a batch AR too is compared with each prompt's own run.
        return row.label == AR and (row.rows_per_step or 1.0) <= 1.0

    def unless_ar(cell: Callable[[Lossless], str]) -> Callable[[MethodRow], str]:
        return lambda row: NONE if is_reference(row) else cell(row.lossless)

    return [
        Line(
            "lossless",
            lambda r: "reference" if is_reference(r) else r.lossless.verdict,
            "the worst verdict over all prompts: exact, ties (every difference from AR lies within measured "
            "numeric noise) or violated",
        ),
        Line("  prompts checked", unless_ar(lambda found: f"{found.checked} of {found.prompts}")),
        Line("  ties", unless_ar(lambda found: str(found.ties))),
        Line(
            "  largest gap of a tie",
            unless_ar(lambda found: f"{found.largest_gap:.2g}" if found.ties else NONE),
        ),
        *([Line("score", lambda r: percent(r.score), SCORE_MEANING)] if report.any_score else []),
    ]


def terminal_table(report: Report, rows: Sequence[MethodRow]) -> Table:
    """Metrics down, the methods of ``rows`` across. `table_width` says how wide it wants to be."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", overflow="fold")
    for row in rows:
        table.add_column(Text(row.label), justify="right", overflow="fold")
    for line in table_lines(report):
        cells = (Text(line.cell(row)) for row in rows)
        table.add_row(Text(line.label), *cells, end_section=line.ends_group)
    return table


def table_width(report: Report, rows: Sequence[MethodRow]) -> int:
    """Columns that the terminal table needs for nothing to fold."""
    return Console(width=10_000).measure(terminal_table(report, rows)).maximum


def fitting_tables(report: Report, width: int) -> list[Table]:
    """One table, or several below each other where all methods side by side are wider than ``width``."""
    groups: list[list[MethodRow]] = []
    for row in report.rows:
        if groups and table_width(report, [*groups[-1], row]) <= width:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [terminal_table(report, group) for group in groups]


def print_report(report: Report, manifest: Mapping[str, Any], console: Console) -> None:
    """Headline, table and notes. Off a terminal (a file, a pipe) the console is made as wide as they need."""
    if not console.is_terminal:
        console.width = max(console.width, table_width(report, report.rows))
    _print_line(console, headline(report, manifest))
    for table in fitting_tables(report, console.width):
        console.print(table)
    for note in notes(report, manifest):
        _print_line(console, note)


def _print_line(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=not console.is_terminal)


def _number(value: float | None, digits: int, factor: float = 1.0) -> str:
    return NONE if value is None else f"{value * factor:,.{digits}f}"


def _value(ratio: Ratio | None) -> str:
    return NONE if ratio is None else _number(ratio.value, 3)


def ratio_cell(ratio: Ratio | None) -> tuple[str, ...]:
    """A ratio and, behind or below it, its interval."""
    if ratio is None or ratio.value is None:
        return (NONE,)
    value = f"{ratio.value:.3f}"
    return (value,) if ratio.interval is None else (value, f"({interval_text(ratio)})")


def interval_text(ratio: Ratio | None) -> str:
    """The 95 % interval, or a dash."""
    if ratio is None or ratio.interval is None:
        return NONE
    return f"{ratio.interval.low:.3f}–{ratio.interval.high:.3f}"
