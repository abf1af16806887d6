"""Tables on a terminal of any width: what is too wide is set below each other, and no figure is cut.

With room for it, a cell is one line. Else, in this order: the parts of a cell, such as a ratio and its interval, and
the words of a heading stand below each other; the columns move together; the names that a line goes by are put into one
cell; the columns are split over several tables.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    close: bool = False
    joined: bool = False


LAYOUTS = (
    Layout(),
    Layout(stacked=True),
    Layout(stacked=True, close=True),
    Layout(stacked=True, joined=True),
)


@dataclass(frozen=True)
class Content:
    """What is to be shown; ``ends`` has the rows after which a gap follows."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    ends: Collection[int]


def fitted_tables(
    title: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int, *, ends: Collection[int] = ()
) -> list[Table]:
    """One table where it fits into ``width``, else several with the same names.

    Args:
        columns: those of names first.
        rows: a cell a column.
        ends: rows after which a gap follows.
    """
    content = Content(columns, rows, ends)
    everything = range(len(columns))
    fitting = _first_fit(content, everything, LAYOUTS, width)
    if fitting is not None:
        return [_built(title, content, everything, fitting)]
    names = [index for index in everything if columns[index].kind is Kind.NAME]
    others = everything[len(names) :]
    layouts = [layout for layout in LAYOUTS if not layout.joined]
    if any(_first_fit(content, [*names, index], layouts, width) is None for index in others):
        layouts = list(LAYOUTS)
    groups: list[list[int]] = []
    for index in others:
        if groups and _first_fit(content, [*names, *groups[-1], index], layouts, width) is not None:
            groups[-1].append(index)
        else:
            groups.append([index])
    tables = []
    for number, group in enumerate(groups):
        chosen = [*names, *group]
        fitting = _first_fit(content, chosen, layouts, width)
        named = f"{title}, continued" if number else title
        tables.append(_built(named, content, chosen, fitting or LAYOUTS[-1], whole=fitting is not None))
    return tables


def _first_fit(content: Content, chosen: Sequence[int], layouts: Sequence[Layout], width: int) -> Layout | None:
    return next((layout for layout in layouts if _needed(content, chosen, layout) <= width), None)


def _needed(content: Content, chosen: Sequence[int], layout: Layout) -> int:
    """Columns of the terminal; where parts are below each other anyway, names and words can be folded a little."""
    table = _built("", content, chosen, layout)
    if layout.stacked:
        for column, kind in zip(table.columns, _kinds(content, chosen, layout), strict=True):
            column.max_width = {Kind.NAME: NARROW_NAME, Kind.WORDS: NARROW_WORDS}.get(kind)
    return Console(width=10_000).measure(table).maximum


def _kinds(content: Content, chosen: Sequence[int], layout: Layout) -> list[Kind]:
    kinds = [content.columns[index].kind for index in chosen]
    others = [kind for kind in kinds if kind is not Kind.NAME]
    return [Kind.NAME, *others] if layout.joined else kinds


def _built(title: str, content: Content, chosen: Sequence[int], layout: Layout, *, whole: bool = True) -> Table:
    """A table of the chosen columns.

    Args:
        whole: whether figures can be kept whole; on the narrowest of terminals they are broken, but nothing is lost.
    """
    table = Table(
        title=Text(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0 if layout.close else 1),
        pad_edge=False,
        leading=int(layout.joined),
    )
    heads = [column.head.replace(" ", "\n") if layout.stacked else column.head for column in content.columns]
    for head, kind in zip(_line(content, heads, chosen, layout), _kinds(content, chosen, layout), strict=True):
        figure = kind is Kind.FIGURE
        table.add_column(Text(head), justify="right" if figure else "left", overflow="fold", no_wrap=figure and whole)
    for number, row in enumerate(content.rows):
        table.add_row(*map(Text, _line(content, row, chosen, layout)), end_section=number in content.ends)
    return table


def _line(content: Content, cells: Sequence[Cell], chosen: Sequence[int], layout: Layout) -> list[str]:
    """The texts of a line of the table."""
    between = "\n" if layout.stacked else " "
    names: list[str] = []
    others: list[str] = []
    for index in chosen:
        cell = cells[index]
        text = cell if isinstance(cell, str) else between.join(filter(None, cell))
        (names if content.columns[index].kind is Kind.NAME else others).append(text)
    return ["\n".join(filter(None, names)), *others] if layout.joined else [*names, *others]
