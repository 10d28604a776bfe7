"""Policies for tensors by patterns of their names, in which the first match counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

Policies: TypeAlias = str | Mapping[str, str] | Callable[[str, Any], str | None] | None
"""One policy for all; policies by name patterns; a function from name and tensor to a policy; None: by tensor names."""

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
        >>> buffers = PolicyArgument("buffers", "buffer", ("average", "local"))
        >>> buffers.policy_of({"head.*": "local"}, "head.scale", None)
        'local'
        >>> buffers.policy_of({"head.*": "local"}, "body.scale", None) is None
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
