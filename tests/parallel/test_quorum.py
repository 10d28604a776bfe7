"""Rounds with a quorum in real jobs: the numbers of the reference, slow and stopped ranks, saved sets, refusals."""

from __future__ import annotations

import copy
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.parallel.launch import run_scenarios
from tests.parallel.program import Scenarios, attempt, column, in_the_middle_of_a_push, log, stop_until
from tests.parallel.tiers import thorough
from tests.unit.test_quorum import ADOPTED, CURVATURE, MINIMUM, PERIOD, RATE, SETS, TABLE, check_adopted

job = pytest.importorskip("tests.parallel.torch_job")
hvd = job.hvd

import torch  # noqa: E402

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic.journal.files import read_run_log  # noqa: E402
from hvd_periodic.torch import synchronizer as module  # noqa: E402
from hvd_periodic.torch.replica import TorchReplica  # noqa: E402
from hvd_periodic.torch.trainers import Centers  # noqa: E402

scenario = Scenarios()

pytestmark = pytest.mark.timeout(180)

JOBS = [
    ("mpirun", 3, "window"),
    ("mpirun", 3, "service"),
    thorough(("torchrun", 3, "window")),
    thorough(("torchrun", 3, "service")),
    thorough(("mpirun, MPI", 3, "service")),
    thorough(("mpirun, torch.distributed", 3, "window")),
]


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}, {job[2]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, size, transport = request.param
    folder = tmp_path_factory.mktemp("job")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HVD_PERIODIC_TRANSPORT", transport)
        return run_scenarios(launcher, size, "test_quorum", folder, 150, framework="torch")


OUTER: dict[str, Any] = {
    "agn, sum": {"outer_optimizer": lambda groups: torch.optim.SGD(groups, lr=0.1)},
    "agn, average": {"outer_optimizer": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)},
}


def quadratic(algorithm: Any, **options: Any) -> tuple[torch.nn.Parameter, Any]:
    """Return a parameter and its optimizer, whose training has begun."""
    x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = hvdp.PeriodicOptimizer(
        torch.optim.SGD([x], lr=RATE), [("x", x)], algorithm, PERIOD, quorum=2, **options
    )
    optimizer.synchronizer.begin()
    return x, optimizer


def period(x: torch.nn.Parameter, optimizer: Any, pause: float = 0.0) -> None:
    """Take the steps of a period."""
    for _ in range(PERIOD):
        time.sleep(pause)
        x.grad = CURVATURE[hvd.rank()] * (x.detach() - MINIMUM[hvd.rank()])
        optimizer.step()


def center_of(x: torch.nn.Parameter, optimizer: Any) -> float:
    with optimizer.center():
        return x.item()


@scenario
def numbers() -> Any:
    """Replayed sets: the center after every round, and x at the end."""
    results = {}
    for name, (algorithm, options, _) in TABLE.items():
        x, optimizer = quadratic(algorithm, **options | OUTER.get(name, {}))
        optimizer.synchronizer.exchanger.replay(SETS)
        hvd.allgather_object(None)
        centers = []
        for members in SETS:
            if hvd.rank() in members:
                period(x, optimizer)
            hvd.allgather_object(None)
            centers.append(center_of(x, optimizer))
            hvd.allgather_object(None)
        results[name] = [centers, x.item()]
        optimizer.finalize()
    return results


def test_numbers(ranks: list[dict[str, Any]]) -> None:
    for name, (_, _, expected) in TABLE.items():
        for centers, _ in column(ranks, "numbers", name):
            assert centers == pytest.approx(expected, abs=5e-9), name
    last = [x for _, x in column(ranks, "numbers", "elastic averaging")]
    assert last == pytest.approx([0.478677379, -0.290441984, 0.250068475], abs=5e-9)


def folder_of(name: str) -> Path:
    """Return a folder that all ranks share."""
    return Path(sys.argv[1]) / name


@scenario
def slow() -> Any:
    """One rank ten times slower; then the same sets once more, without waiting."""
    seen, sets = [], None
    for name in ("slow", "again"):
        x, optimizer = quadratic(hvdp.DiLoCo(), grace_seconds=0.05, run_log=folder_of(name))
        if sets is not None:
            optimizer.synchronizer.exchanger.replay(sets)
        hvd.allgather_object(None)
        for _ in range(3 if hvd.rank() == 1 else 10):
            period(x, optimizer, 0.0 if sets else 0.1 if hvd.rank() == 1 else 0.01)
        optimizer.finalize()
        hvd.allgather_object(None)
        lines = [
            line for rank in read_run_log(folder_of(name)).values() for line in rank if line["event"] == "exchanged"
        ]
        found = {line["number"]: line["members"] for line in lines}
        sets = [found[number] for number in range(1, len(found) + 1)]
        seen.append([x.item(), center_of(x, optimizer), sets])
    return seen


def test_a_slow_rank_is_left_out_and_the_sets_decide_the_trajectory(ranks: list[dict[str, Any]]) -> None:
    reports = column(ranks, "slow")
    for timed, again in reports:
        assert timed == again == reports[0][0]
    sets = reports[0][0][2]
    assert sets[0] == [0, 1, 2]
    assert sets.count([0, 2]) >= 3
    assert any(1 in members for members in sets[1:])


@scenario
def stopped() -> Any:
    """One rank is stopped in the middle of a push of several buckets, until the others have closed five rounds."""
    tensors = [torch.nn.Parameter(torch.zeros(200_000)) for _ in range(4)]
    named = [(f"p{i}", tensor) for i, tensor in enumerate(tensors)]
    with patch.object(module, "TorchReplica", partial(TorchReplica, bucket_bytes=800_000)):
        optimizer = hvdp.PeriodicOptimizer(
            torch.optim.SGD(tensors, lr=1.0), named, hvdp.Averaging(), 1, quorum=2, grace_seconds=0.05
        )
    optimizer.synchronizer.begin()

    def step() -> None:
        for tensor in tensors:
            tensor.grad = torch.full_like(tensor, -1.0 - hvd.rank())
        optimizer.step()

    step()
    rank, (first, second, awake) = hvd.rank(), (folder_of(f"stopped.{i}") for i in range(3))
    if rank == 2:
        transport = optimizer.synchronizer.exchanger.worker.transport
        with in_the_middle_of_a_push(transport, lambda: stop_until(awake, first, second)):
            step()
    else:
        for _ in range(5):
            step()
        (first, second)[rank].touch()
    optimizer.finalize()
    values = {value.item() for tensor in tensors for value in tensor.detach().aminmax()}
    return [sorted(values), optimizer.synchronizer.counters.staleness_max]


def test_a_rank_that_is_stopped_in_the_middle_of_a_push_stops_nobody(ranks: list[dict[str, Any]]) -> None:
    reports = column(ranks, "stopped")
    for _, staleness in reports[:2]:
        assert staleness <= 1, "in the last round, after one of the third rank alone"
    assert reports[2][1] == 5, "rounds while it is stopped"
    for values, _ in reports:
        assert values == reports[0][0]
        assert len(values) == 1


@scenario
def root_stopped() -> Any:
    """The root is stopped for a moment between two rounds, once the others have its answer to the first."""
    x, optimizer = quadratic(hvdp.EASGD(0.25), grace_seconds=0.0, compression=hvdp.Compression.int8)
    rank, (*others, awake) = hvd.rank(), (folder_of(f"root_stopped.{i}") for i in range(3))
    period(x, optimizer)
    if rank:
        others[rank - 1].touch()
    else:
        while not all(file.exists() for file in others):
            time.sleep(0.01)
        stop_until(awake, *others)
    for _ in range(4):
        period(x, optimizer)
    optimizer.finalize()
    return [center_of(x, optimizer), optimizer.synchronizer.counters.rounds]


def test_rounds_go_on_once_a_stopped_root_does(ranks: list[dict[str, Any]]) -> None:
    reports = column(ranks, "root_stopped")
    for center, rounds in reports:
        assert center == reports[0][0]
        assert rounds == 5, "those that it took part in, none without it; in finalize() nothing is left"


def trained(folder: str, sets: list[list[int]], resume: bool) -> Any:
    """Train a model with batch normalization and Adam for some sets, and save it; or load it first."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = hvdp.PeriodicOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1),
        model,
        hvdp.DiLoCo(),
        2,
        buffers="average",
        quorum=2,
        staleness_power=0.5,
    )
    if resume:
        assert hvdp.load(folder_of(folder), model, optimizer) is not None
    optimizer.synchronizer.begin()
    optimizer.synchronizer.exchanger.replay(sets)
    hvd.allgather_object(None)
    for members in sets:
        for _ in range(2 if hvd.rank() in members else 0):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(1000 * hvd.rank() + optimizer.synchronizer.local_steps)
            model(torch.randn(5, 3, generator=generator)).square().mean().backward()
            optimizer.step()
    hvd.allgather_object(None)
    if not resume:
        hvdp.save(folder_of(folder), model, optimizer)
    tensors = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]
    replica = [tensor.tolist() for tensor in tensors]
    with optimizer.center():
        return [replica, [tensor.tolist() for tensor in tensors], optimizer.synchronizer.counters.rounds]


@scenario
def saved() -> Any:
    """All at once; and a part of it, saved while one rank has been away for two rounds, and the rest."""
    whole = trained("whole", [*SETS, [0, 1], [0, 1], [0, 2], [0, 1, 2]], resume=False)
    trained("part", [*SETS, [0, 1], [0, 1]], resume=False)
    return [whole, trained("part", [[0, 2], [0, 1, 2]], resume=True)]


def test_a_saved_set_resumes_exactly(ranks: list[dict[str, Any]]) -> None:
    reports = column(ranks, "saved")
    for whole, resumed in reports:
        assert resumed == whole
        assert whole[1] == reports[0][0][1], "one center"
        assert whole[0] == whole[1], "all were in the last round"


@scenario
def saves_beside_finalize() -> Any:
    """The last rank saves, the first is at its end, and the other trains on until it is there too."""
    x, optimizer = quadratic(hvdp.DiLoCo())
    period(x, optimizer)
    if hvd.rank() == 1:
        period(x, optimizer)
    model = torch.nn.ParameterDict({"x": x})
    last = hvd.rank() == hvd.size() - 1
    return attempt((lambda: hvdp.save(folder_of("beside"), model, optimizer)) if last else optimizer.finalize)


def test_saves_beside_finalize(ranks: list[dict[str, Any]]) -> None:
    for error in column(ranks, "saves_beside_finalize"):
        calls = r"finalize\(\) of optimizer (\d+); save\(\) of optimizer \1\."
        assert re.match(rf"DifferentCallsError: Ranks are in different calls: {calls}", error), error


@scenario
def unexchanged() -> Any:
    """A buffer that differs on the last rank, which ranks compare in an audit and at the end; rank 1 trains on before.

    Before that, the first rank is at its end while the last one audits.
    """
    model = torch.nn.BatchNorm1d(1)
    model.register_buffer("queue", torch.zeros(3))
    last = hvd.rank() == hvd.size() - 1
    with log() as lines:
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        optimizer = hvdp.PeriodicOptimizer(inner, model, hvdp.DiLoCo(), 1, quorum=2)
        for _ in range(2 if hvd.rank() == 1 else 1):
            model(torch.ones(2, 1)).sum().backward()
            optimizer.step()
        error = attempt(optimizer.synchronizer.audit if last else optimizer.finalize)
        model.queue += last
        optimizer.synchronizer.audit()
        optimizer.finalize()
    return error, [line[line.index("Weight") :].split(". ")[0] for line in lines if "differs" in line]


def test_what_no_exchange_touches_is_compared(ranks: list[dict[str, Any]]) -> None:
    (_, first), *rest = found = column(ranks, "unexchanged")
    text = f"differs between ranks: rank {len(ranks) - 1} from rank 0"
    assert first == [f"Weight 'queue', which no exchange touches, {text}"]
    assert not any(lines for _, lines in rest)
    for error, _ in found:
        assert re.match(r"DifferentCallsError: Ranks are in different calls: finalize.*; audit\(\) of", error), error


OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "skip": (hvdp.DiLoCo(), {"nonfinite": "skip"}),
    "skip, agn": (hvdp.AGN(), {"nonfinite": "skip"}),
    "bounds": (hvdp.DiLoCo(), {"max_message_norm": "median", "max_mean_norm": 0.1}),
    "bound, easgd": (hvdp.EASGD(0.3), {"max_message_norm": 0.05}),
    "top-k": (hvdp.DiLoCo(), {"compression": hvdp.Compression.topk(0.3)}),
    "top-k, easgd": (hvdp.EASGD(0.3), {"compression": hvdp.Compression.topk(0.3), "max_message_norm": "median"}),
}


def in_rounds(algorithm: Any, poisoned: bool, **options: Any) -> Any:
    """Train with momentum and batch normalization in rounds of all, if there is a quorum."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvdp.PeriodicOptimizer(inner, model, algorithm, 2, buffers="average", **options)
    optimizer.synchronizer.begin()
    if "quorum" in options:
        optimizer.synchronizer.exchanger.replay([range(3)] * 4)
        hvd.allgather_object(None)
    for step in range(7):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        model(torch.randn(5, 3, generator=generator, dtype=torch.float64)).square().mean().backward()
        if poisoned and step == 3 and hvd.rank() == 1:
            model[0].weight.grad[0, 0] = torch.nan
        optimizer.step()
    optimizer.finalize()
    tensors = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]
    tensors += [state["momentum_buffer"] for state in inner.state.values()]
    counters = optimizer.synchronizer.counters
    values = [value for tensor in tensors for value in tensor.flatten().tolist()]
    return [values, counters.left_out, counters.rounds]


@scenario
def options_in_rounds() -> Any:
    """Options in rounds of all, and in synchronous training."""
    results = {}
    for name, (algorithm, options) in OPTIONS.items():
        poisoned = "nonfinite" in options
        rounds = in_rounds(algorithm, poisoned, quorum=2, **options)
        results[name] = [rounds, in_rounds(algorithm, poisoned, **options)]
    return results


def test_options_in_rounds_of_all_are_as_synchronously(ranks: list[dict[str, Any]]) -> None:
    """But for the order in which Horovod's collective sums, and the float32 of sums of compressed messages."""
    for name, (_, options) in OPTIONS.items():
        for rank, (rounds, synchronous) in enumerate(column(ranks, "options_in_rounds", name)):
            rel, least = (1e-5, 1e-6) if "compression" in options else (1e-9, 1e-12)
            assert rounds[0] == pytest.approx(synchronous[0], rel=rel, abs=least), name
            assert rounds[1:] == synchronous[1:]
            assert rounds[1] == (rank == 1 and "nonfinite" in options), name


@scenario
def adopted() -> Any:
    """After finalize() another parameter comes, or none: the center of x after that, and of both at the end."""
    results = {}
    for comes in (False, True):
        x, optimizer = quadratic(hvdp.DiLoCo())
        y = torch.nn.Parameter(torch.full((2,), 1.0 + hvd.rank(), dtype=torch.float64))
        optimizer.synchronizer.exchanger.replay(ADOPTED)
        hvd.allgather_object(None)
        for members in ADOPTED[:2]:
            if hvd.rank() in members:
                period(x, optimizer)
        optimizer.finalize()
        trained = [("x", x)]
        if comes:
            optimizer.add_param_group({"params": [y]})
            trained.append(("y", y))
            optimizer.adopt(trained)
        before = center_of(x, optimizer), y.tolist()
        if hvd.rank() in ADOPTED[3]:
            y.grad = torch.ones_like(y)
            period(x, optimizer)
        optimizer.finalize()
        with optimizer.center():
            results["comes" if comes else "alone"] = [*before, x.item(), y.tolist()]
    return results


def test_adopted_after_finalize(ranks: list[dict[str, Any]]) -> None:
    check_adopted(column(ranks, "adopted"))


@scenario
def refusals() -> Any:
    x = torch.nn.Parameter(torch.zeros(2))
    layer = torch.nn.Linear(2, 2)

    def make(algorithm: Any = None, wrap: Any = lambda inner: inner, **options: Any) -> str:
        def construct() -> None:
            inner = wrap(torch.optim.SGD([x], lr=0.1))
            hvdp.PeriodicOptimizer(inner, [("x", x)], algorithm or hvdp.EASGD(), 2, **options)

        return attempt(construct)

    return {
        "too large": make(quorum=hvd.size() + 1),
        "on one rank": make(quorum=2 if hvd.rank() == 0 else None),
        "grace": make(quorum=2, grace_seconds=0.5 * hvd.rank()),
        "diloco": make(hvdp.DiLoCo(), quorum=1),
        "levels": make(wrap=lambda inner: hvdp.PeriodicOptimizer(inner, [("x", x)], hvdp.EASGD(), 2), quorum=2),
        "center_device": make(quorum=2, center_device="cpu"),
        "trainer": attempt(lambda: Centers([quadratic(hvdp.EASGD())[1]])),
        "copy": attempt(lambda: copy.deepcopy(quadratic(hvdp.EASGD())[1])),
        "adopt": attempt(lambda: quadratic(hvdp.EASGD())[1].adopt([("x", x)])),
        "buffers": attempt(
            lambda: hvdp.PeriodicOptimizer(
                torch.optim.SGD(layer.parameters(), lr=0.1),
                torch.nn.Sequential(layer, torch.nn.BatchNorm1d(2)),
                hvdp.EASGD(),
                2,
                buffers="broadcast",
                quorum=2,
            )
        ),
    }


def test_refusals(ranks: list[dict[str, Any]]) -> None:
    expected = {
        "too large": "`quorum` must be at most the number of ranks, n=3",
        "on one rank": "quorum",
        "grace": "quorum",
        "diloco": "`quorum` must be more than half of the ranks",
        "levels": "`quorum` is not available for several levels of optimizers",
        "center_device": "`quorum` is not available with `center_device`",
        "trainer": "`quorum` is not available in a trainer",
        "copy": "A synchronizer with a quorum cannot be copied or pickled",
        "adopt": "adopt() is not available before finalize() in asynchronous training or with a quorum",
        "buffers": "buffers='broadcast' is for synchronous exchange",
    }
    for name, text in expected.items():
        for found in column(ranks, "refusals", name):
            assert text in found, name


if __name__ == "__main__":
    job.run_all(scenario)
