"""Reads a page of HTML back, as a browser would."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """What a reader and a browser find in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.labels: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.identities: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        known = dict(attributes)
        self.addresses += [known[name] for name in ("src", "href", "xlink:href", "action") if name in known]
        self.identities += [known["id"]] if "id" in known else []
        if tag == "div" and known.get("role") == "img":
            self.labels.append(known["aria-label"])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "link", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        """Return the cells of the first row with this heading."""
        return next(row[1:] for row in self.rows if row[0] == name)
