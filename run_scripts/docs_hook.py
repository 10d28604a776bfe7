"""What MkDocs does to pages besides: roles in docstrings, such as :class:`hvd_periodic.EASGD`, become links."""

from __future__ import annotations

import ast
import re
from html import unescape
from typing import Any

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):<code>(~?)([\w.]+)</code>")
LINE = re.compile(r'<span id="__line-[^"]*">')
"""Of code: numbered anew in every docstring, and so no name within a page."""
CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
CODE = re.compile(r"<code>([^<]{13,})</code>")
ENDS = re.compile(r"[/_.,(=:]+(?![/_.,(=:)])")
"""After which long names in tables may break, so that the columns beside them are not squeezed."""
CAPITALS = re.compile(r"(?<=[a-z])(?=[A-Z][a-z])")
"""Before which they may break on a phone."""

INLINE = re.compile(r"<code>(?:[^<]|<wbr[^>]*>)*</code>")
OPTION = re.compile(r"(?<![\w-])(--\w[\w-]{,24})(?![\w-])")
"""Of commands: they do not break after a hyphen."""

TEXT = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""Also code that the tests of the pages cannot run."""
SHOWN = re.compile(r'<div class="highlight">(.*?)</div>', re.DOTALL)
TAG = re.compile(r"<[^>]*>")
COLORED = re.compile(r'<span class="(?!line")')
WIDE = 120
"""Characters of the longest lines of code; what is longer is prose."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Color what the sources of a page call text, for the tests' sake, and is code or a difference."""
    if page.url.startswith("troubleshooting/"):
        return markdown
    return TEXT.sub(lambda block: f"```{_language(block[1])}\n{block[1]}```", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Replace roles by links to the API, where it has the name; mark messages, which wrap."""
    if page.url.startswith("troubleshooting/"):
        html = f'<div class="messages">{html}</div>'
    html = LINE.sub('<span class="line">', html)
    html = SHOWN.sub(_wrapping, html)
    html = CELL.sub(lambda cell: CODE.sub(_breakable, cell[0]), html)
    html = INLINE.sub(lambda code: OPTION.sub(r'<span class="option">\1</span>', code[0]), html)
    return ROLE.sub(lambda role: _link(role[2], short=bool(role[1])), html)


def _language(text: str) -> str:
    if all(line[:1] in ("-", "+") for line in text.splitlines()):
        return "diff"
    try:
        ast.parse(text)
    except SyntaxError:
        return "text"
    return "python"


def _wrapping(block: re.Match[str]) -> str:
    if COLORED.search(block[1]) or max(map(len, unescape(TAG.sub("", block[1])).splitlines())) <= WIDE:
        return block[0]
    return block[0].replace('class="', 'class="messages ', 1)


def _breakable(code: re.Match[str]) -> str:
    name = ENDS.sub(lambda end: f"{end[0]}<wbr>", code[1])
    return "<code>" + CAPITALS.sub('<wbr class="capital">', name) + "</code>"


def _link(name: str, short: bool) -> str:
    text = name.rpartition(".")[2] if short else name
    return f'<autoref identifier="{name}" optional><code>{text}</code></autoref>'
