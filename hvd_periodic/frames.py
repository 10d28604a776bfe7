"""Finds out which code is running; no other module inspects Python frames.

Every function says why it needs frames, and which test fails if Python or a framework no longer behaves as expected.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_stack
from types import GeneratorType
from typing import Any

_PACKAGE = str(Path(__file__).parent)


def running_methods() -> Iterator[tuple[object, str, str]]:
    """Yield object, name and module of the running methods, innermost first; the object of a function is None.

    Keras does not tell a callback about the other callbacks, nor torch a hook about the method that steps.
    Tests: ``test_keras_fit_end.py::test_the_best_center_is_restored``,
    ``test_torch_steps.py::test_methods_that_step_past_the_wrapper_are_named``.
    """
    for frame, _ in walk_stack(sys._getframe()):
        yield frame.f_locals.get("self"), frame.f_code.co_name, frame.f_globals.get("__name__", "")


def running_with(name: str) -> Iterator[tuple[object, object]]:
    """Yield object and first argument of the running methods of this name, innermost first.

    Keras does not tell an optimizer how many examples there are in a batch; ``train_step(data)`` has them.
    Test: ``test_keras_weights_by_work.py::test_fit_reports_its_batches``.
    """
    for frame, _ in walk_stack(sys._getframe()):
        code = frame.f_code
        if code.co_name == name and code.co_argcount > 1:
            yield frame.f_locals.get(code.co_varnames[0]), frame.f_locals.get(code.co_varnames[1])


def calling_module(between: tuple[str, ...]) -> str:
    """Return the module that called the innermost of the modules whose names have these prefixes.

    Libraries step an optimizer to make it create its state, and a hook cannot tell such a step from others.
    Tests: ``test_torch_steps.py::test_steps_that_make_state_are_no_steps``; for Horovod, ``test_habits.py``.
    """
    names = (frame.f_globals.get("__name__", "") for frame, _ in walk_stack(sys._getframe()))
    return next((name for name in names if not name.startswith(between)), "")


def arguments_of(generator: GeneratorType[Any, Any, Any]) -> dict[str, Any]:
    """Return the variables of a generator, which are its arguments before it begins; empty after it has ended.

    Scripts pass ``model.named_parameters()`` in place of the model, whose other tensors are needed as well.
    Test: ``test_torch_models.py::test_names_are_those_of_the_model_that_was_compiled``.
    """
    return {} if generator.gi_frame is None else dict(generator.gi_frame.f_locals)


def position() -> str:
    """Return the location of this process's main thread, in the user's code if that is running.

    Another thread of a rank for which others wait answers their query with this location.
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
