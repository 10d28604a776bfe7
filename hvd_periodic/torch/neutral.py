"""The mode in which this package runs its tensor operations, whatever mode the user's code is in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def neutral() -> Iterator[None]:
    """Turn off gradients, inference mode and autocast; create tensors in host memory unless a device is given.

    Horovod's threads cannot write into a tensor made in inference mode, and no code can after that mode has ended.
    """
    inferring = torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if inferring else nullcontext(), torch.no_grad(), ExitStack() as modes:
        if torch.get_default_device().type != "cpu":  # A device context slows every operation down.
            modes.enter_context(torch.device("cpu"))
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                modes.enter_context(torch.autocast(device_type, enabled=False))
        yield


def random_numbers_kept() -> AbstractContextManager[None]:
    """Return a block that does not change the random numbers that training draws on the CPU.

    Only the main thread restores the generator: threads share it, so that none knows its own numbers, and torch hangs
    if two of them request the generator's state at once.
    """
    alone = threading.current_thread() is threading.main_thread()
    return torch.random.fork_rng(devices=[], enabled=alone)


def eagerly(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function such that ``torch.compile`` compiles neither it nor the functions it calls."""
    eager: Callable[P, T] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return eager


def neutrally(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, run in neutral mode and never compiled by ``torch.compile``."""

    @eagerly
    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with neutral():
            return function(*args, **kwargs)

    return run
