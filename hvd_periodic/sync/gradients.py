"""Shows the gradients of local steps to algorithms that use them."""

from __future__ import annotations

from typing import Generic, TypeVar

from hvd_periodic.sync.assigned import Assigned
from hvd_periodic.sync.course import Course

V = TypeVar("V")


class Gradients(Generic[V]):
    """Runs the local rule of the algorithm, and sees to it that no update goes without.

    Args:
        course: knows the algorithm and its vectors.

    Attributes:
        assigned: watches what has no gradients.
    """

    def __init__(self, course: Course[V]) -> None:
        self.course, self._algorithm = course, course.setting.exchanged.algorithm
        self._prepared = False
        setting, groups = course.setting, course.tensor_groups
        name = type(self._algorithm).__name__
        self.assigned = Assigned(setting.exchanged.replica, groups, name, lambda: setting.membership.log)
        setting.meeting.followers.append(self.assigned.follow)

    def prepare(self) -> None:
        """Show the gradients of this iteration, unless they are still averaged over all ranks."""
        self._prepared = True
        if self._algorithm.uses_gradients:
            self.show()

    def show(self) -> None:
        """Run the local rule, where exchanges have begun."""
        if not self.course.setting.phase.equal:
            self.run()

    def run(self) -> None:
        """Run the local rule, and count it."""
        setting, worker = self.course.setting, self.course.tensor_groups.parameters.worker
        setting.ledger.add(gradients=setting.exchanged.replica.local(self._algorithm, worker))

    def check(self, updated: bool) -> None:
        """Raise a RuntimeError after an update whose gradients the algorithm needed and was not shown."""
        if updated and self._algorithm.uses_gradients and not self._prepared:
            raise RuntimeError(
                f"{type(self._algorithm).__name__} needs every local gradient: call prepare_gradients() before each "
                "local update, then step()"
            )
        if updated:
            self.assigned.see_gradients()
        self._prepared = False
