"""Ends a process at once: the only module that does.

Python's own end calls the exit functions of MPI and Horovod, which wait for all ranks, and so for ever where one is
lost or stuck; from another thread than the main one nothing else ends a process whose main thread is in a library.
Tests: ``test_waiting.py::test_who_holds_the_others_up_is_given_up_under_elastic_horovod``; of jobs, ``test_dying.py``.
"""

import os
import threading
from typing import NoReturn

_HANGS = 10.0
"""Seconds after which a process that timed out ends, even if a library still waits for other ranks."""


def end_now(status: int) -> NoReturn:
    """End this process, without its exit functions; what was not flushed is lost."""
    os._exit(status)


def end_soon() -> None:
    """End this process if it still runs in a while."""
    end = threading.Timer(_HANGS, end_now, [1])
    end.daemon = True
    end.start()
