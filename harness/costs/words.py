"""A cost model in words: the line on the terminal, and the formula with its intervals."""

from __future__ import annotations

from ecospec.harness.costs.saved import Coefficient, Drafting, SavedCostModel


def seconds_text(seconds: float) -> str:
    """A time in the unit in which it has one to three digits before the point."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def coefficient_text(coefficient: Coefficient) -> str:
    """A coefficient with its interval, where it has one."""
    interval = coefficient.interval
    if interval is None:
        return seconds_text(coefficient.seconds)
    return f"{seconds_text(coefficient.seconds)} [{seconds_text(interval.low)}, {seconds_text(interval.high)}]"


def percent(value: float | None) -> str:
    """A share, or a dash."""
    return "–" if value is None else f"{100 * value:.1f} %"


def formula(saved: SavedCostModel) -> str:
    """T_verify of a model, its R² and its held-out error, on one line."""
    fit = saved.fit
    terms = " + ".join(
        (
            seconds_text(fit.fixed.seconds),
            f"{seconds_text(fit.pair.seconds)} · (layer, expert) pairs",
            f"{seconds_text(fit.token.seconds)} · tokens",
        )
    )
    if fit.r_squared is None:
        return f"T_verify = {terms}; a projection: {saved.projection}"
    return f"T_verify = {terms}; R² {fit.r_squared:.3f}, held-out error {percent(fit.held_out_error)}"


def drafting_name(drafting: Drafting) -> str:
    """A drafter with its tree size, in words."""
    return f"{drafting.drafter}, {drafting.draft_steps} steps, top-{drafting.draft_topk}"
