"""The interface of policies for the local optimizer's state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, TypeAlias

from hvd_periodic.choices import choices


class LocalState(ABC):
    """Decides which entries of the state are averaged over ranks or reset, and at which exchanges.

    An *entry* is a tensor that an optimizer keeps for every parameter, in its shape, under the optimizer's own name:
    ``exp_avg`` of torch's Adam, ``momentum`` of Keras's SGD. Step counters are not entries, and are left alone.

    Attributes:
        name: the users' name for the policy.
        touches: whether the policy changes any entry.
        resets: whether all entries are reset at every exchange.
    """

    name: ClassVar[str]
    touches: ClassVar[bool] = True
    resets: ClassVar[bool] = False

    @abstractmethod
    def averaged(self, entries: Collection[str]) -> Mapping[str, int]:
        """Return the entries among these to average, each with its period in exchanges.

        Raises:
            ValueError: the policy names an entry that does not exist.
        """


LocalStateLike: TypeAlias = str | Mapping[str, int] | LocalState
"""The name of a policy; multiples of the exchange period by entry, for averaging; or a policy."""


def as_local_state(value: Any, argument: str = "`optimizer_state`") -> LocalState:
    """Return the policy for a name, or for multiples of the exchange period by entry.

    Args:
        value: ``"local"``, ``"reset"``, ``"average"``, a dict such as ``{"exp_avg": 3, "exp_avg_sq": 6}``, or a policy.
        argument: the caller's name for it, for the error message.

    Raises:
        TypeError, ValueError: there is no such policy.

    Example:
        >>> as_local_state("reset")
        Reset()
        >>> as_local_state({"exp_avg": 3}).averaged(["exp_avg", "exp_avg_sq"])
        {'exp_avg': 3}
    """
    if isinstance(value, LocalState):
        return value
    known: dict[str, type[LocalState]] = choices("hvd_periodic.local_state", LocalState)
    if isinstance(value, Mapping):
        average: Any = known["average"]
        made: LocalState = average(dict(value))
        return made
    if not isinstance(value, str) or value not in known:
        raise ValueError(
            f"{argument} must be one of {tuple(sorted(known))}, or a dict of periods by entry. Received: {value!r}"
        )
    return known[value]()
