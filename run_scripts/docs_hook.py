"""What MkDocs does to pages besides: roles in docstrings, such as :class:`hvd_periodic.EASGD`, become links."""

from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):<code>(~?)([\w.]+)</code>")


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Replace roles by links to the API, where it has the name; let style sheets know where messages are."""
    if page.url.startswith("troubleshooting/"):
        html = f'<div class="messages">{html}</div>'
    return ROLE.sub(lambda role: _link(role[2], short=bool(role[1])), html)


def _link(name: str, short: bool) -> str:
    text = name.rpartition(".")[2] if short else name
    return f'<autoref identifier="{name}" optional><code>{text}</code></autoref>'
