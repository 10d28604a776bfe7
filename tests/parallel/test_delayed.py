"""Asynchronous averaging, DiLoCo, SlowMo and BMUF in real jobs, wherever the center lives."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests import delayed_oracle as slow
from tests.parallel.launch import run_scenarios
from tests.parallel.program import Scenarios, column, crossed
from tests.parallel.tiers import thorough

job = pytest.importorskip("tests.parallel.torch_job")
hvd = job.hvd
pytest.importorskip("mpi4py")

import torch  # noqa: E402

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic.asynchronous.worker import VARIABLE  # noqa: E402
from hvd_periodic.torch import synchronizer as module  # noqa: E402
from hvd_periodic.torch.replica import TorchReplica  # noqa: E402

pytestmark = pytest.mark.timeout(200)

MODES: dict[str, tuple[str, str]] = {
    "window": ("window", "replicated"),
    "service": ("service", "root"),
    "sharded": ("service", "sharded"),
}
"""What the environment variable says, and where the center lives."""

JOBS = [("mpirun", 2), thorough(("mpirun", 3)), thorough(("python", 1)), thorough(("mpirun, MPI", 3))]
ORDER = (0, 1, 1, 2, 0, 0, 2, 1, 0, 1, 2)
STALE = 0.5
SECONDS = (0.58, 0.75, 1.51)
"""Per step, of workers of different speed."""

scenario = Scenarios()


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, size = request.param
    framework = "torch alone" if launcher.startswith("mpirun, ") else "torch"
    return run_scenarios(launcher, size, "test_delayed", tmp_path_factory.mktemp("job"), 150, framework=framework)


def order_of(size: int) -> list[int]:
    return [turn for turn in ORDER if turn < size]


@contextmanager
def transport(mode: str, bucket_bytes: int = 24) -> Iterator[str]:
    """Make optimizers on a transport, with buckets of three elements; yield the place of the center."""
    small = partial(TorchReplica, bucket_bytes=bucket_bytes)
    with patch.dict(os.environ, {VARIABLE: MODES[mode][0]}), patch.object(module, "TorchReplica", small):
        yield MODES[mode][1]


class Trainer:
    """A worker on quadratics, with fast and slow parameters of awkward sizes."""

    def __init__(self, mode: str, name: str, **options: Any) -> None:
        self.fast, self.slow = (torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (5, 4))
        self.inner = torch.optim.SGD([{"params": [self.fast]}, {"params": [self.slow]}], lr=0.1)
        with transport(mode) as center:
            self.optimizer = hvdp.PeriodicOptimizer(
                self.inner,
                [("fast", self.fast), ("slow", self.slow)],
                slow.ALGORITHMS[name],
                slow.PERIOD,
                asynchronous=True,
                center=center,
                **options,
            )
        self.optimizer.synchronizer.begin()

    def train(self, own_turn: int) -> None:
        for group, is_slow in zip(self.inner.param_groups, (False, True), strict=True):
            group["lr"] = slow.rate_of(own_turn, is_slow)
        for _ in range(slow.PERIOD):
            self.step()

    def step(self) -> None:
        rank = hvd.rank()
        for parameter in (self.fast, self.slow):
            parameter.grad = slow.CURVATURE[rank] * (parameter.detach() - slow.MINIMUM[rank])
        self.optimizer.step()

    def look(self) -> list[Any]:
        with self.optimizer.center():
            center = [self.fast.tolist(), self.slow.tolist()]
        return [[self.fast.tolist(), self.slow.tolist()], center]

    def in_turn(self, order: Sequence[int]) -> list[Any]:
        return slow.followed(order, hvd.rank(), self.train, self.look, hvd.barrier)


@scenario
def quadratics_in_turn() -> Any:
    """x and c after every turn, and the staleness; of parameters with rates of their own, which change."""
    results: dict[str, Any] = {}
    for mode, name in crossed(list(MODES), list(slow.ALGORITHMS)):
        trainer = Trainer(mode, name, staleness_power=STALE * (name == "diloco"))
        seen = trainer.in_turn(order_of(hvd.size()))
        trainer.optimizer.finalize()
        counters = trainer.optimizer.synchronizer.counters
        results[f"{mode} {name}"] = [seen, trainer.look(), [counters.rounds, counters.pushes_missed]]
    return results


def test_agreement_with_a_slow_oracle(ranks: list[dict[str, Any]]) -> None:
    order = order_of(len(ranks))
    for case in ranks[0]["quadratics_in_turn"]:
        mode, _, name = case.partition(" ")
        assert mode in MODES
        for which, size in enumerate((5, 4)):
            options: dict[str, Any] = {"slow": bool(which), "power": STALE * (name == "diloco")}
            replicas, centers = slow.in_turn(name, len(ranks), order, **options)
            last = slow.Slow(name, len(ranks), **options)
            for turn in order:
                last.turn(turn)
            for rank, (seen, final, _) in enumerate(column(ranks, "quadratics_in_turn", case)):
                for turn, (x, c) in enumerate(seen):
                    assert x[which] == pytest.approx([replicas[turn][rank]] * size, rel=1e-9, abs=1e-12), (case, turn)
                    assert c[which] == pytest.approx([centers[turn]] * size, rel=1e-9, abs=1e-12), (case, turn)
                assert final[0][which] == pytest.approx([last.handed()] * size, rel=1e-9), "all leave with the center"
                assert final[1][which] == pytest.approx([centers[-1]] * size, rel=1e-9), case
            for rank, (_, _, counted) in enumerate(column(ranks, "quadratics_in_turn", case)):
                missed = [m for turn, m in zip(order, last.missed, strict=True) if turn == rank]
                assert counted == [len(missed), sum(missed)], case


@scenario
def pushes_of_all_at_once() -> Any:
    """Workers on their own clocks: what all have pushed, and where the center would come to rest."""
    results = {}
    for mode in MODES:
        parameter = torch.nn.Parameter(torch.zeros(7, dtype=torch.float64))
        with transport(mode) as center:
            inner = torch.optim.SGD([parameter], lr=0.0)
            algorithm = hvdp.DiLoCo(0.7, 0.5)
            optimizer = hvdp.PeriodicOptimizer(
                inner, [("w", parameter)], algorithm, 2**40, asynchronous=True, center=center
            )
        optimizer.synchronizer.begin()
        generator, moved = random.Random(hvd.rank()), torch.zeros(7, dtype=torch.float64)
        for _ in range(40 + 20 * hvd.rank()):
            push = torch.tensor([generator.gauss(0, 1) for _ in range(7)], dtype=torch.float64)
            parameter.data += push
            moved += push
            time.sleep(generator.choice([0, 0, 1e-4, 1e-3]))
            optimizer.synchronizer.sync()
        optimizer.finalize()
        state = optimizer.state_dict()["hvd_periodic"]
        vectors = {key: values["w"].tolist() for key, values in state["vectors"]["parameters"].items()}
        results[mode] = [moved.tolist(), vectors, state["pushes"]]
    return results


def test_every_push_moves_the_point_of_rest_by_its_share(ranks: list[dict[str, Any]]) -> None:
    """Nothing is lost, and nothing counts twice, whatever the order of pushes in each bucket."""
    n, rate, mu = len(ranks), 0.7, 0.5
    for mode in MODES:
        reports = column(ranks, "pushes_of_all_at_once", mode)
        total = np.sum([moved for moved, _, _ in reports], axis=0)
        for rank, (_, vectors, pushes) in enumerate(reports):
            c, m, d = (np.array(vectors[key]) for key in ("center", "momentum", "gathered"))
            rest = c - rate * mu**2 / (1 - mu) * m - rate * mu / (1 - mu) * d
            np.testing.assert_allclose(rest, rate / (n * (1 - mu)) * total, rtol=1e-10, err_msg=mode)
            assert pushes["pushes"] == [40 + 20 * rank for rank in range(n)]
            assert pushes["worker"] == rank
            assert set(pushes["windows"]) == {sum(pushes["pushes"]) % n}
            assert max(pushes["taken"]) == sum(pushes["pushes"])


@scenario
def saved_at_rest() -> Any:
    """A set of files, saved in the middle of a window and of a period: where training goes on from it, and did."""
    results = {}
    for mode, name in crossed(list(MODES), ("diloco", "slowmo", "bmuf")):
        order = order_of(hvd.size())
        trainer = Trainer(mode, name)
        trainer.in_turn(order)
        if hvd.rank() == 0:
            trainer.step()
        parameters = torch.nn.ParameterDict({"fast": trainer.fast, "slow": trainer.slow})
        folder = Path(sys.argv[1]) / f"{mode} {name}"
        hvdp.save(folder, parameters, trainer.optimizer)
        expected = trainer.in_turn(order)
        trainer.optimizer.finalize()

        trainer = Trainer(mode, name)
        parameters = torch.nn.ParameterDict({"fast": trainer.fast, "slow": trainer.slow})
        hvd.barrier()
        trainer.optimizer.finalize()
        hvdp.load(folder, parameters, trainer.optimizer)
        trainer.optimizer.synchronizer.begin()
        found = trainer.in_turn(order)
        results[f"{mode} {name}"] = found == expected
        trainer.optimizer.finalize()
    return results


def test_a_set_that_was_saved_at_rest_resumes_exactly(ranks: list[dict[str, Any]]) -> None:
    for case in ranks[0]["saved_at_rest"]:
        assert column(ranks, "saved_at_rest", case) == [True] * len(ranks), case


@scenario
def by_speed_in_groups() -> Any:
    """The period after the second push, and what all have taken then; all are in each group, however they differ."""
    results = {}
    for mode in MODES:
        parameter = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
        with transport(mode) as center:
            optimizer = hvdp.PeriodicOptimizer(
                *(torch.optim.SGD([parameter], lr=0.1), [("w", parameter)], hvdp.DiLoCo(0.7, 0.5), hvdp.DyLU(50)),
                asynchronous=True,
                center=center,
                grace_seconds=1e6,
            )
        synchronizer = optimizer.synchronizer
        synchronizer.begin()
        synchronizer.progress.step_seconds = lambda steps: SECONDS[hvd.rank()]  # type: ignore[method-assign]
        while synchronizer.rounds < 2:
            parameter.grad = torch.full_like(parameter, 1.0 + hvd.rank())
            optimizer.step()
        results[mode] = [synchronizer.counters.next_exchange - synchronizer.local_steps, parameter.tolist()]
        hvd.barrier()
        optimizer.finalize()
    return results


def test_workers_of_different_speed_take_one_center(ranks: list[dict[str, Any]]) -> None:
    for mode in MODES:
        reports = column(ranks, "by_speed_in_groups", mode)
        assert [period for period, _ in reports] == [50, 38, 19][: len(ranks)]
        assert all(taken == reports[0][1] for _, taken in reports)


@scenario
def in_sixteen_bits() -> Any:
    """bfloat16 parameters: who has not moved pushes nothing."""
    results = {}
    for mode in MODES:
        parameter = torch.nn.Parameter(torch.full((5,), 0.1, dtype=torch.bfloat16))
        with transport(mode) as center:
            inner = torch.optim.SGD([parameter], lr=1.0)
            optimizer = hvdp.ModelAverageOptimizer(inner, [("w", parameter)], 1, asynchronous=True, center=center)
        optimizer.synchronizer.begin()
        if hvd.rank() == 0:
            parameter.grad = torch.full((5,), 0.0123, dtype=torch.bfloat16)
            optimizer.step()
        hvd.barrier()
        seen = []
        for _ in range(3):
            seen.append(optimizer.state_dict()["hvd_periodic"]["vectors"]["parameters"]["center"]["w"].tolist())
            hvd.barrier()
            optimizer.synchronizer.sync()
            hvd.barrier()
        optimizer.finalize()
        results[mode] = seen
    return results


def test_who_has_not_moved_pushes_nothing(ranks: list[dict[str, Any]]) -> None:
    for mode in MODES:
        for seen in column(ranks, "in_sixteen_bits", mode):
            assert seen == [seen[0]] * 3
            assert seen[0][0] != pytest.approx(0.1, abs=1e-3)


@scenario
def excluded_with_statistics() -> Any:
    """Batch normalization; the last rank's second exchange is not finite: it takes the center, and pushes nothing."""
    results = {}
    for mode in MODES:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        last = hvd.rank() == hvd.size() - 1
        with transport(mode) as center:
            inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
            optimizer = hvdp.PeriodicOptimizer(
                inner, model, hvdp.DiLoCo(), 2, asynchronous=True, center=center, nonfinite="skip"
            )
        generator = torch.Generator().manual_seed(hvd.rank())
        for step in range(9):
            optimizer.zero_grad()
            model(torch.randn(16, 3, generator=generator) + hvd.rank()).square().mean().backward()
            if last and step == 3:
                model[0].weight.grad.fill_(float("nan"))
            optimizer.step()
        optimizer.finalize()
        counters = optimizer.synchronizer.counters
        values = hvdp.center_state_dict(model, optimizer)
        results[mode] = [
            {name: value.tolist() for name, value in values.items()},
            optimizer.synchronizer.distance(),
            [counters.rounds, counters.left_out, int(model[1].num_batches_tracked)],
            optimizer.state_dict()["hvd_periodic"]["pushes"]["pushes"],
        ]
    return results


def test_a_rank_that_is_not_finite_takes_the_center(ranks: list[dict[str, Any]]) -> None:
    for mode in MODES:
        reports = column(ranks, "excluded_with_statistics", mode)
        for rank, (center, distance, counted, pushes) in enumerate(reports):
            left_out = rank == len(ranks) - 1
            assert center == reports[0][0], "one center, to the bit"
            assert all(np.isfinite(value).all() for value in center.values())
            assert distance == 0.0
            assert counted[:2] == [5 - left_out, left_out]
            assert pushes == [5] * (len(ranks) - 1) + [4]


if __name__ == "__main__":
    job.run_all(scenario)
