"""Options of a synchronizer that cannot be combined, with each other or with an algorithm; refused at construction."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.arguments import require_int, require_real
from hvd_periodic.asynchronous.rounds import Quorum
from hvd_periodic.centers.norm_bounds import NormBounds
from hvd_periodic.comm.base import Communicator
from hvd_periodic.replica import Replica
from hvd_periodic.schedules.base import Schedule
from hvd_periodic.sync.handshake import Weight
from hvd_periodic.vectors.space import ArraySpace
from hvd_periodic.wires.base import Wire


def check_weight(weight: Weight, algorithm: Algorithm, replica: Replica[Any], fragments: int) -> None:
    """Raise a ValueError if the algorithm takes no mean, or work cannot be counted."""
    if weight.given is not None and not algorithm.takes_mean:
        raise ValueError(
            "`weight` is for algorithms that take the mean over ranks: averaging, DiLoCo, SlowMo, BMUF, and AGN "
            f"with op='average'. Received: {algorithm!r}"
        )
    if weight.by_work and not replica.reports_work:
        raise ValueError(
            f"`weight={weight.given!r}` is for the optimizers of PyTorch, Keras (TensorFlow) and numpy: pass a number "
            "or a function that returns one"
        )
    if weight.by_work and fragments > 1:
        raise ValueError(
            f"`weight={weight.given!r}` counts the work between exchanges of all parameters: pass fragments=1. "
            f"Received: fragments={fragments}"
        )


def check_outer(given: bool, algorithm: Algorithm, variant: Algorithm) -> None:
    """Raise a ValueError if an outer optimizer is given, and the variant for asynchronous exchange takes none."""
    if given and algorithm.takes_outer_optimizer and not variant.takes_outer_optimizer:
        raise ValueError(
            "`outer_optimizer` is for synchronous exchange: with asynchronous=True the momentum of "
            f"{type(algorithm).__name__} waits for the pushes of all ranks, as that of no other optimizer does. Set "
            "its own rate and momentum"
        )


def check_schedule(schedule: Schedule, asynchronous: bool) -> None:
    """Raise a ValueError if the schedule gives workers different numbers of steps where they exchange together."""
    if schedule.asynchronous_only and not asynchronous:
        raise ValueError(
            f"{type(schedule).__name__} gives each worker its own number of local steps, and workers exchange together "
            f"without asynchronous=True, also with a quorum: pass that, or another period. Received: {schedule!r}"
        )


def as_error_decay(error_decay: float, wire: Wire, algorithm: Algorithm) -> float:
    """Return the decay of what is not sent, validated.

    Raises:
        TypeError: not a number.
        ValueError: not in [0, 1]; or less than 1, and everything is sent, or stays in the replica if it is not.
    """
    decay = require_real(error_decay, "`error_decay`", positive=False)
    if decay > 1:
        raise ValueError(f"`error_decay` must be in [0, 1]. Received: {error_decay!r}")
    if decay < 1 and not wire.lossy:
        raise ValueError(
            "`error_decay` is for the part of a message that a lossy `compression` does not send: pass one, or leave "
            f"`error_decay` out. Received: error_decay={error_decay!r}, compression={wire!r}"
        )
    if decay < 1 and not algorithm.uses_error_feedback:
        raise ValueError(
            f"`error_decay` is for algorithms with error feedback. In {type(algorithm).__name__}, the part of a "
            "message that is not sent stays in the replica, and there is nothing to decay. "
            f"Received: error_decay={error_decay!r}"
        )
    return decay


def as_staleness_power(power: float, algorithm: Algorithm, asynchronous: bool, quorum: bool) -> float:
    """Return the power of the discount of what is stale, validated.

    Raises:
        TypeError: not a number.
        ValueError: negative or not finite; or all ranks take part in every exchange; or workers do not push
            displacements from what they took, or no mean is taken of them.
    """
    power = require_real(power, "`staleness_power`", positive=False)
    if power and not (asynchronous or quorum):
        raise ValueError(
            "`staleness_power` is for asynchronous exchange and for rounds with a quorum, in which a displacement may "
            f"be stale. Received: staleness_power={power!r}"
        )
    if power and quorum and not algorithm.takes_mean:
        raise ValueError(
            "`staleness_power` is for algorithms that take the mean over ranks: averaging, DiLoCo, SlowMo, BMUF, and "
            f"AGN with op='average'. Received: {algorithm!r}"
        )
    if power and asynchronous and algorithm.taken_state is None:
        raise ValueError(
            "`staleness_power` is for averaging, DiLoCo, SlowMo and BMUF, whose workers push what they have moved "
            f"since they took the center. Received: {algorithm!r}"
        )
    return power


def as_quorum(
    quorum: int | None, grace_seconds: float | None, algorithm: Algorithm, communicator: Communicator, outer: bool
) -> Quorum | None:
    """Return how many ranks a round waits for, validated; None if it waits for all of them.

    Refused are quorums with which training may diverge: for equal workers whose period takes them all the way to their
    minima, any majority is stable in a mean, and less than half of them is not.

    Args:
        quorum: the number of ranks, if one was given.
        grace_seconds: seconds that a round stays open after they have come, if given.
        algorithm: the algorithm.
        communicator: the ranks.
        outer: whether an optimizer of the framework moves the center.

    Raises:
        TypeError: not a number.
        ValueError: out of range; not stable; or not possible among these ranks.
    """
    if quorum is None:
        if grace_seconds is not None:
            raise ValueError(
                "`grace_seconds` is for rounds that do not wait for all ranks: pass `quorum`, or asynchronous=True, or "
                f"leave it out. Received: grace_seconds={grace_seconds!r}"
            )
        return None
    size = communicator.size
    require_int(quorum, "`quorum`", minimum=1)
    if communicator.elastic or communicator.handshake_group is not communicator:
        refuse_quorum(quorum, "in elastic jobs" if communicator.elastic else "for groups in lockstep")
    if quorum > size:
        raise ValueError(f"`quorum` must be at most the number of ranks, n={size}. Received: quorum={quorum!r}")
    grace = None if grace_seconds is None else require_real(grace_seconds, "`grace_seconds`", positive=False)
    if algorithm.takes_mean:
        momentum = outer or len(algorithm.init_center(ArraySpace(), np.zeros(1))) > 1
        if 2 * quorum < size or (momentum and 2 * quorum == size):
            least = "more than half" if momentum else "at least half"
            raise ValueError(
                f"`quorum` must be {least} of the ranks where the center moves by a mean"
                f"{' with momentum' if momentum else ''}, otherwise training may diverge: use asynchronous=True. "
                f"Received: quorum={quorum!r} of n={size} ranks"
            )
        if 3 * quorum < 2 * size:
            warnings.warn(
                f"`quorum={quorum!r}` is less than two thirds of n={size} ranks: where the center moves by a mean, it "
                "may oscillate, and diverge with momentum. Raise it, or use asynchronous=True",
                stacklevel=1,  # Python shows a text from one line once.
            )
    return None if quorum == size else Quorum(quorum, grace)


def as_grace(grace_seconds: float | None, algorithm: Algorithm) -> float:
    """Return the seconds in which an asynchronous worker waits for pushes of others, validated; None: 0.

    Raises:
        TypeError: not a number.
        ValueError: negative or not finite; or workers do not take the center.
    """
    grace = 0.0 if grace_seconds is None else require_real(grace_seconds, "`grace_seconds`", positive=False)
    if grace and algorithm.taken_state is None:
        raise ValueError(
            "`grace_seconds` is, with asynchronous=True, for averaging, DiLoCo, SlowMo and BMUF, whose workers take "
            f"the center. Received: {algorithm!r}"
        )
    return grace


def refuse_quorum(quorum: int | None, where: str) -> None:
    """Raise a ValueError for a quorum, if one is given, in a place that has none."""
    if quorum is not None:
        raise ValueError(f"`quorum` is not available {where}. Received: quorum={quorum!r}")


def check_bounds(bounds: NormBounds | None, algorithm: Algorithm, size: int) -> None:
    """Raise a ValueError if bounds on norms have no meaning for the algorithm among ``size`` ranks."""
    if bounds is not None and bounds.mean is not None and algorithm.share_of_mean(Exchange(size, 1)) is None:
        raise ValueError(
            "`max_mean_norm` is for algorithms whose center takes an outer step: averaging, DiLoCo, SlowMo, BMUF "
            f"and AGN; `max_message_norm` is for all. Received: {algorithm!r}"
        )
