"""Policies for tensors at an exchange, by name: for buffers of modules, weights of Keras models, and parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

AVERAGE, MAXIMUM, BROADCAST, LOCAL = POLICIES = ("average", "maximum", "broadcast", "local")
"""Mean over ranks; elementwise maximum; the root's value at every exchange; the root's at the start, then each its own.

The mean of integers and booleans is their maximum.
"""

PRESENT = "present"
"""For parameters: what only the ranks contribute whose local steps had a gradient of the parameter."""

ROWS = "rows"
"""For parameters: as ``"average"``, but only the rows travel that some rank has touched."""

Policies: TypeAlias = str | Mapping[str, str] | Callable[[str, Any], str | None] | None
"""One policy for all; policies by name patterns; a function from name and tensor to a policy; None: by tensor names."""

_STATISTICS = {"running", "moving", "mean", "var", "variance", "std", "num", "count"}
"""Words in a name that mark a tensor as a statistic: running_mean, moving_variance, num_batches_tracked."""

_RANDOM = {"seed", "rng", "generator"}
"""Words in a name that mark a tensor as the state of a random generator."""

NONE_AVERAGED = ", without those that `parameters` makes 'local' or 'broadcast'"
"""The end of an error message: no parameter is left to exchange."""

_LISTED = 20
"""Number of names that an error message lists."""


@dataclass(frozen=True)
class PolicyArgument:
    """An argument that takes policies.

    Attributes:
        name: its name.
        noun: what it applies to.
        policies: the policies that it takes.

    Example:
        >>> PARAMETERS.policy_of({"head.*": "local"}, "head.weight", None)
        'local'
        >>> PARAMETERS.policy_of({"head.*": "local"}, "body.weight", None) is None
        True
    """

    name: str
    noun: str
    policies: tuple[str, ...]

    def check(self, given: Policies) -> None:
        """Raise unless this is a valid value of the argument.

        Raises:
            TypeError: it has none of the allowed types.
            ValueError: an unknown policy.
        """
        if isinstance(given, str):
            self._check(given, self.name)
        elif isinstance(given, Mapping):
            for pattern, policy in given.items():
                if not isinstance(pattern, str):
                    raise TypeError(f"Patterns of `{self.name}` must be strings. Received: {pattern!r}")
                self._check(policy, f"{self.name}[{pattern!r}]")
        elif given is not None and not callable(given):
            raise TypeError(f"`{self.name}` must be {self._choices}. Received: {type(given).__name__}")

    def check_patterns(self, given: Policies, names: Sequence[str]) -> None:
        """Raise a ValueError if a pattern matches none of the names."""
        for pattern in self.unmatched(given, names):
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            raise ValueError(
                f"`{self.name}` has a pattern that matches no {self.noun}: {pattern!r}. There are "
                f"{', '.join(names[:_LISTED]) or f'no {self.noun}s'}{more}"
            )

    def unmatched(self, given: Policies, names: Sequence[str]) -> list[str]:
        """Return the patterns that match none of the names."""
        patterns = given if isinstance(given, Mapping) else ()
        return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]

    def policy_of(self, given: Policies, name: str, tensor: Any) -> str | None:
        """Return the policy that was asked for one tensor; None if its name decides.

        Raises:
            ValueError: a function returned an unknown policy.
        """
        if isinstance(given, Mapping):
            return next((policy for pattern, policy in given.items() if fnmatchcase(name, pattern)), None)
        if not callable(given):
            return given
        policy = given(name, tensor)
        if policy is not None:
            self._check(policy, f"{self.name}({name!r}, ...)")
        return policy

    @property
    def _choices(self) -> str:
        return (
            f"one of {self.policies}, a dict from patterns of names to these, or a function (name, tensor) to one of "
            "these"
        )

    def _check(self, policy: object, argument: str) -> None:
        if policy not in self.policies:
            raise ValueError(f"`{argument}` must be {self._choices}. Received: {argument}={policy!r}")


BUFFERS = PolicyArgument("buffers", "buffer", POLICIES)
PARAMETERS = PolicyArgument("parameters", "parameter", (AVERAGE, BROADCAST, LOCAL, PRESENT, ROWS))

EXCHANGED = (AVERAGE, PRESENT, ROWS)
"""Policies of the parameters on which the algorithm acts."""


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


def participation_of(parameters: Policies, named: Sequence[tuple[str, Any]]) -> dict[str, str]:
    """Return the policy of each parameter, by name.

    Raises:
        TypeError, ValueError: as :class:`PolicyArgument` raises.

    Example:
        >>> participation_of({"head.*": "local"}, [("body.weight", None), ("head.weight", None)])
        {'body.weight': 'average', 'head.weight': 'local'}
    """
    PARAMETERS.check(parameters)
    PARAMETERS.check_patterns(parameters, [name for name, _ in named])
    return {name: PARAMETERS.policy_of(parameters, name, tensor) or AVERAGE for name, tensor in named}
