"""A page read as a browser would: its elements, its text, and what it would fetch."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "hr", "input", "wbr"}
FETCHING = {"src", "srcset", "poster", "data", "action", "background"}


@dataclass
class Page(HTMLParser):
    """What `read_page` found.

    Attributes:
        ids: of all elements, in order.
        links: where ``a`` elements lead to.
        fetched: addresses that the page would ask for by itself; those within the page and ``data:`` are none.
        open_elements: never closed.
    """

    ids: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    described: list[str] = field(default_factory=list)
    open_elements: list[str] = field(default_factory=list)
    wrongly_closed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open_elements.append(tag)
        for name, value in attrs:
            text = value or ""
            if name == "id":
                self.ids.append(text)
            if name == "aria-label":
                self.described.append(text)
            if tag == "a" and name == "href":
                self.links.append(text)
            elif name in FETCHING or name.endswith("href"):
                if not text.startswith(("#", "data:")):
                    self.fetched.append(text)
            elif "url(" in text and "url(#" not in text:
                self.fetched.append(text)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open_elements.pop()

    def handle_endtag(self, tag: str) -> None:
        if self.open_elements and self.open_elements[-1] == tag:
            self.open_elements.pop()
        else:
            self.wrongly_closed.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        """All of it, spaces as one."""
        return " ".join(" ".join(self.texts).split())


def read_page(html: str) -> Page:
    """Parse a page; every element must be closed where it was opened."""
    page = Page()
    page.feed(html)
    page.close()
    assert page.open_elements == []
    assert page.wrongly_closed == []
    return page
