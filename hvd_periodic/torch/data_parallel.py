"""A ``DistributedDataParallel`` around the model: whose gradients it averages at every step."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.torch_distributed import TorchDistributedCommunicator


def island_of(
    module: torch.nn.Module | None, communicator: Communicator, asynchronous: bool
) -> TorchDistributedCommunicator | None:
    """Return the ranks that average their gradients with this one; None where none do.

    Args:
        module: the model, if it is known.
        communicator: the ranks that exchange.
        asynchronous: whether they exchange without waiting for each other.

    Raises:
        ValueError: ranks that exchange average their gradients at every step, so that no exchange changes anything; or
            asynchronous exchange.
    """
    parts = [] if module is None else module.modules()
    found = [TorchDistributedCommunicator(p.process_group) for p in parts if isinstance(p, DistributedDataParallel)]
    for averaged in found:
        if averaged.size > 1 and asynchronous:
            raise ValueError(
                "asynchronous=True with a DistributedDataParallel: ranks that average their gradients would exchange "
                "at different moments, and differ from then on"
            )
        exchanging = set(communicator.global_ranks)
        if communicator.size > 1 and averaged.size > 1 and len(exchanging & set(averaged.ranks)) > 1:
            raise ValueError(
                f"The DistributedDataParallel averages the gradients of ranks {averaged.ranks} at every step, and of "
                f"these several exchange among themselves ({sorted(exchanging)}), so that nothing would be left to "
                "exchange. Train the module inside of it, and pass that, model.module; or average inside of groups and "
                "exchange between them, with groups = hvdp.node_groups(), "
                "DistributedDataParallel(model, process_group=groups.local) and process_set=groups.cross here"
            )
    return next((averaged for averaged in found if averaged.size > 1), None)
