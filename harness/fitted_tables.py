"""Tables on a terminal of any width: what is too wide is set below each other, and no figure is cut.

With room for it, a cell is one line. Else, in this order: the parts of a cell, such as a ratio and its interval, and
the words of a heading stand below each other; the names that a line goes by are put into one cell; the columns are
split over several tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Cell = str | tuple[str, ...]
"""A text, or parts that may stand below each other."""
NARROW_NAME, NARROW_WORDS = 20, 24
"""Columns that a name and a sentence are left at least, where there is not room for all of them."""


class Kind(Enum):
    """What a column holds: a name that its lines go by, a figure that is never broken, or words."""

    NAME = "name"
    FIGURE = "figure"
    WORDS = "words"


@dataclass(frozen=True)
class Column:
    """A column's heading, and what it holds."""

    head: str
    kind: Kind = Kind.FIGURE


@dataclass(frozen=True)
class Layout:
    """How narrow a table is made."""

    stacked: bool = False
    joined: bool = False


LAYOUTS = (Layout(), Layout(stacked=True), Layout(stacked=True, joined=True))


def fitted_tables(title: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> list[Table]:
    """One table where it fits into ``width``, else several with the same names.

    Args:
        columns: those of names first.
        rows: a cell a column.
    """
    everything = range(len(columns))
    for layout in LAYOUTS:
        if _fits(columns, rows, everything, layout, width):
            return [_built(title, columns, rows, everything, layout, whole=True)]
    names = [index for index in everything if columns[index].kind is Kind.NAME]
    others = everything[len(names) :]
    layouts = [layout for layout in LAYOUTS if not layout.joined]
    if any(_first_fit(columns, rows, [*names, index], layouts, width) is None for index in others):
        layouts = list(LAYOUTS)
    groups: list[list[int]] = []
    for index in others:
        if groups and _first_fit(columns, rows, [*names, *groups[-1], index], layouts, width) is not None:
            groups[-1].append(index)
        else:
            groups.append([index])
    tables = []
    for number, group in enumerate(groups):
        chosen = [*names, *group]
        fitting = _first_fit(columns, rows, chosen, layouts, width)
        named = f"{title}, continued" if number else title
        tables.append(_built(named, columns, rows, chosen, fitting or LAYOUTS[-1], whole=fitting is not None))
    return tables


def _first_fit(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    chosen: Sequence[int],
    layouts: Sequence[Layout],
    width: int,
) -> Layout | None:
    return next((layout for layout in layouts if _fits(columns, rows, chosen, layout, width)), None)


def _fits(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], chosen: Sequence[int], layout: Layout, width: int
) -> bool:
    table = _built("", columns, rows, chosen, layout, whole=True)
    if layout.stacked:
        for column, kind in zip(table.columns, _kinds(columns, chosen, layout), strict=True):
            column.max_width = {Kind.NAME: NARROW_NAME, Kind.WORDS: NARROW_WORDS}.get(kind)
    return Console(width=10_000).measure(table).maximum <= width


def _kinds(columns: Sequence[Column], chosen: Sequence[int], layout: Layout) -> list[Kind]:
    kinds = [columns[index].kind for index in chosen]
    others = [kind for kind in kinds if kind is not Kind.NAME]
    return [Kind.NAME, *others] if layout.joined else kinds


def _built(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    chosen: Sequence[int],
    layout: Layout,
    *,
    whole: bool,
) -> Table:
    """A table of the chosen columns.

    Args:
        whole: whether figures can be kept whole; on the narrowest of terminals they are broken, but nothing is lost.
    """
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        leading=int(layout.joined),
    )
    heads = _line([columns[index].head for index in chosen], columns, chosen, layout, head=True)
    for head, kind in zip(heads, _kinds(columns, chosen, layout), strict=True):
        figure = kind is Kind.FIGURE
        table.add_column(Text(head), justify="right" if figure else "left", overflow="fold", no_wrap=figure and whole)
    for row in rows:
        table.add_row(*map(Text, _line([row[index] for index in chosen], columns, chosen, layout)))
    return table


def _line(
    cells: Sequence[Cell], columns: Sequence[Column], chosen: Sequence[int], layout: Layout, *, head: bool = False
) -> list[str]:
    """The texts of a line of the table."""
    between = "\n" if layout.stacked else " "
    texts = []
    names = []
    for cell, index in zip(cells, chosen, strict=True):
        parts = (cell,) if isinstance(cell, str) else cell
        text = between.join(filter(None, parts))
        if head and layout.stacked:
            text = text.replace(" ", "\n")
        if layout.joined and columns[index].kind is Kind.NAME:
            names.append(text)
        else:
            texts.append(text)
    return ["\n".join(filter(None, names)), *texts] if layout.joined else texts
