"""The messages of the package: what errors, warnings and log lines say, as templates with … for what varies.

``python -m tests.messages`` prints those that the pages *Troubleshooting* do not have.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/troubleshooting").glob("*.md"))
LOGGED = {"warning", "error", "info", "warn"}
BLOCK = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def template(node: ast.expr) -> str:
    """Return the text of an expression.

    Example:
        >>> template(ast.parse("f'{a}{b} is 5, not ' 'this: %s'", mode="eval").body)
        '… is 5, not this: …'
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = re.sub(r"%(?:\.\d+)?[sdrf]", "…", node.value).replace("%%", "%")
    elif isinstance(node, ast.JoinedStr):
        text = "".join(map(template, node.values))
    elif isinstance(node, ast.BinOp):
        text = template(node.left) + template(node.right)
    else:
        text = "…"
    return re.sub("…+", "…", text)


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in LOGGED or name.endswith("Error"):
                yield node


def trees() -> Iterator[tuple[Path, ast.AST]]:
    """Yield the files of the package, parsed."""
    for path in sorted((ROOT / "hvd_periodic").rglob("*.py")):
        yield path, ast.parse(path.read_text())


def messages() -> dict[str, str]:
    """Return where each message is; those that consist of what others have said are left out."""
    found = {template(call.args[0]): str(path.relative_to(ROOT)) for path, tree in trees() for call in _calls(tree)}
    return {text: path for text, path in found.items() if len(re.sub("…|[^a-zA-Z]", "", text)) > 8}


def texts() -> str:
    """Return all strings of the package, one after another."""
    return "\n".join(template(node) for _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.expr))


def explained() -> list[str]:
    """Return the lines that the pages explain."""
    return [line for page in PAGES for block in BLOCK.findall(page.read_text()) for line in block.splitlines()]


if __name__ == "__main__":
    for message, file in messages().items():
        if message not in explained():
            print(f"{file}: {message}")
