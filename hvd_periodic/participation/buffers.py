"""Policies for buffers of modules and for weights of Keras models, which no gradient changes."""

from __future__ import annotations

import re

from hvd_periodic.participation.patterns import PolicyArgument

AVERAGE, MAXIMUM, BROADCAST, LOCAL = _POLICIES = ("average", "maximum", "broadcast", "local")
"""Mean over ranks; elementwise maximum; the root's value at every exchange; the root's at the start, then each its own.

The mean of integers and booleans is their maximum.
"""

BUFFERS = PolicyArgument("buffers", "buffer", _POLICIES)

_STATISTICS = {"running", "moving", "mean", "var", "variance", "std", "num", "count"}
"""Words in a name that mark a tensor as a statistic: running_mean, moving_variance, num_batches_tracked."""

_RANDOM = {"seed", "rng", "generator"}
"""Words in a name that mark a tensor as the state of a random generator."""


def is_statistic(name: str) -> bool:
    """Return whether the last part of a name marks a statistic.

    Example:
        >>> [is_statistic(name) for name in ("norm.running_mean", "norm/moving_variance", "mean/queue")]
        [True, True, False]
    """
    return not _STATISTICS.isdisjoint(re.split("[./]", name)[-1].split("_"))


def is_of_random_generator(name: str) -> bool:
    """Return whether the last part of a name marks the state of a random generator, which ranks need to differ.

    Example:
        >>> [is_of_random_generator(name) for name in ("dropout/seed_generator_state", "noise.rng_state", "bread")]
        [True, True, False]
    """
    return not _RANDOM.isdisjoint(re.split("[./]", name)[-1].split("_"))
