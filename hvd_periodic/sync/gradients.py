"""Shows gradients to algorithms, and warns about weights that only other code changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import numpy as np

from hvd_periodic.comm.membership import Membership
from hvd_periodic.replica import Replica
from hvd_periodic.sync.exchanger import Exchanger
from hvd_periodic.sync.tensor_groups import TensorGroups

V = TypeVar("V")

_NAMED = 3
"""Maximum number of names in a log line; the line gives the number of the others."""


class Assigned(Generic[V]):
    """Watches parameters that never had a gradient, and weights that are not exchanged.

    It samples a few elements of each tensor, and warns once about each of the two kinds.

    Args:
        replica: the replica of this rank.
        groups: the exchanged tensors with their centers.
        algorithm: the name of the algorithm.
        membership: has the log of this rank.
    """

    def __init__(self, replica: Replica[V], groups: TensorGroups[V], algorithm: str, membership: Membership) -> None:
        self._replica, self._groups, self._algorithm, self._membership = replica, groups, algorithm, membership
        self._count = len(replica.parameters.layout.specs)
        self._never = set(range(self._count))
        """Parameters that have had no gradient."""
        self._before: dict[str, np.ndarray] | None = None
        self._named_parameters = self._named_others = False

    def remember(self) -> None:
        """Record the current values at the start of training; never called in TensorFlow 1 sessions."""
        self._before = {name: self._replica.some_of(tensor) for name, tensor in self._watched()}

    def see_gradients(self) -> None:
        """Record which parameters have a gradient in this iteration."""
        if self._never:
            self._never -= set(self._replica.with_gradient(self._never))

    def follow(self) -> None:
        """Record the parameters without gradients again after an exchange, which has changed them."""
        if self._before is None or self._named_parameters:
            return
        if not self._never:
            return
        if len(self._never) < self._count:
            self._before |= self._without_gradient()
        else:  # No gradient was shown: watching every parameter would be useless, so drop the recorded values.
            for spec in self._groups.parameters.values.layout.specs:
                self._before.pop(spec.name, None)

    def name_parameters(self) -> str | None:
        """Warn about exchanged parameters that changed without ever having a gradient, while others had some.

        Runs as a check of every handshake; always returns None, so it never prevents an exchange.
        """
        self.see_gradients()
        if self._named_parameters or self._before is None or not 0 < len(self._never) < self._count:
            return None
        now, before = self._without_gradient(), self._before
        found = [name for name in now if name in before and not np.array_equal(now[name], before[name], equal_nan=True)]
        if found:
            self._named_parameters = True
            self._membership.log.warning(
                "These weights take part in exchanges, have never had a gradient, and were changed by other code than "
                "local steps: %s. %s exchanges them as if they were trained. %s",
                _listed(found),
                self._algorithm,
                self._replica.how_to_exclude,
            )
        return None

    def name_others(self) -> None:
        """Warn about changed weights that are not exchanged: a model that holds the center keeps this rank's values.

        Called when the center is read.
        """
        if self._named_others or not self._before:
            return
        found = [
            name
            for name, tensor in self._replica.unexchanged().items()
            if name in self._before
            and not np.array_equal(self._replica.some_of(tensor), self._before[name], equal_nan=True)
        ]
        if found:
            self._named_others = True
            self._membership.log.warning(
                "Inside center(), these weights still have this rank's values: %s. No exchange touches them, and they "
                "have changed since the start, so that ranks may read different values. %s",
                _listed(found),
                self._replica.how_to_exchange,
            )

    def _without_gradient(self) -> dict[str, np.ndarray]:
        """Return some elements of each parameter that has had no gradient, by name."""
        values = self._groups.parameters.values
        tensors = values.tensors()
        return {values.layout.specs[i].name: self._replica.some_of(tensors[i]) for i in sorted(self._never)}

    def _watched(self) -> Iterable[tuple[str, Any]]:
        yield from self._replica.unexchanged().items()
        values = self._groups.parameters.values
        yield from ((spec.name, tensor) for spec, tensor in zip(values.layout.specs, values.tensors(), strict=True))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(map(repr, names[:_NAMED]))}{more}"


class Gradients(Generic[V]):
    """Runs the algorithm's local rule, and checks that no update skips it.

    Args:
        exchanger: holds the algorithm and its vectors.

    Attributes:
        assigned: watches tensors without gradients.
        needed_by: what needs to see every local gradient, in words; None if nothing does.
    """

    def __init__(self, exchanger: Exchanger[V]) -> None:
        self.exchanger, self._algorithm = exchanger, exchanger.context.exchanged.algorithm
        self._prepared = False
        context, groups = exchanger.context, exchanger.tensor_groups
        self._untouched = groups.parameters.error_feedback.untouched
        self.needed_by = self._what_needs_all()
        name = type(self._algorithm).__name__
        self.assigned = Assigned(context.exchanged.replica, groups, name, context.membership)
        context.handshake.followers.append(self.assigned.follow)

    def prepare(self) -> None:
        """Show the gradients of this iteration to the algorithm, unless they are still averaged over all ranks."""
        self._prepared = True
        context, presence = self.exchanger.context, self.exchanger.presence
        if presence is not None and (found := presence.found()):
            context.progress.see(found, presence.fragments)
        if self._untouched is not None:
            context.exchanged.replica.mark_rows(self._untouched.marks)
        if self._algorithm.uses_gradients:
            self.show()

    def show(self) -> None:
        """Run the local rule unless the synchronous warmup is active."""
        if not self.exchanger.context.warmup.active:
            self.run()

    def run(self) -> None:
        """Run the local rule and count the gradients."""
        context, worker = self.exchanger.context, self.exchanger.tensor_groups.parameters.worker
        context.progress.add(gradients=context.exchanged.replica.local(self._algorithm, worker))

    def _what_needs_all(self) -> str | None:
        if self.exchanger.presence is not None:
            return "A parameter that is 'present'"
        if self._untouched is not None:
            return "A parameter of which 'rows' travel in elastic averaging"
        return type(self._algorithm).__name__ if self._algorithm.uses_gradients else None

    def check(self, updated: bool) -> None:
        """Raise a RuntimeError after an update whose gradients the algorithm needed but did not see."""
        if updated and self.needed_by is not None and not self._prepared:
            raise RuntimeError(
                f"{self.needed_by} needs every local gradient: call prepare_gradients() before each local update, "
                "then step()"
            )
        if updated:
            self.assigned.see_gradients()
        self._prepared = False
