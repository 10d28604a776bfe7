"""Ranges that profilers show."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def marked(function: Callable[P, T], name: str) -> Callable[P, T]:
    """Return the function as a range of this name: for torch's profiler, and on GPUs for those that read NVTX."""

    @wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.profiler.record_function(name):
            if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                return function(*args, **kwargs)
            with torch.cuda.nvtx.range(name):
                return function(*args, **kwargs)

    return within
