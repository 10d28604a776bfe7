"""Asynchronous exchange in real jobs: through a shared window, a service thread, and one on every rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import bounded_oracle
from tests.helpers import random_arrays
from tests.parallel.launch import LAUNCHERS, run_scenarios, start
from tests.parallel.left_out_in_turn import ALGORITHMS, Slow, order_of
from tests.parallel.program import column, repeated, skip
from tests.parallel.stopped_inside import check_steps, local_steps, order_of_pushes
from tests.parallel.tiers import thorough
from tests.parallel.two_hosts import mpirun_on_two_hosts

for needed in ("horovod.torch", "mpi4py"):
    pytest.importorskip(needed)

pytestmark = pytest.mark.timeout(200)

PROGRAM = "asynchronous_scenarios"
MODES = ("window", "service", "sharded")
OF_LIBRARY = (
    *("descriptions", "messages", "conservation", "elastic_in_turn", "stopped_inside", "refused", "apart"),
    "unexchanged",
)
"""What ranks do to reach each other."""

ON_HOSTS = ("descriptions", "conservation", "elastic_in_turn", "bounded_in_turn")
"""Scenarios of hosts that may share memory, as emulated ones do."""

WITHOUT_MPI4PY = "WITHOUT_MPI4PY"

JOBS = [
    *(("mpirun", 2), ("mpirun", 3, "elastic_in_turn", "stopped_inside", "process_set")),
    *(thorough(("python", 1)), thorough(("mpirun", 3))),
    *(thorough(("mpirun, torch.distributed", 3)), thorough(("mpirun, MPI", 3))),
    *(("torchrun", 2, *OF_LIBRARY), ("horovodrun --gloo", 2, *OF_LIBRARY)),
    *(thorough(("torchrun", 2)), thorough(("torchrun", 3))),
    thorough(("mpirun", 10, "descriptions", "conservation", "stopped_inside")),
]
"""Launcher, ranks, and what the job runs; default: everything. Under ``torchrun``, there is no MPI."""

RATE = 0.25

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, size, *only = request.param
    framework = "torch alone" if launcher.startswith("mpirun, ") else "torch"  # There, Horovod is not imported.
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(launcher, size, PROGRAM, folder, 120, "transports", framework=framework, only=only)


@pytest.fixture(
    scope="module",
    params=[
        ("MPI", 2, *ON_HOSTS, "across_hosts"),
        thorough(("MPI", 3)),
        ("TCP", 2, *ON_HOSTS),
        thorough(("TCP", 3, *ON_HOSTS, "normalized_in_turn")),
    ],
    ids=lambda job: f"{job[0]} {job[1]}",
)
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What ranks on two hosts report, which without mpi4py have TCP."""
    words, (library, size, *only) = mpirun_on_two_hosts(), request.param
    if library == "TCP":
        words = [*words, "-x", f"{WITHOUT_MPI4PY}=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LAUNCHERS, "two hosts", words)
        return run_scenarios("two hosts", size, PROGRAM, tmp_path_factory.mktemp("hosts"), 120, "hosts", only=only)


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reports, Reports]:
    """What the ranks of a job report, and those of another that loads what the first has saved."""
    folder = tmp_path_factory.mktemp("saved")
    first, second = (
        run_scenarios("mpirun", 2, PROGRAM, folder, 120, group, framework="torch") for group in ("saving", "loading")
    )
    return first, second


def of_mode(reports: Reports, scenario: str, mode: str) -> list[Any]:
    """Return what all ranks report of a transport; skip the test if the job ran the scenario on another one."""
    if mode not in column(reports, scenario)[0]:
        skip(f"{scenario}: on another transport")
    return column(reports, scenario, mode)


def check_descriptions(reports: Reports, modes: tuple[str, ...]) -> None:
    expected = {
        "window": "a window of shared memory",
        "service": "messages to a service thread on rank 0",
        "sharded": "messages to a service thread on every rank",
    }
    for mode in modes:
        description = "memory of this process" if len(reports) == 1 else expected[mode]
        assert column(reports, "descriptions", mode) == [description] * len(reports)


def check_conservation(reports: Reports, modes: tuple[str, ...]) -> None:
    for mode in modes:
        for report in column(reports, "conservation", mode):
            assert len(report) == len({*repeated(0), len(reports) - 1}), "centers of the first and of the last rank"
            for error, error_of_float32, moved, buckets in report:
                assert error < 1e-12
                assert error_of_float32 < 1e-4
                assert moved > 1
                assert buckets == 20


def elastic_in_turn(size: int, order: list[int]) -> tuple[list[list[float]], list[float]]:
    """x of all workers and c after every turn: two steps, and an exchange with what is there."""
    x, c = [0.0] * size, 0.0
    replicas, centers = [], []
    for turn in order:
        x[turn] += 2 * (1.0 + 2 * turn)
        difference = x[turn] - c
        x[turn] -= RATE * difference
        c += RATE * difference
        replicas.append(list(x))
        centers.append(c)
    return replicas, centers


def check_elastic_in_turn(reports: Reports, modes: tuple[str, ...]) -> None:
    for mode in modes:
        order = column(reports, "elastic_in_turn", mode, "order")[0]
        assert len(set(order)) == len(reports)
        replicas, centers = elastic_in_turn(len(reports), order)
        for rank, report in enumerate(column(reports, "elastic_in_turn", mode)):
            for (x, c), expected_x, expected_c in zip(report["seen"], replicas, centers, strict=True):
                assert x == pytest.approx([expected_x[rank]] * 5, rel=1e-12)
                assert c == pytest.approx([expected_c] * 5, rel=1e-12)


def check_bounded_in_turn(reports: Reports, modes: tuple[str, ...]) -> None:
    for mode in modes:
        for name in column(reports, "bounded_in_turn", mode)[0]:
            orders, seen, norms = zip(*column(reports, "bounded_in_turn", mode, name), strict=True)
            bounded_oracle.check(name, orders[0], seen, norms)


def check_staleness(reports: Reports, modes: tuple[str, ...]) -> None:
    for mode in modes:
        for rank, report in enumerate(column(reports, "elastic_in_turn", mode)):
            missed, last = [], -1
            for push, turn in enumerate(report["order"]):
                if turn == rank:
                    missed.append(push - last - 1)
                    last = push
            assert report["rounds"] == len(missed)
            assert report["staleness"] == [sum(missed), max(missed), pytest.approx(sum(missed) / len(missed))]


CENTERS_MOVED_BY = {
    "window": {
        *("momentum, sum", "momentum, average", "adam, sum"),
        *repeated("sgd, sum", "momentum later, sum", "counts in its groups, sum"),
    },
    "service": {"sgd, sum", "momentum later, sum", *repeated("momentum, sum")},
    "sharded": {"adam, sum", "momentum, average", "counts in its groups, sum"},
}


def check_normalized_in_turn(reports: Reports, modes: tuple[str, ...]) -> None:
    for mode in modes:
        for report in column(reports, "normalized_in_turn", mode):
            assert set(report) == CENTERS_MOVED_BY[mode]
            for case, (difference, moved) in report.items():
                assert difference < 1e-12, case
                assert moved > 0.1, case


def test_transports(ranks: Reports) -> None:
    check_descriptions(ranks, MODES)


def test_messages(ranks: Reports, request: pytest.FixtureRequest) -> None:
    over_mpi = "mpirun" in request.node.callspec.id
    assert column(ranks, "messages") == ["MPIMessages" if over_mpi else "SocketMessages"] * len(ranks)


def test_conservation(ranks: Reports) -> None:
    check_conservation(ranks, MODES)


@pytest.mark.parametrize("mode", MODES)
def test_no_push_is_lost(ranks: Reports, mode: str) -> None:
    """Sums of integers are exact; with a rate of one, replica and center change places."""
    reports = column(ranks, "stress", mode)
    assert all(report["nothing lost"] and report["swapped"] for report in reports)
    rounds, last_push = column(reports, "rounds"), column(reports, "last push")
    for run in range(2):
        total = sum(of_rank[run] for of_rank in rounds)
        assert total == {1: 100, 2: 150, 3: 150, 4: 5000}[len(ranks)]
        assert max(of_rank[run] for of_rank in last_push) == total, "one rank pushed last, and knows of all others"


@pytest.mark.parametrize("mode", MODES)
def test_no_mixture_of_two_updates(ranks: Reports, mode: str) -> None:
    for report in column(ranks, "no_mixture", mode):
        torn, different = report["easgd"]
        assert torn == 0
        assert different > 25
        torn, apart, compared = report["agn"]
        assert torn == apart == 0
        assert compared == 25 * (len(ranks) if mode == "sharded" else 1)


@pytest.mark.parametrize("mode", MODES)
def test_uneven_data(ranks: Reports, mode: str) -> None:
    """Three epochs, of which some ranks have nothing; the sums of what all have pushed are known."""
    steps = [(3, 0, 1), (0, 5, 0), (9, 1, 0), (6, 0, 0)][: len(ranks)]
    reports = column(ranks, "uneven_data", mode)
    pushes = [[(count + 1) // 2 for count in of_rank] for of_rank in steps]
    center, expected = 0.0, []
    for epoch in range(3):
        center += sum(0.5 * (1 + 2 * rank) * of_rank[epoch] for rank, of_rank in enumerate(pushes))
        expected += [[pytest.approx(center)] * 4] * 2
    total = sum((1.0 + 2 * rank) * sum(of_rank) for rank, of_rank in enumerate(steps))
    for rank, report in enumerate(reports):
        assert report["agn"]["centers"] == expected
        for found in report.values():
            rounds = [sum(pushes[rank][: epoch + 1]) for epoch in range(3)]
            assert found["rounds"] == [count for count in rounds for _ in range(2)], "nothing is left the second time"
        assert report["easgd"]["total"] == pytest.approx([total] * 4)
        centers = report["easgd"]["centers"]
        assert centers == reports[0]["easgd"]["centers"], "to the bit"
        assert centers[::2] == centers[1::2]


def test_elastic_averaging_in_turn(ranks: Reports) -> None:
    check_elastic_in_turn(ranks, MODES)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_of_those_present(ranks: Reports, mode: str) -> None:
    """Who has no gradient of the expert is pulled, and does not move its center."""
    reports = of_mode(ranks, "present_in_turn", mode)
    order = reports[0]["order"]
    for which in range(2):
        x, c = [0.0] * len(ranks), 0.0
        for place, turn in enumerate(order):
            present = not (which and place % 3)
            x[turn] += (1.0 + 2 * turn) * present
            difference = x[turn] - c
            x[turn] -= RATE * difference
            c += RATE * difference * present
            for rank, report in enumerate(reports):
                found_x, found_c = report["seen"][place][which]
                assert found_x == pytest.approx([x[rank]] * 5, rel=1e-12)
                assert found_c == pytest.approx([c] * 5, rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_adopted_after_finalize(ranks: Reports, mode: str) -> None:
    """What stays trains on as if it were alone, with the state of the center's optimizer; what leaves is the same."""
    reports = of_mode(ranks, "adopted", mode)
    for report in reports:
        np.testing.assert_allclose(report["adopted"], report["alone"], rtol=1e-12)
        assert report["left"] == reports[0]["left"] != [1.0] * 4


def test_messages_are_bounded(ranks: Reports) -> None:
    check_bounded_in_turn(ranks, MODES)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_in_different_calls(ranks: Reports, mode: str) -> None:
    for errors in of_mode(ranks, "apart", mode) if len(ranks) > 1 else ():
        for pair, error in errors.items():
            one, other = sorted(pair.split(", "), key=["finalize", "audit", "adopt", "save"].index)
            calls = rf"{one}\(\) of optimizer (\d+); {other}\(\) of optimizer \1\."
            assert re.match(rf"DifferentCallsError: Ranks are in different calls: {calls}", error), (pair, error)


@pytest.mark.parametrize("mode", MODES)
def test_what_no_exchange_touches_is_compared(ranks: Reports, mode: str) -> None:
    """The root names each once."""
    others = {1: None, 2: "rank 1", 3: "ranks 1 and 2"}[len(ranks)]
    text = "Weight {!r}, which no exchange touches, differs between ranks: {} from rank 0"
    first, *rest = of_mode(ranks, "unexchanged", mode)
    assert first == ([text.format(name, others) for name in ("weight", "queue")] if others else [])
    assert not any(rest)


def test_staleness(ranks: Reports) -> None:
    check_staleness(ranks, MODES)


@pytest.mark.parametrize("place", ["bucket", "ledger"])
def test_a_rank_that_is_stopped_inside_blocks_nobody(ranks: Reports, place: str) -> None:
    """Others have pushed while it was; when it goes on, its push counts once, on the center as it is then.

    Replayed in the order of the transactions, all replicas and the center are those of elastic averaging, to rounding.
    """
    reports, size = column(ranks, "stopped_inside", place), len(ranks)
    replaced = [of_rank for _, _, of_rank, _ in reports]
    x, c = np.zeros((size, 9)), np.zeros(9)
    for bucket in range(3):
        part = slice(3 * bucket, 3 * bucket + 3)
        for rank, push in order_of_pushes(replaced, bucket):
            x[rank, part] += np.array(local_steps(rank, push))[part]
            difference = x[rank, part] - c[part]
            x[rank, part] -= RATE * difference
            c[part] += RATE * difference
            assert reports[rank][0][push][part] == pytest.approx(x[rank, part].tolist(), rel=1e-12)
    for rank, (seen, center, _, _) in enumerate(reports):
        assert center == pytest.approx(c.tolist(), rel=1e-12)
        assert seen[-1] == pytest.approx(x[rank].tolist(), rel=1e-12)
    pushed = sum(np.array(local_steps(rank, push)) for rank in range(size) for push in range(len(reports[rank][0])))
    assert np.allclose(x.sum(axis=0) + c, pushed, rtol=1e-12)
    assert reports[-1][3] >= 4 * (size - 1), "pushes of the others while it was stopped"


def test_a_rank_that_is_stopped_in_a_step_of_the_optimizer_blocks_nobody(ranks: Reports) -> None:
    check_steps(column(ranks, "stopped_inside", "optimizer"), rate=0.3, momentum=0.6, nesterov=True)


def test_accumulated_gradient_normalization_in_turn(ranks: Reports) -> None:
    check_normalized_in_turn(ranks, MODES)


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_is_not_finite_starts_again_from_the_center(ranks: Reports, mode: str) -> None:
    """Its momentum too begins anew; nothing is pushed. The Keras optimizers do the same."""
    size, reports = len(ranks), of_mode(ranks, "left_out_in_turn", mode)
    assert set(reports[0]) == set(ALGORITHMS)
    for name in ALGORITHMS:
        slow = Slow(name, size)
        expected = slow.run(order_of(size))
        for rank, (seen, rounds, left_out, sent) in enumerate(column(reports, name)):
            for turn, (x, c) in enumerate(seen):
                assert x == pytest.approx([expected[turn][0][rank]] * 3, rel=1e-12), (name, turn)
                assert c == pytest.approx([expected[turn][1]] * 3, rel=1e-12), (name, turn)
            assert (rounds, left_out, sent) == (slow.rounds[rank], slow.left_out[rank], 3 * 8 * rounds)
        assert sum(slow.left_out) == 1


def test_one_worker_is_synchronous(ranks: Reports) -> None:
    (report,) = column(ranks, "one_worker")
    numbers = report.pop("numbers")
    assert numbers == [[1, 0], [1.5, 0.5], [2.5, 0.5], [2.75, 1.25], [3.75, 1.25], [3.875, 2.125]]
    assert set(report) == {"easgd", "easgd_rho", "sgd", "momentum", "adam"}
    assert max(report.values()) < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_statistics(ranks: Reports, mode: str) -> None:
    reports = of_mode(ranks, "statistics", mode)
    for report in reports:
        assert report["finite"]
        assert report["between"]
        assert report["moved"] > 0.1
        assert report["center"] == reports[0]["center"]
        own = [8 + 2 * rank for rank in range(len(ranks))]
        assert max(own) <= report["batches"] <= sum(own), "a worker goes on from the largest that it has read"


@pytest.mark.parametrize("mode", MODES)
def test_statistics_are_handed_out(ranks: Reports, mode: str) -> None:
    reports = of_mode(ranks, "statistics_handed_out", mode)
    for replica, center in reports:
        assert replica == center == reports[0][1]


@pytest.mark.parametrize("mode", MODES)
def test_refused_arguments(ranks: Reports, mode: str) -> None:
    last = len(ranks) - 1
    for rank, report in enumerate(of_mode(ranks, "refused", mode)):
        assert report["limit"] == ""
        assert "`ElasticAverageOptimizer(moving_rate=...)` must be in (0, 1] in asynchronous" in report["rate"]
        assert f"`ElasticAverageOptimizer(beta=...)` must be in (0, n = {len(ranks)}]" in report["beta"]
        cited = "" if rank == last else f"Rank {last} failed"
        assert cited in report["one rate"]
        assert "Received: moving_rate=1.5" in report["one rate"]
        assert report["outer optimizer"].startswith("ValueError: `outer_optimizer` is for synchronous exchange")
        assert "state_dict()" in report["copied"]
        if last > 0:
            assert "They differ in algorithm" in report["another rate"]
            assert "They differ in place of the center" in report["one synchronous"]
            assert ("They differ in" in report["one place"]) == (mode == "service")


@pytest.mark.parametrize("mode", MODES)
def test_process_set(ranks: Reports, mode: str) -> None:
    first, outside, last = of_mode(ranks, "process_set", mode)
    assert "`process_set` must contain this rank" in outside
    assert first[0] is last[0] is True, "both start from rank 2"
    assert first[2] == last[2]
    start = np.concatenate([array.reshape(-1) for array in random_arrays(2)])
    total = np.sum([first[1], last[1], first[2]], axis=0) - 3 * start
    assert total[:3] == pytest.approx([6.0] * 3), "what both have added to the first tensor"
    assert total[3:] == pytest.approx(np.zeros(start.size - 3))


def test_transports_on_two_hosts(hosts: Reports) -> None:
    check_descriptions(hosts, MODES[1:])


def test_two_hosts_take_the_service(hosts: Reports) -> None:
    for description, error in column(hosts, "across_hosts"):
        assert description == "messages to a service thread on rank 0"
        assert error.startswith("RuntimeError")
        assert "HVD_PERIODIC_TRANSPORT=window needs all ranks on one host" in error


def test_conservation_on_two_hosts(hosts: Reports) -> None:
    check_conservation(hosts, MODES[1:])


def test_in_turn_on_two_hosts(hosts: Reports) -> None:
    check_elastic_in_turn(hosts, MODES[1:])
    check_staleness(hosts, MODES[1:])


def test_messages_are_bounded_on_two_hosts(hosts: Reports) -> None:
    check_bounded_in_turn(hosts, MODES[1:])


def test_accumulated_gradient_normalization_on_two_hosts(hosts: Reports) -> None:
    check_normalized_in_turn(hosts, MODES[1:])


@pytest.mark.parametrize("mode", MODES)
def test_any_rank_saves_alone(restarted: tuple[Reports, Reports], mode: str) -> None:
    for collectives in column(restarted[0], "save", mode):
        assert collectives == {"easgd": 0, "adam": 0}


@pytest.mark.parametrize("mode", MODES)
def test_restart_of_every_rank(restarted: tuple[Reports, Reports], mode: str) -> None:
    for report in column(restarted[1], "every_rank_its_own", mode):
        assert report == {case: {"center": True, "difference": 0.0} for case in ("easgd", "adam")}


@pytest.mark.parametrize("mode", MODES)
def test_restart_from_the_file_of_one_rank(restarted: tuple[Reports, Reports], mode: str) -> None:
    """Saved in training, and after its end."""
    assert of_mode(restarted[1], "the_same_file", mode) == [{"taken": 0.0, "final": 0.0}] * 2


@pytest.mark.parametrize("mode", MODES)
def test_restart_of_the_root_and_broadcast(restarted: tuple[Reports, Reports], mode: str) -> None:
    reports = of_mode(restarted[1], "the_root_alone", mode)
    for case in ("easgd", "adam"):
        for report in column(reports, case):
            assert report["x"] == report["center"] == 0.0
            assert report["steps"][0] == report["steps"][1] == 3
            assert report["rounds"] > 0
            assert (report["difference"] == 0.0) == (case == "adam"), "its replicas differ from those that were saved"


@pytest.mark.parametrize("mode", MODES)
def test_restart_on_another_transport(restarted: tuple[Reports, Reports], mode: str) -> None:
    """A center is a center; the state of its optimizer is in parts, or it is not, and no rank goes on without."""
    for report in column(restarted[1], "another_transport", mode):
        for saved in MODES:
            assert report[f"easgd, {saved}"] == [["", ""], True]
            errors, same = report[f"adam, {saved}"]
            if (saved == "sharded") == (mode == "sharded"):
                assert (errors, same) == (["", ""], True)
            else:
                assert all(error.startswith("ValueError: The state of the center optimizer was") for error in errors)


@pytest.mark.parametrize("mode", MODES)
def test_restart_from_before_the_first_step(restarted: tuple[Reports, Reports], mode: str) -> None:
    assert of_mode(restarted[1], "before_the_first_step", mode) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("mode", "way", "launcher"),
    [
        ("window", "a worker raises in training", "mpirun"),
        ("service", "the root raises in training", "mpirun"),
        ("sharded", "the root raises while others finalize", "mpirun"),
        ("service", "the root raises while others finalize", "torchrun"),
        thorough("window", "a worker raises in training", "torchrun"),
    ],
)
def test_failure_ends_the_job(mode: str, way: str, launcher: str, tmp_path: Path) -> None:
    """The others would train, or wait, for ever."""
    command = ["-m", f"tests.parallel.{PROGRAM}", str(tmp_path), way, mode]
    with pytest.raises(AssertionError, match=r"\AExit [1-9]") as failure:
        start(launcher, 2, command, 60, framework="torch")
    assert "ArithmeticError: something in training" in str(failure.value)
    assert "failed in asynchronous training; ending the job" in str(failure.value)


@pytest.mark.parametrize(
    ("mode", "way", "launcher"),
    [
        ("window", "only the last ones finalize two", "mpirun"),
        ("service", "only the last ones finalize two", "mpirun"),
        ("sharded", "nobody does", "mpirun"),
        ("sharded", "only the last ones finalize two", "torchrun"),
        thorough("window", "nobody does", "torchrun"),
    ],
)
def test_finalize_may_be_forgotten(mode: str, way: str, launcher: str, tmp_path: Path) -> None:
    output = start(launcher, 2, ["-m", f"tests.parallel.{PROGRAM}", str(tmp_path), way, mode], 60, framework="torch")
    assert "Rank 0 exits without finalize(), and waits for the others" in output
