"""What a profile leaves: ``profile.json``, ``profile.md``, and the lines on the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ecospec.errors import UserError
from ecospec.harness.costs.saved import Drafting, Point, SavedCostModel, StepRest
from ecospec.harness.costs.text import uniform_experts
from ecospec.harness.costs.words import coefficient_text, drafting_name, percent, seconds_text

PROFILE_JSON, PROFILE_MD = "profile.json", "profile.md"


def profile_json(saved: SavedCostModel) -> dict[str, Any]:
    """The cost model with what the plots show."""
    return {
        "cost_model": saved.to_json(),
        "figure_1b": {
            "tokens": list(range(1, len(saved.pairs_by_tokens) + 1)),
            "consecutive_tokens": [pairs / saved.moe_layers for pairs in saved.pairs_by_tokens],
            "draft_trees": {
                drafting_name(each): [pairs / saved.moe_layers for pairs in each.pairs_by_tokens]
                for each in saved.draftings
            },
            "uniform": [
                uniform_experts(n, saved.experts, saved.top_k) for n in range(1, len(saved.pairs_by_tokens) + 1)
            ],
        },
    }


def summary_lines(saved: SavedCostModel) -> list[str]:
    """What the terminal says: the model with its intervals, how well it holds, and every warning."""
    fit = saved.fit
    best = max((point.bandwidth_share for point in saved.points), default=0.0)
    lines = [
        f"T_verify = a + b · (unique (layer, expert) pairs) + c · tokens, on {saved.key.device} ({saved.key.dtype})",
        f"  a = {coefficient_text(fit.fixed)}  (95 % intervals in brackets)",
        f"  b = {coefficient_text(fit.pair)} a pair",
        f"  c = {coefficient_text(fit.token)} a token",
        f"  R² = {'–' if fit.r_squared is None else f'{fit.r_squared:.4f}'}; at held-out E the model is at most "
        f"{percent(fit.held_out_error)} off; on draft trees of real text T is "
        f"{_signed(fit.text_error)} off",
        f"T_AR = {'–' if saved.ar_seconds is None else seconds_text(saved.ar_seconds)}; copy bandwidth "
        f"{saved.copy_bytes_per_second / 1e9:.1f} GB/s, of which the passes reach {percent(best)} at most",
    ]
    for drafting in saved.draftings:
        lines.append(f"T_draft = {seconds_text(drafting.rest.draft)} ({drafting_name(drafting)})")
        lines += [f"T_predict = {seconds_text(each.predict)} ({label})" for label, each in drafting.predicting.items()]
        lines += [f"T_estimate = {seconds_text(each)} ({name})" for name, each in drafting.estimating.items()]
    return [*lines, *(f"warning: {warning}" for warning in fit.warnings)]


def _signed(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.1f} %"


def profile_markdown(saved: SavedCostModel, figures: Sequence[str]) -> str:
    """The same as a page, with every cell and the plots.

    Args:
        figures: the names of the image files beside it.
    """
    fit, key = saved.fit, saved.key
    threads = f", {key.threads} threads" if key.threads else ""
    parts = [
        f"# Cost of verification: {saved.target}",
        "",
        f"On {key.device} ({key.kind}{threads}), {key.dtype}, torch {key.torch}, transformers {key.transformers}; "
        f"measured {saved.measured}.",
        "",
        *_warnings(saved),
        "## The model",
        "",
        "T_verify = a + b · (unique (layer, expert) pairs) + c · tokens",
        "",
        *_table(
            ["", "value", "95 % interval", "standard error"],
            [
                [name, seconds_text(each.seconds), _interval(each.interval), _seconds(each.standard_error)]
                for name, each in (
                    ("a, a pass", fit.fixed),
                    ("b, a pair", fit.pair),
                    ("c, a token", fit.token),
                )
            ],
        ),
        f"R² {'–' if fit.r_squared is None else f'{fit.r_squared:.4f}'}. Held-out error {percent(fit.held_out_error)}: "
        "the largest |T − model| / T at numbers of experts that the fit was made without. On draft trees of real text "
        f"T is {_signed(fit.text_error)} off.",
        "",
        *[line for name in figures for line in (f"![{name}]({name})", "")],
        "## The rest of a step",
        "",
        f"T_AR, a forward pass of plain decoding: {_seconds(saved.ar_seconds)}. Copy bandwidth: "
        f"{saved.copy_bytes_per_second / 1e9:.1f} GB/s.",
        "",
        *_rest(saved.draftings),
        "## The sweep",
        "",
        f"Passes over n tokens behind {saved.context} in the KV memory, forced to E experts in each of "
        f"{saved.moe_layers} MoE layers. T is the lower quartile of {max((p.passes for p in saved.points), default=0)} "
        "passes: what else the machine does only ever adds.",
        "",
        *_table(
            [
                "n",
                "E",
                "pairs",
                "T ms",
                "median, upper quartile",
                "model ms",
                "off",
                "share of copy bandwidth",
                "held out",
            ],
            [_point(saved, point) for point in saved.points],
        ),
    ]
    return "\n".join(parts)


def _warnings(saved: SavedCostModel) -> list[str]:
    if saved.projection is not None:
        return [f"**A projection, not a measurement: {saved.projection}.**", ""]
    if not saved.fit.warnings:
        return []
    return ["**Before relying on this model, know that**", "", *(f"- {warning}" for warning in saved.fit.warnings), ""]


def _interval(interval: Any) -> str:
    return "–" if interval is None else f"{seconds_text(interval.low)} to {seconds_text(interval.high)}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else seconds_text(value)


def _rest(draftings: Sequence[Drafting]) -> list[str]:
    rows: list[list[str]] = []

    def row(drafting: Drafting, label: str, rest: StepRest) -> list[str]:
        times = (rest.draft, rest.predict, rest.select, rest.commit, rest.outside, rest.total)
        return [drafting_name(drafting), label, *(f"{1e3 * seconds:.3f}" for seconds in times)]

    for each in draftings:
        rows.append(row(each, "–", each.rest))
        rows += [row(each, label, rest) for label, rest in each.predicting.items()]
    if not rows:
        return ["No drafter was named, so nothing else was measured.", ""]
    header = [
        "drafter",
        "predictor",
        "T_draft ms",
        "T_predict ms",
        "T_select ms",
        "T_commit ms",
        "outside ms",
        "sum ms",
    ]
    times = [[drafting_name(d), name, f"{1e3 * each:.3f}"] for d in draftings for name, each in d.estimating.items()]
    estimates = _table(["drafter", "acceptance estimator", "T_estimate ms"], times) if times else []
    return [*_table(header, rows), *estimates]


def _point(saved: SavedCostModel, point: Point) -> list[str]:
    model = saved.fit.verify_seconds(point.tokens, point.expert_pairs)
    return [
        str(point.tokens),
        str(point.active_experts),
        str(point.expert_pairs),
        f"{1e3 * point.seconds:.3f}",
        f"{1e3 * point.median:.3f}, {1e3 * point.high:.3f}",
        f"{1e3 * model:.3f}",
        f"{100 * (model / point.seconds - 1):+.1f} %",
        percent(point.bandwidth_share),
        "yes" if point.held_out else "",
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [*("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines), ""]


def new_folder() -> Path:
    """``runs/profile-<time>``, not yet existing."""
    stem = f"profile-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs") / (f"{stem}-{n}" if n else stem) for n in range(1000))
    return next(path for path in candidates if not path.exists())


def check_new(folder: Path) -> None:
    """Refuse a folder that a profile could not be put into.

    Raises:
        UserError: it holds something, or is none.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--output {folder}: not an empty folder; expected a new one")
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be made ({error.strerror})") from error


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder, whole or not at all.

    Args:
        write: writes the files into the folder that it is given.

    Raises:
        UserError: it cannot be made.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            write(partial)
            if folder.exists():
                folder.rmdir()  # empty, as was checked
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be made ({error.strerror})") from error
