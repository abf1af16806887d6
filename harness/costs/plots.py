"""The paper's Figure 1 for this target and device (EcoSpec, arXiv 2607.12696), as files. Imports matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from ecospec.harness.costs.saved import SavedCostModel
from ecospec.harness.costs.text import uniform_experts
from ecospec.harness.costs.words import drafting_name

PUBLISHED_MB = {"Qwen3-235B-A22B": 37.75, "GPT-OSS-120B": 12.45, "DeepSeek-V3.1": 44.04}
"""Bytes of one expert in 10⁶ bytes, as the paper's Figure 1c gives them."""
SIZE = (6.4, 4.2)
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which colour-blind readers can tell apart."""
MARKERS = "osD^v<>pPX*h"
FIGURES = ("figure-1a", "figure-1b", "figure-1c")
FORMATS = ("svg", "png")


def write_plots(saved: SavedCostModel, folder: Path) -> list[str]:
    """Write the three plots in both formats; returns the names of the PNG files."""
    made = (latency_plot(saved), experts_plot(saved), bytes_plot(saved))
    names = []
    for name, figure in zip(FIGURES, made, strict=True):
        for kind in FORMATS:
            # The same measurement gives the same file.
            with matplotlib.rc_context({"svg.hashsalt": "ecospec", "svg.fonttype": "path"}):
                metadata: Any = {"Date": None} if kind == "svg" else {"Software": None}
                figure.savefig(folder / f"{name}.{kind}", dpi=150, metadata=metadata)
        names.append(f"{name}.png")
    return names


def _axes(title: str, x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def latency_plot(saved: SavedCostModel) -> Figure:
    """a: T_verify against E, the points of each n with the fitted line; hollow ones are held out."""
    figure, axes = _axes(
        f"a  Verification against active experts ({saved.key.device})",
        "active experts E, unique in each MoE layer",
        "T_verify, ms (lower quartile; bars to the median)",
    )
    counts = sorted({point.tokens for point in saved.points})
    shades = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.88, len(counts)))
    for n, colour, i in zip(counts, shades, range(len(counts)), strict=True):
        points = [point for point in saved.points if point.tokens == n]
        at = np.array([point.active_experts for point in points])
        model = [1e3 * saved.fit.verify_seconds(n, point.expert_pairs) for point in points]
        axes.plot(at, model, color=colour, linewidth=1.1, zorder=1)
        for point in points:
            axes.errorbar(
                point.active_experts,
                1e3 * point.seconds,
                yerr=[[0.0], [1e3 * (point.median - point.seconds)]],
                fmt=MARKERS[i % len(MARKERS)],
                color=colour,
                markerfacecolor="white" if point.held_out else colour,
                markersize=5,
                elinewidth=0.6,
                label=f"n = {n}" if point is points[0] else None,
                zorder=2,
            )
    axes.set_ylim(0, 1.15e3 * max(point.seconds for point in saved.points))  # a busy machine's medians may be cut off
    figure.legend(fontsize=8, frameon=False, loc="outside right upper")
    r_squared = "–" if saved.fit.r_squared is None else f"{saved.fit.r_squared:.3f}"
    axes.text(
        0.99,
        0.02,
        f"lines: the fitted model, R² = {r_squared}; hollow: held out",
        transform=axes.transAxes,
        ha="right",
        fontsize=7.5,
    )
    return figure


def experts_plot(saved: SavedCostModel) -> Figure:
    """b: unique experts against verified tokens on text, beside uniform routing."""
    figure, axes = _axes(
        f"b  Unique experts on text ({saved.experts} experts, top-{saved.top_k})",
        "verified tokens n",
        "unique experts in each MoE layer",
    )
    most = max(len(saved.pairs_by_tokens), *(len(each.pairs_by_tokens) for each in saved.draftings), 1)
    at = np.arange(1, most + 1)
    uniform = [uniform_experts(int(n), saved.experts, saved.top_k) for n in at]
    axes.plot(at, uniform, "--", color="#777777", label="uniform routing, E · (1 − (1 − K/E)ⁿ)")
    curves = [(f"consecutive tokens of text ({saved.windows} places)", saved.pairs_by_tokens)]
    curves += [(f"draft trees, most confident nodes ({drafting_name(d)})", d.pairs_by_tokens) for d in saved.draftings]
    for i, (label, pairs) in enumerate(curves):
        experts = np.array(pairs) / saved.moe_layers
        axes.plot(
            np.arange(1, len(pairs) + 1),
            experts,
            marker=MARKERS[i % len(MARKERS)],
            markersize=4,
            color=COLOURS[i % len(COLOURS)],
            label=label,
        )
    axes.axhline(saved.experts, color="#777777", linewidth=0.6)
    axes.set_ylim(0, saved.experts * 1.04)
    axes.legend(fontsize=7.5, frameon=False, loc="lower right")
    return figure


def bytes_plot(saved: SavedCostModel) -> Figure:
    """c: bytes per expert, of this target and of the paper's models as published."""
    figure, axes = _axes("c  Bytes per expert", "MB (10⁶ bytes), logarithmic", "")
    names = ["this target", *(f"{name}\n(published)" for name in PUBLISHED_MB)]
    values = [saved.expert_bytes / 1e6, *PUBLISHED_MB.values()]
    places = np.arange(len(names))[::-1]
    axes.barh(places, values, color=[COLOURS[1], *[COLOURS[0]] * len(PUBLISHED_MB)], height=0.6)
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlim(min(values) / 4, max(values) * 4)
    for place, value in zip(places, values, strict=True):
        axes.text(value * 1.08, place, f"{value:.4g} MB", va="center", fontsize=8)
    axes.grid(visible=False, axis="y")
    return figure
