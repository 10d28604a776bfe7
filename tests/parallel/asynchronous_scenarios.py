"""What every rank does in asynchronous exchange, on every transport; see ``scenarios.py``.

mpirun -np 2 python -m tests.parallel.asynchronous_scenarios FOLDER transports
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import hvd_periodic.torch as hvdp
from hvd_periodic import DiLoCo, read_run_log
from hvd_periodic.asynchronous.center_in_memory import CenterInMemory
from hvd_periodic.asynchronous.ledger import Ledger
from hvd_periodic.asynchronous.worker import VARIABLE
from hvd_periodic.torch import synchronizer as module
from hvd_periodic.torch.outer import TorchOuterOptimizer
from hvd_periodic.torch.replica import TorchReplica
from hvd_periodic.vectors.layout import chunk
from tests import bounded_oracle as bounded
from tests.conformance.messages_contract import check_messages
from tests.counting import CountsInGroup
from tests.delayed_oracle import followed
from tests.helpers import random_arrays
from tests.parallel import left_out_in_turn as in_turn_of
from tests.parallel.program import NotApplicableError, Scenarios, attempt, log, repeated
from tests.parallel.stopped_inside import pushes
from tests.parallel.torch_job import hvd

MODES: dict[str, tuple[str, str]] = {
    "window": ("window", "replicated"),
    "service": ("service", "replicated"),
    "sharded": ("service", "sharded"),
}
"""What the environment variable says, and where the center lives."""

SECONDS = 900
"""After so many a rank says where it stands, and ends."""

WITHOUT_MPI4PY = "WITHOUT_MPI4PY"
"""Environment variable that makes it as good as not installed."""

NEVER = 2**40
SMALL = 24
"""Bytes of a bucket: three elements of float64, fewer than four ranks."""

CENTER_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.3),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.3, momentum=0.6, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
}

Tensors = Sequence[torch.Tensor]

transports, hosts, saving, loading = Scenarios(), Scenarios(), Scenarios(), Scenarios()
GROUPS = {"transports": transports, "hosts": hosts, "saving": saving, "loading": loading}
FOLDER: list[Path] = []


def on_all(*groups: Scenarios) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Register a function of the mode for all modes; across hosts there is no window."""

    def register(function: Callable[[str], Any]) -> Callable[[str], Any]:
        for group in groups:

            def run(modes: list[str] = [m for m in MODES if m != "window" or group is not hosts]) -> Any:  # noqa: B006
                return {mode: function(mode) for mode in modes}

            run.__name__ = function.__name__
            group(run)
        return function

    return register


def on_one(group: Scenarios, mode: str) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Register a function of the mode that does not depend on the transport: for one, in thorough runs for all."""

    def register(function: Callable[[str], Any]) -> Callable[[str], Any]:
        def run() -> Any:
            return {chosen: function(chosen) for chosen in (mode, *repeated(*(m for m in MODES if m != mode)))}

        run.__name__ = function.__name__
        group(run)
        return function

    return register


@contextmanager
def transport(mode: str, bucket_bytes: int = SMALL) -> Iterator[None]:
    """Make optimizers on this transport, with small buckets."""
    small = partial(TorchReplica, bucket_bytes=bucket_bytes)
    with patch.dict(os.environ, {VARIABLE: MODES[mode][0]}), patch.object(module, "TorchReplica", small):
        yield


def named(tensors: Tensors) -> list[tuple[str, torch.Tensor]]:
    return [(f"p{i}", tensor) for i, tensor in enumerate(tensors)]


def elastic(mode: str, tensors: Tensors, period: int = NEVER, rate: float = 0.0, **options: Any) -> Any:
    """Elastic averaging, by sync() alone unless there is a period."""
    options = {"moving_rate": 0.25, "bucket_bytes": SMALL} | options
    with transport(mode, options.pop("bucket_bytes")):
        inner = torch.optim.SGD(tensors, lr=rate)
        return hvdp.ElasticAverageOptimizer(
            inner, named(tensors), period, asynchronous=True, center=MODES[mode][1], **options
        )


def in_groups(moves: Callable[[Any], torch.optim.Optimizer], tensors: Tensors) -> torch.optim.Optimizer:
    """Make an optimizer of two groups, one of which is slow."""
    middle = (len(tensors) + 1) // 2
    return moves([{"params": tensors[:middle]}, {"params": tensors[middle:], "lr": 0.05}][: len(tensors)])


def normalized(mode: str, tensors: Tensors, period: int, moves: Any, **options: Any) -> Any:
    """Accumulated gradient normalization; the local optimizer stands still."""
    options = {"bucket_bytes": SMALL} | options
    with transport(mode, options.pop("bucket_bytes")):
        inner = torch.optim.SGD(tensors, lr=0.0)
        options = {"center": MODES[mode][1], "asynchronous": True} | options
        return hvdp.AGNOptimizer(inner, named(tensors), period, moves, **options)


def awkward(seed: int) -> list[torch.Tensor]:
    """Parameters of awkward shapes."""
    return [torch.nn.Parameter(torch.from_numpy(array)) for array in random_arrays(seed)]


def flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def center_of(tensors: Tensors, optimizer: Any) -> torch.Tensor:
    with optimizer.center():
        return flat(tensors)


def bits(value: torch.Tensor) -> str:
    return hashlib.sha256(value.numpy().tobytes()).hexdigest()


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return max(float((here - there).abs().max()) for here, there in zip(found, expected, strict=True))


@torch.no_grad()
def show(tensors: Tensors, gradient: torch.Tensor) -> None:
    """Make the pieces of a flat vector the gradients."""
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, part in zip(tensors, gradient.split(sizes), strict=True):
        tensor.grad = part.reshape(tensor.shape).to(tensor.dtype, copy=True)


def turns(count: int) -> list[int]:
    """An order of the ranks; some come several times in a row."""
    if hvd.size() == 2:
        return [i % 2 for i in range(count - 2)] + [1, 1]
    generator = random.Random(3)
    return [*range(hvd.size()), *(generator.randrange(hvd.size()) for _ in range(count - hvd.size()))]


def gradient_of(rank: int, step: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(size, generator=generator, dtype=torch.float64)


@on_all(transports, hosts)
def descriptions(mode: str) -> Any:
    """Which way a rank says that it takes."""
    synchronizer = elastic(mode, awkward(0)).synchronizer
    synchronizer.finalize()
    return synchronizer.exchanger.worker.transport.description


@transports
def messages() -> Any:
    """The contract of messages, over MPI or TCP."""
    if hvd.size() == 1:
        raise NotApplicableError("needs several ranks")
    communicator = elastic("service", awkward(0)).synchronizer.membership.communicator
    check_messages(communicator.messages, hvd.size(), hvd.barrier)
    return type(communicator.messages()).__name__


@on_all(transports, hosts)
def conservation(mode: str) -> Any:
    """Workers on their own clocks: the sum of all replicas and the center, less what was added locally."""
    found = []
    for root in sorted({*repeated(0), hvd.size() - 1}):
        tensors = [*awkward(7), torch.nn.Parameter(torch.randn(8))]
        optimizer = elastic(mode, tensors, moving_rate=0.3, root_rank=root)
        optimizer.synchronizer.begin()
        start, generator = flat(tensors), random.Random(hvd.rank())
        moved = torch.zeros_like(start)
        for _ in range(10 + 5 * hvd.rank()):
            for _ in range(generator.randrange(3)):
                optimizer.step()
            before = flat(tensors)
            with torch.no_grad():
                for tensor in tensors:
                    tensor += torch.randn(tensor.shape) * (1 + hvd.rank())
            moved += flat(tensors) - before
            time.sleep(generator.choice([0, 0, 1e-4, 2e-3]))
            optimizer.synchronizer.sync()
        optimizer.synchronizer.finalize()
        ours = flat(tensors) - moved
        total = torch.stack(hvd.allgather_object(ours)).sum(0) + center_of(tensors, optimizer)
        error = (total - (hvd.size() + 1) * start).abs()
        apart = float((center_of(tensors, optimizer) - start).norm())
        buckets = len(optimizer.synchronizer.replica.parameters.layout.buckets)
        found.append([float(error[:-8].max()), float(error[-8:].max()), apart, buckets])
    return found


STRESS = {1: 200, 2: 300, 3: 300, 4: 10_000}
"""Exchanges of all ranks together."""


@on_all(transports)
def stress(mode: str) -> Any:
    """As fast as can be, with sums that are exact."""
    each = STRESS[hvd.size()] // hvd.size()
    tensors = [torch.nn.Parameter(torch.zeros(5, dtype=torch.float64)), torch.nn.Parameter(torch.tensor(0.0).double())]
    optimizer = normalized(mode, tensors, 1, lambda groups: torch.optim.SGD(groups, lr=1.0))
    pushes = torch.randint(-9, 10, (each // 2, 6), generator=torch.Generator().manual_seed(hvd.rank())).double()
    for push in pushes:
        show(tensors, push)
        optimizer.step()
    optimizer.synchronizer.finalize()
    expected = -torch.stack(hvd.allgather_object(pushes.sum(0))).sum(0)
    nothing_lost = bool((center_of(tensors, optimizer) == expected).all())
    counters = [optimizer.synchronizer.counters]

    tensors = [torch.nn.Parameter(100 * torch.arange(7).double())]
    optimizer = elastic(mode, tensors, moving_rate=1.0)
    start = flat(tensors)
    tensors[0].data += 1 + hvd.rank()
    for _ in range(each - each // 2):
        optimizer.synchronizer.sync()
    optimizer.synchronizer.finalize()
    values = torch.stack([*hvd.allgather_object(flat(tensors)), center_of(tensors, optimizer)])
    swapped = bool((values.sort(0).values == torch.stack([start + i for i in range(hvd.size() + 1)])).all())
    counters.append(optimizer.synchronizer.counters)
    return {
        "nothing lost": nothing_lost,
        "swapped": swapped,
        "rounds": [c.rounds for c in counters],
        "last push": [c.rounds + c.pushes_missed for c in counters],
    }


@on_all(transports)
def no_mixture(mode: str) -> Any:
    """Vectors that are constant over a bucket, large enough to be torn; what is read is constant as well."""
    size, count = 16_000, 3
    pieces = [chunk(size, k, hvd.size()) for k in range(hvd.size())] if mode == "sharded" else [(0, size)]

    def torn(values: torch.Tensor) -> int:
        rows = values.reshape(count, size)
        return sum(int(row[a:b].min() != row[a:b].max()) for row in rows for a, b in pieces)

    found: dict[str, Any] = {}
    generator = random.Random(hvd.rank())
    tensor = torch.nn.Parameter(torch.zeros(count * size, dtype=torch.float64))
    optimizer = elastic(mode, [tensor], bucket_bytes=8 * size)
    seen = []
    for _ in range(25):
        tensor.data.fill_(generator.random())
        optimizer.synchronizer.sync()
        seen += [tensor.detach().clone(), center_of([tensor], optimizer)]
    optimizer.synchronizer.finalize()
    found["easgd"] = [sum(map(torn, seen)), len({float(values[0]) for values in seen})]

    tensor.data.zero_()
    moves = CENTER_OPTIMIZERS["momentum"]
    optimizer = normalized(mode, [tensor], 1, moves, bucket_bytes=8 * size)
    pulled, read = [], []
    for _ in range(25):
        tensor.grad = torch.full_like(tensor, generator.random())
        optimizer.step()
        pulled.append(tensor.detach().clone())
        read.append(center_of([tensor], optimizer))
    optimizer.synchronizer.finalize()
    apart = [values.reshape(count, size)[:, a:b] for values in pulled for a, b in pieces]
    found["agn"] = [sum(map(torn, pulled + read)), sum(int(part.min() != part.max()) for part in apart), len(apart)]
    return found


STEPS = {0: (3, 0, 1), 1: (0, 5, 0), 2: (9, 1, 0), 3: (6, 0, 0)}
"""Of each rank, in three epochs, in periods of 2."""


@on_all(transports)
def uneven_data(mode: str) -> Any:
    """Ranks with more, fewer and no steps; the last one with steps is slow."""
    results: dict[str, Any] = {}
    for name in ("easgd", "agn"):
        tensors = [torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))]
        if name == "agn":
            optimizer = normalized(mode, tensors, 2, lambda groups: torch.optim.SGD(groups, lr=0.5))
        else:
            optimizer = elastic(mode, tensors, 2, rate=1.0)
        seen = []
        for steps in STEPS[hvd.rank()]:
            for _ in range(steps):
                time.sleep(0.005 * (hvd.rank() == 2))
                show(tensors, torch.full((4,), -1.0 - 2 * hvd.rank()).double())
                optimizer.step()
            optimizer.synchronizer.finalize()
            time.sleep(0.005 * hvd.rank())
            seen.append((center_of(tensors, optimizer).tolist(), optimizer.synchronizer.rounds))
            optimizer.synchronizer.finalize()
            seen.append((center_of(tensors, optimizer).tolist(), optimizer.synchronizer.rounds))
        results[name] = {"centers": [c for c, _ in seen], "rounds": [rounds for _, rounds in seen]}
        replicas = torch.stack(hvd.allgather_object(flat(tensors))).sum(0)
        results[name]["total"] = (replicas + center_of(tensors, optimizer)).tolist()
    return results


@on_all(transports, hosts)
def elastic_in_turn(mode: str) -> Any:
    """Two steps and an exchange of one rank at a time, gradient −1 − 2 rank: x, c and the counters."""
    tensors = [torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))]
    optimizer = elastic(mode, tensors, 2, rate=1.0)
    optimizer.synchronizer.begin()
    order, seen = turns(11), []
    for turn in order:
        if turn == hvd.rank():
            for _ in range(2):
                show(tensors, torch.full((5,), -1.0 - 2 * hvd.rank()).double())
                optimizer.step()
        hvd.barrier()
        seen.append((flat(tensors).tolist(), center_of(tensors, optimizer).tolist()))
        hvd.barrier()
    optimizer.synchronizer.finalize()
    counters = optimizer.synchronizer.counters
    staleness = [counters.pushes_missed, counters.staleness_max, counters.staleness_mean]
    return {"order": order, "seen": seen, "staleness": staleness, "rounds": counters.rounds}


@on_one(transports, "sharded")
def adopted(mode: str) -> Any:
    """One of two parameters is frozen after finalize(), or was never there: what the other one and the center are."""
    found: dict[str, Any] = {}
    for alone in (True, False):
        stays, leaves = (torch.nn.Parameter(torch.ones(size, dtype=torch.float64)) for size in (5, 4))
        tensors = [stays] if alone else [stays, leaves]
        optimizer = normalized(mode, tensors, 2, CENTER_OPTIMIZERS["adam"])
        optimizer.synchronizer.begin()
        for part in range(2):
            for place, turn in enumerate(turns(7)):
                for step in range(2 * (turn == hvd.rank())):
                    show(tensors, gradient_of(turn, 2 * place + step, 9)[: flat(tensors).numel()])
                    optimizer.step()
                hvd.barrier()
            optimizer.finalize()
            if not part and not alone:
                leaves.requires_grad_(False)
                tensors = [stays]
                optimizer.inner.param_groups[0]["params"] = tensors
                with transport(mode):
                    optimizer.adopt(named(tensors))
        found["alone" if alone else "adopted"] = [flat(tensors).tolist(), center_of(tensors, optimizer).tolist()]
    return found | {"left": leaves.tolist()}


@on_one(transports, "window")
def apart(mode: str) -> Any:
    """After finalize(), the last rank adopts or saves, and the others make another call; then all finalize."""
    tensors = awkward(0)
    optimizer, model = elastic(mode, tensors), torch.nn.ParameterList(tensors)
    optimizer.synchronizer.begin()
    optimizer.finalize()
    last = hvd.rank() == hvd.size() - 1
    calls: dict[str, Callable[[], object]] = {
        "adopt": lambda: optimizer.adopt(model),
        "audit": optimizer.synchronizer.audit,
        "finalize": optimizer.finalize,
        "save": lambda: hvdp.save(Path(sys.argv[1]) / "apart", model, optimizer),
    }
    pairs = ("adopt", "finalize"), ("adopt", "save"), ("save", "adopt"), ("save", "finalize"), ("audit", "finalize")
    found = {f"{one}, {others}": attempt(calls[one if last else others]) for one, others in pairs}
    optimizer.finalize()
    return found


@on_all(transports)
def unexchanged(mode: str) -> Any:
    """A frozen weight and a buffer that differ, which ranks compare in an audit, and then others at the end."""
    model = torch.nn.BatchNorm1d(2)
    for name in ("teacher", "queue"):
        model.register_buffer(name, torch.zeros(3))
    model.weight.requires_grad_(False)
    with transport(mode), log() as lines:
        inner = torch.optim.SGD([model.bias], lr=1.0)
        optimizer = hvdp.ElasticAverageOptimizer(inner, model, 1, 0.25, asynchronous=True)
        for changed, compare in ((model.weight, optimizer.synchronizer.audit), (model.queue, optimizer.finalize)):
            model.bias.grad = torch.ones(2)
            optimizer.step()
            with torch.no_grad():
                changed += hvd.rank()
            for _ in range(2):
                compare()
    return [line[line.index("Weight") :].split(". ")[0] for line in lines if "differs" in line]


@on_one(transports, "service")
def present_in_turn(mode: str) -> Any:
    """As ``elastic_in_turn``, with an expert of which every third turn has a gradient."""
    body, expert = (torch.nn.Parameter(torch.zeros(5, dtype=torch.float64)) for _ in range(2))
    with transport(mode):
        optimizer = hvdp.ElasticAverageOptimizer(
            torch.optim.SGD([body, expert], lr=1.0),
            [("body", body), ("expert", expert)],
            1,
            0.25,
            asynchronous=True,
            center=MODES[mode][1],
            parameters={"expert": "present"},
        )
    optimizer.synchronizer.begin()
    order, seen = turns(11), []
    for place, turn in enumerate(order):
        if turn == hvd.rank():
            body.grad, expert.grad = (torch.full((5,), -1.0 - 2 * hvd.rank()).double() for _ in range(2))
            if place % 3:
                expert.grad = None
            optimizer.step()
        hvd.barrier()
        seen.append([(x.tolist(), center_of([x], optimizer).tolist()) for x in (body, expert)])
        hvd.barrier()
    optimizer.synchronizer.finalize()
    return {"order": order, "seen": seen}


@on_one(transports, "window")
def left_out_in_turn(mode: str) -> Any:
    """The last rank's third gradient is NaN: it starts again from the center."""
    results: dict[str, Any] = {}
    for name in in_turn_of.ALGORITHMS:
        tensors = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]
        options = {"asynchronous": True, "center": MODES[mode][1], "nonfinite": "skip"}
        with transport(mode):
            inner = torch.optim.SGD(tensors, in_turn_of.RATE, in_turn_of.MOMENTUM)
            if name == "agn":
                optimizer: Any = hvdp.AGNOptimizer(inner, named(tensors), in_turn_of.PERIOD, **options)
            else:
                options["rho"] = in_turn_of.RHO if name == "easgd_rho" else 0.0
                rates = in_turn_of.PERIOD, in_turn_of.MOVING_RATE
                optimizer = hvdp.ElasticAverageOptimizer(inner, named(tensors), *rates, **options)

        def step(gradient: float, tensors: Any = tensors, optimizer: Any = optimizer) -> None:
            show(tensors, torch.full((3,), gradient).double())
            optimizer.step()

        seen = in_turn_of.taken(
            step,
            lambda t=tensors, o=optimizer: (flat(t).tolist(), center_of(t, o).tolist()),
            (hvd.rank(), hvd.size()),
            hvd.barrier,
        )
        counters = optimizer.synchronizer.counters
        hvd.barrier()
        optimizer.synchronizer.finalize()
        results[name] = [seen, counters.rounds, counters.left_out, counters.bytes_sent]
    return results


OF_BOUNDS = {
    "window": ("easgd", "diloco", *repeated("easgd_rho", "averaging", "agn", "bmuf")),
    "service": ("easgd", "agn, average", *repeated("slowmo")),
    "sharded": ("easgd", "agn", "slowmo", *repeated("easgd_rho", "bmuf")),
}
"""The algorithms of bounded messages, by transport."""


@on_all(transports, hosts)
def bounded_in_turn(mode: str) -> Any:
    """Messages are cut to a norm, over buckets and shards: x and c after every turn, and the norms in the run log."""
    results: dict[str, Any] = {}
    for name in OF_BOUNDS[mode]:
        start, folder = torch.tensor(bounded.START, dtype=torch.float64), FOLDER[0] / f"{mode} {name}"
        tensors = [torch.nn.Parameter(part.clone()) for part in start.tensor_split([bounded.OF_FIRST])]
        with transport(mode):
            optimizer = hvdp.PeriodicOptimizer(
                torch.optim.SGD(tensors, bounded.RATE),
                named(tensors),
                bounded.ALGORITHMS[name],
                bounded.PERIOD,
                asynchronous=True,
                center=MODES[mode][1],
                max_message_norm=bounded.bound_of(name),
                run_log=folder,
            )
        optimizer.synchronizer.begin()

        def train(own_turn: int, tensors: Any = tensors, optimizer: Any = optimizer) -> None:
            for _ in range(bounded.PERIOD):
                show(tensors, torch.tensor(bounded.gradient(hvd.rank(), flat(tensors).tolist()), dtype=torch.float64))
                optimizer.step()

        def look(tensors: Any = tensors, optimizer: Any = optimizer) -> Any:
            return flat(tensors).tolist(), center_of(tensors, optimizer).tolist()

        order = turns(9)
        seen = followed(order, hvd.rank(), train, look, hvd.barrier)
        optimizer.finalize()
        lines = read_run_log(folder)[hvd.rank()]
        results[name] = [order, seen, [line["message_norm"] for line in lines if line["event"] == "exchanged"]]
    return results


OF_MODES: dict[str, dict[str, Sequence[str]]] = {
    "window": {
        **dict.fromkeys(("adam", *repeated("sgd", "momentum later", "counts in its groups")), ("sum",)),
        "momentum": ("sum", "average"),
    },
    "service": dict.fromkeys(("sgd", "momentum later", *repeated("momentum")), ("sum",)),
    "sharded": {"adam": ("sum",), "momentum": ("average",), "counts in its groups": ("sum",)},
}
"""What moves the center, and what it is given."""


@on_all(transports, hosts)
def normalized_in_turn(mode: str) -> Any:
    """One rank at a time; a plain optimizer that is given the same gradients, on this rank.

    One of them gets its momentum in the middle, as from a scheduler.
    """
    results = {}
    others = {"momentum later": CENTER_OPTIMIZERS["sgd"], "counts in its groups": CountsInGroup}
    makers = {**CENTER_OPTIMIZERS, **others}
    for name, ops in OF_MODES[mode].items():
        moves = makers[name]
        for op in ops:
            tensors, plain = awkward(hvd.rank()), awkward(0)
            copied, reference = in_groups(moves, tensors), in_groups(moves, plain)
            optimizer = normalized(mode, tensors, 2, copied, op=op)
            optimizer.synchronizer.begin()
            steps = [0] * hvd.size()
            found, expected = [flat(tensors)], [flat(plain)]
            for place, turn in enumerate(turns(9)):
                if name == "momentum later" and place == 3:
                    for group in copied.param_groups + reference.param_groups:
                        group["momentum"] = 0.6
                    hvd.barrier()
                gradients = [gradient_of(turn, steps[turn] + i, found[0].numel()) for i in range(2)]
                steps[turn] += 2
                scale = 2 * (hvd.size() if op == "average" else 1)
                show(plain, sum(gradients) / scale)
                reference.step()
                if turn == hvd.rank():
                    for gradient in gradients:
                        show(tensors, gradient)
                        optimizer.step()
                    found.append(flat(tensors))
                    expected.append(flat(plain))
                hvd.barrier()
                found.append(center_of(tensors, optimizer))
                expected.append(flat(plain))
                hvd.barrier()
            optimizer.synchronizer.finalize()
            results[f"{name}, {op}"] = [difference(found, expected), float((expected[-1] - expected[0]).norm())]
    return results


@transports
def stopped_inside() -> Any:
    """The last rank is stopped between read and write of a transaction: of a bucket, the ledger, or an optimizer.

    Reports what each rank had after every push, the center, of all transactions the versions that they replaced, and
    the staleness.
    """
    if hvd.size() == 1:
        raise NotApplicableError("needs several ranks")
    found = {}
    places: dict[str, tuple[type, str]] = {
        "bucket": (CenterInMemory, "transact"),
        "ledger": (Ledger, "begin"),
        "optimizer": (TorchOuterOptimizer, "step"),
    }
    for place, inside in places.items():
        tensor = torch.nn.Parameter(torch.zeros(9, dtype=torch.float64))
        steps = place == "optimizer"
        optimizer = (
            normalized("window", [tensor], 1, CENTER_OPTIMIZERS["momentum"]) if steps else elastic("window", [tensor])
        )
        optimizer.synchronizer.begin()

        def push(numbers: list[float], tensor: Any = tensor, optimizer: Any = optimizer, steps: Any = steps) -> Any:
            if steps:
                show([tensor], torch.tensor(numbers, dtype=torch.float64))
                optimizer.step()
            else:
                tensor.data += torch.tensor(numbers)
                optimizer.synchronizer.sync()
            return tensor.tolist()

        worker, transport = (hvd.rank(), hvd.size()), optimizer.synchronizer.exchanger.worker.transport
        path = str(FOLDER[0] / place)
        seen, replaced = pushes(worker, hvd.barrier, path, transport, 1 if steps else 3, push, inside)
        optimizer.synchronizer.finalize()
        staleness = optimizer.synchronizer.counters.staleness_max
        found[place] = [seen, center_of([tensor], optimizer).tolist(), replaced, staleness]
    return found


@transports
def one_worker() -> Any:
    """Alone, asynchronous exchange is synchronous exchange."""
    if hvd.size() > 1:
        raise NotApplicableError("needs one rank")
    results: dict[str, Any] = {}
    for name in ("easgd", "easgd_rho", *CENTER_OPTIMIZERS):
        runs = []
        for asynchronous in (False, True):
            tensors = awkward(1)
            with transport("window"):
                inner = torch.optim.SGD(tensors, lr=0.2, momentum=0.5)
                optimizer: Any
                if name.startswith("easgd"):
                    optimizer = hvdp.ElasticAverageOptimizer(
                        inner, named(tensors), 2, rho=0.5 * ("rho" in name), asynchronous=asynchronous
                    )
                else:
                    moves = CENTER_OPTIMIZERS[name]
                    optimizer = hvdp.AGNOptimizer(inner, named(tensors), 2, moves, asynchronous=asynchronous)
            seen = []
            for step in range(9):
                show(tensors, gradient_of(0, step, flat(tensors).numel()) + flat(tensors))
                optimizer.step()
                seen += [flat(tensors), center_of(tensors, optimizer)]
            optimizer.synchronizer.finalize()
            runs.append([*seen, flat(tensors), center_of(tensors, optimizer)])
        results[name] = difference(*runs)
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = elastic("window", [parameter], 2, rate=1.0)
    results["numbers"] = []
    for _ in range(6):
        parameter.grad = -torch.ones_like(parameter)
        optimizer.step()
        results["numbers"].append((parameter.item(), center_of([parameter], optimizer).item()))
    return results


@on_one(transports, "sharded")
def statistics(mode: str) -> Any:
    """Batch normalization, other data on every rank: the center's statistics, and bounds of what workers had."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    with transport(mode):
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = hvdp.ElasticAverageOptimizer(inner, model, 2, asynchronous=True, center=MODES[mode][1])
    statistic = [buffer for name, buffer in model.named_buffers() if "running" in name]
    held = [flat(statistic)]

    def remember(*_: Any) -> None:
        held.append(flat(statistic))

    model.register_forward_hook(remember)
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(8 + 2 * hvd.rank()):
        optimizer.zero_grad()
        data = torch.randn(16, 3, generator=generator) * (1 + hvd.rank()) + hvd.rank()
        model(data).square().mean().backward()
        optimizer.step()
        time.sleep(5e-3 * (hvd.rank() == 0))
    optimizer.synchronizer.finalize()
    every = torch.cat([torch.stack(values) for values in hvd.allgather_object(held)])
    state = hvdp.center_state_dict(model, optimizer)
    center = flat([value for name, value in state.items() if "running" in name])
    return {
        "finite": bool(torch.cat([flat(list(state.values()))]).isfinite().all()),
        "between": bool(((every.min(0).values <= center + 1e-6) & (center - 1e-6 <= every.max(0).values)).all()),
        "moved": float((center - held[0]).norm()),
        "center": bits(center),
        "batches": int(state["1.num_batches_tracked"]),
    }


@on_one(transports, "window")
def statistics_handed_out(mode: str) -> Any:
    """Averaging, other data on every rank: at the end, bits of parameters and statistics, and those of the center."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    with transport(mode):
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = hvdp.ModelAverageOptimizer(inner, model, 2, asynchronous=True, center=MODES[mode][1])
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(5 + 2 * hvd.rank()):
        optimizer.zero_grad()
        model(torch.randn(16, 3, generator=generator) + hvd.rank()).square().mean().backward()
        optimizer.step()
    optimizer.synchronizer.finalize()
    return bits(flat(list(model.state_dict().values()))), bits(
        flat(list(hvdp.center_state_dict(model, optimizer).values()))
    )


@on_one(transports, "service")
def refused(mode: str) -> Any:
    """Arguments that some rank, or every rank, should be told to be wrong."""
    last = hvd.rank() == hvd.size() - 1
    service = "sharded" if mode == "service" else "replicated"

    def construct(**options: Any) -> None:
        elastic(mode, [torch.nn.Parameter(torch.zeros(3))], 2, **options).synchronizer.finalize()

    def differ(**options: Any) -> None:
        parameter = torch.nn.Parameter(torch.zeros(3))
        common = {"asynchronous": True, "center": MODES[mode][1]} | (options if last else {})
        with transport(mode):
            inner = torch.optim.SGD([parameter], lr=0.1)
            hvdp.ElasticAverageOptimizer(inner, [("w", parameter)], 2, **common)

    def outer_optimizer() -> None:
        parameter = torch.nn.Parameter(torch.zeros(3))
        inner = torch.optim.SGD([parameter], lr=0.1)
        moves = CENTER_OPTIMIZERS["sgd"]
        hvdp.PeriodicOptimizer(inner, [("w", parameter)], DiLoCo(), 2, outer_optimizer=moves, asynchronous=True)

    def copied() -> None:
        optimizer = elastic(mode, [torch.nn.Parameter(torch.zeros(3))], 2)
        optimizer.synchronizer.finalize()
        pickle.dumps(optimizer)

    return {
        "rate": attempt(lambda: construct(moving_rate=1.01)),
        "beta": attempt(lambda: construct(moving_rate=None, beta=1.01 * hvd.size())),
        "limit": attempt(lambda: construct(moving_rate=1.0)),
        "one rate": attempt(lambda: construct(moving_rate=1.5 if last else 0.5)),
        "another rate": attempt(lambda: construct(moving_rate=0.25 if last else 0.5)),
        "one synchronous": attempt(lambda: differ(asynchronous=False)),
        "one place": attempt(lambda: differ(center=service)) if mode == "service" else "",
        "outer optimizer": attempt(outer_optimizer),
        "copied": attempt(copied, pickle.PicklingError),
    }


PROCESS_SETS: list[Any] = []


@on_one(transports, "window")
def process_set(mode: str) -> Any:
    """Ranks 0 and 2 of three exchange around rank 2; rank 1 trains alone."""
    if hvd.size() != 3:
        raise NotApplicableError("needs three ranks")
    tensors = awkward(hvd.rank())
    if hvd.rank() == 1:
        return attempt(lambda: elastic(mode, tensors, process_set=PROCESS_SETS[0], root_rank=2))
    optimizer = elastic(mode, tensors, process_set=PROCESS_SETS[0], root_rank=2)
    started = bool((flat(tensors) == flat(awkward(2))).all())
    tensors[0].data += 3.0
    for _ in range(5):
        optimizer.synchronizer.sync()
    optimizer.synchronizer.finalize()
    return [started, flat(tensors).tolist(), center_of(tensors, optimizer).tolist()]


def train_in_turn(optimizer: Any, tensors: Tensors, order: list[int], first: int) -> list[torch.Tensor]:
    """Exchange in an order that all ranks know; return what this rank saw after every turn."""
    optimizer.synchronizer.begin()
    seen = []
    for step, turn in enumerate(order, first):
        if turn == hvd.rank():
            show(tensors, gradient_of(turn, step, flat(tensors).numel()))
            optimizer.step()
        hvd.barrier()
        seen += [flat(tensors), center_of(tensors, optimizer)]
        hvd.barrier()
    return seen


CASES = ("easgd", "adam")


def saved_optimizer(mode: str, case: str, tensors: Tensors) -> Any:
    if case == "easgd":
        return elastic(mode, tensors, 1, rate=0.1, rho=0.5)
    return normalized(mode, tensors, 1, CENTER_OPTIMIZERS[case])


@on_all(saving)
def save(mode: str) -> Any:
    """Every rank saves while the others are elsewhere; training goes on, and its results are kept for comparison.

    Returns the number of collectives that this rank has started while it saved, by case.
    """
    results = {}
    for case in CASES:
        tensors = awkward(0)
        optimizer = saved_optimizer(mode, case, tensors)
        unused = optimizer.state_dict()
        train_in_turn(optimizer, tensors, turns(7), 0)
        center = center_of(tensors, optimizer)
        hvd.barrier()
        taken = {}
        for rank in range(hvd.size()):
            if rank == hvd.rank():
                started = optimizer.synchronizer.membership.communicator.tracker.begun
                taken = {"model": [t.detach().clone() for t in tensors], "optimizer": optimizer.state_dict()}
                results[case] = optimizer.synchronizer.membership.communicator.tracker.begun - started
            else:
                time.sleep(0.02)
            hvd.barrier()
        seen = train_in_turn(optimizer, tensors, turns(5), 7)
        optimizer.synchronizer.finalize()
        final = optimizer.state_dict()
        hvd.barrier()
        kept = {"taken": taken, "unused": unused, "final": final, "center": center, "seen": seen}
        kept["later"] = train_in_turn(optimizer, tensors, turns(5), 12)
        optimizer.synchronizer.finalize()
        torch.save(kept, FOLDER[0] / f"{mode} {case} {hvd.rank()}.pt")
    return results


def file(mode: str, case: str, rank: int) -> Any:
    return torch.load(FOLDER[0] / f"{mode} {case} {rank}.pt", weights_only=True)


def restore(mode: str, case: str, saved: Any, here: bool = True, delay: float = 0.0) -> tuple[list[torch.Tensor], Any]:
    tensors = awkward(3)
    optimizer = saved_optimizer(mode, case, tensors)
    time.sleep(delay)
    if here:
        optimizer.load_state_dict(saved["optimizer"])
        for tensor, value in zip(tensors, saved["model"], strict=True):
            tensor.data.copy_(value)
    return tensors, optimizer


@on_all(loading)
def every_rank_its_own(mode: str) -> Any:
    """Each rank loads its file, the root later than the others."""
    results = {}
    for case in CASES:
        saved = file(mode, case, hvd.rank())
        tensors, optimizer = restore(mode, case, saved["taken"], delay=0.02 * (hvd.rank() == 0))
        center = bool((center_of(tensors, optimizer) == saved["center"]).all())
        hvd.barrier()
        seen = train_in_turn(optimizer, tensors, turns(5), 7)
        results[case] = {"center": center, "difference": difference(seen, saved["seen"])}
        optimizer.synchronizer.finalize()
    return results


@on_one(loading, "service")
def the_same_file(mode: str) -> Any:
    """All ranks load the file of the last rank, saved by it alone; the centers go on as they did.

    Compared from the turn in which the last rank has trained: until then the center that was final is what it reads.
    """
    results = {}
    for key, first in (("taken", 7), ("final", 12)):
        saved = file(mode, "adam", hvd.size() - 1)
        states = {"taken": saved["taken"]["optimizer"], "final": saved["final"]}
        tensors, optimizer = restore(mode, "adam", {"model": saved["taken"]["model"], "optimizer": states[key]})
        hvd.barrier()
        seen = train_in_turn(optimizer, tensors, turns(5), first)
        expected = {"taken": saved["seen"], "final": saved["later"]}[key]
        woken = 2 * hvd.size() - 1
        results[key] = difference(seen[woken::2], expected[woken::2])
        optimizer.synchronizer.finalize()
    return results


@on_one(loading, "window")
def the_root_alone(mode: str) -> Any:
    """The root loads its file, and broadcast() tells the others."""
    results = {}
    for case in CASES:
        saved = file(mode, case, 0)
        tensors, optimizer = restore(mode, case, saved["taken"], here=hvd.rank() == 0)
        optimizer.synchronizer.broadcast()
        counters = optimizer.synchronizer.counters
        x = difference([flat(tensors)], [flat(saved["taken"]["model"])])
        center = difference([center_of(tensors, optimizer)], [saved["center"]])
        hvd.barrier()
        seen = train_in_turn(optimizer, tensors, turns(5), 7)
        optimizer.synchronizer.finalize()
        results[case] = {
            "x": x,
            "center": center,
            "steps": [counters.local_steps, saved["taken"]["optimizer"]["hvd_periodic"]["counters"]["local_steps"]],
            "difference": difference(seen[1::2], saved["seen"][1::2]),
            "rounds": optimizer.synchronizer.rounds - counters.rounds,
        }
    return results


@on_all(loading)
def another_transport(mode: str) -> Any:
    """A state from each transport on this one: the center, or the error of any rank."""
    results: dict[str, Any] = {}
    for case in ("easgd", "adam"):
        for other in MODES:
            saved = file(other, case, hvd.rank())
            tensors = awkward(3)
            optimizer = saved_optimizer(mode, case, tensors)
            error = attempt(partial(optimizer.load_state_dict, saved["taken"]["optimizer"]), KeyError)
            errors = hvd.allgather_object(error)
            same = not any(errors) and bool((center_of(tensors, optimizer) == saved["center"]).all())
            if not any(errors):
                optimizer.synchronizer.finalize()
            results[f"{case}, {other}"] = [errors, same]
    return results


@on_one(loading, "sharded")
def before_the_first_step(mode: str) -> Any:
    """A state that was saved before the center had moved, loaded after it has: it moves as if for the first time."""
    saved = file(mode, "adam", hvd.rank())
    tensors, optimizer = restore(mode, "adam", saved["taken"])
    hvd.barrier()
    train_in_turn(optimizer, tensors, turns(4), 7)
    optimizer.synchronizer.finalize()
    optimizer.load_state_dict(saved["unused"])
    hvd.barrier()
    found = train_in_turn(optimizer, tensors, turns(4), 0)
    fresh = awkward(0)
    other = saved_optimizer(mode, "adam", fresh)
    hvd.barrier()
    expected = train_in_turn(other, fresh, turns(4), 0)
    for done in (optimizer, other):
        done.synchronizer.finalize()
    return difference(found[1::2], expected[1::2])


@hosts
def across_hosts() -> Any:
    """What happens by default, and where memory is asked for that ranks do not share."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    inner = torch.optim.SGD([parameter], lr=0.1)
    with patch.dict(os.environ):
        os.environ.pop(VARIABLE, None)
        optimizer = hvdp.ElasticAverageOptimizer(inner, [("w", parameter)], 2, asynchronous=True)
    description = optimizer.synchronizer.exchanger.worker.transport.description
    optimizer.synchronizer.finalize()
    return description, attempt(lambda: elastic("window", [torch.nn.Parameter(torch.zeros(3))]))


def end(way: str, mode: str) -> None:
    """Train until something happens."""
    last = hvd.size() - 1
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(1 + ("two" in way))]
    optimizers = [elastic(mode, [parameter], 2) for parameter in parameters]

    def train(steps: int) -> None:
        for _ in range(steps):
            for optimizer in optimizers:
                optimizer.step()

    train(6 + 6 * hvd.rank())
    if "raises" in way and hvd.rank() == (last if "worker" in way else 0):
        time.sleep(0.3)
        raise ArithmeticError("something in training")
    if "training" in way:
        while True:
            train(1)
            time.sleep(1e-3)
    if "finalize" in way and hvd.rank() == last:
        for optimizer in optimizers:
            optimizer.synchronizer.finalize()


def main(folder: Path, group: str, mode: str = "") -> None:
    """Run a group of scenarios, or come to an end."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    if WITHOUT_MPI4PY in os.environ:
        sys.modules["mpi4py"] = None  # type: ignore[assignment]
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    if size == 3:
        PROCESS_SETS.append(hvd.ProcessSet([0, 2]))
    hvd.init(process_sets=PROCESS_SETS or None)
    torch.set_num_threads(1)
    FOLDER.append(folder)
    if group in GROUPS:
        GROUPS[group].run(folder, hvd.rank())
    else:
        end(group, mode)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
