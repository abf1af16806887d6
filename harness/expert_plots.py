"""The plots of which experts a run's steps read (the paper's Figure 4), and of what a pass costs by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ecospec.harness.activations import Activations
from ecospec.harness.plots import INK, Plot, drawn, method_entry
from ecospec.harness.report import Report
from ecospec.harness.report_plots import method_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_MARKERS = 12
"""Along a curve."""


def expert_plots(report: Report, activations: Mapping[str, Activations], shown: str | None) -> list[Plot]:
    """The load curve of all methods and the heatmap of each, folded but for one.

    Args:
        shown: the label of the method whose heatmap is open; where it has none, the last one's is.
    """
    places = {row.label: i for i, row in enumerate(report.rows) if row.label in activations}
    if not places:
        return []
    opened = shown if shown in places else list(places)[-1]
    order = sorted(places, key=lambda label: label != opened)
    busiest = max(float(activations[label].shares.max()) for label in places)
    return [
        load_plot(places, activations, report),
        *(heatmap(i, label, activations[label], busiest, folded=label != opened) for i, label in enumerate(order)),
    ]


def load_plot(places: Mapping[str, int], activations: Mapping[str, Activations], report: Report) -> Plot:
    """How unevenly the experts of a layer are used."""

    def draw(figure: Figure) -> None:
        axes: Any = figure.add_subplot()
        axes.grid(True)
        for label, index in places.items():
            curve = activations[label].load_curve
            ranks = range(1, len(curve) + 1)
            every = max(1, len(curve) // MOST_MARKERS)
            style = method_style(index, filled=True)
            axes.plot(ranks, 100 * curve, **style, markersize=4.5, markevery=(index % every, every))
        axes.set_ylim(bottom=0)
        axes.set_xlim(1, max(2, len(curve)))
        axes.set_xlabel("an expert's rank in its layer, busiest first")
        axes.set_ylabel("% of steps that read it")

    words = [
        f"{label}: the busiest expert of a layer is read in {100 * activations[label].load_curve[0]:.0f} % of steps, "
        f"the median one in {100 * activations[label].load_curve[len(activations[label].load_curve) // 2]:.0f} %"
        for label in places
    ]
    counted = {found.prompts for found in activations.values()}
    fewer = (
        f" Over {min(counted)} of {report.prompts} prompts; of the others nothing is on disk or no step was taken."
        if min(counted) < report.prompts
        else ""
    )
    return Plot(
        "load",
        "How evenly experts are used",
        "Share of the steps in which an expert is read, by its rank, mean over MoE layers; the area under a curve is "
        f"E. A level curve would be an even load.{fewer}",
        "; ".join(words),
        drawn("load", 3.0, draw),
        tuple(method_entry(index, label) for label, index in places.items()),
    )


def heatmap(number: int, label: str, found: Activations, busiest: float, *, folded: bool) -> Plot:
    """The share of steps that read each expert of each MoE layer."""
    layers, experts = found.shares.shape

    def draw(figure: Figure) -> None:
        axes: Any = figure.add_subplot()
        image = axes.imshow(
            100 * found.shares, aspect="auto", cmap="cividis", vmin=0, vmax=100 * busiest, interpolation="none"
        )
        axes.set_xlabel("expert")
        axes.set_ylabel("MoE layer")
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.xaxis.get_major_locator().set_params(integer=True)
        bar: Any = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05)
        bar.set_label("% of steps")
        bar.outline.set_visible(False)

    layer, expert = divmod(int(found.counts.argmax()), experts)
    return Plot(
        f"experts-{number}",
        f"Experts read by {label}",
        f"Share of its {found.steps:,.0f} steps in which each expert of each MoE layer is read; one scale for all "
        "methods. Layers and experts count from 0.",
        f"{layers} MoE layers of {experts} experts; the busiest is expert {expert} of layer {layer}, read in "
        f"{100 * found.shares.max():.0f} % of steps, and {int((found.counts == 0).sum())} are never read",
        drawn(f"experts-{number}", min(4.5, 1.9 + 0.035 * layers), draw),
        folded=folded,
    )


def cost_plot(model: Mapping[str, Any]) -> Plot:
    """The fitted cost model against what it was fitted to.

    Args:
        model: the manifest's ``cost_model``.
    """
    points = [(each["tokens"], each["expert_pairs"], 1e3 * each["seconds"]) for each in model["points"]]
    held_out = [bool(each.get("held_out")) for each in model["points"]]
    counts = sorted({tokens for tokens, _, _ in points})

    def predicted(tokens: float, pairs: float) -> float:
        seconds: float = model["fixed_seconds"] + model["pair_seconds"] * pairs + model["token_seconds"] * tokens
        return 1e3 * seconds

    def draw(figure: Figure) -> None:
        axes: Any = figure.add_subplot()
        axes.grid(True)
        for (tokens, pairs, ms), hollow in zip(points, held_out, strict=True):
            style = method_style(1 + counts.index(tokens), filled=not hollow)
            axes.plot([pairs], [ms], **style, markersize=5, linestyle="none")
        ends = (min(pairs for _, pairs, _ in points), max(pairs for _, pairs, _ in points))
        for tokens in dict.fromkeys((counts[0], counts[-1])):
            axes.plot(ends, [predicted(tokens, pairs) for pairs in ends], color=INK, linewidth=1.0)
            place = (ends[1], predicted(tokens, ends[1]))
            axes.annotate(f"n = {tokens:g}", place, xytext=(7, 0), textcoords="offset points", va="center")
        axes.margins(x=0.12)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("unique (layer, expert) pairs in the pass")
        axes.set_ylabel("T_verify, ms")

    fit = (
        f"T = {1e3 * model['fixed_seconds']:.3g} ms + {1e6 * model['pair_seconds']:.3g} µs a pair + "
        f"{1e3 * model['token_seconds']:.3g} ms a token"
    )
    squared = "not known" if model["r_squared"] is None else f"{model['r_squared']:.3f}"
    source = f" Projected, not measured: {model['projection']}." if model.get("projection") else ""
    hollow = "; hollow ones were not fitted to" if any(held_out) else ""
    worst = max((abs(predicted(n, pairs) - ms) for n, pairs, ms in points), default=0.0)
    return Plot(
        "cost",
        "What a pass costs: the model and its measurements",
        f"{fit}; R² {squared}. Lines: the model at the fewest and the most tokens n; points: measured passes{hollow}."
        + source,
        f"{fit}; R² {squared}; {len(points)} measured passes, the model at most {worst:.3g} ms off",
        drawn("cost", 3.0, draw) if points else "",
        tuple(method_entry(1 + i, f"{tokens:g} token{'s' if tokens != 1 else ''}") for i, tokens in enumerate(counts)),
    )
