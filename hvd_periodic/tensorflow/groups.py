"""Groups of ranks for TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable

from hvd_periodic.comm.groups import Groups, make_groups
from hvd_periodic.comm.horovod import ranks_of_host
from hvd_periodic.tensorflow.communicator import FRONT_END


def node_groups(size: int | None = None) -> Groups:
    """Group the ranks of each host, or consecutive ranks; all ranks call this instead of ``hvd.init()``.

    Args:
        size: ranks per group; the last group may be smaller. Default: all ranks of a host.

    Returns:
        The process sets of this rank: ``local``, its group, for ``hvd.DistributedOptimizer``; and ``cross``, between
        groups, for an optimizer of this package.

    Raises:
        TypeError, ValueError: ``size`` is not an int of at least 1.
        RuntimeError: ``hvd.init()`` was called before, without ``process_sets="dynamic"``.

    Example::

        groups = hvdp.node_groups()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=groups.local)
        optimizer = hvdp.ElasticAverageOptimizer(optimizer, model, 10, process_set=groups.cross)
    """
    return make_groups(*FRONT_END.everyone(), size)


def rank_groups(groups: Iterable[Iterable[int]]) -> Groups:
    """Group the given ranks, like :func:`node_groups`; every rank must be in exactly one group.

    Raises:
        ValueError: groups overlap, do not hold every rank of the job, or differ between ranks.
        RuntimeError: ``hvd.init()`` was called before, without ``process_sets="dynamic"``.

    Example::

        groups = hvdp.rank_groups([[0, 1, 2], [3, 4]])
    """
    return make_groups(*FRONT_END.everyone(), groups=groups)


def node_ranks() -> range:
    """Return the current ranks of this host; local. Pass the function itself as ``process_set``.

    The optimizer calls it for the group of this rank, and again when ranks change: for elastic Horovod, in which
    process sets are not possible. Any function that divides all ranks into groups may be passed in its place.

    Raises:
        RuntimeError: Horovod is not initialized.

    Example::

        inner = hvdp.ModelAverageOptimizer(optimizer, model, 2, process_set=hvdp.node_ranks)
        optimizer = hvdp.ElasticAverageOptimizer(inner, model, 16)
    """
    return ranks_of_host(FRONT_END.horovod())
