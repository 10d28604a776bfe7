"""Options of a synchronizer that cannot be combined, with each other or with an algorithm; refused at construction."""

from __future__ import annotations

from typing import Any

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.arguments import require_real
from hvd_periodic.centers.norm_bounds import NormBounds
from hvd_periodic.local_state.base import LocalState
from hvd_periodic.replica import Replica
from hvd_periodic.schedules.base import Schedule
from hvd_periodic.sync.handshake import Weight


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


def as_staleness_power(power: float, algorithm: Algorithm, asynchronous: bool) -> float:
    """Return the power of the discount of stale pushes, validated.

    Raises:
        TypeError: not a number.
        ValueError: negative or not finite; or exchange is synchronous; or workers do not push displacements from what
            they took.
    """
    power = require_real(power, "`staleness_power`", positive=False)
    if power and not asynchronous:
        raise ValueError(
            "`staleness_power` is for asynchronous exchange, in which pushes may be stale. Received: "
            f"staleness_power={power!r}"
        )
    if power and algorithm.taken_state is None:
        raise ValueError(
            "`staleness_power` is for averaging, DiLoCo, SlowMo and BMUF, whose workers push what they have moved "
            f"since they took the center. Received: {algorithm!r}"
        )
    return power


def check_bounds(bounds: NormBounds | None, algorithm: Algorithm, replica: Replica[Any], size: int) -> None:
    """Raise a ValueError if bounds on norms have no meaning for the algorithm among ``size`` ranks, or the replica."""
    if bounds is None:
        return
    if replica.present:
        raise ValueError(
            "`max_message_norm` and `max_mean_norm` are norms over all that a rank exchanges, and `parameters` "
            f"makes some of it 'present' on some ranks only: leave out one of the two. Received: {bounds}"
        )
    if bounds.mean is not None and algorithm.share_of_mean(Exchange(size, 1)) is None:
        raise ValueError(
            "`max_mean_norm` is for algorithms whose center takes an outer step: averaging, DiLoCo, SlowMo, BMUF "
            f"and AGN; `max_message_norm` is for all. Received: {algorithm!r}"
        )


def check_participation(
    replica: Replica[Any], algorithm: Algorithm, policy: LocalState, fragments: int, averages_until: Schedule | None
) -> None:
    """Raise a ValueError if ``parameters`` cannot be combined with the other options.

    Args:
        replica: knows the policies of its parameters.
        algorithm: the algorithm.
        policy: the policy for the state of the local optimizer.
        fragments: the number of fragments.
        averages_until: the schedule, if gradients are averaged over the ranks that exchange at first; else None.
    """
    special = replica.keeps_own or replica.parameters_from_root is not None or replica.present
    if averages_until is not None and special:
        raise ValueError(
            "`parameters` cannot be 'local', 'broadcast' or 'present' as long as gradients are averaged over the "
            f"ranks that exchange, as in {averages_until!r}: leave out PostLocal, or `parameters`"
        )
    if replica.present and policy.touches and fragments > 1:
        raise ValueError(
            "`fragments`, `optimizer_state` and `parameters` that are 'present' cannot be combined, since a "
            "fragment does not know who was present in the whole period: leave out one of them. Received: "
            f"fragments={fragments}, optimizer_state={policy}"
        )
    if replica.present and algorithm.reduction != "sum":
        raise ValueError(
            "`parameters` can be 'present' only if messages are summed, and "
            f"{type(algorithm).__name__} takes another reduction: {algorithm.reduction!r}"
        )
