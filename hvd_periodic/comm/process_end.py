"""Ends a process at once; no other module does.

Python's normal exit calls the exit functions of MPI and Horovod, which wait forever if a rank is lost or stuck. From
another thread, nothing else ends a process whose main thread is inside a library.
Tests: ``test_waiting.py::test_who_holds_the_others_up_is_given_up_under_elastic_horovod``; for jobs, ``test_dying.py``.
"""

import logging
import os
import sys
import threading
from typing import NoReturn

_HANGS = 10.0
"""Seconds after which a process that timed out ends, even if a library still waits for other ranks."""


def end_now(status: int) -> NoReturn:
    """End this process without running exit functions; unflushed output is lost."""
    os._exit(status)


def abort() -> NoReturn:
    """End this process as failed, at once."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    end_now(1)


def end_soon() -> None:
    """End this process if it is still running after a while."""
    end = threading.Timer(_HANGS, end_now, [1])
    end.daemon = True
    end.start()
