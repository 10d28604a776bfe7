"""Non-finite replicas: an error on all ranks, exclusion from the exchange, or no check."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from hvd_periodic.centers.tensor_group import TensorGroup
from hvd_periodic.replica import Replica
from hvd_periodic.sync.membership import Membership
from hvd_periodic.sync.tensor_groups import TensorGroups
from hvd_periodic.wires.base import Wire

V = TypeVar("V")

RAISE, SKIP, IGNORE = "raise", "skip", "ignore"
"""What becomes of a rank whose replica is not finite: an error on all, it is left out, or nothing is looked at."""


def as_nonfinite(nonfinite: str) -> str:
    """Return what was asked for.

    Raises:
        ValueError: there is no such policy.
    """
    if nonfinite not in (RAISE, SKIP, IGNORE):
        raise ValueError(f"`nonfinite` must be {RAISE!r}, {SKIP!r} or {IGNORE!r}. Received: {nonfinite!r}")
    return nonfinite


_SKIP_ADVICE = "nonfinite='skip' leaves such a rank out, and gives it the center back"


class Checked(NamedTuple):
    """A tensor that has to be finite.

    Attributes:
        name: readable.
        tensor: of this rank.
        center: where it may be infinite like its center, as a mask is; None where it may not.
    """

    name: str
    tensor: Any
    center: Any = None


class Finite(Generic[V]):
    """What has to be finite before an exchange: parameters, what the worker keeps of them, averaged statistics; and
    on the root the buffers that all take from it.

    Of statistics and buffers, elements that are infinite like their center are right: all ranks have started from
    them. Where the center is not here, all that are infinite.

    Args:
        groups: what is exchanged.
        membership: knows whether this rank is the root.
        policy: ``"raise"``, ``"skip"`` or ``"ignore"``.
        wire: by which parameters travel; a lossy one cannot carry what is not finite, whatever the policy.
        replica: of this rank.
    """

    def __init__(
        self, groups: TensorGroups[V], membership: Membership, policy: str, wire: Wire, replica: Replica[V]
    ) -> None:
        self._groups, self._membership, self._replica = groups, membership, replica
        self._policy, self._wire = policy, wire
        self.skips = policy == SKIP
        """Ranks that are not finite are left out."""

    def checked(self) -> list[Checked]:
        """Return all tensors that have to be finite."""
        if self._policy == IGNORE and not self._wire.lossy:
            return []
        parameters = self._groups.parameters
        stores = {"parameter": parameters.values, **parameters.worker}
        found = [
            Checked(f"{key} {spec.name!r}", tensor)
            for key, store in stores.items()
            for spec, tensor in zip(store.layout.specs, store.tensors(), strict=True)
        ]
        if self._policy == IGNORE:
            return found
        for group in self._groups.statistics:
            name = self._name_in(group)
            if name is None:
                continue
            tensors = group.values.tensors()
            centers = group.center.tensors() if group.placement.everywhere else tensors
            pairs = zip(group.values.layout.specs, tensors, centers, strict=True)
            found += [Checked(name.format(spec.name), tensor, center) for spec, tensor, center in pairs]
        return found

    def problem(self, steps: int) -> str | None:
        """Return which tensor is not finite after so many local steps, if one is not."""
        checked = self.checked()
        if self._replica.space.coding.are_finite([each.tensor for each in checked]):
            return None
        wrong = (index for index, each in enumerate(checked) if not self._is_right(each))
        index = next(wrong, None)
        return None if index is None else self.text(index, steps)

    def text(self, index: int, steps: int) -> str:
        """Return what is wrong where the tensor at a place of :meth:`checked` is not finite."""
        found = f"{self.checked()[index].name} is not finite at step {steps}"
        if self._policy == IGNORE:
            return f"{found}: it cannot travel with compression={self._wire!r}"
        if self.skips:
            return found
        found = f"{found}, and would spoil the center. Look at the learning rate, the loss and the data of this rank"
        return f"{found}; {_SKIP_ADVICE}" if self._can_skip else found

    @property
    def _can_skip(self) -> bool:
        """Whether this rank could be left out: not where others have parts of its replica, or have to stay in step."""
        communicator = self._membership.communicator
        return self._replica.may_be_left_out and communicator.handshake_group is communicator

    def _name_in(self, group: TensorGroup[V]) -> str | None:
        """Return what a tensor of a group is called, given its name; None where this rank's can spoil nothing."""
        if group.algorithm.reduction == "root":
            return "buffer {!r} of the root" if self._membership.is_root else None
        return "statistic {!r}" if group.algorithm.reduction == "sum" else None

    def _is_right(self, checked: Checked) -> bool:
        if self._replica.space.coding.are_finite([checked.tensor]):
            return True
        coding = self._replica.space.coding
        return checked.center is not None and bool(coding.is_finite_or(checked.tensor, checked.center))
