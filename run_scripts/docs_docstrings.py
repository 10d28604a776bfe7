"""What mkdocstrings does to docstrings besides: examples are shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Calls their sections what Griffe looks for."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the sections of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
