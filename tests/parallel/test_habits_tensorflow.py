"""What people do around exchanges, out of habit, in Keras: it works, or is an error on every rank; nothing waits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.launch import run_scenarios
from tests.parallel.program import column

pytest.importorskip("horovod.tensorflow")

pytestmark = [pytest.mark.timeout(180), pytest.mark.thorough]

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What each rank of one job reports; all tests of a job share it."""
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios("mpirun", 2, "habits_tensorflow_scenarios", folder, 150, framework="tensorflow")


def test_weights_of_a_compiled_model_loaded_on_the_root(ranks: Reports) -> None:
    found = column(ranks, "weights_of_a_compiled_model_loaded_on_the_root")
    for case in found[0]:
        of_ranks = column(found, case)
        if "sharded" in case:
            assert all("has loaded its shard of the center" in report[0] for report in of_ranks)
            continue
        for rank, (error, steps, rounds, skipped, center) in enumerate(of_ranks):
            assert error == "", case
            assert (steps, rounds) == (6, 3), case
            # In an eager loop the gradients of the first step are there already, of weights that nobody wanted.
            assert skipped == ("eager" in case and rank > 0), case
            assert center == of_ranks[0][4], case
        same = found[0][case.replace("compiled", "fit")][4]
        assert "eager" in case or of_ranks[0][4] == pytest.approx(same, abs=1e-5), case


def test_weights_of_another_step_are_named(ranks: Reports) -> None:
    for error in column(ranks, "weights_of_another_step_on_one_rank"):
        assert "have loaded states of different runs or steps: step 3 on rank" in error
        assert f"step 6 on rank {len(ranks) - 1}" in error


def test_models_loaded_from_files(ranks: Reports) -> None:
    found = column(ranks, "models_loaded_from_files")
    for case in ("together", "root"):
        assert found[0][case][:3] == ["", 5, 2], case
        assert column(found, case) == [found[0][case]] * len(ranks), case
    for error in column(found, "apart"):
        assert "have loaded states of different runs or steps: step 3 on rank" in error[0]


def test_a_state_loaded_after_a_compiled_step(ranks: Reports) -> None:
    for report in column(ranks, "a_state_loaded_after_a_compiled_step"):
        assert report == {place: [4, 10] for place in ("replicated", "root", "sharded")}


def test_gradients_of_replaced_parameters_are_not_applied(ranks: Reports) -> None:
    """In a compiled step they are of the values that the state has brought; in an eager one they were there before."""
    size, found = len(ranks), column(ranks, "a_state_loaded_into_a_synchronizer_on_the_root")
    gradients = [-1.0 - 2.0 * rank for rank in range(size)]
    first = -sum(gradients)  # Two steps, normalized by two.
    for loop, reports in {loop: column(found, loop) for loop in found[0]}.items():
        returned = [gradient if rank == 0 or loop == "compiled" else 0.0 for rank, gradient in enumerate(gradients)]
        # All have taken over the root's accumulator, with its gradient of step 3.
        second = -sum(gradients[0] + gradient for gradient in returned) / 2
        assert reports == [[gradient, 2, first + second] for gradient in returned], loop


def test_rates_that_are_set_per_epoch_where_steps_are_uneven(ranks: Reports) -> None:
    found = column(ranks, "rates_set_per_epoch")
    assert found == [["", 39, found[0][2]]] * len(ranks)


def test_two_optimizers(ranks: Reports) -> None:
    for report in column(ranks, "two_optimizers"):
        assert report["together"] == [3, 3]
        assert report["counted"] == ""
        assert "Ranks wait for each other in different places: " in report["not counted"]
