"""Real jobs with Keras optimizers, asserted on what all ranks report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import oracle
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.test_scenarios import EXPECTED, EXPECTED_OF_RANK_1, check_adopted, check_exchanges
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.tensorflow")

OF_SIZE = (
    *("constant_gradients", "quadratics", "centers_and_buffers", "buffer_policies", "queues_of_features"),
    *("overflow_on_one_rank", "uneven_data", "disagreements", "late_start", "states_of_local_optimizers"),
    *("failures_on_the_last_rank", "statistics_of_integers", "process_set", "contract"),
    "adopted_quadratics",
)
"""What the number of ranks makes a difference for."""

JOBS = [
    thorough(("mpirun", 2)),
    ("horovodrun --gloo", 2, *OF_SIZE),
    thorough(("python", 1, *OF_SIZE)),
    thorough(("mpirun", 3, *OF_SIZE, "thawed_in_fit")),
    ("mpirun, MPI", 2, "constant_gradients", "contract"),
    thorough(("mpirun, MPI", 3, *OF_SIZE)),
    thorough(("mpirun, torch.distributed", 2, *OF_SIZE)),
]
"""Launcher, ranks, and what the job runs; default: everything."""

whole = pytest.mark.parametrize("ranks", JOBS[:1], ids=lambda job: f"{job[0]} {job[1]}", indirect=True)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: f"{job[0]} {job[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    launcher, size, *only = request.param
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(launcher, size, "keras_scenarios", folder, 240, framework="tensorflow", only=only)


@pytest.mark.parametrize("loop", ["eager", "function"])
def test_numbers_worked_out_by_hand(loop: str, ranks: list[dict[str, Any]]) -> None:
    reported = column(ranks, "constant_gradients")
    names = [case.partition(" ")[0] for case in reported[0] if case.endswith(loop)]
    assert set(names) >= {"easgd", "agn"}
    for name in names:
        expected = EXPECTED.get((name, len(ranks)), [])
        found = reported[0][f"{name} {loop}"][: len(expected)]
        assert found == [pytest.approx(pair) for pair in expected], name
        if len(ranks) == 2 and name in EXPECTED_OF_RANK_1:
            expected_x = EXPECTED_OF_RANK_1[name]
            assert [x for x, _ in reported[1][f"{name} {loop}"][: len(expected_x)]] == pytest.approx(expected_x)


@whole
def test_the_first_batch_builds_a_model_as_if_it_had_known_its_shape(ranks: list[dict[str, Any]]) -> None:
    """To the bit, on each rank: all begin the first step with the root's values, and nobody leaves an update out."""
    for report in column(ranks, "built_by_the_first_batch"):
        for name in ("easgd", "agn sharded", "averaged"):
            known, built = report[f"{name}, known"], report[f"{name}, built"]
            assert built == known, name
            assert built[:3] == [10, 2 if name == "averaged" else 5, 0], name
    centers = [report["built_by_the_first_batch"]["agn sharded, built"][3] for report in ranks]
    assert centers == [centers[0]] * len(ranks)


@whole
def test_fit_takes_the_same_steps(ranks: list[dict[str, Any]]) -> None:
    """Also where several steps are one execution: what is seen then is every fourth."""
    for report in ranks:
        for name in ("easgd", "average", "agn"):
            expected = report["constant_gradients"][f"{name} function"]
            found = report["constant_gradients_in_fit"]
            assert found[f"{name} 1"] == [pytest.approx(pair, rel=1e-6) for pair in expected]
            assert found[f"{name} 4"] == [found[f"{name} 1"][3], found[f"{name} 1"][7]]


def test_agreement_with_the_oracle(ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of float64: to 1e-12, but for AGN, whose center has a learning rate in float32, as Keras has it."""
    monkeypatch.setattr(oracle, "MOMENTUM", 0.5)  # as in the scenario: Keras rounds 0.6 to float32
    expected = oracle.parallel_results(len(ranks))
    found = column(ranks, "quadratics")
    assert len(found[0]) >= 4 + 2
    for case in found[0]:
        replicas, center = expected[case.partition(" ")[0]]
        for rank, report in enumerate(found):
            x, c = report[case]
            tolerance = 1e-6 if case.startswith("agn") else 1e-12
            assert x == pytest.approx(replicas[rank], rel=tolerance, abs=tolerance), f"replica {rank} of {case}"
            assert c == pytest.approx(center, rel=tolerance, abs=tolerance), f"center of {case} on rank {rank}"


def test_centers_and_statistics_are_identical_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    for name in column(ranks, "centers_and_buffers")[0]:
        reports = column(ranks, "centers_and_buffers", name)
        assert len({report["start"] for report in reports}) == 1, f"{name} starts from the root's weights"
        assert len(set(reports[0]["centers"])) == len(reports[0]["centers"]) >= 2, "the center moves at every exchange"
        for key in ("centers", "statistics"):
            assert column(reports, key) == [reports[0][key]] * len(ranks), f"{key} of {name}"
        for key in ("local", "seeds"):
            assert len({report[key] for report in reports}) == len(ranks), f"{key} of {name} stay local"


def test_policies_of_statistics(ranks: list[dict[str, Any]]) -> None:
    mean = (len(ranks) - 1) / 2
    found = column(ranks, "buffer_policies")
    assert [report["average"][0] for report in found] == [mean] * len(ranks)
    for policy in ("local", "no model"):
        assert [report[policy][0] for report in found] == list(range(len(ranks)))
    for policy, kinds in (("average", 1), ("local", 1), ("no model", len(ranks))):
        assert len({report[policy][1] for report in found}) == kinds, f"frozen weights, {policy}"


def test_queues_of_features_stay_normalized(ranks: list[dict[str, Any]]) -> None:
    found = column(ranks, "queues_of_features")
    for name, kinds in (("default", len(ranks)), ("root's", 1)):
        assert [report[name][0] for report in found] == pytest.approx([0.0] * len(ranks), abs=1e-6)
        assert len({report[name][1] for report in found}) == kinds, name


@whole
def test_buckets_and_graphs_change_nothing(ranks: list[dict[str, Any]]) -> None:
    for report in column(ranks, "small_buckets_equal_one"):
        assert [buckets for buckets, _, _ in report] == [15, 15, 1, 1]
        assert all(found[1:] == report[0][1:] for found in report)


@whole
def test_resume_continues_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    for report in column(ranks, "resume"):
        assert len(report) == 5
        assert all(report.values()), report
    assert column(ranks, "resume_of_a_synchronizer") == [[True, True]] * len(ranks)


@whole
def test_restore_on_the_root_only(ranks: list[dict[str, Any]]) -> None:
    assert column(ranks, "restore_on_root_only") == [[True, 3]] * len(ranks)


def test_overflow_on_one_rank(ranks: list[dict[str, Any]]) -> None:
    """The last rank skips one update of four; the others do not. Eagerly and compiled."""
    for rank, report in enumerate(column(ranks, "overflow_on_one_rank")):
        skipped = int(rank == len(ranks) - 1)
        assert report == [[4, 2, skipped, pytest.approx(4 - 1 / len(ranks))]] * 2


def test_uneven_data(ranks: list[dict[str, Any]]) -> None:
    """Compiled steps of some ranks meet the finalize() of others."""
    centers = {
        "average from 5": {1: 5.0, 2: 6.5},
        "agn from 5": {1: 2.0, 2: 4.0},
        "average from 0": {1: 0, 2: 1.5, 3: 3},
    }
    found = column(ranks, "uneven_data")
    assert found[0].keys() >= {"easgd from 5", "agn from 5", "average from 0"}
    for name in found[0]:
        reports = column(found, name)
        assert len({(center, rounds) for center, rounds, _ in reports}) == 1
        assert reports[0][0] == pytest.approx(centers.get(name, {}).get(len(ranks), reports[0][0]))
        if name.startswith("average"):
            assert all(center == x for center, _, x in reports)


def test_disagreement_is_an_error_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    found = column(ranks, "disagreements")
    assert column(found, "none") == [""] * len(ranks)
    refusals = {
        "refused": "Received: moving_rate=7.0",
        "center": "Received: center='nowhere'",
        "integer": "'w' must be float64, float32, bfloat16 or float16. Received: int32",
    }
    for case, text in refusals.items():
        assert text in found[last][case]
        assert all(f"Rank {last} failed" in report[case] for report in found[:last])
    if last:
        fragments = {
            "period": "differ in schedule: Every(period=2) on rank",
            "rate": "EASGD(moving_rate=0.05, beta=None, rho=0.0) on rank",
            "shape": "w float32[3] on rank",
            "dtype": "w float64[2] on rank",
            "algorithm": "Averaging() on rank",
        }
        for case, fragment in fragments.items():
            for error in column(found, case):
                assert error.startswith("ValueError: All ranks must run the same optimizer")
                assert fragment in error


def test_a_first_step_without_build(ranks: list[dict[str, Any]]) -> None:
    for equal, different, compiled in column(ranks, "late_start"):
        assert equal == different == "", "ranks whose values are replaced leave out the first update"
        assert compiled == -1.0, "a compiled step starts from the root's value"


@whole
def test_exchange_at_different_steps_is_an_error_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for errors in column(ranks, "different_steps"):
        for loop in ("eager", "function"):
            if len(ranks) == 1:
                assert errors[loop] == ""
            else:
                assert f"from 3 to {2 + len(ranks)}" in errors[loop]


@whole
def test_one_rank_compiles_and_others_do_not(ranks: list[dict[str, Any]]) -> None:
    assert column(ranks, "different_loops") == [report["constant_gradients"]["easgd eager"][:6] for report in ranks]


def test_failures_on_one_rank_are_errors_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    found = column(ranks, "failures_on_the_last_rank")
    for loop in ("eager", "function"):
        for rank, error in enumerate(column(found, f"schedule {loop}")):
            assert "The schedule failed: KeyError: 'no such step'" in error
            assert (f"Rank {last} failed (1 of {last + 1} ranks did)" in error) == (rank != last)


def test_statistics_of_integers_become_the_largest(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    expected = {"bool": min(last, 1), "int8": last, "uint32": last, "uint64": last, "int64": last}
    for report in column(ranks, "statistics_of_integers"):
        assert report == {dtype: [value, 0] for dtype, value in expected.items()}


def test_process_set(ranks: list[dict[str, Any]]) -> None:
    """Ranks 0 and 2 of three start from rank 2 and average steps of 1 and 3; rank 1 is not in the set."""
    first, outside, last = column(ranks, "process_set")
    assert first == last == [2.0, 6.0, [0, 2]]
    assert "must contain this rank" in outside


def test_horovod_has_to_be_initialized(ranks: list[dict[str, Any]], request: pytest.FixtureRequest) -> None:
    """Unless MPI's launcher has started the ranks, which then exchange over MPI; alone, a process is the only rank."""
    missing = "call hvd.init()" if len(ranks) > 1 and not ranks[0]["by_mpi"] else ""
    if "torch.distributed" in request.node.name:
        missing = "call torch.distributed.init_process_group()"
    for report in ranks:
        assert missing in report["not_initialized"]
        assert (report["not_initialized"] == "") == (missing == "")


def test_contract_of_the_communicator(ranks: list[dict[str, Any]]) -> None:
    assert column(ranks, "contract") == ["kept"] * len(ranks)


@whole
def test_torch_is_not_loaded(ranks: list[dict[str, Any]]) -> None:
    assert all(column(ranks, "torch_is_not_loaded"))


@whole
def test_schedules_of_the_clock(ranks: list[dict[str, Any]]) -> None:
    """In ``fit``, compiled and eager; losses are reported in its steps, and models saved and loaded."""
    check_exchanges(ranks)


def test_states_of_local_optimizers(ranks: list[dict[str, Any]]) -> None:
    """Exchanges are at even steps: which moments ranks have in common then, and which are zero."""
    size = len(ranks)
    for case in column(ranks, "states_of_local_optimizers")[0]:
        trajectories = column(ranks, "states_of_local_optimizers", case)
        policy = case.partition(",")[0]
        for step in range(8):
            first, second = (
                len({str(trajectory[step][moment]) for trajectory in trajectories}) == 1 for moment in range(2)
            )
            exchange = (step + 1) // 2 if step % 2 else 0
            due = {"periods": (exchange > 0, exchange > 0 and exchange % 2 == 0)}.get(policy, (exchange > 0,) * 2)
            assert size == 1 or (first, second) == due, f"{case}, step {step}"
            zero = not np.any([trajectory[step] for trajectory in trajectories])
            assert zero == (policy == "reset" and exchange > 0), f"{case}, step {step}"
    if size > 1:
        local = [[0.1 * (1 + 2 * rank) * (1 + 0.9)] for rank in range(size)]
        for trajectory in column(ranks, "states_of_local_optimizers", "average, function"):
            assert np.abs(trajectory[1][0]) == pytest.approx(np.mean(local, axis=0))


@pytest.mark.parametrize("loop", ["eager", "function"])
def test_numbers_of_a_variable_that_is_frozen_and_thawed(loop: str, ranks: list[dict[str, Any]]) -> None:
    found = column(ranks, "adopted_quadratics", loop)
    assert found == [found[0]] * len(ranks)
    if len(ranks) == 2:
        check_adopted(found[0])


def test_layers_that_are_thawed_in_mid_run(ranks: list[dict[str, Any]]) -> None:
    for center in column(ranks, "thawed_in_fit")[0]:
        found = column(ranks, "thawed_in_fit", center)
        assert found == [found[0]] * len(ranks), "one model after adopt(), and one center"
        assert found[0][3] == 4, "of 10 steps, and one by adopt()"
        assert len(ranks) == 1 or "All ranks must run the same optimizer" in found[0][0]
