"""What ranks compare before they exchange for the first time."""

from __future__ import annotations

from typing import Any

from hvd_periodic.arguments import described
from hvd_periodic.comm.agreement import agree, build_on_all
from hvd_periodic.local_state.base import LocalState
from hvd_periodic.sync.course import Course
from hvd_periodic.sync.planning import forecast
from hvd_periodic.version import __version__


def check_agreement(course: Course[Any], policy: LocalState) -> None:
    """Check that all ranks are about to do the same.

    Raises:
        ValueError: ranks differ; raised on all of them.
    """
    membership = course.setting.membership
    membership.communicator.check()
    facts = build_on_all(membership.communicator, membership.name, lambda: facts_of(course, policy))
    agree(membership.communicator, membership.name, facts)
    if membership.together.group is not None:
        agree(membership.together.group, membership.together.group_name, facts)


def facts_of(course: Course[Any], policy: LocalState) -> dict[str, object]:
    """Return what all ranks must agree on, by readable name."""
    setting, exchanged = course.setting, course.setting.exchanged
    schedule = setting.planner.schedule
    return {
        "version": __version__,
        "algorithm": exchanged.algorithm,
        "schedule": described(schedule),
        "first exchanges": forecast(schedule, 8),
        "root rank": setting.membership.root,
        "place of the center": course.placement.name,
        **course.facts(),
        "center optimizer": exchanged.center_optimizer.name,
        "optimizer_state": policy,
        "timeout_seconds": setting.membership.communicator.tracker.timeout,
        **exchanged.replica.facts(),
        **exchanged.hyperparameters.settings(),
    }
