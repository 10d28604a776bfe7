"""The mode in which all that this package does with tensors runs, whatever mode the user's code is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def neutral() -> Iterator[None]:
    """Neither record gradients nor infer, in full precision, with new tensors in host memory unless they say otherwise.

    Horovod's threads cannot write into a tensor that was made in inference mode, nor can anybody once that has ended.
    """
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as modes:
        if torch.get_default_device().type != "cpu":  # A device context slows every operation down.
            modes.enter_context(torch.device("cpu"))
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                modes.enter_context(torch.autocast(device_type, enabled=False))
        yield


def eagerly(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, which ``torch.compile`` calls as it is: neither it nor what it calls is compiled."""
    eager: Callable[P, T] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return eager


def neutrally(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, run in the neutral mode, where ``torch.compile`` does not follow."""

    @eagerly
    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with neutral():
            return function(*args, **kwargs)

    return run
