"""Policies for exchanged tensors that have no gradient: buffers of modules, weights of Keras models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

AVERAGE, MAXIMUM, BROADCAST, LOCAL = POLICIES = ("average", "maximum", "broadcast", "local")
"""Mean over ranks; elementwise maximum; the root's value at every exchange; the root's at the start, then each its own.

The mean of integers and booleans is their maximum.
"""

Policies: TypeAlias = str | Mapping[str, str] | Callable[[str, Any], str | None] | None
"""One policy for all; policies by name patterns; a function from name and tensor to a policy; None: by tensor names."""

_STATISTICS = {"running", "moving", "mean", "var", "variance", "std", "num", "count"}
"""Words in a name that mark a tensor as a statistic: running_mean, moving_variance, num_batches_tracked."""

_CHOICES = f"one of {POLICIES}, a dict from patterns of names to these, or a function (name, tensor) to one of these"

_LISTED = 20
"""Number of names that an error message lists."""


def check_policies(buffers: Policies) -> None:
    """Raise unless this is a valid value of the argument.

    Raises:
        TypeError: it has none of the allowed types.
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
    """Raise a ValueError if a pattern matches none of the names."""
    for pattern in buffers if isinstance(buffers, Mapping) else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            raise ValueError(
                f"`buffers` has a pattern that matches no buffer: {pattern!r}. There are "
                f"{', '.join(names[:_LISTED]) or 'no buffers'}{more}"
            )


def policy_asked_for(buffers: Policies, name: str, tensor: Any) -> str | None:
    """Return the policy that was asked for one tensor; None if its name decides.

    Raises:
        ValueError: a function returned an unknown policy.
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
    """Return whether the last part of a name marks a statistic.

    Example:
        >>> [is_statistic(name) for name in ("norm.running_mean", "norm/moving_variance", "mean/queue")]
        [True, True, False]
    """
    return not _STATISTICS.isdisjoint(re.split("[./]", name)[-1].split("_"))


def _check(policy: object, argument: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"`{argument}` must be {_CHOICES}. Received: {argument}={policy!r}")
