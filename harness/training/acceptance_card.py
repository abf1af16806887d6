"""The card of fitted acceptance estimators, and its plot: how good the estimates are on prompts that were held out."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from ecospec.harness.training.acceptance import FittedRecordings
from ecospec.predictors.acceptance.folder import PLOT
from ecospec.predictors.acceptance.judging import Bin

PANEL_INCHES = 3.3
COLUMNS = 3
"""Most panels side by side."""
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)

Reliability = Mapping[str, tuple[Bin, ...]]
"""The bins of each estimator, by its name."""


def card_text(found: FittedRecordings) -> str:
    """The card: what it was fitted to, and how well it does on prompts that were held out."""
    suites = ", ".join(dict.fromkeys(name for names in found.suites.values() for name in names))
    lines = [
        "# Acceptance estimators",
        "",
        f"Fitted to recorded draft trees of {suites}; target {found.target}, drafter {found.drafter}. The figures are",
        "over all drafted nodes of prompts that were held out: a node counts as accepted where the target accepts it",
        "and all of its path.",
        "",
        f"![Reliability curves]({PLOT})",
        "",
        "On the diagonal, as many nodes are accepted as estimated; above it, more. The tables below have the figures.",
    ]
    for key, fitted in found.fitted.items():
        nodes = next(iter(fitted.judged.values())).nodes
        lines += [
            "",
            f"## Temperature {key}",
            "",
            f"Fitted to {fitted.prompts} prompts, judged by {nodes} nodes of {fitted.held_out} others.",
            "",
            "| estimator | Brier score | log loss, nats | calibration error |",
            "|---|---|---|---|",
            *(
                f"| {name} | {judged.brier:.4f} | {judged.log_loss:.4f} | {judged.calibration_error:.4f} |"
                for name, judged in fitted.judged.items()
            ),
            "",
            "Reliability: of the nodes whose estimate lies in a tenth, the mean estimate and the share accepted.",
            "",
            "| estimator | " + " | ".join(f"{at / 10:.1f}–{(at + 1) / 10:.1f}" for at in range(10)) + " |",
            "|---|" + "---|" * 10,
        ]
        for name, judged in fitted.judged.items():
            tenths = {min(int(each.estimated * 10), 9): each for each in judged.bins}
            cells = {at: f"{each.estimated:.2f} → {each.accepted:.2f}" for at, each in tenths.items()}
            lines.append(f"| {name} | " + " | ".join(cells.get(at, "–") for at in range(10)) + " |")
    return "\n".join(lines) + "\n"


def reliability_of(facts: Mapping[str, Any]) -> dict[str, Reliability]:
    """The reliability curves by temperature, as ``acceptance.json`` has them under ``judged``."""
    return {
        temperature: {
            name: tuple(Bin(**each) for each in judged["bins"])
            for name, judged in found.items()
            if isinstance(judged, Mapping)
        }
        for temperature, found in facts["judged"].items()
    }


def reliability_figure(curves: Mapping[str, Reliability]) -> Any:
    """The share of nodes that were accepted against the mean estimate, a panel for each temperature."""
    from matplotlib.figure import Figure

    from ecospec.harness.costs.plots import COLOURS, MARKERS

    columns = min(COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    size = (PANEL_INCHES * columns, (PANEL_INCHES + 0.1) * rows + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    names = list(dict.fromkeys(name for each in curves.values() for name in each))
    colours = dict(zip(names, (COLOURS[at % len(COLOURS)] for at in range(len(names))), strict=True))
    for panel, (temperature, found) in zip(axes.flat, curves.items(), strict=False):
        panel.plot((0, 1), (0, 1), "--", color="#777777", linewidth=0.8, zorder=1)
        for at, (name, bins) in enumerate(found.items()):
            x, y = [each.estimated for each in bins], [each.accepted for each in bins]
            (line,) = panel.plot(x, y, marker=MARKERS[at % len(MARKERS)], color=colours[name], label=name)
            line.set(markersize=3.5, linewidth=1.2, gid=f"{name}-{temperature}")
        panel.set_title(f"T = {temperature}", fontsize=10, loc="left")
        panel.set_xlim(-0.02, 1.02)
        panel.set_ylim(-0.02, 1.02)
        panel.set_xticks(TICKS)
        panel.set_yticks(TICKS)
        panel.tick_params(labelsize=8)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_aspect("equal")
    for panel in axes.flat[len(curves) :]:
        panel.set_visible(False)
    figure.supxlabel("estimated, mean of a tenth", fontsize=9)
    figure.supylabel("accepted, share of its nodes", fontsize=9)
    axes[0, 0].legend(fontsize=8, frameon=False, loc="lower right")
    return figure


def reliability_svg(curves: Mapping[str, Reliability]) -> str:
    """The figure as a file: the same curves give the same one."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever settings the user has for plots of his own
        # Text stays text: the glyphs' outlines would be half of the file. Its measures are of the library's own font.
        matplotlib.rcParams.update({"svg.hashsalt": "ecospec", "svg.fonttype": "none", "font.family": "DejaVu Sans"})
        nothing: Any = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        reliability_figure(curves).savefig(file, format="svg", metadata=nothing)
    return file.getvalue()
