"""A report in words: the table's lines, the notes a reader must not miss, and both on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ecospec.harness.records import AR
from ecospec.harness.report import Lossless, MethodRow, Report
from ecospec.harness.stats import Ratio

NONE = "–"
FEW_PROMPTS = 20
"""Below this number of prompts, a bootstrap over prompts gives intervals that are too narrow."""
EMBEDDED = "embedded"
SCORE_MEANING = "mean over prompts of the suite's own metric; where the output is lossless, all methods have AR's"
LOW_BANDWIDTH_SHARE = 0.5
"""Below this share of the copy bandwidth, a pass is said not to be bound by reading weights."""
OVERHEAD_SHARE = 0.30
"""Above this share of a step outside the target's forward pass, a row is said to measure overhead."""


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
    return [*_speed_lines(report), *_verification_lines(), *_time_lines(), *_byte_lines(), *_lossless_lines(report)]


def _speed_lines(report: Report) -> list[Line]:
    per_token = "AR's seconds per token over the method's, each Σ seconds / Σ tokens over prompts"
    return [
        Line("speed-up, end to end", lambda r: _value(r.speedup), f"{per_token}; prefill included"),
        Line("  95 % interval", lambda r: _interval(r.speedup)),
        Line(
            "speed-up, decode only",
            lambda r: _value(r.decode_speedup),
            f"{per_token}; the tokens after the first",
        ),
        Line("  95 % interval", lambda r: _interval(r.decode_speedup)),
        Line(
            f"over {report.baseline}, decode only",
            lambda r: _value(r.over_baseline),
            f"the decode-only speed-up with {report.baseline} in AR's place",
        ),
        Line("  95 % interval", lambda r: _interval(r.over_baseline), ends_group=True),
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


def _verification_lines() -> list[Line]:
    return [
        Line(
            "acceptance length α",
            lambda r: _number(r.acceptance_length, 3),
            "Σ emitted tokens / Σ steps; AR has 1",
        ),
        Line("  mean over prompts", lambda r: _number(r.acceptance_length_prompt_mean, 3)),
        Line(
            "active experts E",
            lambda r: _number(r.active_experts, 3),
            "Σ unique (layer, expert) pairs / Σ steps / MoE layers; AR has K",
        ),
        Line("  mean over prompts", lambda r: _number(r.active_experts_prompt_mean, 3)),
        Line(
            "verified tokens per step",
            lambda r: _number(r.verified_tokens, 2),
            "Σ selected nodes / Σ steps, root included",
        ),
        Line(
            "predicted overlap",
            lambda r: _percent(r.predicted_overlap),
            "share of the verified nodes' true experts that were predicted, mean over steps",
            ends_group=True,
        ),
    ]


def _time_lines() -> list[Line]:
    def phase(name: str) -> Callable[[MethodRow], str]:
        return lambda row: _number(row.phase_ms.get(name), 3)

    return [
        Line("T_draft, ms per step", phase("draft"), "Σ seconds of the phase / Σ steps; so for every T"),
        Line("T_predict", phase("predict")),
        Line("T_select", phase("select")),
        Line("T_verify", phase("verify")),
        Line("T_commit", phase("commit")),
        Line(
            "outside the target's pass",
            lambda r: _percent(r.outside_target),
            "1 − T_verify / the sum of all T",
        ),
        Line(
            "ρ = T_AR / T_verify",
            lambda r: _number(r.rho, 3),
            "AR's mean forward pass over the mean verification pass",
            ends_group=True,
        ),
    ]


def _byte_lines() -> list[Line]:
    return [
        Line(
            "expert MB per step",
            lambda r: _number(r.expert_bytes_per_step, 2, 1e-6),
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
            lambda r: _percent(r.bandwidth_share),
            "achieved GB/s over what the device copies, bytes read and written, measured before the run",
            ends_group=True,
        ),
    ]


def _lossless_lines(report: Report) -> list[Line]:
    def unless_ar(cell: Callable[[Lossless], str]) -> Callable[[MethodRow], str]:
        return lambda row: NONE if row.label == AR else cell(row.lossless)

    return [
        Line(
            "lossless",
            lambda r: "reference" if r.label == AR else r.lossless.verdict,
            "the worst verdict over all prompts: exact, ties (every difference from AR lies within measured "
            "numeric noise) or violated",
        ),
        Line("  prompts checked", unless_ar(lambda found: f"{found.checked} of {found.prompts}")),
        Line("  ties", unless_ar(lambda found: str(found.ties))),
        Line(
            "  largest gap of a tie",
            unless_ar(lambda found: f"{found.largest_gap:.2g}" if found.ties else NONE),
        ),
        *([Line("score", lambda r: _percent(r.score), SCORE_MEANING)] if any_score(report) else []),
    ]


def any_score(report: Report) -> bool:
    """Whether anything was scored."""
    return any(row.score is not None for row in report.rows)


def headline(report: Report, manifest: Mapping[str, Any]) -> str:
    """Where the data come from, and what was run on what; the first line a reader sees."""
    threads = manifest.get("threads")
    parts = [
        str(manifest.get("source") or "data source not recorded"),
        str(manifest.get("suite") or ""),
        f"target {manifest.get('target') or 'not recorded'}{_widening(manifest)}",
        f"{report.prompts} prompt{'s' if report.prompts != 1 else ''}",
        f"γ = {manifest['budget']}" if "budget" in manifest else "",
        f"T = {manifest['temperature']:g}" if "temperature" in manifest else "",
        str(manifest.get("dtype") or ""),
        str(manifest.get("device") or ""),
        f"{threads} thread{'s' if threads != 1 else ''}" if threads else "",
    ]
    return " · ".join(part for part in parts if part)


def _widening(manifest: Mapping[str, Any]) -> str:
    widened = manifest.get("widened") or 1
    if widened <= 1:
        return ""
    return (
        f" (experts widened ×{widened} without changing the function, so that reading them takes a "
        "larger part of a verification step)"
    )


def notes(report: Report, manifest: Mapping[str, Any]) -> list[str]:
    """One line for each thing that a reader of the table must know."""
    return [
        *_prompt_notes(report),
        *_caution_notes(report, manifest),
        *_lossless_notes(report, str(manifest.get("dtype") or "")),
        *_score_notes(report, manifest),
        *_verification_only_notes(report),
        *_interval_notes(report),
        *_overhead_notes(report),
    ]


def _prompt_notes(report: Report) -> Iterator[str]:
    if report.prompts < report.prompts_begun:
        yield (
            f"{report.prompts} of {report.prompts_begun} prompts were finished by every method; only these are counted"
        )
    if report.prompts_without_step:
        yield (
            f"{report.prompts_without_step} of {report.prompts} prompts ended at the first token, which the "
            "prefill gives: they have no decode step and are in the end-to-end figures alone"
        )


def _caution_notes(report: Report, manifest: Mapping[str, Any]) -> Iterator[str]:
    if 0 < report.prompts < FEW_PROMPTS:
        yield (
            f"{report.prompts} prompt{'s are' if report.prompts > 1 else ' is'} too few to compare methods by; "
            f"intervals over fewer than {FEW_PROMPTS} are too narrow"
        )
    if manifest.get("suite_note"):
        yield str(manifest["suite_note"])
    if manifest.get("target") == EMBEDDED:
        yield "the embedded model is test equipment: it compares policies, and says nothing about a large model's speed"


def _lossless_notes(report: Report, dtype: str) -> Iterator[str]:
    rows = [row for row in report.rows if row.label != AR]
    said: dict[str, list[str]] = {}
    for row in rows:
        said.setdefault(_lossless_sentence(row.lossless, report.check, dtype), []).append(row.label)
    for sentence, labels in said.items():
        yield f"lossless: {sentence}" if len(said) == 1 else f"lossless, {', '.join(labels)}: {sentence}"


def _lossless_sentence(found: Lossless, check: str, dtype: str) -> str:
    if not found.checked:
        return f"not checked (--check {check})"
    scope = (
        f"all {found.prompts} prompts"
        if found.checked == found.prompts
        else f"the {found.checked} of {found.prompts} prompts that were checked"
    )
    tail = f" ({dtype})" if dtype else ""
    if found.verdict == "exact":
        return f"every token equals AR's for {scope}{tail}"
    if found.verdict == "ties":
        return (
            f"ties: {found.ties} token(s) differ from AR's over {scope}, each where AR's two best choices "
            f"are closer than the measured numeric noise; the largest gap is {found.largest_gap:.2g}{tail}"
        )
    return f"VIOLATED: {found.violated} of {found.checked} prompts checked emit tokens that AR does not{tail}"


def _score_notes(report: Report, manifest: Mapping[str, Any]) -> Iterator[str]:
    for row in report.rows:
        if row.score_differs:
            yield f"{row.label}: {row.score_differs} text(s) score otherwise than AR's"
    if any_score(report):
        yield f"score: {manifest.get('score_metric') or 'by the suite'}, of texts cut at --max-new-tokens"
    elif manifest.get("score_why_not"):
        yield f"score: {manifest['score_why_not']}"


def _verification_only_notes(report: Report) -> Iterator[str]:
    labels = [row.label for row in report.rows if row.true_routing]
    if labels:
        yield (
            f"{', '.join(labels)}: verification metrics only. It looks at the target's true routing, which "
            "an extra pass outside all timing gives, so that a speed-up would be false"
        )


def _interval_notes(report: Report) -> Iterator[str]:
    missing: dict[str, dict[str, None]] = {}
    level: dict[str, list[str]] = {}
    for row in report.rows:
        for kind, ratio in _ratios(row, report.baseline):
            if ratio.why is not None:
                missing.setdefault(ratio.why, {})[row.label] = None
            elif ratio.value is not None and ratio.interval is not None and 1.0 in ratio.interval:
                level.setdefault(kind, []).append(row.label)
    for kind, names in level.items():
        yield f"{kind} not distinguishable from 1.0 (it lies within the interval): {', '.join(names)}"
    for why, labels in missing.items():
        yield f"{', '.join(labels)}: no interval can be given ({why})"


def _ratios(row: MethodRow, baseline: str) -> Iterator[tuple[str, Ratio]]:
    if row.label == AR:
        return
    kinds = (
        ("end-to-end speed-up", row.speedup),
        ("decode-only speed-up", row.decode_speedup),
        (f"decode-only speed-up over {baseline}", row.over_baseline),
    )
    for kind, ratio in kinds:
        if ratio is not None:
            yield kind, ratio


def _overhead_notes(report: Report) -> Iterator[str]:
    shares = [row.bandwidth_share for row in report.rows if row.bandwidth_share is not None and row.label != AR]
    if shares and max(shares) < LOW_BANDWIDTH_SHARE:
        yield (
            f"verification reaches {_percent(max(shares))} of the copy bandwidth at most: it is not bound by reading "
            "weights here, so that fewer experts save less time than where it is"
        )
    for row in report.rows:
        if row.outside_target is not None and row.outside_target > OVERHEAD_SHARE:
            yield (
                f"{row.label}: {_percent(row.outside_target)} of a step is outside the target's forward "
                "pass: this row measures overhead more than experts"
            )


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


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def _value(ratio: Ratio | None) -> str:
    return NONE if ratio is None else _number(ratio.value, 3)


def _interval(ratio: Ratio | None) -> str:
    if ratio is None or ratio.interval is None:
        return NONE
    return f"{ratio.interval.low:.3f}–{ratio.interval.high:.3f}"
