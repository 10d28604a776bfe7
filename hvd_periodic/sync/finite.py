"""Non-finite replicas: an error on all ranks, exclusion from the exchange, or no check."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from hvd_periodic.centers.tensor_group import TensorGroup
from hvd_periodic.comm.membership import Membership
from hvd_periodic.participation.broadcast import FROM_ROOT
from hvd_periodic.replica import Replica
from hvd_periodic.sync.tensor_groups import TensorGroups
from hvd_periodic.vectors.store import Store
from hvd_periodic.wires.base import Wire

V = TypeVar("V")

RAISE, SKIP, IGNORE = "raise", "skip", "ignore"
"""Policies for a rank whose replica is not finite: an error on all ranks, exclusion of the rank, or no check."""


def as_nonfinite(nonfinite: str) -> str:
    """Return the policy, validated.

    Raises:
        ValueError: there is no such policy.
    """
    if nonfinite not in (RAISE, SKIP, IGNORE):
        raise ValueError(f"`nonfinite` must be {RAISE!r}, {SKIP!r} or {IGNORE!r}. Received: {nonfinite!r}")
    return nonfinite


_SKIP_ADVICE = "nonfinite='skip' excludes such a rank and resets it to the center"


class Checked(NamedTuple):
    """A tensor that has to be finite.

    Attributes:
        name: readable name.
        tensor: this rank's tensor.
        center: its center, if the tensor may be infinite wherever the center is (like a mask); else None.
    """

    name: str
    tensor: Any
    center: Any = None


class Finite(Generic[V]):
    """Checks before an exchange that the tensors of this rank are finite.

    Checked are the parameters, the worker's vectors, averaged statistics, and on the root the buffers that it
    broadcasts. In statistics and buffers, elements that are infinite like their center are valid, since all ranks have
    started from them. If the center is not on this rank, all infinite elements are valid.

    Args:
        groups: the exchanged tensors.
        membership: knows whether this rank is the root.
        policy: ``"raise"``, ``"skip"`` or ``"ignore"``.
        wire: encoding of the parameters; a lossy one cannot carry non-finite values, whatever the policy.
        replica: the replica of this rank.
    """

    def __init__(
        self, groups: TensorGroups[V], membership: Membership, policy: str, wire: Wire, replica: Replica[V]
    ) -> None:
        self._groups, self._membership, self._replica = groups, membership, replica
        self._policy, self._wire = policy, wire
        self.skips = policy == SKIP
        """Non-finite ranks are excluded."""

    def checked(self) -> list[Checked]:
        """Return all tensors that have to be finite."""
        return [
            Checked(name.format(spec.name), tensor, center)
            for name, store, centers in self._stores()
            for spec, tensor, center in zip(
                store.layout.specs,
                store.tensors(),
                [None] * len(store.layout.specs) if centers is None else centers.tensors(),
                strict=True,
            )
        ]

    def _stores(self) -> list[tuple[str, Store[V], Store[V] | None]]:
        """Return a format for readable names, the tensors and their centers, as :class:`Checked` has them."""
        if self._policy == IGNORE and not self._wire.lossy:
            return []
        parameters = self._groups.parameters
        stores = {"parameter": parameters.values, **parameters.worker}
        found: list[tuple[str, Store[V], Store[V] | None]] = [
            (f"{key} {{!r}}", store, None) for key, store in stores.items()
        ]
        for group in () if self._policy == IGNORE else self._groups.statistics:
            name = self._name_in(group)
            if name is not None:
                found.append((name, group.values, group.center if group.placement.everywhere else group.values))
        return found

    def problem(self, steps: int) -> str | None:
        """Return a message naming the first non-finite tensor after ``steps`` local steps; None if all are finite."""
        memory = [part for _, store, _ in self._stores() for part in store.memory()]
        if self._replica.space.coding.are_finite(memory):
            return None
        wrong = (index for index, each in enumerate(self.checked()) if not self._is_right(each))
        index = next(wrong, None)
        return None if index is None else self.text(index, steps)

    def text(self, index: int, steps: int) -> str:
        """Return the message for a non-finite tensor, given by its index in :meth:`checked`."""
        found = f"{self.checked()[index].name} is not finite at step {steps}"
        if self._policy == IGNORE:
            return f"{found}: it cannot travel with compression={self._wire!r}"
        if self.skips:
            return found
        found = f"{found}, and would spoil the center. Look at the learning rate, the loss and the data of this rank"
        return f"{found}; {_SKIP_ADVICE}" if self._can_skip else found

    @property
    def _can_skip(self) -> bool:
        """Whether this rank could be excluded: no other rank holds parts of its replica or runs in lockstep with it."""
        return self._replica.may_be_left_out and not self._membership.is_lockstep_group

    def _name_in(self, group: TensorGroup[V]) -> str | None:
        """Return a format for readable names of a group's tensors; None if this rank's tensors need no check."""
        if group.algorithm.reduction == "root":
            noun = "parameter" if group.name == FROM_ROOT else "buffer"
            return f"{noun} {{!r}} of the root" if self._membership.is_root else None
        return "statistic {!r}" if group.algorithm.reduction == "sum" else None

    def _is_right(self, checked: Checked) -> bool:
        if self._replica.space.coding.are_finite([checked.tensor]):
            return True
        coding = self._replica.space.coding
        return checked.center is not None and bool(coding.is_finite_or(checked.tensor, checked.center))
