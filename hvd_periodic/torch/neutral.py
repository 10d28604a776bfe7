"""The mode in which all that this package does with tensors runs, whatever mode the user's code is in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
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


def random_numbers_kept() -> AbstractContextManager[None]:
    """Return a block after which training draws the random numbers on the CPU that it would have drawn without it.

    Threads draw from one generator, so that none knows which those are. They keep nothing: torch waits for ever where
    two ask for the state of its generator at once.
    """
    alone = threading.current_thread() is threading.main_thread()
    return torch.random.fork_rng(devices=[], enabled=alone)


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
