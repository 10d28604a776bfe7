"""What is torch.distributed's own: process groups, meshes, DistributedDataParallel, and what is refused.

torchrun --standalone --nproc-per-node 4 -m tests.parallel.torch_distributed_scenarios FOLDER
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import hvd_periodic.numpy as hvdn
import hvd_periodic.torch as hvdp
from hvd_periodic.comm.selection import VARIABLE
from hvd_periodic.numpy.communicator import communicator_of as of_arrays
from hvd_periodic.torch.communicator import communicator_of
from tests.conformance.communicator_contract import check_communicator
from tests.parallel.program import NotApplicableError, Scenarios, attempt
from tests.parallel.torch_job import hvd

scenario = Scenarios()


class Scalar(torch.nn.Module):
    """One parameter, of which the loss is linear: the gradient is −1 − 2 rank."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([float(hvd.rank())], dtype=torch.float64))

    def forward(self, slope: float) -> torch.Tensor:
        return -slope * self.w.sum()


def averaging(model: torch.nn.Module, **options: Any) -> hvdp.ModelAverageOptimizer:
    return hvdp.ModelAverageOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, 2, **options)


def trained(model: torch.nn.Module, between: Callable[[], object] = lambda: None, **options: Any) -> list[float]:
    """Return x after each of four steps."""
    optimizer = averaging(model, **options)
    seen = []
    for _ in range(4):
        optimizer.zero_grad()
        model(1.0 + 2.0 * hvd.rank()).backward()
        optimizer.step()
        between()
        seen.append(next(model.parameters()).item())
    optimizer.finalize()
    return seen


def halves() -> list[list[int]]:
    """Return two groups of neighbours, the second of which may be smaller, or one rank each."""
    middle = (hvd.size() + 1) // 2
    return [list(range(middle)), list(range(middle, hvd.size()))]


@scenario
def some_ranks() -> Any:
    """The last two ranks exchange, and start from the last; the others are told that they are not in the group."""
    members = [hvd.size() - 2, hvd.size() - 1]
    group = dist.new_group(members)
    if hvd.rank() not in members:
        return attempt(lambda: averaging(Scalar(), process_set=group))
    check_communicator(communicator_of(group), torch.from_numpy)
    return trained(Scalar(), process_set=group, root_rank=members[1])


@scenario
def arrays() -> Any:
    """Those of numpy travel over a group as well; a communicator of tensors itself carries none."""
    check_communicator(of_arrays(dist.new_group(list(range(hvd.size())))))
    x = np.zeros(1)
    optimizer = hvdn.ModelAverageOptimizer(hvdn.SGD(1.0), {"x": x}, 2)
    optimizer.step([np.array([-1.0 - 2.0 * hvd.rank()])])
    optimizer.step([np.array([-1.0 - 2.0 * hvd.rank()])])
    return x.item(), attempt(lambda: of_arrays(communicator_of(None)))


@scenario
def two_groups_at_once() -> Any:
    """Groups exchange apart from each other, though some ranks are in more groups by now than others."""
    lists = halves()
    made = [dist.new_group(ranks) for ranks in lists]
    mine = next(group for ranks, group in zip(lists, made, strict=True) if hvd.rank() in ranks)
    return trained(Scalar(), process_set=mine)


@scenario
def meshes() -> Any:
    """A mesh of one dimension is a group of ranks; of one with two, one has to be chosen."""
    if hvd.size() != 4:
        raise NotApplicableError("needs four ranks")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("islands", "inside"))
    error = attempt(lambda: averaging(Scalar(), process_set=mesh))
    return trained(Scalar(), process_set=mesh["islands"]), error


@scenario
def islands() -> Any:
    """Gradients are averaged by DistributedDataParallel inside of groups, replicas between them."""
    groups = hvdp.node_groups(size=2)
    if len({len(ranks) for ranks in groups.ranks}) > 1:
        raise NotApplicableError("needs groups of equal size")
    model = DistributedDataParallel(Scalar(), process_group=groups.local)
    seen = trained(model, process_set=groups.cross)
    again = averaging(model, process_set=groups.cross)
    return seen, attempt(lambda: copy.deepcopy(again.synchronizer)), groups.ranks


@scenario
def averaged_anyway() -> Any:
    """DistributedDataParallel over the ranks that exchange leaves nothing to exchange, also inside of a module."""
    model = DistributedDataParallel(Scalar())
    return {
        "model": attempt(lambda: averaging(model)),
        "inside": attempt(lambda: averaging(torch.nn.Sequential(model))),
        "pairs": attempt(
            lambda: hvdp.ModelAverageOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        ),
    }


@scenario
def collectives_of_the_user() -> Any:
    """They come between those of an exchange that travels, on the same ranks, and disturb neither."""
    heard = []

    def between() -> None:
        mine = torch.tensor([float(hvd.rank())])
        dist.all_reduce(mine)
        heard.append(mine.item())

    return trained(Scalar(), between, overlap=1), heard


@scenario
def refused() -> Any:
    """Each is an error on every rank; where one rank alone is wrong, the others are told."""
    last = hvd.rank() == hvd.size() - 1
    fake = ModuleType("horovod.torch")
    # The last two ranks are numbered the other way round: the others agree.
    swapped = {hvd.size() - 2: hvd.size() - 1, hvd.size() - 1: hvd.size() - 2}
    fake.is_initialized, fake.size = lambda: True, hvd.size  # type: ignore[attr-defined]
    fake.rank = lambda: swapped.get(hvd.rank(), hvd.rank())  # type: ignore[attr-defined]
    found = {"none": attempt(lambda: averaging(Scalar()))}
    with patch.dict(sys.modules, {"horovod.torch": fake}), patch.dict(os.environ, {VARIABLE: "torch"}):
        found["numbers"] = attempt(lambda: averaging(Scalar()))
        fake.rank, fake.size = hvd.rank, lambda: 1  # type: ignore[attr-defined]
        found["size"] = attempt(lambda: averaging(Scalar()))
    with patch.dict(os.environ, {VARIABLE: "nccl" if last else "torch"}):
        found["variable"] = attempt(lambda: averaging(Scalar()))
    with patch.dict(os.environ, {VARIABLE: "horovod"}):
        found["not installed"] = attempt(lambda: averaging(Scalar()))
    process_set = SimpleNamespace(process_set_id=1, ranks=[0, 1])
    found["process set"] = attempt(lambda: averaging(Scalar(), process_set=process_set))
    with patch.object(dist, "get_backend_config", lambda group: "cuda:nccl"):
        found["device"] = attempt(lambda: averaging(Scalar()))
    with patch.object(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo,xpu:gloo"):
        of_gloo = communicator_of(None)
    found["gloo"] = [attempt(lambda kind=kind: of_gloo.check_devices([kind])) for kind in ("cpu", "cuda", "xpu")]
    found["afterwards"] = attempt(lambda: averaging(Scalar()))
    return found


@scenario
def copies() -> Any:
    """Of an optimizer over a group, in this process; elsewhere nobody knows the group."""
    group = dist.new_group(list(range(hvd.size())))
    model = Scalar()
    optimizer = averaging(model, process_set=group)
    written = pickle.dumps(optimizer)
    same = [each.synchronizer.membership.communicator.process_set is group for each in (copy.deepcopy(optimizer),)]
    same.append(pickle.loads(written).synchronizer.membership.communicator.process_set is group)
    known = type(optimizer.synchronizer.membership.communicator)
    with patch.object(known, "_own", {}):
        return same, attempt(lambda: pickle.loads(written))


@scenario
def saved_in_the_background() -> Any:
    """A thread talks to other ranks while training does."""
    folder = Path(sys.argv[1]) / "checkpoint"
    model = Scalar()
    optimizer = averaging(model)
    saving = hvdp.save(folder, model, optimizer, background=True)
    for _ in range(4):
        optimizer.zero_grad()
        model(1.0).backward()
        optimizer.step()
    saving.wait()
    hvdp.load(folder, model, optimizer)
    return model.w.item(), optimizer.synchronizer.local_steps


@scenario
def initialized_anew() -> Any:
    """An optimizer of before is refused; a new one trains."""
    model = Scalar()
    before = averaging(model)
    dist.barrier()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    errors = [attempt(lambda: averaging(model)), attempt(before.synchronizer.sync)]
    # In a place of its own: in the store of before there are addresses of the groups of before.
    dist.init_process_group("gloo", f"file://{Path(sys.argv[1]).absolute()}/again", rank=rank, world_size=size)
    errors.append(attempt(before.synchronizer.sync))
    return errors, trained(Scalar())


if __name__ == "__main__":
    before = attempt(lambda: averaging(torch.nn.Linear(1, 1)))
    hvd.init()
    torch.set_num_threads(1)
    scenario.run(Path(sys.argv[1]), hvd.rank(), not_initialized=before)
