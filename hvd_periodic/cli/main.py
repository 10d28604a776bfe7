"""Finds and runs a command; prints a usage error as one line and returns an exit code."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hvd_periodic.cli import doctor, plan, plot, rendezvous, report, simulate, timeline
from hvd_periodic.cli.usage_error import UsageError
from hvd_periodic.version import __version__

COMMANDS = {
    "doctor": doctor,
    "plan": plan,
    "simulate": simulate,
    "report": report,
    "plot": plot,
    "timeline": timeline,
    "rendezvous": rendezvous,
}
"""Modules with ``add_arguments(parser)`` and ``run(arguments) -> exit code``; their docstrings are the help texts."""

USAGE_ERROR, INTERRUPTED = 2, 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    made = argparse.ArgumentParser(
        prog="hvdp",
        description="Checks a machine, estimates the cost of exchanges, simulates training, reports on run logs, and "
        "serves elastic jobs.",
        epilog="hvdp COMMAND --help explains a command.",
    )
    made.add_argument("--version", action="version", version=f"hvd_periodic {__version__}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        text = str(module.__doc__)
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 2 after a usage error.

    Args:
        argv: words of the command line; by default the arguments of this process.
    """
    arguments = parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # Without the source line.
            code: int = COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        print(f"hvdp {arguments.command}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe. Python would complain again when it flushes at exit.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _show_warning(message: Warning | str, *_where: Any, **_more: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
