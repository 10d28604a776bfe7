"""Groups of ranks: gradients are averaged within a group at every step, replicas between groups periodically."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_periodic.arguments import require_int
from hvd_periodic.comm.base import Communicator
from hvd_periodic.logs import logger, set_up

_dividing: dict[tuple[int, ...], Any] = {}
"""Process sets of groups by their ranks."""


@dataclass(frozen=True)
class Groups:
    """The groups of a job, and the process sets of this rank.

    Attributes:
        ranks: the ranks of every group.
        local: process set of this rank's group, for ``hvd.DistributedOptimizer``; with ``torch.distributed``, a process
            group, for ``DistributedDataParallel``.
        cross: process set of the ranks with which this one exchanges between groups: the ranks at the same position in
            their groups. All ranks, if groups have different sizes, or if more than two groups are interleaved in
            changing order: a group then counts once per rank.
    """

    ranks: tuple[tuple[int, ...], ...]
    local: Any
    cross: Any


def groups_of_size(ranks: int, size: int) -> list[list[int]]:
    """Divide ``ranks`` ranks into groups of neighbors; the last group may be smaller.

    Raises:
        TypeError, ValueError: ``size`` is not an int of at least 1.

    Example:
        >>> groups_of_size(5, 2)
        [[0, 1], [2, 3], [4]]
    """
    require_int(size, "`node_groups(size=...)`", minimum=1)
    return [list(range(start, min(start + size, ranks))) for start in range(0, ranks, size)]


def across(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the sets of ranks that exchange between groups.

    Horovod numbers the ranks of a set in ascending order. Members of a group stay bitwise equal only if all sets sum
    over groups in the same order, up to the order of the first two; otherwise, all ranks exchange.

    Example:
        >>> across([[0, 1], [2, 3]])
        [[0, 2], [1, 3]]
        >>> across([[0, 1], [2]])
        [[0, 1, 2]]
        >>> across([[0, 5], [1, 4], [2, 3]])
        [[0, 1, 2, 3, 4, 5]]
    """
    everybody = [sorted(rank for group in groups for rank in group)]
    if len({len(group) for group in groups}) > 1:
        return everybody
    columns = list(zip(*groups, strict=True))
    orders = {tuple(sorted(range(len(groups)), key=column.__getitem__)) for column in columns}
    if len(groups) > 2 and len(orders) > 1:
        return everybody
    return [sorted(column) for column in columns]


def check_groups(groups: Iterable[Iterable[int]], ranks: int) -> list[list[int]]:
    """Return groups as sorted lists.

    Raises:
        ValueError: the groups overlap, are empty, or do not hold exactly the ranks of the job.
    """
    lists = [sorted(group) for group in groups]
    found = [rank for group in lists for rank in group]
    twice = sorted({rank for rank in found if found.count(rank) > 1})
    if twice:
        raise ValueError(f"Groups must not overlap: rank {twice[0]} is in several. Received: {lists}")
    if sorted(found) != list(range(ranks)) or not all(lists):
        raise ValueError(f"Groups must hold every rank from 0 to {ranks - 1} and no other. Received: {lists}")
    return lists


def make_groups(
    communicator: Communicator,
    register: Callable[[list[int]], Any],
    size: int | None = None,
    groups: Iterable[Iterable[int]] | None = None,
) -> Groups:
    """Register the process sets of groups; collective among all ranks.

    Args:
        communicator: all ranks.
        register: returns the process set of some ranks; called in the same order on all ranks.
        size: size of the groups of neighbors.
        groups: lists of ranks. Without size and groups, one group per host.

    Raises:
        TypeError, ValueError: groups are invalid, or differ between ranks; on all ranks.
        RuntimeError: process sets cannot be registered.
    """
    address, _ = communicator.address()
    with communicator.tracker.at("node_groups()"):
        told = communicator.allgather_object((socket.gethostname(), address), "hvd_periodic.hosts")
    hosts = [host for host, _ in told]
    communicator.tracker.set_peers([its_address for _, its_address in told])
    failure, lists = None, []
    try:
        if groups is not None:
            lists = check_groups(groups, communicator.size)
        elif size is not None:
            lists = groups_of_size(communicator.size, size)
        else:
            lists = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    except (TypeError, ValueError) as error:
        failure = error
    with communicator.tracker.at("node_groups()"):
        of_ranks = communicator.allgather_object(lists, "hvd_periodic.groups")
    if failure is not None:
        raise failure
    if any(other != lists for other in of_ranks):
        number, other = next((number, other) for number, other in enumerate(of_ranks) if other != lists)
        raise ValueError(f"All ranks must pass the same groups. Received here: {lists}; on rank {number}: {other}")
    rank = communicator.rank
    sets = {tuple(members): register(members) for members in [*lists, *across(lists)]}
    _dividing.update((members, made) for members, made in sets.items() if len(members) < communicator.size)
    # Ranks learn of a new set at different times; one that ends now would shut Horovod down before others know it.
    with communicator.tracker.at("node_groups()"):
        communicator.allgather_object(None, "hvd_periodic.registered")
    local, cross = (next(m for m in found if rank in m) for found in (lists, across(lists)))
    if rank == 0:
        _tell(lists, communicator.elastic)
    return Groups(tuple(map(tuple, lists)), sets[tuple(local)], sets[tuple(cross)])


def _tell(lists: Sequence[Sequence[int]], elastic: bool) -> None:
    """Log the groups, with warnings about unusual ones."""
    set_up()
    logger.info("Groups of ranks: %s", lists)
    if elastic:
        logger.warning(
            "If an elastic job has process sets, Horovod ends all its processes as soon as one is lost: pass "
            "process_set=hvdp.node_ranks, which needs no process sets, to the optimizer"
        )
    if len(lists) == 1:
        logger.warning(
            "All ranks are in one group, so no other group is left to exchange with: see node_groups(size=...)"
        )
    if any(len(group) == 1 for group in lists):
        logger.info("A group of one rank averages no gradients")


def divides_the_job(process_set: Any) -> bool:
    """Return whether a process set is one of the groups that the job is divided into."""
    return any(known is process_set for known in _dividing.values())
