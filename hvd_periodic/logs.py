"""The log of the package, written to stderr if the environment asks for it."""

from __future__ import annotations

import logging
import os
import threading

VARIABLE = "HVD_PERIODIC_LOG"
"""Environment variable: ``info`` for a line at the start and a summary at the end, ``debug`` for a line per exchange
as well; ``warning`` or ``error`` for less. Without it, the script's setup of Python's ``logging`` applies."""

_LEVELS = ("debug", "info", "warning", "error")

logger = logging.getLogger("hvd_periodic")

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
