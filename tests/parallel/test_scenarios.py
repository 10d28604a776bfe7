"""Real jobs: the scenarios on real ranks under every launcher, asserted on what all ranks report."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

from tests import oracle, overlap_oracle
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.torch")

OF_SIZE = (
    *("constant_gradients", "quadratics", "overlapped_quadratics", "centers_and_buffers", "disagreements"),
    *("distributed_optimizer_inside", "changes_after_construction", "different_steps", "uneven_data", "small_integers"),
    *("overflow_on_one_rank", "restore_on_root_only", "process_set", "contract"),
    *("adopted_quadratics", "thawed_layers"),
)
"""What the number of ranks makes a difference for."""

OF_THREE = ("constant_gradients", "quadratics", "uneven_data", "small_integers", "process_set", "contract")
"""What a third rank makes a difference for."""

OF_LIBRARY = ("constant_gradients", "overlapped_quadratics", "disagreements", "uneven_data", "process_set", "contract")
"""What the launcher, and the library that it leads to, make a difference for."""

JOBS = [
    ("mpirun", 2),
    ("mpirun", 3, *OF_THREE),
    ("python", 1, *OF_SIZE),
    ("horovodrun --gloo", 2, *OF_LIBRARY),
    ("torchrun", 2, *OF_LIBRARY),
    ("mpirun, MPI", 2, *OF_LIBRARY),
    *(thorough((launcher, 2, *OF_SIZE)) for launcher in ("horovodrun --gloo", "torchrun")),
    *(thorough(("mpirun", 3)), thorough(("mpirun", 3, *OF_SIZE))),
    thorough(("python", 1)),
    thorough(("horovodrun --gloo", 3)),
    thorough(("horovodrun --mpi", 2)),
    thorough(("torchrun", 3)),
    thorough(("mpirun, MPI", 2)),
    thorough(("mpirun, MPI", 3)),
]
"""Launcher, ranks, and the scenarios of the job; default: all."""


PLACEMENTS = ("replicated", "root", "sharded")


def name_of(job: Any) -> str:
    """Return the name of a job, in the names of its tests."""
    return f"{job[0]} {job[1]}{' of size' if len(job) > 2 else ''}"


pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", params=JOBS, ids=name_of)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job reports; all tests of a job share it."""
    launcher, size, *only = request.param
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(launcher, size, "scenarios", folder, 150, framework="torch", only=only)


EXPECTED = {
    ("easgd", 1): [[1, 0], [1.5, 0.5], [2.5, 0.5], [2.75, 1.25], [3.75, 1.25], [3.875, 2.125]],
    ("easgd", 2): [[1, 0], [1.5, 2], [2.5, 2], [3.125, 4.5], [4.125, 4.5], [4.96875, 7.125]],
    ("easgd_default", 2): [[1, 0], [4 / 3, 8 / 3], [7 / 3, 8 / 3], [28 / 9, 16 / 3]],
    ("average", 2): [[1, 0], [4, 4], [5, 4], [8, 8]],
    ("agn", 2): [[0.1, 0], [0.2, 0], [0.3, 0], [0.4, 0.4], [0.5, 0.4], [0.6, 0.4], [0.7, 0.4], [0.8, 0.8]],
    ("agn_average", 2): [[0.1, 0], [0.2, 0], [0.3, 0], [0.2, 0.2], [0.3, 0.2], [0.4, 0.2], [0.5, 0.2], [0.4, 0.4]],
}
"""x and c of rank 0 after each step: the numbers of the papers' formulas, worked out by hand."""

EXPECTED_OF_RANK_1 = {
    "easgd": [3, 4.5, 7.5, 8.375, 11.375, 11.90625],
    "easgd_default": [3, 4, 7, 68 / 9],
    "average": [3, 4, 7, 8],
    "agn": [0.3, 0.6, 0.9, 0.4, 0.7, 1.0, 1.3, 0.8],
}


def test_numbers_worked_out_by_hand(ranks: list[dict[str, Any]]) -> None:
    reported = column(ranks, "constant_gradients")
    for (name, size), expected in EXPECTED.items():
        if size == len(ranks):
            found = reported[0][name][: len(expected)]
            assert [value for pair in found for value in pair] == pytest.approx([v for pair in expected for v in pair])
    if len(ranks) == 2:
        for name, expected_x in EXPECTED_OF_RANK_1.items():
            assert [x for x, _ in reported[1][name][: len(expected_x)]] == pytest.approx(expected_x)


def test_complex_numbers_worked_out_by_hand(ranks: list[dict[str, Any]]) -> None:
    for center, reports in ((center, column(ranks, "complex_constant_gradients", center)) for center in PLACEMENTS):
        if len(ranks) == 2:
            assert reports == [[[[-0.5, 0.75]] * 2, [[-1.125, 1.6875]] * 2, [[-1.78125, 2.671875]] * 2]] * 2, center


BOUNDED = {
    "message": [(0.798, 1.064), (1.9362, 2.5816)],
    "mean": [(0.399, 0.532), (0.9681, 1.2908)],
    "median": [(1.596, 2.128), (3.8724, 5.1632)],
}


def test_bounded_norms_worked_out_by_hand(ranks: list[dict[str, Any]]) -> None:
    for name, centers in BOUNDED.items() if len(ranks) == 2 else ():
        for center in PLACEMENTS:
            for seen in column(ranks, "bounded_norms", f"{name} {center}"):
                assert np.array(seen) == pytest.approx(np.array(centers)), f"{name} {center}"


def test_agreement_with_the_oracle(ranks: list[dict[str, Any]]) -> None:
    expected = oracle.parallel_results(len(ranks))
    assert expected.keys() == column(ranks, "quadratics")[0].keys()
    for name, (replicas, center) in expected.items():
        for rank, (x, c) in enumerate(column(ranks, "quadratics", name)):
            assert x == pytest.approx(replicas[rank], rel=1e-12, abs=1e-12), f"replica {rank} of {name}"
            assert c == pytest.approx(center, rel=1e-12, abs=1e-12), f"center of {name} on rank {rank}"


def test_exchanges_that_travel_lose_no_local_progress(ranks: list[dict[str, Any]]) -> None:
    found = column(ranks, "overlapped_quadratics")[0]
    for case in found:
        name, _, overlap = case.partition(" ")
        reports = column(ranks, "overlapped_quadratics", case)
        assert [seen[-1] for seen in reports] == [reports[0][-1]] * len(ranks), "one center"
        if name.startswith("easgd"):
            blocking = column(ranks, "overlapped_quadratics", f"{name} 0")
            if len(ranks) <= 2:
                assert reports == blocking, "the trajectory without overlap, to the bit"
            for seen, other in zip(reports, blocking, strict=True):
                assert np.array(seen) == pytest.approx(np.array(other), rel=1e-12, abs=1e-12)
            continue
        steps = overlap_oracle.expected(name, len(ranks), overlap if overlap == "period" else int(overlap))
        for rank, seen in enumerate(reports):
            assert np.array(seen[:-1]) == pytest.approx(
                np.array([of_ranks[rank] for of_ranks in steps]), rel=1e-9, abs=1e-9
            ), (case, rank)


def test_networks_whose_exchanges_travel(ranks: list[dict[str, Any]]) -> None:
    """One center at the end; a copy and a checkpoint that were made in mid-flight go on alike."""
    for name in column(ranks, "overlapped_networks")[0]:
        reports = column(ranks, "overlapped_networks", name)
        assert reports == [reports[0]] * len(ranks), name
        original, copied, loaded = reports[0]
        tolerance = 0 if len(ranks) <= 2 else 1e-4  # Horovod may fuse in another order, and so may sums be rounded.
        assert copied == pytest.approx(original, rel=tolerance, abs=tolerance), name
        assert loaded == pytest.approx(original, rel=tolerance, abs=tolerance), name


def test_centers_and_buffers_are_identical_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    for name in column(ranks, "centers_and_buffers")[0]:
        reports = column(ranks, "centers_and_buffers", name)
        assert len(set(reports[0]["centers"])) == len(reports[0]["centers"]) >= 2, "the center moves at every exchange"
        for report in reports:
            for key in ("centers", "exported"):
                assert report[key] == reports[0][key], f"{key} of {name}"
        assert len({report["buffers"] for report in reports}) == 1, f"buffers of {name}"
        assert len({report["local"] for report in reports}) == len(ranks), f"replicas of {name} after a local step"


def test_buckets_change_nothing(ranks: list[dict[str, Any]]) -> None:
    for report in column(ranks, "small_buckets_equal_one"):
        assert report == {"buckets": [35, 1], "difference": pytest.approx(0.0, abs=1e-6)}


def test_horovod_has_to_be_initialized(ranks: list[dict[str, Any]]) -> None:
    """Unless MPI's launcher has started the ranks, which then exchange over MPI; alone, a process is the only rank."""
    for report in ranks:
        several = len(ranks) > 1 and not report["by_mpi"]
        assert "call hvd.init()" in report["not_initialized"] if several else report["not_initialized"] == ""


def test_disagreement_is_an_error_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    found = column(ranks, "disagreements")
    assert column(found, "none") == [""] * len(ranks)
    assert all(column(found, "refused"))
    assert "Received: moving_rate=7.0" in found[last]["refused"]
    assert "Received: center='nowhere'" in found[last]["center"]
    if len(ranks) == 1:
        return
    fragments = {
        "period": "differ in schedule: Every(period=2) on rank",
        "rate": "EASGD(moving_rate=0.05, beta=None, rho=0.0) on rank",
        "shape": "weight float32[3, 2]",
        "dtype": "weight float64[2, 2]",
        "name": "x.weight",
        "root": "differ in root rank",
        "algorithm": "Averaging() on rank",
    }
    for case, fragment in fragments.items():
        for error in column(found, case):
            assert error.startswith("ValueError: All ranks must run the same optimizer")
            assert fragment in error
            assert f"on rank {last}" in error
    for case in ("refused", "center"):
        assert all(f"Rank {last} failed" in report[case] for report in found[:last])


def test_a_distributed_optimizer_over_the_same_ranks_is_noticed(ranks: list[dict[str, Any]]) -> None:
    for error in column(ranks, "distributed_optimizer_inside"):
        if len(ranks) == 1:
            assert error == ""
        else:
            assert re.match(r"ValueError: The (hvd\.DistributedOpt\w+ inside|DistributedData\w+) averages", error)


def test_a_change_on_one_rank_is_an_error_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    assert all("Parameters of the optimizer were added" in e for e in column(ranks, "changes_after_construction"))


def test_exchange_at_different_steps_is_an_error_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    errors = column(ranks, "different_steps")
    if len(ranks) == 1:
        assert errors == [""]
    else:
        assert all(f"from 3 to {2 + len(ranks)}" in error for error in errors)


def test_uneven_data(ranks: list[dict[str, Any]]) -> None:
    """Centers worked out by hand for one and two ranks; for any number they are equal on all ranks."""
    centers = {1: {"average": 5.0, "agn": 2.0}, 2: {"average": 6.5, "agn": 4.0}}.get(len(ranks), {})
    for name in ("easgd", "average", "agn"):
        reports = column(ranks, "uneven_data", name)
        assert len({(center, rounds) for center, rounds, _ in reports}) == 1
        assert reports[0][0] == pytest.approx(centers.get(name, reports[0][0]))
        steps = 5 + 3 * (len(ranks) - 1) + 2 * (3 + len(ranks) - 1)
        later = column(ranks, "uneven_data", f"{name}, later")
        assert later == [[later[0][0], steps]] * len(ranks), "all go on from the step of the rank that did most"
    assert all(center == x for center, _, x in column(ranks, "uneven_data", "average"))


def test_overflow_on_one_rank(ranks: list[dict[str, Any]]) -> None:
    """The last rank skips one update of four; the others do not."""
    expected = 4 - 1 / len(ranks)
    skipped = [0] * (len(ranks) - 1) + [1]
    for report, skips in zip(column(ranks, "overflow_on_one_rank"), skipped, strict=True):
        assert report == [4, 2, skips, pytest.approx(expected)]


def test_buffers_of_small_integers_take_the_largest(ranks: list[dict[str, Any]]) -> None:
    seen = [int(rank < len(ranks)) for rank in range(5)]
    expected = dict.fromkeys(["torch.bool", "torch.uint8", "torch.int8", "torch.int16"], seen)
    assert column(ranks, "small_integers") == [expected] * len(ranks)


def test_resume_continues_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    assert all(all(report.values()) and len(report) == 4 for report in column(ranks, "resume"))


def test_restore_on_the_root_only(ranks: list[dict[str, Any]]) -> None:
    for restored, steps, error in column(ranks, "restore_on_root_only"):
        assert restored == [True, True]
        assert steps == 3
        assert ("center variables differ" in error) == (len(ranks) > 1)


def test_fragments_go_where_they_go_alone(ranks: list[dict[str, Any]]) -> None:
    """To the bit, but for sums over three ranks, whose order is Horovod's."""
    found = column(ranks, "fragments_of_quadratics")[0]
    for case in found:
        reports = column(ranks, "fragments_of_quadratics", case)
        alone = column(ranks, "fragments_of_quadratics", f"{case.partition(' ')[0]} alone")
        for rank, seen in enumerate(reports):
            assert np.ravel(seen) == pytest.approx(np.ravel(alone[rank]), rel=1e-12, abs=1e-12), case
        assert len({str(seen[-1]) for seen in reports}) == 1, "one center"
        if len(ranks) <= 2 and not case.startswith("agn"):
            assert reports == alone, case


def test_fragments_of_networks(ranks: list[dict[str, Any]]) -> None:
    """A copy and what was loaded go on as the original; all ranks end with one center."""
    for name in column(ranks, "fragments_of_networks")[0]:
        reports = column(ranks, "fragments_of_networks", name)
        assert reports == [reports[0]] * len(ranks), name
        original, *others = reports[0]
        for other in others:
            assert other == (original if len(ranks) <= 2 else pytest.approx(original, rel=1e-5, abs=1e-5)), name


def test_fragments_refused(ranks: list[dict[str, Any]]) -> None:
    texts = {
        "many": "`fragments` must be at most 3, the number of tensors and buckets",
        "on the last": "`fragments` must be at most 3, the number of tensors and buckets",
        "short": "`fragments` must be at most the local steps of a period, one for each. Received: fragments=3",
        "shrinking": "a period of 2 at step 3",
        "loaded": "The state was saved with fragments=3, and this optimizer has fragments=2",
    }
    for report in column(ranks, "fragments_refused"):
        for case, text in texts.items():
            assert text in report[case], case
        assert len(ranks) == 1 or "fragments=3) on rank" in report["different"]


def test_process_set(ranks: list[dict[str, Any]]) -> None:
    """Ranks 0 and 2 of three start from rank 2 and average steps of 1 and 3; rank 1 is not in the set."""
    first, outside, last = column(ranks, "process_set")
    assert first == last == [2.0, 6.0, 2]
    assert "must contain this rank" in outside


def test_modes_of_the_users_code_change_nothing(ranks: list[dict[str, Any]]) -> None:
    """Inference mode, autocast, a default device, ... around everything: the same numbers, and the block keeps them."""
    for report in column(ranks, "modes"):
        for mode, found in report.items():
            for algorithm, (kept, numbers) in found.items():
                assert kept, f"{mode} inside center() of {algorithm}"
                assert numbers == report["none"][algorithm][1], f"{algorithm} in {mode}"


def test_buffers_that_are_no_statistics(ranks: list[dict[str, Any]]) -> None:
    mean, infinity = (len(ranks) - 1) / 2, float("inf")
    assert len({equal for _, equal in column(ranks, "buffers")}) == 1
    for rank, (seen, _) in enumerate(column(ranks, "buffers")):
        first = [mean, infinity if rank == 0 else rank, mean]
        for (statistic, mask, state, normalized), expected in zip(seen, first, strict=True):
            assert statistic == pytest.approx([expected, mean])
            assert (mask, state, normalized) == ([0.0, -infinity], rank, True)


def test_contract_of_the_communicator(ranks: list[dict[str, Any]]) -> None:
    assert column(ranks, "contract") == ["kept"] * len(ranks)


EXCHANGES = {
    "piecewise": [2, 4, 6, 10, 14],
    "doubling": [1, 2, 4, 6, 10, 14],
    "qsr": [4, 8],  # (.2/.1)² = 4, then (.2/.01)² = 400
    "adacomm": [4, 8, 10, 11, 12, 13, 14, 15, 16],  # √(.1/.01 · 1/4) 4 = 6.3 does not fall: 2, then 1
}
"""Steps of 16 at which ranks exchange, worked out by hand: the rate is .1, and .01 after 5 steps; losses 4, 1, .25."""


def check_exchanges(ranks: list[dict[str, Any]]) -> None:
    """Assert what ranks report of schedules of the clock, without interruption and resumed after step 7."""
    reported = column(ranks, "schedules_of_the_clock")
    assert reported == [reported[0]] * len(ranks), "ranks exchange together"
    assert {case.partition(" ")[0] for case in reported[0]} == {*EXCHANGES, "seconds"}
    for case, steps in reported[0].items():
        if case.startswith("seconds"):
            assert steps[0] == 1, "to measure"
            assert all(later - earlier <= 5 for earlier, later in itertools.pairwise(steps[1:])), "0.15 s, of 0.03 each"
        else:
            assert steps == EXCHANGES[case.partition(" ")[0]], case


def test_schedules_of_the_clock(ranks: list[dict[str, Any]]) -> None:
    check_exchanges(ranks)


ADOPTED = [
    [0.104321875, 0.7391475],
    [0.224422972, 1.420331637],
    [0.33928258, 1.420331637],
    [0.433479688, 1.442588048],
]
"""Two parameters after rounds 1 to 4; the second is frozen after round 2 and thawed after round 3."""


def check_adopted(found: list[list[float]]) -> None:
    """Check the values of two ranks after each of five rounds."""
    assert found[:4] == [pytest.approx(pair, abs=1e-7) for pair in ADOPTED]
    assert found[4][1] == pytest.approx(1.463099129, abs=1e-7)


def test_numbers_of_a_parameter_that_is_frozen_and_thawed(ranks: list[dict[str, Any]]) -> None:
    found = column(ranks, "adopted_quadratics")
    assert found == [found[0]] * len(ranks)
    if len(ranks) == 2:
        check_adopted(found[0])


def test_layers_that_are_thawed_in_mid_run(ranks: list[dict[str, Any]]) -> None:
    for center in ranks[0].get("thawed_layers", ()):
        found = column(ranks, "thawed_layers", center)
        assert found == [found[0]] * len(ranks), "one model after adopt(), and one center"
        assert found[0][3] == 4, "of 10 steps, and one by adopt()"
        assert len(ranks) == 1 or "All ranks must run the same optimizer" in found[0][0]
