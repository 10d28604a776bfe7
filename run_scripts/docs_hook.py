"""What MkDocs does to pages besides: roles in docstrings, such as :class:`hvd_periodic.EASGD`, become links."""

from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):<code>(~?)([\w.]+)</code>")
LINE = re.compile(r'<span id="__line-[^"]*">')
"""Of code: numbered anew in every docstring, and so no name within a page."""
CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
CODE = re.compile(r"<code>([^<]{20,})</code>")
ENDS = re.compile(r"[/_.,(=:]+")
"""After which long names in tables may break, so that the columns beside them are not squeezed."""


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Replace roles by links to the API, where it has the name; let style sheets know where messages are."""
    if page.url.startswith("troubleshooting/"):
        html = f'<div class="messages">{html}</div>'
    html = LINE.sub('<span class="line">', html)
    html = CELL.sub(lambda cell: CODE.sub(_breakable, cell[0]), html)
    return ROLE.sub(lambda role: _link(role[2], short=bool(role[1])), html)


def _breakable(code: re.Match[str]) -> str:
    return f"<code>{ENDS.sub(lambda end: f'{end[0]}<wbr>', code[1])}</code>"


def _link(name: str, short: bool) -> str:
    text = name.rpartition(".")[2] if short else name
    return f'<autoref identifier="{name}" optional><code>{text}</code></autoref>'
