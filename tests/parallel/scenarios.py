"""What every rank of a job does; each scenario returns what this rank saw, and the test asserts on all ranks' words.

mpirun -np 2 python -m tests.parallel.scenarios FOLDER
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hvd_periodic.torch as hvdp
from hvd_periodic import PostLocal
from hvd_periodic.comm.local import started_by_mpi
from hvd_periodic.torch.communicator import communicator_of
from hvd_periodic.torch.model import NamedTensors
from hvd_periodic.torch.replica import TorchReplica
from tests import oracle
from tests.conformance.communicator_contract import check_communicator
from tests.parallel import torch_fragments, torch_life, torch_overlap
from tests.parallel.program import NotApplicableError, Scenarios, attempt
from tests.parallel.torch_job import OVER_MPI, UNDER_TORCHRUN, hvd

scenario = Scenarios()
scenario.include(torch_life.scenario)
scenario.include(torch_overlap.scenario)
scenario.include(torch_fragments.scenario)

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "easgd": lambda o, m, **k: hvdp.ElasticAverageOptimizer(o, m, 2, moving_rate=0.25, **k),
    "easgd_default": lambda o, m, **k: hvdp.ElasticAverageOptimizer(o, m, 2, **k),
    "easgd_rho": lambda o, m, **k: hvdp.ElasticAverageOptimizer(o, m, 2, moving_rate=0.25, rho=0.5, **k),
    "average": lambda o, m, **k: hvdp.ModelAverageOptimizer(o, m, 2, **k),
    "post_local": lambda o, m, **k: hvdp.ModelAverageOptimizer(o, m, PostLocal(2, 3), **k),
    "agn": lambda o, m, **k: hvdp.AGNOptimizer(o, m, 4, **k),
    "agn_average": lambda o, m, **k: hvdp.AGNOptimizer(o, m, 4, op="average", **k),
    "diloco": lambda o, m, **k: hvdp.PeriodicOptimizer(o, m, hvdp.DiLoCo(), 2, **k),
    "slowmo": lambda o, m, **k: hvdp.PeriodicOptimizer(o, m, hvdp.SlowMo(), 2, **k),
    "bmuf": lambda o, m, **k: hvdp.PeriodicOptimizer(o, m, hvdp.BMUF(), 2, **k),
}


def bits(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def scalar(optimizer: Callable[..., Any], rate: float, **common: Any) -> tuple[torch.nn.Parameter, Any]:
    """One parameter, different on each rank until the root's value, 0, is broadcast."""
    parameter = torch.nn.Parameter(torch.tensor([float(hvd.rank())], dtype=torch.float64))
    return parameter, optimizer(torch.optim.SGD([parameter], lr=rate), [("w", parameter)], **common)


def center_of(parameter: torch.Tensor, optimizer: Any) -> float:
    with optimizer.center():
        return parameter.item()


@scenario
def constant_gradients() -> Any:
    """Gradient −1 − 2 rank: x and c after each step."""
    results = {}
    for name, make in OPTIMIZERS.items():
        parameter, optimizer = scalar(make, 0.1 if name.startswith("agn") else 1.0)
        trajectory = []
        for _ in range(8):
            parameter.grad = torch.full_like(parameter, -1.0 - 2.0 * hvd.rank())
            optimizer.step()
            trajectory.append((parameter.item(), center_of(parameter, optimizer)))
        results[name] = trajectory
    return results


@scenario
def complex_constant_gradients() -> Any:
    """Moves of 1 + 2i on rank 0 and −3 + i on the others: the center after each exchange."""
    gradient = -1 - 2j if hvd.rank() == 0 else 3 - 1j
    results = {}
    for center in ("replicated", "root", "sharded"):
        w = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        sgd = torch.optim.SGD([w], lr=1.0)
        optimizer = hvdp.ElasticAverageOptimizer(sgd, [("w", w)], 1, moving_rate=0.25, center=center)
        results[center] = []
        for _ in range(3):
            w.grad = torch.full_like(w, gradient)
            optimizer.step()
            with optimizer.center():
                results[center].append(torch.view_as_real(w.detach()).tolist())
    return results


@scenario
def bounded_norms() -> Any:
    """Moves of (3, 4) on rank 0 and (.6, .8) on the others, by DiLoCo: the center after each exchange."""
    move = (3.0, 4.0) if hvd.rank() == 0 else (0.6, 0.8)
    bounds: dict[str, Any] = {"message": {"max_message_norm": 1}, "mean": {"max_mean_norm": 0.5}}
    bounds["median"] = {"max_message_norm": "median"}
    results = {}
    for center in ("replicated", "root", "sharded"):
        for name, bound in bounds.items():
            w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
            sgd = torch.optim.SGD([w], lr=1.0)
            optimizer = hvdp.PeriodicOptimizer(sgd, [("w", w)], hvdp.DiLoCo(0.7, 0.9), 1, center=center, **bound)
            seen = []
            for _ in range(2):
                w.grad = -torch.tensor(move, dtype=torch.float64)
                optimizer.step()
                seen.append(w.tolist())
            results[f"{name} {center}"] = seen
    return results


@scenario
def quadratics() -> Any:
    """The losses of the oracle, with momentum; x and c at the end."""
    results = {}
    for name, make in OPTIMIZERS.items():
        parameter = torch.nn.Parameter(torch.tensor(oracle.START, dtype=torch.float64))
        inner = torch.optim.SGD([parameter], lr=oracle.RATE, momentum=oracle.MOMENTUM)
        optimizer = make(inner, [("w", parameter)])
        for _ in range(oracle.STEPS):
            parameter.grad = torch.tensor(oracle.gradient(hvd.rank(), parameter.tolist()), dtype=torch.float64)
            optimizer.step()
        x = parameter.tolist()
        with optimizer.center():
            results[name] = (x, parameter.tolist())
    return results


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 50),
        torch.nn.BatchNorm1d(50),
        torch.nn.Tanh(),
        torch.nn.Linear(50, 2),
    )


@scenario
def centers_and_buffers() -> Any:
    """A network with batch normalization and Adam, other data on each rank, several buckets."""
    results = {}
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(hvd.rank())
        model = network()
        optimizer = make(torch.optim.Adam(model.parameters(), lr=0.01), model)
        seen = []
        for _ in range(9):
            data = torch.randn(16, 6) + hvd.rank()
            optimizer.zero_grad()
            (model(data) - data[:, :2]).square().mean().backward()
            rounds = optimizer.synchronizer.rounds
            optimizer.step()
            if optimizer.synchronizer.rounds > rounds:
                with optimizer.center():
                    seen.append(bits(list(model.state_dict().values())))
                buffers = bits(list(model.buffers()))
        local = bits(list(model.parameters()))
        optimizer.synchronizer.finalize()
        exported = bits(list(hvdp.center_state_dict(model, optimizer).values()))
        results[name] = {"centers": seen, "buffers": buffers, "local": local, "exported": exported}
    return results


@scenario
def small_buckets_equal_one() -> Any:
    """The same training over buckets of 64 bytes and over one: center and replica to the bit."""
    found = []
    for bucket_bytes in (64, 2**20):
        torch.manual_seed(0)
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvdp.ElasticAverageOptimizer(inner, model, 2, moving_rate=0.3)
        synchronizer = optimizer.synchronizer
        replica = TorchReplica(NamedTensors.of(model, None), inner, bucket_bytes)
        super(hvdp.Synchronizer, synchronizer).__init__(
            replica, synchronizer.algorithm, synchronizer.planner.schedule, synchronizer.membership.communicator
        )
        synchronizer.start()
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(6):
            data = torch.randn(16, 6, generator=generator)
            optimizer.zero_grad()
            (model(data) - data[:, :2]).square().mean().backward()
            optimizer.step()
        found.append([len(replica.parameters.layout.buckets), hvdp.center_state_dict(model, optimizer)])
    (many, small), (one, large) = found
    difference = max(float((small[key] - large[key]).abs().max()) for key in small if small[key].is_floating_point())
    return {"buckets": (many, one), "difference": difference}


@scenario
def disagreements() -> Any:
    """One rank differs from the others in one thing; every rank must learn of it."""
    last = hvd.rank() == hvd.size() - 1

    def construct(period: int = 2, out: int = 2, dtype: Any = torch.float32, name: str = "", **options: Any) -> None:
        model = torch.nn.Linear(2, out).to(dtype)
        pairs = [(name + n, p) for n, p in model.named_parameters()]
        hvdp.ElasticAverageOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), pairs, period, **options)

    def other_algorithm() -> None:
        model = torch.nn.Linear(2, 2)
        hvdp.ModelAverageOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), 2)

    cases: dict[str, dict[str, Any]] = {
        "period": {"period": 3},
        "rate": {"moving_rate": 0.05},
        "shape": {"out": 3},
        "dtype": {"dtype": torch.float64},
        "name": {"name": "x."},
        "root": {"root_rank": hvd.size() - 1},
        "refused": {"moving_rate": 7.0},
        "center": {"center": "nowhere"},
    }
    results = {
        case: attempt(lambda options=options: construct(**(options if last else {}))) for case, options in cases.items()
    }
    results["algorithm"] = attempt(other_algorithm if last else construct)
    results["none"] = attempt(construct)
    return results


@scenario
def distributed_optimizer_inside() -> Any:
    model = torch.nn.Linear(2, 2)
    if UNDER_TORCHRUN:
        model = torch.nn.parallel.DistributedDataParallel(model)
        return attempt(lambda: hvdp.AGNOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model))
    if OVER_MPI:
        raise NotApplicableError("MPI has no optimizer that averages gradients")
    inner = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    return attempt(lambda: hvdp.AGNOptimizer(inner, model))


@scenario
def changes_after_construction() -> Any:
    parameter, optimizer = scalar(OPTIMIZERS["average"], 1.0)

    def train() -> None:
        for step in range(2):
            parameter.grad = torch.ones_like(parameter)
            if step == 1 and hvd.rank() == hvd.size() - 1:
                optimizer.inner.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
            optimizer.step()

    return attempt(train)


SCHEDULES: dict[str, Any] = {
    "piecewise": hvdp.Piecewise({0: 2, 5: 4}),
    "doubling": hvdp.Doubling(1, 2, 5),
    "qsr": hvdp.QSR(2, 0.2),
    "adacomm": hvdp.AdaComm(4, 1),
    "seconds": hvdp.Seconds(0.15),
}


def scheduled(schedule: Any, saved_at: int | None = None) -> list[int]:
    """Exchange steps of 16; rates, losses and speeds differ between ranks, and training may be resumed."""

    def build() -> tuple[Any, Any, Any]:
        parameter, optimizer = scalar(lambda o, m, **k: hvdp.ModelAverageOptimizer(o, m, schedule, **k), 1.0)
        decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5])
        for group in optimizer.param_groups:  # The schedule sees what the first step sees, not 1.
            group["lr"] = 0.1 * (1 + hvd.rank())
        return parameter, optimizer, decay

    (parameter, optimizer, decay), found = build(), []
    for step in range(1, 17):
        if step - 1 == saved_at:
            saved = pickle.dumps((parameter.detach(), optimizer.state_dict(), decay.state_dict()))
            parameter, optimizer, decay = build()
            values, state, place = pickle.loads(saved)
            parameter.data.copy_(values)
            optimizer.load_state_dict(state)
            decay.load_state_dict(place)
        if isinstance(schedule, hvdp.Seconds):
            time.sleep(0.03 if hvd.rank() == 0 else 0.005)
        loss = torch.tensor(4.0 if step <= 4 else 1.0 if step <= 8 else 0.25, requires_grad=True)
        optimizer.synchronizer.report(loss * 2 * (1 + hvd.rank()) / (1 + hvd.size()))
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        decay.step()
        if optimizer.synchronizer.counters.last_exchange == step:
            found.append(step)
    return found


@scenario
def schedules_of_the_clock() -> Any:
    found = {name: scheduled(schedule) for name, schedule in SCHEDULES.items()}
    return found | {f"{name} resumed": scheduled(schedule, saved_at=7) for name, schedule in SCHEDULES.items()}


@scenario
def different_steps() -> Any:
    """sync() after different numbers of steps: refused on all ranks."""
    parameter, optimizer = scalar(OPTIMIZERS["post_local"], 1.0)
    optimizer.synchronizer.planner.schedule = PostLocal(0, 100)

    def train() -> None:
        for _ in range(3 + hvd.rank()):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        optimizer.synchronizer.sync()

    return attempt(train)


@scenario
def uneven_data() -> Any:
    """Rank r has 5 + 3r steps of gradient −1, in periods of 2, then finalizes: nobody hangs, one center."""
    results = {}
    for name in ("easgd", "average", "agn"):
        parameter, optimizer = scalar(OPTIMIZERS[name], 1.0)
        for _ in range(5 + 3 * hvd.rank()):
            parameter.grad = -torch.ones_like(parameter)
            optimizer.step()
        optimizer.synchronizer.finalize()
        results[name] = (center_of(parameter, optimizer), optimizer.synchronizer.rounds, parameter.item())
        for _ in range(2):  # another epoch, of another length on each rank
            for _ in range(3 + hvd.rank()):
                parameter.grad = -torch.ones_like(parameter)
                optimizer.step()
            optimizer.synchronizer.finalize()
        results[f"{name}, later"] = (center_of(parameter, optimizer), optimizer.synchronizer.local_steps)
    return results


@scenario
def overflow_on_one_rank() -> Any:
    parameter, optimizer = scalar(OPTIMIZERS["average"], 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(1, 5):
        optimizer.zero_grad()
        overflow = hvd.rank() == hvd.size() - 1 and step == 2
        scaler.scale(-(parameter * (float("inf") if overflow else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    counters = optimizer.synchronizer.counters
    return counters.local_steps, counters.rounds, counters.skipped_updates, parameter.item()


@scenario
def small_integers() -> Any:
    """Buffers of few bits; with weights that differ, messages travel apart from what ranks tell each other."""
    found = {}
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16):
        model = torch.nn.Linear(2, 1)
        model.register_buffer("seen", torch.zeros(5, dtype=dtype))
        sgd, weight = torch.optim.SGD(model.parameters(), lr=0.1), 1.0 + hvd.rank()
        optimizer = hvdp.ModelAverageOptimizer(sgd, model, 1, buffers="average", weight=weight)
        model.seen[hvd.rank()] = 1
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        found[str(model.seen.dtype)] = model.seen.int().tolist()
    return found


def resume_training(optimizer_class: Any, name: str) -> bool:
    """Save in mid-period on every rank, go on; restore in a new optimizer, go on: the same to the bit."""

    def make() -> tuple[torch.nn.Module, Any]:
        model = network()
        return model, OPTIMIZERS[name](optimizer_class(model.parameters(), lr=0.01), model)

    def train(model: torch.nn.Module, optimizer: Any, seed: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(100 * seed + hvd.rank())
        for _ in range(steps):
            data = torch.randn(16, 6, generator=generator)
            optimizer.zero_grad()
            (model(data) - data[:, :2]).square().mean().backward()
            optimizer.step()

    model, optimizer = make()
    train(model, optimizer, 1, 5)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    pickled = pickle.dumps((model, optimizer))
    train(model, optimizer, 2, 6)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other_model, other = make()
    other_model.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(other_model, other, 2, 6)
    copied_model, copied = pickle.loads(pickled)
    train(copied_model, copied, 2, 6)
    expected = bits([*model.state_dict().values(), *hvdp.center_state_dict(model, optimizer).values()])
    return all(
        bits([*m.state_dict().values(), *hvdp.center_state_dict(m, o).values()]) == expected
        for m, o in ((other_model, other), (copied_model, copied))
    )


@scenario
def resume() -> Any:
    return {name: resume_training(torch.optim.Adam, name) for name in ("easgd_rho", "average", "agn", "post_local")}


@scenario
def restore_on_root_only() -> Any:
    """The root loads a checkpoint; without broadcast() the others notice, with it all continue from there."""
    parameter, optimizer = scalar(OPTIMIZERS["easgd"], 1.0)
    for _ in range(3):
        parameter.grad = torch.full_like(parameter, -1.0 - hvd.rank())
        optimizer.step()
    saved, value, center = optimizer.state_dict(), parameter.item(), center_of(parameter, optimizer)
    roots_value = hvd.broadcast_object(value, 0, name="value")

    parameter, optimizer = scalar(OPTIMIZERS["easgd"], 1.0)
    if hvd.rank() == 0:
        optimizer.load_state_dict(saved)
        parameter.data.fill_(value)
    optimizer.synchronizer.broadcast()
    restored = (parameter.item() == roots_value, center_of(parameter, optimizer) == center)
    steps = optimizer.synchronizer.local_steps
    optimizer.synchronizer.audit()

    if hvd.rank() == 0:
        optimizer.load_state_dict(saved)
        optimizer.synchronizer.replica.load(
            optimizer.synchronizer.tensor_groups.parameters.center, {"w": torch.tensor([77.0], dtype=torch.float64)}
        )
    return restored, steps, attempt(optimizer.synchronizer.audit)


@scenario
def process_set() -> Any:
    """Ranks 0 and the last exchange; a rank between them trains alone and is told that it is not in the set."""
    members = sorted({0, hvd.size() - 1})
    if len(members) == hvd.size():
        raise NotApplicableError("needs three ranks")
    chosen = PROCESS_SETS[0]
    if hvd.rank() not in members:
        return attempt(lambda: scalar(OPTIMIZERS["average"], 1.0, process_set=chosen))
    parameter, optimizer = scalar(OPTIMIZERS["average"], 1.0, process_set=chosen, root_rank=members[1])
    started = parameter.item()
    for _ in range(2):
        parameter.grad = torch.full_like(parameter, -1.0 - hvd.rank())
        optimizer.step()
    again = optimizer
    if OVER_MPI:
        assert "cannot be pickled or copied: save its state_dict()" in attempt(lambda: pickle.dumps(optimizer))
    else:
        again = pickle.loads(pickle.dumps(optimizer))
    return started, parameter.item(), again.synchronizer.membership.communicator.size


@scenario
def contract() -> Any:
    """The common contract of communicators, on that of the job."""
    check_communicator(communicator_of(None), torch.from_numpy)
    return "kept"


PROCESS_SETS: list[Any] = []


def main(folder: Path) -> None:
    """Run all scenarios in the same order on all ranks; write this rank's results."""
    before = attempt(construct_optimizer)
    sizes = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE")
    size = int(next((os.environ[variable] for variable in sizes if os.environ.get(variable)), 1))
    if size > 2:  # Process sets are declared before the size can be asked for.
        PROCESS_SETS.append(hvd.ProcessSet([0, size - 1]))
    hvd.init(process_sets=PROCESS_SETS or None)
    torch.set_num_threads(1)
    scenario.run(folder, hvd.rank(), not_initialized=before, by_mpi=started_by_mpi())


def construct_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    hvdp.ModelAverageOptimizer(torch.optim.SGD([parameter], lr=1.0), [("w", parameter)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
