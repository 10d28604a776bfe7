"""Options of the optimizers of TensorFlow 1 graphs on real ranks, beside those of numpy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests import oracle
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.tensorflow")

pytestmark = pytest.mark.timeout(360)

OF_LIBRARY = ("presence", "in_flight", "tables")
"""What sends messages of every kind: parts, counts beside values, rows, bytes, and some while ranks go on."""

JOBS = [
    ("horovodrun --gloo", 2, "v1"),
    thorough(("mpirun", 3, "v2")),
    *(thorough((launcher, 3, "v2", *OF_LIBRARY)) for launcher in ("mpirun, MPI", "mpirun, torch.distributed")),
]
"""Launcher, ranks, version, and what the job runs; default: everything."""


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: " ".join(map(str, job[:3])))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    launcher, size, mode, *only = request.param
    arguments = (launcher, size, "contrib_options_scenarios", tmp_path_factory.mktemp("job"), 300, mode)
    return run_scenarios(*arguments, framework="tensorflow", only=only)


def close(course: Any) -> Any:
    """TensorFlow's kernels may round once where numpy rounds twice."""
    return pytest.approx(np.ravel(course), rel=1e-12, abs=1e-12)


def assert_alike(ranks: list[dict[str, Any]], scenario: str) -> None:
    """Sessions and arrays take the same course, and all ranks have one center after every step."""
    for case in column(ranks, scenario)[0]:
        found = column(ranks, scenario, case)
        for rank, (of_session, of_arrays) in enumerate(found):
            for what in (0, 1):
                seen, expected = ([values[what] for values in course] for course in (of_session, of_arrays))
                assert np.concatenate(seen) == close(np.concatenate(expected)), (case, rank, what)
        centers = [[center for _, center in of_session] for of_session, _ in found]
        assert all(center in (centers[0], [[]] * len(center)) for center in centers), case
        assert centers[0][0] != centers[0][-1], f"the center of {case} moves"


def test_ranks_that_count_differently(ranks: list[dict[str, Any]]) -> None:
    assert_alike(ranks, "weights_and_audits")


def test_variables_that_take_part_in_other_ways(ranks: list[dict[str, Any]]) -> None:
    assert_alike(ranks, "participation")


def test_variables_that_some_ranks_train(ranks: list[dict[str, Any]]) -> None:
    assert_alike(ranks, "presence")


def test_tables_of_which_touched_rows_travel(ranks: list[dict[str, Any]]) -> None:
    """The dense exchange to the bit, or within rounding in elastic averaging, which also follows the oracle.

    More than two ranks may be added in another order in a shorter message.
    """
    size = len(ranks)
    for case in column(ranks, "tables")[0]:
        elastic = case.startswith("easgd")
        for (rows, fewer), (dense, more) in column(ranks, "tables", case):
            assert np.ravel(rows) == close(dense) if elastic or size > 2 else rows == dense, case
            if not case.startswith("average"):  # In 16 bits, what was rounded off travels as well.
                assert fewer < more, case
    (expected, center), _ = oracle.easgd_of_table(size, oracle.periodic(2), 0.1)
    for rank, ((rows, _), _) in enumerate(column(ranks, "tables", "easgd_decaying True True")):
        assert rows[-1][0] == pytest.approx(expected[rank], rel=1e-6), "the rate of TensorFlow is a float32"
        assert rows[-1][1] == pytest.approx(center, rel=1e-6)


def test_tables_start_again_with_the_replicas(ranks: list[dict[str, Any]]) -> None:
    for rows, dense in column(ranks, "tables_that_are_initialized_again"):
        for (of_rows, _), (of_whole, _) in zip(rows, dense, strict=True):
            assert np.ravel(of_rows) == close(of_whole)


def test_parts_of_the_parameters_that_are_exchanged_in_turn(ranks: list[dict[str, Any]]) -> None:
    assert_alike(ranks, "fragments")


def test_algorithms_that_tf_contrib_opt_did_not_have(ranks: list[dict[str, Any]]) -> None:
    assert_alike(ranks, "other_algorithms")


def test_the_center_on_one_rank(ranks: list[dict[str, Any]]) -> None:
    assert_alike(ranks, "on_the_root")


def test_exchanges_in_flight(ranks: list[dict[str, Any]]) -> None:
    assert_alike(ranks, "in_flight")


def test_a_center_that_went_astray_is_found(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    for first, second in column(ranks, "a_center_that_went_astray"):
        assert first == ""
        assert f"rank {last} from rank 0, first in 'b'. Has a session begun without the hook" in second


def test_variables_that_no_exchange_touches_and_that_differ_are_named(ranks: list[dict[str, Any]]) -> None:
    """Once, by the root; not averages, global steps, seeds, nor those of which each rank is to have its own."""
    last = "rank 1" if len(ranks) == 2 else "ranks 1 and 2"
    for case, lines in column(ranks[:1], "variables_that_differ")[0].items():
        found = [line for line in lines if "differs between ranks" in line]
        names = {"pointer", *(["outside"] if case.endswith("True") else []), "teacher"}
        if case.startswith("the start") and case.endswith("True"):
            names -= {"teacher"}  # Its center has set it.
        assert sorted(line.split("'")[1] for line in found) == sorted(names if "no audit" not in case else []), case
        for line in found:
            name = line.split("'")[1]
            argument = "parameters" if name == "teacher" else "buffers"
            assert line.endswith(
                f"Weight {name!r}, which no exchange touches, differs between ranks: {last} from rank 0. Assign it "
                f"identically on all ranks; or, to keep each rank's own, pass {argument}={{{name!r}: 'local'}}"
            )
    assert not any("differs" in line for lines in column(ranks[1:], "variables_that_differ") for line in lines)


def test_what_another_optimizer_exchanges_is_not_compared(ranks: list[dict[str, Any]]) -> None:
    assert not any("differs between" in line for line in column(ranks, "what_another_optimizer_exchanges")[0])


def test_a_rank_that_ends_early_is_an_error_on_all(ranks: list[dict[str, Any]]) -> None:
    for error in column(ranks, "a_rank_that_ends_early"):
        assert "Ranks wait for each other in different places" in error
        assert re.search(r"exchange of optimizer \d+ at local step 2 on rank", error)
        early = len(ranks) - 1
        assert re.search(rf"end of a session of optimizer \d+ at local step 1 on rank {early}\. Run equally", error)
