"""What becomes of the buffers of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch

from hvd_periodic.torch.dtypes import INTEGERS, REALS

AVERAGE, MAXIMUM, BROADCAST, LOCAL = POLICIES = ("average", "maximum", "broadcast", "local")
"""Mean over ranks, elementwise maximum, the root's at every exchange; or the root's at the start and then each its own.

The mean of integers and booleans is their maximum.
"""

Buffers: TypeAlias = str | Mapping[str, str] | Callable[[str, torch.Tensor], str | None] | None
"""A policy for all; policies by patterns of names; a function from name and tensor to one; None: by their names."""

_STATISTICS = {"running", "moving", "mean", "var", "variance", "std", "num", "count"}
"""Words of a name that make a buffer a statistic: running_mean, moving_variance, num_batches_tracked."""


def policies(buffers: Buffers, named: Sequence[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the policy of each buffer, by name: what is done with it in the end.

    Args:
        buffers: as users give it.
        named: the buffers.

    Raises:
        TypeError: ``buffers`` is none of what it may be.
        ValueError: an unknown policy, one that the buffer cannot have, or a pattern that matches no buffer.
    """
    if isinstance(buffers, str):
        _check(buffers, "buffers")
    elif isinstance(buffers, Mapping):
        for pattern, policy in buffers.items():
            _check(policy, f"buffers[{pattern!r}]")
            if not any(fnmatchcase(name, pattern) for name, _ in named):
                raise ValueError(
                    f"`buffers` has a pattern that matches no buffer: {pattern!r}. There are "
                    f"{', '.join(name for name, _ in named) or 'no buffers'}"
                )
    elif buffers is not None and not callable(buffers):
        raise TypeError(f"`buffers` must be {_CHOICES}. Received: {type(buffers).__name__}")
    return {name: policy_of(buffers, name, tensor) for name, tensor in named}


def policy_of(buffers: Buffers, name: str, tensor: torch.Tensor) -> str:
    """Return the policy of one buffer.

    Raises:
        ValueError: as :func:`policies`.
    """
    policy = buffers if isinstance(buffers, str) else None
    if isinstance(buffers, Mapping):
        policy = next((policy for pattern, policy in buffers.items() if fnmatchcase(name, pattern)), None)
    elif callable(buffers):
        policy = buffers(name, tensor)
        if policy is not None:
            _check(policy, f"buffers({name!r}, ...)")
    if policy is None:
        policy = AVERAGE if _STATISTICS & set(name.rpartition(".")[2].split("_")) else LOCAL
    elif policy != LOCAL and not isinstance(buffers, str) and tensor.numel() == 0 and not tensor.is_meta:
        raise ValueError(
            f"Buffer {name!r} is empty, so {policy!r} would do nothing: run one forward pass before the optimizer is "
            "made, so that the buffer has its shape, or use 'local'"
        )
    elif policy in (AVERAGE, MAXIMUM) and not isinstance(buffers, str) and not _has_mean(tensor):
        raise ValueError(f"Buffer {name!r} of {tensor.dtype} has no {policy}: use 'broadcast' or 'local'")
    if tensor.numel() == 0 or tensor.is_meta or (policy in (AVERAGE, MAXIMUM) and not _has_mean(tensor)):
        return LOCAL
    return MAXIMUM if policy == AVERAGE and tensor.dtype in INTEGERS else policy


_CHOICES = f"one of {POLICIES}, a dict from patterns of names to these, or a function (name, tensor) to one of these"


def _check(policy: object, argument: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"`{argument}` must be {_CHOICES}. Received: {argument}={policy!r}")


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.dtype in REALS or tensor.dtype in INTEGERS
