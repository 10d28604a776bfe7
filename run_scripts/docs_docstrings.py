"""What mkdocstrings does besides: examples are code, wrapped methods are as inherited, signatures list all options."""

from __future__ import annotations

import re
from typing import Any

import griffe

LITERAL = re.compile(r"^( *)(.*)::\n\n((?:\1    .*\n|\n)+)", re.MULTILINE)
"""A line that ends in two colons, and a block of code below it."""
WRAPPED = re.compile(r"\w+\(\w+\.\w+\)")
"""What a class assigns to the name of a method of its base, for the same method under a decorator."""


class Examples(griffe.Extension):
    """Calls their sections what Griffe looks for, and marks blocks of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change one docstring."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = LITERAL.sub(_as_code, f"{text}\n")

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Leave wrapped methods to the class from which they are."""
        for name, member in list(cls.members.items()):
            value = str(member.value) if isinstance(member, griffe.Attribute) else ""
            if WRAPPED.fullmatch(value) and value.endswith(f".{name})"):
                cls.del_member(name)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Put options with their defaults into a signature, in place of ``**options: Unpack[...]``."""
        for last in list(func.parameters)[-1:]:
            if isinstance(last.annotation, griffe.ExprSubscript) and last.annotation.canonical_path == "typing.Unpack":
                del func.parameters[last.name]
                declared = func.modules_collection[last.annotation.slice.canonical_path]
                for name, option in declared.attributes.items():
                    kind, default = option.annotation.slice.elements
                    keyword = griffe.ParameterKind.keyword_only
                    func.parameters.add(griffe.Parameter(name, annotation=kind, kind=keyword, default=default))


def _as_code(found: re.Match[str]) -> str:
    indent, title, block = found.groups()
    lines = [line[4:] for line in block.rstrip().splitlines()]
    title = "**Examples:**" if title == "Example" else f"{title}:"
    return "\n".join([f"{indent}{title}\n", f"{indent}```python", *lines, f"{indent}```\n\n"])
