"""Policies for tensors that an exchange reaches and no gradient does: buffers of modules, weights of Keras models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

AVERAGE, MAXIMUM, BROADCAST, LOCAL = POLICIES = ("average", "maximum", "broadcast", "local")
"""Mean over ranks, elementwise maximum, the root's at every exchange; or the root's at the start and then each its own.

The mean of integers and booleans is their maximum.
"""

Policies: TypeAlias = str | Mapping[str, str] | Callable[[str, Any], str | None] | None
"""A policy for all; policies by patterns of names; a function from name and tensor to one; None: by their names."""

_STATISTICS = {"running", "moving", "mean", "var", "variance", "std", "num", "count"}
"""Words of a name that make a tensor a statistic: running_mean, moving_variance, num_batches_tracked."""

_CHOICES = f"one of {POLICIES}, a dict from patterns of names to these, or a function (name, tensor) to one of these"

_LISTED = 20
"""Names that an error message lists."""


def check_policies(buffers: Policies) -> None:
    """Raise unless this is what users may give.

    Raises:
        TypeError: it is none of what it may be.
        ValueError: an unknown policy.
    """
    if isinstance(buffers, str):
        _check(buffers, "buffers")
    elif isinstance(buffers, Mapping):
        for pattern, policy in buffers.items():
            _check(policy, f"buffers[{pattern!r}]")
    elif buffers is not None and not callable(buffers):
        raise TypeError(f"`buffers` must be {_CHOICES}. Received: {type(buffers).__name__}")


def check_patterns(buffers: Policies, names: Sequence[str]) -> None:
    """Raise a ValueError where a pattern matches none of the names."""
    for pattern in buffers if isinstance(buffers, Mapping) else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            raise ValueError(
                f"`buffers` has a pattern that matches no buffer: {pattern!r}. There are "
                f"{', '.join(names[:_LISTED]) or 'no buffers'}{more}"
            )


def policy_asked_for(buffers: Policies, name: str, tensor: Any) -> str | None:
    """Return the policy that was asked for one tensor; None where that is left to its name.

    Raises:
        ValueError: a function returned an unknown one.
    """
    if isinstance(buffers, Mapping):
        return next((policy for pattern, policy in buffers.items() if fnmatchcase(name, pattern)), None)
    if not callable(buffers):
        return buffers
    policy = buffers(name, tensor)
    if policy is not None:
        _check(policy, f"buffers({name!r}, ...)")
    return policy


def is_statistic(name: str) -> bool:
    """Return whether the last part of a name says that it is one of a statistic.

    Example:
        >>> [is_statistic(name) for name in ("norm.running_mean", "norm/moving_variance", "mean/queue")]
        [True, True, False]
    """
    return not _STATISTICS.isdisjoint(re.split("[./]", name)[-1].split("_"))


def _check(policy: object, argument: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"`{argument}` must be {_CHOICES}. Received: {argument}={policy!r}")
