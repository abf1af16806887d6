"""Plots as inline SVG that takes its colours from the page: one rendering for a light and a dark one.

Matplotlib draws with stand-in colours, which become CSS variables afterwards; text stays text. Nothing in a plot
depends on the time or on chance, so that the same figures give the same bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it takes its time to import, and only a page needs it
    from matplotlib.figure import Figure

INK, FAINT, PAPER = "#010101", "#010102", "#010103"
"""Stand-ins for text and axes, for grid lines, and for what lies under all."""
METHOD_COLOURS = 10
PHASE_COLOURS = 8
"""How many of each the style sheet has; further ones begin anew, told apart by their markers or by their order."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
"""In the order of the methods, with another period than the colours: a pair of both is one method's."""
WIDTH_INCHES = 4.6
"""A plot's own width: on a phone its text is as large as the page's, on a desk somewhat larger."""
FONT_POINTS = 9.2


def method_colour(index: int) -> str:
    """The stand-in for a method's colour; plain decoding is 0."""
    return f"#0102{index if index == 0 else (index - 1) % (METHOD_COLOURS - 1) + 1:02x}"


def phase_colour(index: int) -> str:
    """The stand-in for a phase's colour."""
    return f"#0103{index % PHASE_COLOURS:02x}"


def marker(index: int) -> str:
    """A method's marker, as Matplotlib names it."""
    return MARKERS[index % len(MARKERS)]


def css_colour(stand_in: str) -> str:
    """The CSS variable of a stand-in."""
    names = {INK: "--ink", FAINT: "--faint", PAPER: "--paper"}
    if stand_in in names:
        return f"var({names[stand_in]})"
    kind, number = {"02": "method", "03": "phase"}[stand_in[3:5]], int(stand_in[5:], 16)
    return f"var(--{kind}-{number})"


def drawn(name: str, height_inches: float, draw: Callable[[Figure], None]) -> str:
    """Draw a figure and give it as an ``<svg>`` element for a page.

    Args:
        name: begins every id in it, so that several stand on one page.
        height_inches: beside the width that all have.
        draw: fills the figure.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "ecospec",
        "text.parse_math": False,  # a label may have a dollar sign
        "font.family": "DejaVu Sans",  # ships with the library: the same measures everywhere
        "font.size": FONT_POINTS,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.titlesize": FONT_POINTS,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "axes.facecolor": "none",
        "axes.unicode_minus": True,
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": FAINT,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "image.interpolation": "none",
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever settings the user has for plots of his own
        matplotlib.rcParams.update(style)
        figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
        draw(figure)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(file, metadata=nothing)
    return _inline(name, file.getvalue())


_DROPPED = re.compile(
    r"^.*?(?=<svg)"  # the prologue of a file of its own
    r"|<style[^>]*>.*?</style>"  # in a page it would be everything's
    r"|<metadata>.*?</metadata>"
    r"|;? ?font-family: [^;\"]*",  # the page's own font
    re.DOTALL,
)
_OPENING = re.compile(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>")
_FONT = re.compile(r"font: (?:[\w.]+ )*([\d.]+)px [^;\"]*")
_COLOUR = re.compile(r"#010[123][0-9a-f]{2}\b")
_ID = re.compile(r"(<[^<>]*?\s(?:id=\"|href=\"#))")


def _inline(name: str, text: str) -> str:
    text = _DROPPED.sub("", text.replace("xlink:href=", "href="))
    text = _OPENING.sub(r"<svg \1>", text, count=1)
    text = _FONT.sub(r"font-size: \1px", text)
    text = _COLOUR.sub(lambda found: css_colour(found[0]), text)
    return _ID.sub(rf"\1{name}-", text).replace("url(#", f"url(#{name}-").strip()


def shortened(label: str, longest: int = 58) -> str:
    """A label that fits above a bar: of a long one the middle is left out, as paths differ at their ends."""
    if len(label) <= longest:
        return label
    head = (longest - 1) * 3 // 5
    return f"{label[:head]}…{label[len(label) - (longest - 1 - head) :]}"


@dataclass(frozen=True)
class LegendEntry:
    """A label with its colour and, for a method, its marker as an SVG path in a square from 0 to 10."""

    label: str
    colour: str
    path: str


@dataclass(frozen=True)
class Plot:
    """A plot on a page.

    Attributes:
        title, caption: what it shows, and how to read it.
        summary: its figures in words, for those who do not see it.
        svg: the element; trusted, since all text in it was escaped when it was drawn.
        legend: what stands for what, beneath the plot.
        folded: whether it is shown only when asked for.
    """

    name: str
    title: str
    caption: str
    summary: str
    svg: str
    legend: tuple[LegendEntry, ...] = ()
    folded: bool = False


SQUARE = "M0 0H10V10H0Z"
_PATHS = {
    "o": "M5 .5A4.5 4.5 0 1 1 4.99 .5Z",
    "s": "M1 1H9V9H1Z",
    "^": "M5 .5L9.5 9H.5Z",
    "D": "M5 0L10 5L5 10L0 5Z",
    "v": "M5 9.5L.5 1H9.5Z",
    "P": "M3.2 .5H6.8V3.2H9.5V6.8H6.8V9.5H3.2V6.8H.5V3.2H3.2Z",
    "X": "M2.5 0L5 2.5L7.5 0L10 2.5L7.5 5L10 7.5L7.5 10L5 7.5L2.5 10L0 7.5L2.5 5L0 2.5Z",
    "<": "M.5 5L9 .5V9.5Z",
}


def method_entry(index: int, label: str) -> LegendEntry:
    """A method's line of a legend."""
    return LegendEntry(label, css_colour(method_colour(index)), _PATHS[marker(index)])


def phase_entry(index: int, label: str) -> LegendEntry:
    """A phase's line of a legend."""
    return LegendEntry(label, css_colour(phase_colour(index)), SQUARE)
