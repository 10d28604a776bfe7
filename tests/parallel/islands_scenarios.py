"""What every rank of two islands does, of which each divides its model: ``... -np 4 ... islands_scenarios FOLDER``."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hvd_periodic.torch as hvdp
from tests import oracle
from tests.parallel.program import Scenarios, attempt
from tests.parallel.torch_job import UNDER_TORCHRUN, hvd

scenario = Scenarios()
ISLANDS = [[0, 1], [2, 3]]
HERE: dict[str, Any] = {}
"""The groups of ranks, the mesh of all, that of the island, and the folder."""

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "easgd": lambda o, m, **k: hvdp.ElasticAverageOptimizer(o, m, 2, moving_rate=0.25, **k),
    "easgd_rho": lambda o, m, **k: hvdp.ElasticAverageOptimizer(o, m, 2, moving_rate=0.25, rho=0.5, **k),
    "average": lambda o, m, **k: hvdp.ModelAverageOptimizer(o, m, 2, **k),
    "agn": lambda o, m, **k: hvdp.AGNOptimizer(o, m, 4, **k),
    "diloco": lambda o, m, **k: hvdp.PeriodicOptimizer(o, m, hvdp.DiLoCo(), 2, **k),
}


class Quadratic(torch.nn.Module):
    """The oracle's problem, its parameters in tensors of these sizes; its gradient is that of this rank."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        start = torch.tensor(oracle.START, dtype=torch.float64) + hvd.rank() // 2
        self.parts = torch.nn.ParameterList(start.split(list(sizes)))

    def forward(self, step: int) -> torch.Tensor:
        """Return a loss with the oracle's gradient."""
        x = torch.cat(list(self.parts))
        return (torch.tensor(oracle.gradient(hvd.rank(), x.tolist()), dtype=torch.float64) * x).sum()


class Net(torch.nn.Module):
    """Layers of uneven sizes, and data of every rank's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(hvd.rank() // 2)
        self.first, self.second = torch.nn.Linear(4, 7), torch.nn.Linear(7, 3, bias=False)

    def forward(self, step: int) -> torch.Tensor:
        """Return the loss of a batch."""
        data = torch.randn(5, 4, generator=torch.Generator().manual_seed(97 * hvd.rank() + step))
        return (self.second(self.first(data).tanh()) - data[:, :3].sin()).square().mean()


class Wide(torch.nn.Linear):
    """A layer that is larger than what ranks tell each other besides."""

    def __init__(self) -> None:
        super().__init__(65, 129, bias=False)

    def forward(self, step: int) -> torch.Tensor:  # type: ignore[override]
        """Return a loss."""
        return super().forward(torch.full((1, 65), 0.01 * hvd.rank())).square().sum()


def net() -> Any:
    """Return one whose layers are divided each for itself, so that they are gathered one by one."""
    model = Net()
    divided(model.first)
    return divided(model)


def divided(model: torch.nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """Divide a model between the ranks of this island."""
    return fully_shard(model, mesh=mesh or HERE["island"], **options)


def made(name: str, model: Any = None, sizes: tuple[int, ...] = (3,), **options: Any) -> tuple[Any, Any]:
    """Return a divided model and its optimizer, whose ranks exchange over torch.distributed if nothing else is said."""
    model = divided(Quadratic(*sizes)) if model is None else model
    inner = torch.optim.SGD(model.parameters(), lr=oracle.RATE, momentum=oracle.MOMENTUM)
    return model, OPTIMIZERS[name](inner, model, **{"process_set": HERE["mesh"]["islands"]} | options)


def whole(model: Any) -> list[float]:
    """Return all parameters, for a look from outside."""
    return [value for part in model.parameters() for value in part.full_tensor().view(-1).tolist()]


def center_of(model: Any, optimizer: Any) -> list[float]:
    """Return the center; a forward pass gathers it, and the next one has to gather the replica."""
    with optimizer.center(), torch.no_grad():
        values = whole(model)
        model(0)
    return values


def train(model: Any, optimizer: Any, steps: int = oracle.STEPS, looks: bool = True) -> None:
    """Train, and look at the center now and then."""
    for _ in range(steps):
        optimizer.zero_grad()
        step = optimizer.synchronizer.local_steps
        model(step).backward()
        optimizer.step()
        if looks and step % 3 == 1:
            center_of(model, optimizer)


def trained(name: str, **options: Any) -> list[Any]:
    """Return replica and center after training."""
    model, optimizer = made(name, **options)
    train(model, optimizer)
    return [whole(model), center_of(model, optimizer)]


@scenario
def two_levels() -> Any:
    """Every algorithm, with one tensor divided unevenly, and with one of which a rank has nothing."""
    over_horovod = {"process_set": HERE["groups"].cross, "center_device": "cpu"}
    return {name: [trained(name), trained(name, sizes=(2, 1)), trained(name, **over_horovod)] for name in OPTIMIZERS}


@scenario
def alike() -> Any:
    """Options under which training goes where it goes without."""
    ways: list[dict[str, Any]] = [
        {"center": "root"},
        {"center": "sharded"},
        {"audit_every": 1},
        {"overlap": 1},
        {"overlap": "period", "center_device": "cpu"},
        {"timeout_seconds": 500, "nonfinite": "ignore", "weight": 1.0 + hvd.rank() // 4},
    ]
    return {str(way): [trained("average" if "weight" in way else "easgd", **way)] for way in ways}


@scenario
def as_whole_models() -> Any:
    """Options under which it goes where islands go whose ranks have the whole model, and average their gradients."""
    ways: list[tuple[str, dict[str, Any]]] = [
        ("diloco", {"overlap": 1}),
        ("average", {"overlap": "period"}),
        ("average", {"optimizer_state": "average"}),
        ("average", {"optimizer_state": "reset"}),
        ("diloco", {"compression": hvdp.Compression.fp16}),
        ("easgd_rho", {"parameters": {"*parts.1": "local"}}),
        ("agn", {"parameters": {"*parts.1": "broadcast"}}),
        ("diloco", {"parameters": {"*parts.1": "present"}}),
    ]
    found = {}
    for name, way in ways:
        sizes = (2, 1) if "parameters" in way else (3,)
        one = DistributedDataParallel(Quadratic(*sizes), process_group=HERE["island"].get_group())
        _, optimizer = made(name, one, **way)
        train(one, optimizer, looks=False)
        with optimizer.center():
            center = torch.cat(list(one.module.parts)).tolist()
        model, optimizer = made(name, sizes=sizes, **way)
        train(model, optimizer, looks=False)
        replica = torch.cat(list(one.module.parts)).tolist()
        found[f"{name} {way}"] = [[whole(model), center_of(model, optimizer)], [replica, center]]
    return found


@scenario
def others() -> Any:
    """Options of which the end says that all ranks have the same center, and replicas that are not lost."""
    found = {}
    codings = hvdp.Compression.bf16, hvdp.Compression.int8, hvdp.Compression.topk(0.5)
    for way in ({"fragments": 2}, *({"compression": coding} for coding in codings)):
        model, optimizer = made("diloco", net(), **way)
        train(model, optimizer)
        optimizer.finalize()
        found[str(way)] = [whole(model), center_of(model, optimizer), optimizer.synchronizer.distance()]
    return found


@scenario
def hybrid() -> Any:
    """Islands of replicas of one shard: two dimensions of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("islands", "replicas", "shards"))
    island = divided(Quadratic(3), mesh["replicas", "shards"])
    return trained("diloco", model=island, process_set=mesh["islands"])


class Gathered(TorchDispatchMode):
    """Sees what torch.distributed gathers; ``largest`` is the most bytes that a tensor of such an operation has."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        if "gather" in str(function) and "c10d" in str(function):
            tensors = (value for value in tree_leaves(args) if isinstance(value, torch.Tensor))
            self.largest = max(self.largest, *(tensor.nbytes for tensor in tensors))
        return function(*args, **(kwargs or {}))


def size_here(part: Any) -> int:
    """Return how many elements this rank has."""
    return int(part.to_local().numel())


@scenario
def exchanged() -> Any:
    """What exchanges send, and the most that anybody gathers."""
    # Of exchanges that overlap, small messages are not gathered with what ranks tell each other.
    model, optimizer = made("easgd", divided(Wide()), process_set=HERE["groups"].cross, overlap=1)
    synchronizer = optimizer.synchronizer
    train(model, optimizer, 3, looks=False)
    with Gathered() as seen:
        synchronizer.sync()
        with optimizer.center():
            pass
        hvdp.center_state_dict(model, optimizer)
        synchronizer.state_dict()
        optimizer.finalize()
    with Gathered() as plainly:
        next(model.parameters()).full_tensor()
    held, all_there_is = (sum(each(part) for part in model.parameters()) for each in (size_here, torch.Tensor.numel))
    counters = synchronizer.counters
    return [seen.largest, plainly.largest, counters.bytes_sent, counters.rounds, held, all_there_is]


def restored(name: str, state: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Return a new model and optimizer that go on from the states of others."""
    model, optimizer = made(name, net(), **options)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer


@scenario
def resumed() -> Any:
    """From states in memory, in mid-period and with an exchange under way; and from DCP's files of each island."""
    found = {}
    ways: list[tuple[str, dict[str, Any]]] = [
        ("easgd_rho", {}),
        ("diloco", {"process_set": HERE["groups"].cross}),
        ("agn", {"center": "sharded"}),
        ("diloco", {"overlap": "period", "fragments": 2}),
        ("average", {"compression": hvdp.Compression.int8}),
    ]
    for name, way in ways:
        model, optimizer = made(name, net(), **way)
        train(model, optimizer, 5)
        state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        pair = restored(name, state, **way)
        ends = []
        for each in ((model, optimizer), pair):
            train(*each, 6)
            ends.append([whole(each[0]), center_of(*each)])
        found[f"{name} {list(way)}"] = ends
    return found


@scenario
def checkpointed() -> Any:
    """By ``torch.distributed.checkpoint``: every island its own files."""
    found = {}
    for name, way in (("easgd_rho", {}), ("diloco", {"overlap": "period"}), ("agn", {}), ("average", {})):
        model, optimizer = made(name, net(), **way)
        train(model, optimizer, 5)
        island = HERE["folder"] / f"{name}-{hvd.rank() // 2}"
        group = HERE["island"].get_group()
        dcp.save(states(model, optimizer), checkpoint_id=island, process_group=group)
        train(model, optimizer, 6)
        ends = [[whole(model), center_of(model, optimizer)]]
        model, optimizer = made(name, net(), **way)
        hasty = attempt(lambda: load(model, optimizer, island)) if name == "agn" else ""  # noqa: B023
        if name in ("agn", "diloco"):
            optimizer.synchronizer.sync()
        load(model, optimizer, island)
        train(model, optimizer, 6)
        found[name] = [*ends, [whole(model), center_of(model, optimizer)], hasty]
    return found


def load(model: Any, optimizer: Any, island: Path) -> None:
    """Go on from what was saved."""
    saved = states(model, optimizer)
    dcp.load(saved, checkpoint_id=island, process_group=HERE["island"].get_group())
    set_model_state_dict(model, saved["model"])
    set_optimizer_state_dict(model, optimizer.inner, saved["optimizer"])
    optimizer.synchronizer.load_state_dict(saved["exchanges"])


def states(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return all that there is to save."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer.inner),
        "exchanges": optimizer.synchronizer.state_dict(),
    }


class Mixed(torch.nn.Module):
    """A layer that is divided, statistics, a parameter that is not divided, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3 + hvd.rank() // 2)
        self.layer, self.norm = torch.nn.Linear(4, 3, bias=False), torch.nn.BatchNorm1d(3)
        self.scale, self.still = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.randn(3))
        self.still.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number."""
        return (self.norm(self.layer(x)) * self.scale + self.still).square().sum()


@scenario
def mixed() -> Any:
    """Parameters of every kind, and statistics."""
    model = Mixed()
    divided(model.layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"process_set": HERE["groups"].cross, "optimizer_state": "average", "nonfinite": "raise"}
    optimizer = hvdp.ModelAverageOptimizer(optimizer, model, 2, **options)
    torch.manual_seed(hvd.rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).backward()
        model.scale.grad.fill_(1.0)  # What is not divided is for the user to average inside of islands.
        optimizer.step()
    state = hvdp.center_state_dict(model, optimizer)
    shards = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}
    shards = {name: value.tolist() for name, value in shards.items()}
    moments = optimizer.state[model.layer.weight]["exp_avg"].to_local().tolist()
    return [shards, moments, type(state["layer.weight"]).__name__]


@scenario
def refused() -> Any:
    """What cannot be, on every rank of both islands."""
    tall = torch.nn.Linear(4, 4, bias=False)
    dim = hvd.rank() // 2
    uneven = divided(tall, shard_placement_fn=lambda parameter: Shard(dim))
    nothing = divided(Quadratic(3), init_device_mesh("cpu", (4,)))

    def island_of_one() -> Any:
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("ranks", "shard"))
        return divided(Quadratic(3), mesh["shard"] if hvd.rank() >= 2 else HERE["island"])

    alone = island_of_one()
    fine = divided(Quadratic(3))
    of_complex = divided(torch.nn.Linear(4, 4, bias=False, dtype=torch.complex64))
    cases: dict[str, Callable[[], Any]] = {
        "uneven": lambda: hvdp.ModelAverageOptimizer(
            torch.optim.SGD(uneven.parameters(), lr=0.1), uneven, process_set=HERE["groups"].cross
        ),
        "other size": partial(made, "average", alone),
        "one island": partial(made, "average", process_set=HERE["groups"].local),
        "all ranks": partial(made, "average", process_set=None),
        "one mesh": partial(made, "average", nothing),
        "asynchronous": partial(made, "easgd", asynchronous=True),
        "skip": partial(made, "easgd", nonfinite="skip"),
        "bounds": partial(made, "average", max_mean_norm=1.0),
        "complex": lambda: hvdp.ModelAverageOptimizer(
            torch.optim.SGD(of_complex.parameters(), lr=0.1), of_complex, process_set=HERE["groups"].cross
        ),
        "seconds": lambda: hvdp.PeriodicOptimizer(
            torch.optim.SGD(fine.parameters(), lr=0.1), fine, hvdp.Averaging, hvdp.Seconds(1.0)
        ),
        "save": lambda: hvdp.save(HERE["folder"] / "no", *made("easgd")),
        "load": lambda: hvdp.load(HERE["folder"] / "no", *made("easgd")),
    }
    return {name: attempt(case) for name, case in cases.items()}


@scenario
def peers() -> str:
    """The second island passes an argument that makes no sense."""
    return attempt(partial(made, "diloco", fragments=1 if hvd.rank() < 2 else 0))


@scenario
def not_finite() -> str:
    """A shard of one rank is NaN: its peers hear of it."""
    model, optimizer = made("average")
    optimizer.synchronizer.begin()
    with torch.no_grad():
        model.parts[0].to_local().fill_(float("nan") if hvd.rank() == 3 else 1.0)
    return attempt(optimizer.synchronizer.sync)


def main() -> None:
    """Run on four ranks, over the network of this host."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    HERE["folder"] = Path(sys.argv[1])
    hvd.init(process_sets="dynamic")
    if not UNDER_TORCHRUN:
        meeting = f"file://{HERE['folder']}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=hvd.rank(), world_size=hvd.size())
    HERE["groups"] = hvdp.rank_groups(ISLANDS)
    HERE["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("islands", "shards"))
    HERE["island"] = HERE["mesh"]["shards"]
    scenario.run(HERE["folder"], hvd.rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
