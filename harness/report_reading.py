"""A report read back from ``report.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ecospec.harness.report import SCHEMA, Lossless, MethodRow, Report
from ecospec.harness.speedups import Spread
from ecospec.harness.stats import Interval, Ratio


def read_report(path: Path) -> Report | None:
    """The report that a run left; None where there is none that this version would have written.

    It can be made anew from the run's records, so that a damaged one is no more than a missing one.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.pop("schema") != SCHEMA:
            return None
        return Report(**{**raw, "rows": tuple(_row(row) for row in raw["rows"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _row(raw: dict[str, Any]) -> MethodRow:
    ratios = {key: _ratio(raw[key]) for key in ("speedup", "decode_speedup", "over_baseline", "verification_speedup")}
    depths = {key: tuple(raw[key]) for key in ("reached_by_depth", "accepted_by_depth")}
    spread = raw["decode_spread"] and Spread(**raw["decode_spread"])
    return MethodRow(**{**raw, **ratios, **depths, "decode_spread": spread, "lossless": Lossless(**raw["lossless"])})


def _ratio(raw: dict[str, Any] | None) -> Ratio | None:
    return Ratio(**{**raw, "interval": raw["interval"] and Interval(**raw["interval"])}) if raw else None
