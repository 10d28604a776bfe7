"""Prints tables, JSON and progress: with rich if it is installed, otherwise as plain text.

A table is for people and goes to standard output; progress goes to standard error, and only if that is a terminal.
Output into a pipe is not colored, and no line is cut.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE")
"""Variables of launchers: mpirun gives its ranks terminals, but their output may end in a file."""

UNBOUNDED = 400
"""Maximum width in characters of a table that goes into a pipe."""


class Advance(Protocol):
    """Advances a progress bar."""

    def __call__(self, done: int, now: str = "") -> None:
        """Add ``done`` to the finished part of the total; ``now`` describes the current work."""


def terminal(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that a user watches."""
    return stream.isatty() and not any(name in os.environ for name in LAUNCHED)


def _colored() -> bool:
    """Return whether output may have colors: a user watches it, and NO_COLOR is not set."""
    return terminal(sys.stdout) and not os.environ.get("NO_COLOR")


def say(text: str = "") -> None:
    """Print a paragraph, as wide as the terminal."""
    width = shutil.get_terminal_size().columns if terminal(sys.stdout) else 120
    print(textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False))


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(plain_table(title, columns, rows))
        return
    say(title)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if i else "left", overflow="fold", vertical="bottom")
    for row in rows:
        table.add_row(*map(Text, row))
    seen = terminal(sys.stdout)
    Console(width=None if seen else UNBOUNDED, force_terminal=_colored(), highlight=False).print(table)


def item(head: str, style: str, text: str, command: str = "") -> None:
    """Print a paragraph with a head of some style, and below it, on one line, a command for users to copy."""
    seen = terminal(sys.stdout)
    width = min(shutil.get_terminal_size().columns, 100) if seen else 120
    indent = " " * 9
    lines = textwrap.wrap(text, width - len(indent), break_long_words=False, break_on_hyphens=False)
    body = f"\n{indent}".join(lines) + (f"\n{indent}$ {command}" if command else "")
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(f"{head:<9}{body}", flush=True)
        return
    Console(force_terminal=_colored(), highlight=False, soft_wrap=True).print(
        Text(f"{head:<9}", style), Text(body), sep=""
    )


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text.

    Example:
        >>> print(plain_table("steps", ["algorithm", "n"], [["easgd", "10"]]))
        steps
        algorithm   n
        easgd      10
    """
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    cells = (
        [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    )
    return "\n".join([title, *("  ".join(row).rstrip() for row in cells)])


def write_json(value: Any) -> None:
    """Print JSON; NaN and infinity, which JSON does not have, become null."""
    print(json.dumps(_finite(value), indent=1))


def nothing(done: int, now: str = "") -> None:
    """Advance no progress bar."""


@contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """Show a progress bar on a terminal; yield the function that advances it and describes the current work."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield nothing
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    hidden, pipe = not terminal(sys.stderr), not terminal(sys.stdout)  # A pipe gets its lines.
    with Progress(*columns, console=console, transient=True, disable=hidden, redirect_stdout=not pipe) as bar:
        task = bar.add_task(what, total=total)

        def advance(done: int, now: str = "") -> None:
            bar.update(task, advance=done, description=now or None)

        yield advance


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
