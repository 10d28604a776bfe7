"""accelerate and transformers' Trainer on two ranks, by torchrun, and by mpirun beside Horovod."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.parallel.beside import trainers, with_trainers  # noqa: F401
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.torch")

pytestmark = [pytest.mark.timeout(330), pytest.mark.usefixtures("with_trainers")]

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["mpirun", thorough("torchrun")])
def ranks(request: pytest.FixtureRequest, with_trainers: None, tmp_path_factory: pytest.TempPathFactory) -> Reports:  # noqa: F811
    """What each rank reports."""
    return run_scenarios(
        request.param, 2, "huggingface_scenarios", tmp_path_factory.mktemp("job"), 300, framework="trainers"
    )


def test_a_loop_with_accelerate_goes_where_the_oracle_goes(ranks: Reports) -> None:
    """Gradients accumulate for a step; the center is reached through what ``prepare`` returns."""
    for rank, report in enumerate(column(ranks, "accelerated")):
        assert report["ranks"] == [rank, 2]
        assert report["steps"] == 13
        assert max(report["shown"], report["end"]) < 1e-12


def test_half_precision_and_an_overflow_on_one_rank(ranks: Reports) -> None:
    assert column(ranks, "half_precision") == [[["torch.bfloat16"], 9, overflows, 2] for overflows in (0, 1)]


def test_a_trainer_evaluates_and_saves_the_center(ranks: Reports) -> None:
    for rank, report in enumerate(column(ranks, "goes_where_the_oracle_goes")):
        assert report["ranks"] == [rank, 2]
        assert (report["steps"], report["looks"]) == (13, 4)  # Three while it trains, and one after it.
        assert max(*report["seen"], *report["saved"], report["end"]) < 1e-12


def test_the_root_alone_writes(ranks: Reports) -> None:
    """But for the states of random generators, which Trainers write on every rank."""
    of_root, of_other = column(ranks, "the_root_alone_writes")
    assert {"model.safetensors", "optimizer.pt", "rng_state_0.pth", "trainer_state.json"} <= set(of_root)
    assert of_other == ["rng_state_1.pth"]


def test_accumulated_gradients_are_one_step(ranks: Reports) -> None:
    assert column(ranks, "accumulates") == [[3, 3]] * 2


def test_a_second_training_has_one_level_of_its_own(ranks: Reports) -> None:
    assert column(ranks, "trains_twice") == [[False, False, 5]] * 2


def test_training_goes_on_to_the_bit_or_from_the_center(ranks: Reports) -> None:
    for exact, of_root in column(ranks, "resumes"):
        assert (exact[0], exact[2]) == (True, 15)
        assert of_root == [False, True, 15]


def test_training_goes_on_from_a_folder_of_another_run(ranks: Reports) -> None:
    """And never from a checkpoint of the same step that is of another run."""
    for report in column(ranks, "resumes_from_another_folder"):
        assert report["where it was written"] == report["told"] == [True, []]
        exact, (line,) = report["lost"]
        assert not exact
        assert "has no exchange state; starting exchanges from the model" in line


def test_a_checkpoint_that_is_asked_for_afterwards_has_the_center_or_is_an_error_on_all(ranks: Reports) -> None:
    for report in column(ranks, "asked_afterwards"):
        assert report["saved"] < 1e-12
        assert report["optimizer"].startswith("ValueError: A Trainer saves the state of an optimizer on the root alone")
        for case in ("model", "every rank"):
            assert report[case].startswith("ValueError: A callback after PeriodicTrainerCallback has requested")
    for message in column(ranks, "saved_in_another_way"):
        assert "holds the replica of a rank instead of the center" in message


def test_a_rank_that_stops_alone_is_an_error_on_all(ranks: Reports) -> None:
    for message in column(ranks, "stops_on_one_rank"):
        assert "RuntimeError: A rank has stopped training before the others, but a Trainer waits" in message


def test_early_stopping_ends_all_and_the_best_center_is_left(ranks: Reports) -> None:
    assert column(ranks, "stops_early_on_all") == [[6, 1]] * 2


@pytest.mark.parametrize("case", ["saves", "saves every rank", "nested", "asked"])
def test_a_center_that_is_elsewhere_is_not_saved_with_the_optimizer(ranks: Reports, case: str) -> None:
    """Every rank says so, for both places, whoever asks for the checkpoint."""
    for messages in column(ranks, "centers_that_are_elsewhere", case):
        for message, place in zip(messages, ("root", "sharded"), strict=True):
            assert re.match(f"ValueError: A Trainer saves the state .* Received: center='{place}'", message), message


def test_a_center_that_is_elsewhere_is_saved_as_the_model(ranks: Reports) -> None:
    for report in column(ranks, "models_of_centers_that_are_elsewhere"):
        assert max(report["root"], report["sharded"]) < 1e-12


REFUSED = {
    "plain": "TypeError: A trainer .* Received: SGD",
    "plain trainer": "TypeError: A trainer .* Received: AdamW",
    "wrapped": "RuntimeError: DistributedDataParallel averages the gradients of ranks that exchange",
    "strangers": r"ValueError: The Accelerator knows this process as rank 0 of 1, .* as rank \d of 2: start",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank(ranks: Reports, case: str) -> None:
    for message in column(ranks, "what_is_refused", case):
        assert re.match(REFUSED[case], message), message


def test_adapters_that_are_added_later(ranks: Reports) -> None:
    """By averaging that a process computes for all ranks, after each set of parameters."""
    trained = [f"backbone.lora_{part}.second.weight" for part in "AB"]
    for report in column(ranks, "adapters_that_are_added_later"):
        assert max(report["errors"]) < 1e-12
        assert (report["trained"], report["moved"]) == (trained, True)
