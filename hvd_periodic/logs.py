"""The log of the package, written to stderr if the environment asks for it."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

VARIABLE = "HVD_PERIODIC_LOG"
"""Environment variable: ``info`` for a line at the start and a summary at the end, ``debug`` for a line per exchange
as well; ``warning`` or ``error`` for less. Without it, the script's setup of Python's ``logging`` applies."""

_LEVELS = ("debug", "info", "warning", "error")

logger = logging.getLogger("hvd_periodic")

Log = logging.LoggerAdapter[logging.Logger]

_begun: list[bool] = []
_lock = threading.Lock()
"""Ranks may be threads."""


def set_up() -> None:
    """Write the log of this package to stderr, if the environment asks for it; once, before the first line.

    Whatever may log first calls this: it is not done on import, which leaves the logging of a program as it is.
    """
    with _lock:
        if _begun:
            return
        _begun.append(True)
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    if asked.lower() not in _LEVELS:
        logger.warning("%s must be one of %s. Received: %r", VARIABLE, ", ".join(_LEVELS), asked)
        return
    logger.setLevel(asked.upper())
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] hvd_periodic: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False


def log_of(number: int | None) -> Log:
    """Return the log of one of several optimizers, whose lines begin with the number of the optimizer.

    Args:
        number: number of the optimizer; None if there is only one.
    """
    return _Named(logger, {"number": number})


class _Named(logging.LoggerAdapter[logging.Logger]):
    """Begins lines with the number of an optimizer, if there is one."""

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the line and its keyword arguments."""
        number = (self.extra or {}).get("number")
        return (msg if number is None else f"Optimizer {number}: {msg}"), kwargs
