"""What users do around exchanges on a GPU, each against the CPU's result; part of ``gpu_program``.

A habit yields what it compared, how far that is from what is expected, and how far it may be.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import hvd_periodic.torch as hvdp
from hvd_periodic.torch.coding import TensorCoding
from hvd_periodic.torch.communicator import communicator_of
from tests.conformance.communicator_contract import check_communicator
from tests.parallel.gpu_differences import CLOSE, EXACT, LOSSY, mostly, relative
from tests.parallel.torch_job import hvd

PERIOD, STEPS, SAVED_AT, OVERFLOW_AT = 3, 9, 4, 5

COARSE = (
    hvdp.Compression.int4,
    hvdp.Compression.e3m0,
    hvdp.Compression.int2,
    hvdp.Compression.topk(chunk=4096, keep=64),
)
"""Encodings of so few bits that rounding, where it decides between two codes, changes a value by much."""

CPU = torch.device("cpu")

Rows = Iterator[tuple[str, float, float]]
Forward = Callable[[torch.Tensor], torch.Tensor]
Habit = Callable[[torch.device], Rows]

HABITS: dict[str, Habit] = {}


def habit(function: Habit) -> Habit:
    """Register a habit."""
    HABITS[function.__name__.replace("_", " ")] = function
    return function


class Trainer:
    """A network on a device, and what trains it.

    Args:
        device: where it is.
        algorithm: of its exchanges.
        local: makes the local optimizer of some parameters.
        mesh: the network is sharded over it.
        options: of ``PeriodicOptimizer``.
    """

    def __init__(
        self,
        device: torch.device,
        algorithm: Callable[[], hvdp.Algorithm] = hvdp.Averaging,
        local: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        mesh: Any = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
        ).to(device)
        if mesh is None:
            self.model.to(memory_format=torch.channels_last)
        else:
            fully_shard(self.model, mesh=mesh)
        self.forward: Forward = self.model
        self.optimizer: Any = hvdp.PeriodicOptimizer(
            local(self.model.parameters()), self.model, algorithm(), PERIOD, **options
        )

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of a step, which differ between ranks."""
        generator = torch.Generator().manual_seed(1000 * hvd.rank() + number)
        inputs, targets = torch.randn(16, 3, 8, 8, generator=generator), torch.randint(10, (16,), generator=generator)
        return inputs.to(self.device), targets.to(self.device)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Take a step."""
        self.optimizer.zero_grad()
        cross_entropy(self.forward(inputs), targets).backward()
        self.optimizer.step()

    def train(self, first: int = 0, last: int = STEPS) -> None:
        """Take some steps."""
        for number in range(first, last):
            self.step(*self.batch(number))

    def trained(self, first: int = 0) -> torch.Tensor:
        """Take the steps from one on; return the replica and the center, on the host."""
        self.train(first)
        return self.seen()

    def seen(self) -> torch.Tensor:
        """Return the replica and the center, on the host, and finish."""
        replica = [tensor.clone() for tensor in self.model.state_dict().values()]
        self.optimizer.finalize()
        with self.optimizer.center():
            center = [tensor.clone() for tensor in self.model.state_dict().values()]
        parts = (part.full_tensor() if hasattr(part, "full_tensor") else part for part in chain(replica, center))
        return torch.cat([part.detach().reshape(-1).cpu().double() for part in parts])


@habit
def the_communicator(device: torch.device) -> Rows:
    """It fulfils its contract for tensors of the device, which numpy does not read on a GPU."""
    with patch.object(torch.Tensor, "__array__", lambda self, dtype=None, copy=None: self.cpu().numpy()):
        check_communicator(communicator_of(None), lambda array: torch.from_numpy(array).to(device))
    yield "", 0, 0


@habit
def bytes_of_wires(device: torch.device) -> Rows:
    """Encodings of the same rows, and what is decoded from them: the number of bytes that differ."""
    random = torch.Generator().manual_seed(hvd.rank())
    for wire in (hvdp.Compression.int8, hvdp.Compression.topk(0.01), *COARSE):
        different = 0
        for length in (1, 7, 257, 100_003):
            normal = torch.randn(length, generator=random)
            exponents = torch.randint(-149, 126, (length,), generator=random)
            ties = torch.tensor([0, 0.375, 0.5, -0.75, 1.5, -3, 6, 7, -3.5])
            kinds = [
                normal,
                torch.ldexp(normal, exponents).clamp(-3e38, 3e38),
                ties[torch.randint(len(ties), (length,), generator=random)],
                torch.full((length,), 0.1),
                torch.zeros(length),
            ]
            for row in kinds:
                payloads = [wire.encode(TensorCoding(), row[None].to(where)) for where in (device, CPU)]
                decoded = [wire.decode(TensorCoding(), payload, length) for payload in payloads]
                for of_device, of_cpu in (payloads, decoded):
                    different += int((_bytes_of(of_device) != _bytes_of(of_cpu)).sum())
        yield repr(wire), different, 0


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().cpu().view(torch.uint8).reshape(-1)


@habit
def a_network(device: torch.device) -> Rows:
    """Its parameters are in another order in memory than they are numbered, and its statistics are averaged."""
    ways: dict[str, dict[str, Any]] = {
        "": {},
        "overlap": {"overlap": 1},
        "state averaged": {"optimizer_state": "average"},
        "weighted": {"weight": 1.0 + hvd.rank()},
        "audited": {"audit_every": 1, "nonfinite": "skip"},
    }
    for name, options in ways.items():
        yield name, relative(Trainer(device, **options).trained(), Trainer(CPU, **options).trained()), CLOSE


@habit
def options_of_exchanges(device: torch.device) -> Rows:
    """Bounds of norms, decaying errors, ranks that take part in tensors by pattern, quorums."""
    last = hvd.rank() == hvd.size() - 1
    sparse = hvdp.sparse_loco(PERIOD)
    ways: dict[str, dict[str, Any]] = {
        "bound of messages": {"max_message_norm": 0.05},
        "bound by the median": {"max_message_norm": "median", "max_mean_norm": 0.05},
        "weighed by steps": {"weight": "steps"},
        "SparseLoCo": {"algorithm": lambda: sparse["algorithm"]}
        | {key: sparse[key] for key in ("compression", "error_decay")},
        "patterns": {"parameters": {"0.*": "broadcast", "4.bias": "local", "4.*": "present"}},
        "patterns, sharded": {"parameters": {"4.*": "present"}, "center": "sharded"},
        "quorum of all": {"quorum": hvd.size(), "grace_seconds": 600.0},
    }
    for name, options in ways.items():
        if "quorum" in options and hvd.size() == 1:
            continue
        ends = []
        for where in (device, CPU):
            trainer = Trainer(where, **options)
            if "patterns" in name and last and hvd.size() > 1:  # This rank has no gradients there.
                forward = trainer.model.forward
                trainer.forward = lambda x, f=forward: f(x).detach().requires_grad_()
            ends.append(trainer.trained())
        difference = mostly if name == "SparseLoCo" else relative
        yield name, difference(*ends), CLOSE


@habit
def tables_and_pairs(device: torch.device) -> Rows:
    """Rows of an embedding, with dense and sparse gradients; and complex parameters."""
    for sparse in (False, True):
        ends = []
        for where in (device, CPU):
            torch.manual_seed(0)
            table = nn.Embedding(50, 4, sparse=sparse).to(where)
            local = torch.optim.SGD(table.parameters(), lr=0.1)
            optimizer = hvdp.PeriodicOptimizer(local, table, hvdp.DiLoCo(), PERIOD, parameters={"*": "rows"})
            for number in range(STEPS):
                optimizer.zero_grad()
                touched = torch.tensor([(3 * hvd.rank() + number) % 20, number], device=where)
                table(touched).square().sum().backward()
                optimizer.step()
            optimizer.finalize()
            ends.append(table.weight.detach().cpu().double())
        yield "rows, " + ("sparse" if sparse else "dense"), relative(*ends), EXACT
    ends = []
    for where in (device, CPU):
        pair = nn.Parameter(torch.zeros(300, dtype=torch.complex64, device=where))
        optimizer = hvdp.PeriodicOptimizer(torch.optim.SGD([pair], lr=0.1), [("pair", pair)], hvdp.EASGD(), PERIOD)
        for number in range(STEPS):
            pair.grad = pair.detach() - torch.arange(300, device=where) * (1 + 1j * hvd.rank()) - number
            optimizer.step()
        optimizer.finalize()
        ends.append(torch.view_as_real(pair.detach()).cpu().double())
    yield "complex", relative(*ends), EXACT


@habit
def mixed_precision(device: torch.device) -> Rows:
    """With a GradScaler whose gradients overflow once on the last rank; and with bfloat16, which needs none."""
    last = hvd.rank() == hvd.size() - 1
    for name, algorithm in (("average", hvdp.Averaging), ("AGN", hvdp.AGN)):
        ends = []
        for where in (device, CPU):
            trainer = Trainer(where, algorithm)
            scaler = torch.amp.GradScaler(where.type, init_scale=256.0)
            for number in range(STEPS):
                inputs, targets = trainer.batch(number)
                trainer.optimizer.zero_grad()
                with torch.autocast(where.type, torch.float16 if where.type == "cuda" else torch.bfloat16):
                    loss = cross_entropy(trainer.forward(inputs), targets)
                scaler.scale(loss * (torch.inf if last and number == OVERFLOW_AT else 1.0)).backward()
                if name == "AGN":
                    scaler.unscale_(trainer.optimizer)
                    nn.utils.clip_grad_norm_(trainer.model.parameters(), 5.0)
                scaler.step(trainer.optimizer)
                scaler.update()
            skipped = trainer.optimizer.synchronizer.counters.skipped_updates
            yield f"{name}, updates skipped on {where.type}", abs(skipped - last), 0
            ends.append(trainer.seen())
        yield f"{name}, GradScaler", relative(*ends), LOSSY
        ends.clear()
        for where in (device, CPU):
            trainer = Trainer(where, algorithm)
            trainer.forward = torch.autocast(where.type, torch.bfloat16)(trainer.model.forward)
            ends.append(trainer.trained())
        yield f"{name}, bfloat16", relative(*ends), LOSSY


@habit
def compiled(device: torch.device) -> Rows:
    """The model; and a function that takes a whole step."""
    backend = "inductor" if device.type == "cuda" else "eager"
    expected = Trainer(CPU).trained()
    trainer = Trainer(device)
    trainer.forward = torch.compile(trainer.model, backend=backend)
    yield "model", relative(trainer.trained(), expected), CLOSE
    trainer = Trainer(device)
    trainer.step = torch.compile(trainer.step, backend=backend)  # type: ignore[method-assign]
    yield "step", relative(trainer.trained(), expected), CLOSE


@habit
def checkpoints(device: torch.device) -> Rows:
    """Saved while an exchange is in flight, and loaded on the same device, or on the other one."""
    expected = {where: Trainer(where, overlap=2).trained() for where in (device, CPU)}
    for before, after in ((device, device), (device, CPU), (CPU, device)):
        ways = {"torch.save": _by_torch, "hvdp.save": _by_hvdp, "in the background": partial(_by_hvdp, background=True)}
        for name, carried in ways.items():
            first, second = Trainer(before, overlap=2), Trainer(after, overlap=2)
            first.train(0, SAVED_AT)
            carried(first, second)
            ends = second.trained(SAVED_AT), expected[after]
            yield f"{name}, {before.type} to {after.type}", relative(*ends), 0 if before == after else CLOSE
            first.optimizer.finalize()


def _by_torch(first: Trainer, second: Trainer) -> None:
    file = io.BytesIO()
    torch.save({"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, map_location=second.device)
    second.model.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(saved["optimizer"])


def _by_hvdp(first: Trainer, second: Trainer, background: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        hvdp.save(folder, first.model, first.optimizer, background=background).wait()
        hvdp.load(folder, second.model, second.optimizer)


@habit
def optimizers(device: torch.device) -> Rows:
    """AGN, whose center has an optimizer like the local one, beside it or in host memory."""
    kinds: dict[str, dict[str, Any]] = {"foreach": {"foreach": True}, "fused": {"fused": True}}
    if device.type == "cuda":
        kinds["capturable"] = {"capturable": True}
        kinds["capturable, lr a tensor"] = {"capturable": True, "lr": torch.tensor(1e-3, device=device)}
    expected = Trainer(CPU, hvdp.AGN, torch.optim.AdamW).trained()
    for name, settings in kinds.items():
        for place in (None, "cpu"):
            made = Trainer(device, hvdp.AGN, lambda p, s=settings: torch.optim.AdamW(p, **s), center_device=place)
            yield f"{name}, center on {place or device.type}", relative(made.trained(), expected), CLOSE


@habit
def a_model_in_two_places(device: torch.device) -> Rows:
    """Parameters on the GPU and in host memory."""
    ends = []
    for places in ((device, CPU), (CPU, CPU)):
        values = torch.arange(5.0)
        parameters = [nn.Parameter((values + hvd.rank()).to(place)) for place in places]
        named = list(zip("ab", parameters, strict=True))
        optimizer = hvdp.PeriodicOptimizer(torch.optim.SGD(parameters, lr=0.1), named, hvdp.EASGD(rho=0.2), PERIOD)
        for number in range(STEPS):
            for parameter in parameters:
                parameter.grad = parameter.detach() - hvd.rank() - number
            optimizer.step()
        optimizer.finalize()
        ends.append(torch.cat([parameter.detach().cpu().double() for parameter in parameters]))
    yield "", relative(*ends), EXACT


@habit
def fully_sharded(device: torch.device) -> Rows:
    """Islands of one rank; over torch.distributed alone."""
    if dist.is_initialized():
        mesh = init_device_mesh(device.type, (hvd.size(), 1), mesh_dim_names=("islands", "shards"))
        expected = Trainer(CPU).trained()
        for place in (None, "cpu"):
            made = Trainer(device, mesh=mesh["shards"], process_set=mesh["islands"], center_device=place)
            yield f"center on {place or device.type}", relative(made.trained(), expected), CLOSE


@habit
def asynchronous(device: torch.device) -> Rows:
    """On one rank, against the CPU; on several, what is conserved: vectors go to host memory and back."""
    if hvd.size() == 1:
        for name, algorithm in (("elastic", hvdp.EASGD), ("AGN", hvdp.AGN)):
            ends = [Trainer(where, algorithm, asynchronous=True).trained() for where in (device, CPU)]
            yield name, relative(*ends), CLOSE
    else:
        x, points = nn.Parameter(torch.zeros(1000, device=device)), torch.arange(1000) / 1000
        local = torch.optim.SGD([x], lr=0.1)
        optimizer = hvdp.ElasticAverageOptimizer(local, [("x", x)], PERIOD, moving_rate=0.25, asynchronous=True)
        for number in range(10 * PERIOD):
            x.grad = -(points + hvd.rank() + number % 2).to(device)
            optimizer.step()
        hvd.barrier()  # Workers are at rest.
        replica = x.detach().cpu().double()
        with optimizer.center():
            center = x.detach().cpu().double()
        found = torch.stack(hvd.allgather_object(replica, name="replicas")).sum(0) + center
        moves = [PERIOD * (points.double() + rank + 0.5) for rank in range(hvd.size())]
        yield "conservation", relative(found, torch.stack(moves).sum(0)), EXACT
        optimizer.finalize()


@habit
def streams_and_graphs(device: torch.device) -> Rows:
    """All in a stream of the user's; and a model whose passes are replayed from CUDA graphs."""
    expected = Trainer(CPU).trained()
    with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
        yield "stream", relative(Trainer(device).trained(), expected), CLOSE
    if device.type == "cuda":
        ends = []
        for where in (device, CPU):
            trainer = Trainer(where)
            trainer.model.eval()  # Captures would count among the statistics.
            if where == device:
                sample = torch.randn(16, 3, 8, 8, device=device)
                trainer.forward = torch.cuda.make_graphed_callables(trainer.model, (sample,))
            ends.append(trainer.trained())
        yield "graphs", relative(*ends), CLOSE
