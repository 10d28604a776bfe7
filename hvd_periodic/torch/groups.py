"""Groups of ranks, for PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

from hvd_periodic.comm.groups import Groups, make_groups
from hvd_periodic.comm.horovod import ranks_of_host
from hvd_periodic.torch.communicator import FRONT_END
from hvd_periodic.torch.neutral import neutrally


@neutrally
def node_groups(size: int | None = None) -> Groups:
    """Return groups of ranks, by host or of neighboring ranks; all ranks call this in place of ``hvd.init()``.

    Args:
        size: ranks per group; the last group may have fewer. Default: all ranks of a host.

    Returns:
        The process sets of this rank: ``local``, its group, for ``hvd.DistributedOptimizer``; and ``cross``, between
        groups, for an optimizer of this package. Over ``torch.distributed``, which must be initialized first, they are
        process groups, and ``local`` is for ``DistributedDataParallel``.

    Raises:
        TypeError, ValueError: ``size`` is not an int of at least 1.
        RuntimeError: ``hvd.init()`` was called before, without ``process_sets="dynamic"``.

    Example::

        groups = hvdp.node_groups()
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=groups.local)
        optimizer = hvdp.ElasticAverageOptimizer(optimizer, model, 10, process_set=groups.cross)
    """
    return make_groups(*FRONT_END.everyone(), size)


@neutrally
def rank_groups(groups: Iterable[Iterable[int]]) -> Groups:
    """Return groups of the given ranks, as :func:`node_groups` does; each rank must be in one of them.

    Raises:
        ValueError: groups overlap, do not hold every rank of the job, or differ between ranks.
        RuntimeError: ``hvd.init()`` was called before, without ``process_sets="dynamic"``.

    Example::

        groups = hvdp.rank_groups([[0, 1, 2], [3, 4]])
    """
    return make_groups(*FRONT_END.everyone(), groups=groups)


def node_ranks() -> range:
    """Return the current ranks of this host; local. Pass the function itself as ``process_set``.

    It returns the group of this rank and is called again when ranks change, under elastic Horovod, which permits no
    process sets. Any other function that divides all ranks into groups may be passed in the same way.

    Raises:
        RuntimeError: Horovod is not initialized.

    Example::

        inner = hvdp.ModelAverageOptimizer(optimizer, model, 2, process_set=hvdp.node_ranks)
        optimizer = hvdp.ElasticAverageOptimizer(inner, model, 16)
    """
    return ranks_of_host(FRONT_END.horovod())
