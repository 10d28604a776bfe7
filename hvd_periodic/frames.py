"""Which code is running: the only module that looks at the frames of Python.

Every function says why it has to, and which test fails where Python or a framework no longer runs as it expects.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, GeneratorType
from typing import Any

_PACKAGE = str(Path(__file__).parent)


def running_methods() -> Iterator[tuple[object, str, str]]:
    """Yield object, name and module of the methods that are running, the innermost first; of functions, None.

    Keras tells a callback nothing of the callbacks beside it, and torch a hook nothing of the method that steps.
    Tests: ``test_keras_fit_end.py::test_the_best_center_is_restored``,
    ``test_torch_steps.py::test_methods_that_step_past_the_wrapper_are_named``.
    """
    for frame in _callers():
        yield frame.f_locals.get("self"), frame.f_code.co_name, frame.f_globals.get("__name__", "")


def calling_module(between: tuple[str, ...]) -> str:
    """Return the module that called the innermost of the modules whose names have these prefixes.

    Libraries step an optimizer to make it create its state: the step has no mark by which a hook could tell.
    Tests: ``test_torch_steps.py::test_steps_that_make_state_are_no_steps``; of Horovod, ``test_habits.py``.
    """
    names = (frame.f_globals.get("__name__", "") for frame in _callers())
    return next((name for name in names if not name.startswith(between)), "")


def arguments_of(generator: GeneratorType[Any, Any, Any]) -> dict[str, Any]:
    """Return the variables of a generator that has not begun: its arguments; nothing of one that is over.

    Scripts pass ``model.named_parameters()`` for the model, whose other tensors are to be found as well.
    Test: ``test_torch_models.py::test_names_are_those_of_the_model_that_was_compiled``.
    """
    return {} if generator.gi_frame is None else dict(generator.gi_frame.f_locals)


def position() -> str:
    """Return the location of the main thread of this process, in the user's code if it runs any.

    A rank for which others wait is asked from another thread, and says where it is.
    Test: ``test_frames.py::test_the_position_is_in_the_users_code``.
    """
    first = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    libraries = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), _PACKAGE, "<frozen")
    while frame is not None and frame.f_code.co_filename.startswith(libraries):
        frame = frame.f_back
    found = frame or first
    if found is None:
        return "no code of Python"
    return f"{found.f_code.co_name}(), {found.f_code.co_filename}:{found.f_lineno}"


def _callers() -> Iterator[FrameType]:
    """Yield the frames of all functions that are running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
