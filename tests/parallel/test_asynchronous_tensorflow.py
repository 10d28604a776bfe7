"""Real jobs in asynchronous exchange, with Keras optimizers and those of TensorFlow 1 graphs, on every transport."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests import bounded_oracle
from tests.parallel.launch import run_scenarios
from tests.parallel.left_out_in_turn import ALGORITHMS, Slow, order_of
from tests.parallel.program import column, skip
from tests.parallel.stopped_inside import check_steps
from tests.parallel.test_scenarios import EXPECTED
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.tensorflow")

pytestmark = pytest.mark.timeout(240)

OF_ONE = (
    *("one_worker", "one_worker_in_fit", "left_out_in_turn", "resume", "resume_where_the_root_had_no_data"),
    *("loaded_and_saved_without_training", "resume_of_a_synchronizer", "callbacks", "overflow_on_one_rank"),
    *("embeddings_and_statistics", "kinds_of_variables", "several", "first_calls", "refusals"),
    "adopted_in_fit",
)
"""What one rank alone shows, or what does not depend on their number."""

JOBS = [
    ("mpirun", 1, *OF_ONE),
    ("mpirun, MPI", 2, "in_turn", "bounded_in_turn", "conservation", "stopped_inside"),
    thorough(("mpirun", 1)),
    thorough(("mpirun", 3)),
    thorough(("mpirun, MPI", 2, "resume")),
    thorough(("mpirun, MPI", 3, "in_turn", "bounded_in_turn", "conservation", "uneven_data", "several", "refusals")),
    ("horovodrun --gloo", 2, "uneven_data"),
    thorough(("horovodrun --gloo", 2, "in_turn", "uneven_data")),
]
"""Launcher, ranks, and what the job runs; default: everything. The last two have no MPI."""

GRAPHS = [
    thorough(("mpirun", 1, "v2")),
    ("mpirun", 2, "v1"),
    thorough(("mpirun, MPI", 2, "v2")),
    thorough(("horovodrun --gloo", 2, "v1")),
]
"""Launcher, ranks, and version."""

DEFAULT_RHO = [[1, 0], [1.3125, 0.4375], [1.984375, 0.4375], [1.9755859375, 0.9501953125]]
"""The numbers that tf.contrib.opt itself gave."""


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    launcher, size, *only = request.param
    arguments = (launcher, size, "asynchronous_tensorflow_scenarios", tmp_path_factory.mktemp("job"), 200)
    return run_scenarios(*arguments, framework="tensorflow", only=only)


@pytest.fixture(scope="module", params=GRAPHS, ids=lambda job: " ".join(map(str, job)))
def graphs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    launcher, size, mode = request.param
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(launcher, size, "asynchronous_contrib_scenarios", folder, 200, mode, framework="tensorflow")


def by_mode(ranks: list[dict[str, Any]], scenario: str) -> list[tuple[str, list[Any]]]:
    """Return what all ranks report, by transport."""
    modes = list(column(ranks, scenario)[0])
    assert modes[0] == "window"
    assert len(modes) == 1 or len(ranks) > 1
    return [(mode, column(ranks, scenario, mode)) for mode in modes]


def simulate(name: str, size: int, order: list[int]) -> tuple[list[list[float]], list[float], list[list[int]]]:
    """Return x of each rank and c after each turn, and of each rank its rounds, and pushes missed: sum and largest."""
    period, alpha = {"easgd": (2, 0.25), "easgd_default": (2, min(0.9 / size, 1 / (size + 1))), "agn": (4, 0.0)}[name]
    x, total, steps, seen = ([0.0] * size for _ in range(4))
    counters = [[0, 0, 0] for _ in range(size)]
    c, pushes = 0.0, 0
    trajectory: list[list[float]] = []
    centers = []

    def step(rank: int) -> None:
        nonlocal c, pushes
        gradient = -1.0 - 2 * rank
        x[rank] -= (0.1 if name == "agn" else 1.0) * gradient
        total[rank] += gradient
        steps[rank] += 1
        if steps[rank] % period:
            return
        if name == "agn":
            c -= 0.1 * total[rank] / period
            x[rank], total[rank] = c, 0.0
        else:
            difference = alpha * (x[rank] - c)
            x[rank], c = x[rank] - difference, c + difference
        missed = int(pushes - seen[rank])
        pushes += 1
        seen[rank] = pushes
        counters[rank] = [counters[rank][0] + 1, counters[rank][1] + missed, max(counters[rank][2], missed)]

    for rank in range(size):
        step(rank)
    for i, rank in enumerate(order):
        for _ in range(period - (i == 0)):
            step(rank)
        trajectory.append(list(x))
        centers.append(c)
    return trajectory, centers, counters


def test_a_rank_that_is_stopped_in_a_step_of_the_optimizer_blocks_nobody(ranks: list[dict[str, Any]]) -> None:
    check_steps(column(ranks, "stopped_inside"), rate=0.25, momentum=0.5, nesterov=False)


def test_one_worker_is_as_in_synchronous_exchange(ranks: list[dict[str, Any]]) -> None:
    (found,) = column(ranks, "one_worker")
    assert {case.split()[0] for case in found} >= {"agn", "easgd"}
    for case, (synchronous, asynchronous) in found.items():
        for expected, values in zip(synchronous, asynchronous, strict=True):
            assert values == pytest.approx(expected, rel=1e-6 if case.startswith("agn") else 1e-12), case
        assert synchronous[0] != synchronous[-1]


def test_numbers_worked_out_by_hand(ranks: list[dict[str, Any]]) -> None:
    """In an eager loop, compiled, and through fit; there also with several steps in one execution."""
    (found,) = column(ranks, "one_worker_in_fit")
    expected = {
        "easgd": EXPECTED["easgd", 1],
        "agn": [[0.1, 0], [0.2, 0], [0.3, 0], [0.1, 0.1], [0.2, 0.1], [0.3, 0.1], [0.4, 0.1], [0.2, 0.2]],
    }
    for name, pairs in expected.items():
        for way in ("eager", "function", "1"):
            seen = found.get(f"{name} {way}", pairs)
            assert seen[: len(pairs)] == [pytest.approx(pair, rel=1e-6) for pair in pairs], way
        each = found[f"{name} 1"]
        assert found.get(f"{name} 4", [each[3], each[7]]) == [each[3], each[7]]
    assert found.keys() >= {"easgd 1", "easgd 4", "easgd function", "agn 1", "agn eager"}


@pytest.mark.parametrize("name", ["easgd", "easgd_default", "agn"])
def test_one_rank_at_a_time(name: str, ranks: list[dict[str, Any]]) -> None:
    """Every number is known then: replicas, center, and how stale it was."""
    modes = [(mode, reports) for mode, reports in by_mode(ranks, "in_turn") if name in reports[0]]
    assert modes
    for mode, reports in modes:
        found = column(reports, name)
        replicas, centers, counters = simulate(name, len(ranks), found[0]["order"])
        tolerance = 1e-6 if name == "agn" else 1e-12
        for rank, report in enumerate(found):
            for turn, (x, c) in enumerate(report["seen"]):
                assert x == pytest.approx([replicas[turn][rank]] * 3, rel=tolerance), (mode, report["loop"], turn)
                assert c == pytest.approx([centers[turn]] * 3, rel=tolerance), (mode, report["loop"], turn)
            assert [report["rounds"], report["missed"], report["staleness"]] == counters[rank], (mode, report["loop"])
            assert report["final"] == found[0]["final"]


def test_messages_are_bounded(ranks: list[dict[str, Any]]) -> None:
    for _, reports in by_mode(ranks, "bounded_in_turn"):
        for name in reports[0]:
            orders, seen, norms = zip(*column(reports, name), strict=True)
            bounded_oracle.check(name, orders[0], seen, norms)


def test_a_rank_that_is_not_finite_starts_again_from_the_center(ranks: list[dict[str, Any]]) -> None:
    """Compiled and not, where PyTorch goes, see ``test_asynchronous.py``."""
    size = len(ranks)
    for mode, reports in by_mode(ranks, "left_out_in_turn"):
        assert {case.split()[0] for case in reports[0]} == set(ALGORITHMS)
        for case in reports[0]:
            slow = Slow(case.split()[0], size)
            expected = slow.run(order_of(size))
            for rank, (seen, rounds, left_out, sent) in enumerate(column(reports, case)):
                for turn, (x, c) in enumerate(seen):
                    assert x == pytest.approx([expected[turn][0][rank]] * 3, rel=1e-12), (mode, case, turn)
                    assert c == pytest.approx([expected[turn][1]] * 3, rel=1e-12), (mode, case, turn)
                assert (rounds, left_out, sent) == (slow.rounds[rank], slow.left_out[rank], 3 * 8 * rounds), case
            assert sum(slow.left_out) == 1


def test_sum_of_replicas_and_center_is_conserved(ranks: list[dict[str, Any]]) -> None:
    for mode, reports in by_mode(ranks, "conservation"):
        for report in reports:
            assert all(error < 1e-12 for error, _ in report.values()), mode
            assert all(moved > 0.1 for _, moved in report.values()), mode


def test_different_numbers_of_steps(ranks: list[dict[str, Any]]) -> None:
    """In three epochs; every rank pushes what is left at the end of each."""
    steps, rounds = [4, 5, 10], [3, 3, 6]
    for mode, reports in by_mode(ranks, "uneven_data"):
        for case in reports[0]:
            found = column(reports, case)
            for report in found:
                assert report["centers"] == found[0]["centers"], (mode, case)
                assert report["centers"][::2] == report["centers"][1::2], (mode, case)
                assert 0 <= report["staleness"] <= report["missed"]
                assert report["mean"] == report["missed"] / report["rounds"]
                assert math.isfinite(report["x"])
                assert report["in the file"] == report["centers"][-1]
            assert column(found, "steps") == steps[: len(ranks)]
            assert column(found, "rounds") == rounds[: len(ranks)]
            last = [report["rounds"] + report["missed"] for report in found]
            assert max(last) == sum(rounds[: len(ranks)]), "the last push of all"
            assert len(set(found[0]["centers"])) == min(1 + len(ranks), 3), "training goes on"


def test_resume(ranks: list[dict[str, Any]]) -> None:
    for mode, reports in by_mode(ranks, "resume"):
        for report in reports:
            assert report
            for name, found in report.items():
                assert all(found.values()), (mode, name, found)
    for mode, reports in by_mode(ranks, "resume_of_a_synchronizer"):
        assert reports == [{"easgd": [True] * 4, "agn": [True] * 4}] * len(ranks), mode


def test_resume_where_the_root_had_no_data(ranks: list[dict[str, Any]]) -> None:
    for mode, reports in by_mode(ranks, "resume_where_the_root_had_no_data"):
        for report in reports:
            assert report["after"] == report["before"], mode


def test_a_loaded_model_keeps_its_center_until_it_is_trained(ranks: list[dict[str, Any]]) -> None:
    for mode, reports in by_mode(ranks, "loaded_and_saved_without_training"):
        for report in reports:
            assert report["again"] == report["attached"] == report["expected"], mode
            assert report["read"] == ""
            assert report["center"] == report["expected"], mode


def test_adopted_in_fit(ranks: list[dict[str, Any]]) -> None:
    for mode, reports in by_mode(ranks, "adopted_in_fit"):
        for early, came, *center in reports:
            assert "adopt() is not available before finalize() in asynchronous training or with a quorum" in early, mode
            assert came == reports[0][1] != center[0], mode
            assert center == reports[0][2:], mode


def test_callbacks(ranks: list[dict[str, Any]]) -> None:
    keys = {"val_center_loss", "val_center_mae", "rounds", "center_distance", "staleness_mean", "staleness_max"}
    for mode, reports in by_mode(ranks, "callbacks"):
        for name in reports[0]:
            found = column(reports, name)
            for rank, report in enumerate(found):
                period = 4 if name == "agn" else 2
                batches = 3 + 2 * rank
                assert keys <= set(report["keys"])
                assert report["rounds"] == [batches * epoch // period for epoch in (1, 2, 3)]
                assert report["steps"] == 3 * batches
                assert report["finite"]
                assert report["saved"] == (rank == 0)
                assert report["final"] == found[0]["final"], (mode, name)
            assert found[0]["best"] or len(ranks) > 1, "alone, the file holds the center that was best"


def test_overflow_on_one_rank(ranks: list[dict[str, Any]]) -> None:
    """The last rank skips an update, and its gradient; the iteration counts."""
    size = len(ranks)
    c, pull = 0.0, []
    for _ in range(size):  # Elastic: each takes its steps 2 to 4, one after the other.
        x = 1.0
        for i in range(2, 5):
            x += not (len(pull) == size - 1 and i == 2)
            if i != 3:
                difference = 0.25 * (x - c)
                x, c = x - difference, c + difference
        pull.append(x)
    for mode, reports in by_mode(ranks, "overflow_on_one_rank"):
        for rank, report in enumerate(reports):
            skipped = int(rank == size - 1)
            assert report["easgd"] == [[4, 2, skipped], pytest.approx(pull[rank]), pytest.approx(c)], mode
            counted, x, c_agn = report["agn"]
            assert counted == [4, 1, skipped]
            assert c_agn == reports[0]["agn"][2]
            assert 0 < x <= c_agn


def test_embeddings_and_statistics(ranks: list[dict[str, Any]]) -> None:
    """A schedule of the learning rate as well; one worker does what it does in synchronous exchange."""
    for mode, reports in by_mode(ranks, "embeddings_and_statistics"):
        for name in reports[0]:
            found = column(reports, name)
            assert column(found, "center") == [found[0]["center"]] * len(ranks), (mode, name)
            assert all(column(found, "finite"))
            assert all(column(found, "statistics moved"))
            assert all(report.get("from synchronous", 0.0) < 1e-6 for report in found), (mode, name)


def test_kinds_of_variables(ranks: list[dict[str, Any]]) -> None:
    """Half precision; of integers the center keeps the largest."""
    last = len(ranks) - 1
    expected = {"bool": min(last, 1), "int8": last, "uint32": last, "uint64": last, "int64": last}
    for mode, reports in by_mode(ranks, "kinds_of_variables"):
        for rank, report in enumerate(reports):
            assert report["counts"] == {dtype: [value, 0] for dtype, value in expected.items()}, mode
            own = {dtype: [min(rank, 1) if dtype == "bool" else rank, 0] for dtype in expected}
            assert report["own counts"] == own, mode
            for case in report.keys() - {"counts", "own counts"}:
                assert report[case] == reports[0][case]
                assert math.isfinite(report[case][1])
                assert report[case][1] > 0


def test_several_optimizers(ranks: list[dict[str, Any]]) -> None:
    for mode, reports in by_mode(ranks, "several"):
        assert column(reports, "started") == [[float(len(ranks) - 1), 0.0]] * len(ranks)
        assert column(reports, "centers") == [reports[0]["centers"]] * len(ranks), mode
        if len(ranks) == 3:
            assert reports[0]["set"] == reports[2]["set"] > 0
            assert "set" not in reports[1]


def test_first_calls(ranks: list[dict[str, Any]]) -> None:
    for mode, reports in by_mode(ranks, "first_calls"):
        for rank, report in enumerate(reports):
            assert report["errors"] == ["", ""], "whether or not all start alike"
            assert report["loaded"] == [5.0, 5.0], "all start from what the root has loaded"
            assert report["rounds"] == [2 + rank, 2 + rank], mode
            assert report["distance"] == 0


def test_refusals(ranks: list[dict[str, Any]]) -> None:
    last, found = len(ranks) - 1, column(ranks, "refusals")
    assert column(found, "none") == column(found, "largest rate") == [""] * len(ranks)
    everywhere = {
        "beta": f"must be in (0, n = {last + 1}] in asynchronous exchange",
        "power": "`staleness_power` is for averaging, DiLoCo, SlowMo and BMUF",
        "outer optimizer": "ValueError: `outer_optimizer` is for synchronous exchange",
    }
    for case, text in everywhere.items():
        assert all(text in error for error in column(found, case)), case
    on_the_last = {
        "rate": "must be in (0, 1] in asynchronous exchange. Received: moving_rate=1.5",
        "unknown transport": "must be 'window' or 'service'. Received: 'pigeon'",
        "center": "Received: center='nowhere'",
    }
    for case, text in on_the_last.items():
        assert all(text in error for error in column(found, case)), case
        assert all(f"Rank {last} failed" in error for error in column(found, case)[:last])
    if last:
        differences = {
            "synchronous": "place of the center: asynchronous on rank",
            "transport": "environment variable HVD_PERIODIC_TRANSPORT",
            "sharded": "sharded center: False on rank",
        }
        for case, text in differences.items():
            for error in column(found, case):
                assert error.startswith("ValueError: All ranks must run the same optimizer")
                assert text in error


def test_graphs_of_one_worker(graphs: list[dict[str, Any]]) -> None:
    """The numbers of tf.contrib.opt, of x and of the global center variable, with every kind of variable."""
    if len(graphs) > 1:
        skip("needs one rank")
    expected = {"zero": EXPECTED["easgd", 1], "unlocked": EXPECTED["easgd", 1], "default": DEFAULT_RHO}
    found = graphs[0]["one_worker"]
    for case, report in found.items():
        name, _, use_resource = case.partition(" ")
        if name == "synchronous":
            assert found[f"default {use_resource}"]["plain"] == [pytest.approx(row) for row in report["plain"]]
            continue
        pairs = expected[name]
        assert [row[:2] for row in report["plain"][: len(pairs)]] == [pytest.approx(pair) for pair in pairs], case
        assert [row[2] for row in report["plain"]] == [0, 1, 1, 2, 2, 3]
        assert report["monitored"] == report["plain"]
        assert report["final"] == report["ended"] == report["plain"][-1]


def test_graphs_that_take_turns(graphs: list[dict[str, Any]]) -> None:
    """What contrib's own tests of two workers expect: x = .5 and .75, c = .75; AGN's center moves by .1 per turn."""
    n = len(graphs)
    for mode, reports in by_mode(graphs, "one_after_the_other"):
        x, c, center = [0.0] * n, [0.0] * n, 0.0
        for turn in range(3 * n):
            rank = turn % n
            difference = (x[rank] + 1.0 - center) / 2
            x[rank], center = x[rank] + 1.0 - difference, center + difference
            c[rank] = center
            for other, report in enumerate(column(reports, "easgd")):
                assert report[0][turn] == pytest.approx([x[other], c[other]]), (mode, turn)
            if (n, turn) == (2, 1):
                assert (x, center) == ([0.5, 0.75], 0.75), "contrib's numbers"
            pulled = 0.1 * (turn + 1)
            assert reports[rank]["agn"][0][turn] == pytest.approx([pulled] * 2, abs=1e-6), (mode, turn)
        for name, last in (("easgd", center), ("agn", 0.3 * n)):
            assert [report[1] for report in column(reports, name)] == [[pytest.approx(last, abs=1e-6)]] * n


OF_TWO = [0.2139375, 0.0784375, 0.277118582, 0.130990301, 0.325165782, 0.171916596]
"""The center of asynchronous averaging of the first two workers, worked out by hand, after every turn."""


def test_graphs_that_average_in_turn(graphs: list[dict[str, Any]]) -> None:
    """Every number is known then; at the end, all have pushed everything, and leave with the center."""
    size, (h, b, period) = len(graphs), ((0.5, 1.0, 0.7), (3.0, -1.0, 2.0), 3)
    rate = float(np.float32(0.1))  # TensorFlow has it in single precision.
    x, taken, known, center = [0.0] * size, [0.0] * size, [0.0] * size, 0.0

    def train(rank: int, steps: int) -> None:
        for _ in range(steps):
            x[rank] -= rate * h[rank] * (x[rank] - b[rank])

    expected: list[list[list[float]]] = []
    for turn in range(3 * size):
        rank = turn % size
        train(rank, period)
        center += (x[rank] - taken[rank]) / size
        x[rank] = taken[rank] = known[rank] = center
        if size == 2:
            assert center == pytest.approx(OF_TWO[turn], rel=1e-6)
        expected.append([[x[other], known[other], 1 + (turn - other) // size] for other in range(size)])
    for rank in range(size):
        train(rank, 2)
    expected.append([[x[rank], known[rank], 3] for rank in range(size)])
    center += sum(x[rank] - taken[rank] for rank in range(size)) / size
    expected += [[[center, center, 3]] * size] * 2
    for mode, reports in by_mode(graphs, "averaging_one_after_the_other"):
        for kind in reports[0]:
            for rank, seen in enumerate(column(reports, kind)):
                assert seen == [pytest.approx(of_ranks[rank], rel=1e-12) for of_ranks in expected], (mode, kind)


class Plain:
    """An optimizer of one number, by hand."""

    def __init__(self, name: str) -> None:
        self._name, self._m, self._v, self._t = name, 0.0, 0.0, 0

    def __call__(self, x: float, gradient: float) -> float:
        """Return the next value."""
        self._t += 1
        if self._name == "sgd":
            return x - 0.25 * gradient
        if self._name == "momentum":
            self._m = 0.5 * self._m + gradient
            return x - 0.125 * (gradient + 0.5 * self._m)
        self._m = 0.9 * self._m + 0.1 * gradient
        self._v = 0.999 * self._v + 0.001 * gradient**2
        rate = 0.125 * math.sqrt(1 - 0.999**self._t) / (1 - 0.9**self._t)
        return x - rate * self._m / (math.sqrt(self._v) + 1e-8)


def test_graphs_of_one_worker_normalized(graphs: list[dict[str, Any]]) -> None:
    """The center has an optimizer of its own, whose state is its own."""
    if len(graphs) > 1:
        skip("needs one rank")
    for name, found in graphs[0]["one_worker_normalized"].items():
        local, center = Plain(name), Plain(name)
        x = c = total = 0.0
        for i, pair in enumerate(found[:-1]):
            gradient = i * i / 8 - 1.0
            x, total = local(x, gradient), total + gradient
            if i % 3 == 2:
                c = center(c, total / 3)
                x, total = c, 0.0
            tolerance = 1e-4 if name == "adam" else 1e-6  # TensorFlow keeps the powers of Adam's betas in float32.
            assert pair == pytest.approx([x, c], rel=tolerance), (name, i)
        assert found[-1] == found[-2]


def test_graphs_with_different_numbers_of_steps(graphs: list[dict[str, Any]]) -> None:
    """The center is the same everywhere after the end; global_step counts one's own exchanges."""
    for mode, reports in by_mode(graphs, "different_numbers_of_steps"):
        for case in reports[0]:
            for way in ("monitored", "plain"):
                found = column(reports, case, way)
                assert [c for c, _ in found] == [found[0][0]] * len(graphs), (mode, case, way)
                assert [rounds for _, rounds in found] == [2, 0, 4][: len(graphs)]
                assert found[0][0] > 0
            assert column(reports, case, "in the file") == [found[0][0]] * len(graphs), (mode, case)


def test_graphs_conserve_the_sum(graphs: list[dict[str, Any]]) -> None:
    for mode, reports in by_mode(graphs, "conservation"):
        for case in reports[0]:
            starts, ends, centers = (np.array(rows) for rows in zip(*column(reports, case), strict=True))
            assert (centers == centers[0]).all()
            error = ends.sum(0) + centers[0] - starts.sum(0) - 1.0
            assert np.abs(error).max() < 1e-12, (mode, case)
            assert np.abs(centers[0] - 1.0).max() > 0.1


def test_graphs_without_locking(graphs: list[dict[str, Any]]) -> None:
    for mode, reports in by_mode(graphs, "without_locking"):
        for name in reports[0]:
            found = column(reports, name)
            assert all(finite for finite, _, _ in found)
            assert len({center for _, center, _ in found}) == 1, (mode, name)
            assert all(0 < largest < 10 for _, _, largest in found)


def test_graphs_go_on_from_the_checkpoint_of_the_chief(graphs: list[dict[str, Any]]) -> None:
    """Networks with partitioned, reference and resource variables, an embedding and a moving average."""
    for mode, reports in by_mode(graphs, "restart"):
        for case in reports[0]:
            for rank, (first, second) in enumerate(column(reports, case)):
                assert first["final"] == reports[0][case][0]["final"], (mode, case)
                assert second["first"] == first["final"], (mode, case)
                assert second["final"] == reports[0][case][1]["final"] != second["first"]
                assert first["finite"]
                assert second["finite"]
                own = (6 + 4 * rank) // 2
                assert first["steps"] == [0, own]
                assert second["steps"] == [3, 3 + own], "the global step is the chief's at the start"
                assert first["statistics"][0] != first["statistics"][1]
                for session, of_root in zip((first, second), reports[0][case], strict=True):
                    assert session["statistics"][1] == of_root["statistics"][1], (mode, case)


def test_graphs_save_the_final_center(graphs: list[dict[str, Any]]) -> None:
    """In the checkpoint that the session itself writes at its end."""
    for mode, reports in by_mode(graphs, "checkpoint_of_the_session"):
        assert column(reports, "final") == [reports[0]["final"]] * len(graphs)
        assert reports[0]["saved"] == reports[0]["final"], mode


def test_graphs_with_several_sessions(graphs: list[dict[str, Any]]) -> None:
    for mode, reports in by_mode(graphs, "several_sessions"):
        for first, second in reports:
            assert first == reports[0][0], mode
            assert second == reports[0][1], mode
            assert first[1] == second[1] == pytest.approx(1.0 * len(graphs))
        if len(graphs) == 1:
            assert reports[0] == [pytest.approx([0.625, 1.0])] * 2


def test_graphs_refuse(graphs: list[dict[str, Any]]) -> None:
    for mode, found in by_mode(graphs, "refusals"):
        for case in {"none", "elastic with a tensor"} & found[0].keys():
            assert column(found, case) == [""] * len(graphs), (mode, case)
        everywhere = {
            "tensor": "The optimizer of an asynchronous center is outside of the graph, where 'learning_rate'",
            "tensor on the last rank": "'learning_rate' of MomentumOptimizer, a tensor, has no value: pass a number",
            "final of a synchronous one": "RuntimeError: get_final_op() ends asynchronous training",
            "final before minimize": "RuntimeError: get_final_op() ends asynchronous training",
            "rate": "must be in (0, 1] in asynchronous exchange. Received: moving_rate=1.25",
            "average without a getter": "asynchronous=True needs a ModelAverageCustomGetter",
        }
        for case in everywhere.keys() & found[0].keys():
            assert all(everywhere[case] in error for error in column(found, case)), (mode, case)
        different = {"one is synchronous": "asynchronous", "one does not lock": "use_locking"}
        for case in different.keys() & found[0].keys() if len(graphs) > 1 else ():
            text = different[case]
            for error in column(found, case):
                assert error.startswith("ValueError: All ranks must run the same optimizer"), (mode, case)
                assert text in error
