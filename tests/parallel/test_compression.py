"""Messages that are encoded, in real jobs: a slow oracle, one center on all ranks, places, checkpoints, errors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests import compression_oracle as slow
from tests import oracle
from tests.overlap_oracle import PERIOD
from tests.parallel.launch import run_scenarios
from tests.parallel.program import Scenarios, attempt, column, crossed, repeated, rotated
from tests.parallel.tiers import thorough

job = pytest.importorskip("tests.parallel.torch_job")
hvd = job.hvd

import torch  # noqa: E402

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic.torch.communicator import communicator_of  # noqa: E402

scenario = Scenarios()

WIRES: dict[str, Any] = {
    "fp16": hvdp.Compression.fp16,
    "bf16": hvdp.Compression.bf16,
    "int8": hvdp.Compression.int8,
    "topk": hvdp.Compression.topk(0.5),
    "int4": hvdp.Compression.int4,
    "e3m0": hvdp.Compression.e3m0,
    "int2": hvdp.Compression.int2,
    "chunks": hvdp.Compression.topk(chunk=2, keep=1),
}

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "easgd": lambda: hvdp.EASGD(0.25),
    "average": hvdp.Averaging,
    "agn": hvdp.AGN,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": lambda: hvdp.BMUF(0.5),
}

pytestmark = pytest.mark.timeout(180)

OF_SIZE = ("compressed_quadratics", "rows_of_tables", "not_finite_on_the_last_rank")
"""What the number of ranks makes a difference for."""

JOBS = [
    ("mpirun", 2),
    ("horovodrun --gloo", 3, *OF_SIZE),
    thorough(("horovodrun --gloo", 3)),
    thorough(("mpirun", 4)),
    thorough(("torchrun", 2)),
    thorough(("mpirun, MPI", 2)),
]
"""Launcher, ranks, and what the job runs; default: everything."""


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, size, *only = request.param
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(launcher, size, "test_compression", folder, 150, framework="torch", only=only)


@scenario
def compressed_quadratics() -> Any:
    """The losses of the oracle, with momentum: x after every step, and the center at the end."""
    results = {}
    for name, wire in crossed(tuple(ALGORITHMS), tuple(WIRES)):
        parameter = torch.nn.Parameter(torch.tensor(oracle.START, dtype=torch.float64))
        inner = torch.optim.SGD([parameter], lr=oracle.RATE, momentum=oracle.MOMENTUM)
        optimizer = hvdp.PeriodicOptimizer(
            inner, [("w", parameter)], ALGORITHMS[name](), PERIOD, compression=WIRES[wire]
        )
        seen = []
        for _ in range(oracle.STEPS):
            parameter.grad = torch.tensor(oracle.gradient(hvd.rank(), parameter.tolist()), dtype=torch.float64)
            optimizer.step()
            seen.append(parameter.tolist())
        with optimizer.center():
            results[f"{name} {wire}"] = [seen, parameter.tolist()]
    return results


def test_agreement_with_a_slow_oracle(ranks: list[dict[str, Any]]) -> None:
    for case in column(ranks, "compressed_quadratics")[0]:
        name, _, wire = case.partition(" ")
        quantize, hops, tolerance = slow.IN_JOBS[wire]
        steps, center = slow.expected(name, len(ranks), quantize, hops)
        reports = column(ranks, "compressed_quadratics", case)
        assert [report[1] for report in reports] == [reports[0][1]] * len(ranks), f"one center of {case}, to the bit"
        assert reports[0][1] == pytest.approx(center, rel=tolerance, abs=tolerance), case
        for rank, (seen, _) in enumerate(reports):
            expected = [of_ranks[rank] for of_ranks in steps]
            assert np.array(seen) == pytest.approx(np.array(expected), rel=tolerance, abs=tolerance), (case, rank)


@scenario
def present_experts() -> Any:
    """An expert of which ranks have gradients at some steps only: x after every step; with wires, the center."""
    results = {}
    ways: dict[str, dict[str, Any]] = {"none": {}, "sharded": {"center": "sharded"}}
    ways |= {wire: {"compression": compression} for wire, compression in WIRES.items()}
    for name, way in crossed(("average", "diloco", "easgd"), tuple(ways)):
        body, expert = (torch.nn.Parameter(torch.full((2,), 1.0, dtype=torch.float64)) for _ in range(2))
        inner = torch.optim.SGD([body, expert], lr=oracle.RATE, momentum=oracle.MOMENTUM)
        named = [("body", body), ("expert", expert)]
        algorithm = hvdp.EASGD(0.25, rho=0.5) if name == "easgd" else ALGORITHMS[name]()
        optimizer = hvdp.PeriodicOptimizer(
            inner, named, algorithm, PERIOD, parameters={"expert": "present"}, **ways[way]
        )
        seen = []
        for step in range(1, oracle.STEPS + 1):
            for x in (body, expert):
                x.grad = (0.5 + 0.25 * hvd.rank()) * (x.detach() - (1.5 - hvd.rank()))
            if not oracle.has_gradient(hvd.rank(), step, 0):
                expert.grad = None
            optimizer.step()
            seen.append(expert.tolist())
        with optimizer.center():
            results[f"{name} {way}"] = [seen, expert.tolist()]
    return results


def test_parameters_of_those_present(ranks: list[dict[str, Any]]) -> None:
    for case in column(ranks, "present_experts")[0]:
        name, _, way = case.partition(" ")
        element = oracle.Present(1.0, len(ranks), name)
        exchanges = range(PERIOD, oracle.STEPS + 1, PERIOD)
        steps = oracle.present(element, oracle.STEPS, exchanges, lambda i, t: oracle.has_gradient(i, t, 0))
        reports = column(ranks, "present_experts", case)
        assert [center for _, center in reports] == [reports[0][1]] * len(ranks), f"one center of {case}, to the bit"
        if way in ("topk", "chunks"):  # Half of what there is to say comes later.
            continue
        tolerance = {"rel": 1e-12} if way in ("none", "sharded") else {"abs": 0.02}
        assert reports[0][1] == pytest.approx([element.center] * 2, **tolerance), case
        for rank, (seen, _) in enumerate(reports):
            for of_step, of_ranks in zip(seen, steps, strict=True):
                assert of_step == pytest.approx([of_ranks[rank]] * 2, **tolerance), (case, rank)


@scenario
def rows_of_tables() -> Any:
    """A table of which every rank touches other rows in each period: values after each step, and bytes, both ways."""
    results = {}
    for policy in ("rows", "average"):
        fp16 = {"compression": hvdp.Compression.fp16}
        ways = {"diloco": {}, "agn": {}, "average": {"overlap": 1}, "easgd": {}, "diloco, fp16": fp16}
        for name, options in ways.items():
            table = torch.nn.Parameter(torch.ones(1000, 3, dtype=torch.float64))
            inner = torch.optim.SGD([table], lr=0.1)
            optimizer = hvdp.PeriodicOptimizer(
                inner,
                [("table", table)],
                ALGORITHMS[name.split(",")[0]](),
                PERIOD,
                parameters={"table": policy},
                **options,
            )
            seen = []
            for step in range(oracle.STEPS):
                table.grad = torch.zeros_like(table)
                table.grad[[3 * step, 3 * step + 1 + hvd.rank(), 500 + hvd.rank()]] = 1.0 + hvd.rank()
                optimizer.step()
                seen.append(table.detach().sum(1).tolist())
            results[f"{policy} {name}"] = [seen, optimizer.synchronizer.counters.bytes_sent]
            optimizer.finalize()
    return results


def test_rows_of_tables(ranks: list[dict[str, Any]]) -> None:
    """As whole tables, to the bit with two ranks; with more, an allreduce may add in another order.

    In elastic averaging, within rounding; in 16 bits, within that of the sums, which Horovod may form.
    """
    for name in ("diloco", "agn", "average", "easgd", "diloco, fp16"):
        for (rows, fewer), (whole, more) in zip(
            *(column(ranks, "rows_of_tables", f"{policy} {name}") for policy in ("rows", "average")), strict=True
        ):
            if len(ranks) == 2 and name in ("diloco", "agn", "average"):
                assert rows == whole
            else:
                tolerance = 0.02 if "fp16" in name else 1e-12
                assert np.array(rows) == pytest.approx(np.array(whole), abs=tolerance)
            assert 10 * fewer < more


@scenario
def compressed_networks() -> Any:
    """Batch normalization, other numbers of batches on every rank, with overlap and without.

    Returns the sums of parameters and of statistics of the center at the end: of the original, of a copy, and of what
    was loaded from a checkpoint.
    """
    results = {}
    cases = rotated(tuple(WIRES), ("average", "easgd", "agn", "diloco"), (0, 1, "period"))
    cases += repeated(("int8", "average", 1), ("int8", "easgd", "period"), ("topk", "agn", 2), ("chunks", "diloco", 1))
    for wire, name, overlap in cases:
        torch.manual_seed(hvd.rank())
        model = torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 2))

        def optimizer_of(model: Any, name: str = name, wire: str = wire, overlap: Any = overlap) -> Any:
            inner, algorithm = torch.optim.SGD(model.parameters(), 0.01, momentum=0.5), ALGORITHMS[name]()
            return hvdp.PeriodicOptimizer(inner, model, algorithm, PERIOD, overlap=overlap, compression=WIRES[wire])

        def train(model: Any, optimizer: Any, seed: int, batches: int) -> None:
            torch.manual_seed(seed)
            for _ in range(batches):
                data = torch.randn(16, 6) + hvd.rank()
                optimizer.zero_grad()
                (model(data) - data[:, :2]).square().mean().backward()
                optimizer.step()

        optimizer = optimizer_of(model)
        train(model, optimizer, 1, 2 * PERIOD + 1)
        copied, copy_of_optimizer = copy.deepcopy((model, optimizer))
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        loaded = copy.deepcopy(model)
        other = optimizer_of(loaded)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        loaded.load_state_dict(weights)
        other.load_state_dict(state)
        ends = []
        for trained, its_optimizer in ((model, optimizer), (copied, copy_of_optimizer), (loaded, other)):
            train(trained, its_optimizer, 2, 4 + 3 * hvd.rank())
            its_optimizer.synchronizer.finalize()
            with its_optimizer.center():
                ends.append(
                    [
                        [tensor.double().sum().item() for tensor in tensors]
                        for tensors in (trained.parameters(), trained.buffers())
                    ]
                )
        results[f"{name} {wire} {overlap}"] = ends
    return results


def test_networks(ranks: list[dict[str, Any]]) -> None:
    """One center at the end; a copy and a checkpoint, with what was not sent, go on alike."""
    for case in column(ranks, "compressed_networks")[0]:
        reports = column(ranks, "compressed_networks", case)
        assert reports == [reports[0]] * len(ranks), case
        original, *others = reports[0]
        # Statistics and float16 are summed by Horovod, in an order of its own; bytes are summed in that of ranks.
        exact = len(ranks) <= 2 or "fp16" not in case
        for parameters, statistics in others:
            assert parameters == (original[0] if exact else pytest.approx(original[0], abs=0.05)), case
            assert statistics == pytest.approx(original[1], rel=1e-3, abs=1e-3), case


@scenario
def compressed_in_other_places() -> Any:
    """float16 with the center on the root, or sharded: the center after four exchanges; others: the error."""
    results = {}
    for wire, compression in WIRES.items():
        for place in ("replicated", "root", "sharded"):
            parameter = torch.nn.Parameter(torch.linspace(-1, 1, 50))

            def made(parameter: Any = parameter, place: str = place, compression: Any = compression) -> Any:
                inner = torch.optim.SGD([parameter], lr=0.1)
                return hvdp.ModelAverageOptimizer(inner, [("w", parameter)], 1, center=place, compression=compression)

            error = attempt(made)
            if error:
                results[f"{wire} {place}"] = error
                continue
            optimizer = made()
            for _ in range(4):
                parameter.grad = (parameter.detach() - hvd.rank()) * torch.linspace(0.5, 1, 50)
                optimizer.step()
            with optimizer.center():
                results[f"{wire} {place}"] = parameter.tolist()
    results["sums in half"] = "f2" in communicator_of(None).sums
    return results


def test_the_center_elsewhere(ranks: list[dict[str, Any]]) -> None:
    found = column(ranks, "compressed_in_other_places")
    assert found == [found[0]] * len(ranks)
    for wire in WIRES:
        for place in ("root", "sharded"):
            report = found[0][f"{wire} {place}"]
            if wire == "fp16" and found[0]["sums in half"]:
                assert report == pytest.approx(found[0][f"{wire} replicated"], abs=0.02), (wire, place)
            else:
                assert report.startswith("ValueError: `compression` as "), report
                assert f"needs center='replicated': with center={place!r}" in report


@scenario
def not_finite_on_the_last_rank() -> Any:
    """The error, and the center after it."""
    results = {}
    for wire, compression in WIRES.items():
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvdp.ModelAverageOptimizer(
            torch.optim.SGD([parameter], lr=0.1), [("w", parameter)], 2, compression=compression
        )

        def step(value: float, parameter: Any = parameter, optimizer: Any = optimizer) -> None:
            parameter.grad = torch.full((3,), value)
            optimizer.step()

        step(1.0)
        last = hvd.rank() == hvd.size() - 1
        error = attempt(lambda: step(float("inf") if last else 1.0))  # noqa: B023
        with optimizer.center():
            results[wire] = [error, parameter.tolist()]
    return results


def test_what_is_not_finite(ranks: list[dict[str, Any]]) -> None:
    for wire in WIRES:
        for rank, (error, center) in enumerate(column(ranks, "not_finite_on_the_last_rank", wire)):
            assert center == [0.0] * 3, "as it was"
            last = rank == len(ranks) - 1
            assert ("parameter 'w' is not finite at step 2" if last else f"Rank {len(ranks) - 1}") in error
            assert "parameter 'w' is not finite at step 2" in error or not last


if __name__ == "__main__":
    job.run_all(scenario)
