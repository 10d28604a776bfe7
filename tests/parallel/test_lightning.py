"""Lightning on two ranks, of Horovod and of torch.distributed: what it shows, decides and writes is of all of them."""

from __future__ import annotations

import math
import re
from pathlib import Path
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
    folder: Path = tmp_path_factory.mktemp("lightning")
    return run_scenarios(request.param, 2, "lightning_scenarios", folder, 300, framework="trainers")


def test_ranks_are_those_of_the_job(ranks: Reports) -> None:
    found = column(ranks, "who_is_who")
    assert sorted(found[0].pop("seen") + found[1].pop("seen")) == list(range(12))
    for rank, report in enumerate(found):
        assert report == {
            "global_rank": rank,
            "world_size": 2,
            "local_rank": rank,
            "node_rank": 0,
            "is_global_zero": rank == 0,
        }


def test_the_center_is_validated_tested_and_left_in_the_module(ranks: Reports) -> None:
    for report in column(ranks, "goes_where_the_oracle_goes"):
        assert report["steps"] == 13
        assert report["looks"] == 3  # Two while it trains, and the test.
        assert max(*report["validated"], report["end"], report["predicted"]) < 1e-12
        assert max(report["logged"], report["tested"]) < 1e-6  # Logged in float32.


def test_metrics_are_of_all_ranks(ranks: Reports) -> None:
    for report in column(ranks, "goes_where_the_oracle_goes"):
        assert (report["ranks"], report["metric"]) == (1.0, 0.5)


@pytest.mark.parametrize("center", ["root", "sharded"])
def test_a_center_that_is_elsewhere_is_validated_and_saved(ranks: Reports, center: str) -> None:
    assert all(max(found) < 1e-12 for found in column(ranks, "centers_that_are_elsewhere", center))


def test_the_root_alone_writes(ranks: Reports) -> None:
    of_root, of_other = column(ranks, "files")
    assert of_root["files"] == [
        *("epoch=0-step=5.ckpt", "epoch=1-step=10.ckpt", "last.ckpt"),
        "lightning_logs/version_0/metrics.csv",
    ]
    assert of_root["exchanges"]
    assert of_other["files"] == []
    assert max(of_root["saved"], of_other["saved"]) < 1e-12


def test_training_goes_on_to_the_bit(ranks: Reports) -> None:
    folders = ["epoch=1-step=10.ckpt.ranks", "last.ckpt.ranks"]  # That of the first epoch has gone with its checkpoint.
    expected = {"equal": True, "steps": 20, "own": True, "folders": folders}
    assert column(ranks, "resumes_to_the_bit") == [expected] * 2


def test_all_go_on_from_the_center_without_the_files_of_ranks(ranks: Reports) -> None:
    assert column(ranks, "goes_on_from_the_center") == [{"root": True, "lost": True, "files of ranks": False}] * 2


def test_accumulated_gradients_are_one_step(ranks: Reports) -> None:
    assert column(ranks, "accumulates") == [[4, 4, 1]] * 2


def test_precisions(ranks: Reports) -> None:
    """Lightning has no float16 on the CPU, and takes bfloat16."""
    for report in column(ranks, "precisions"):
        assert list(report.values()) == [[["torch.bfloat16"], ["torch.float32"]]] * 3


def test_an_overflow_on_one_rank_counts(ranks: Reports) -> None:
    assert column(ranks, "a_batch_that_overflows") == [[9, 0, 3], [9, 1, 3]]


def test_early_stopping_ends_all_at_the_same_step(ranks: Reports) -> None:
    assert column(ranks, "stops_early_on_all") == [[3, 9, 9]] * 2


def test_uneven_data(ranks: Reports) -> None:
    for kind in ("iterable", "counted"):
        (steps, mine, end, looks), (other_steps, others, other_end, other_looks) = column(ranks, "uneven_data", kind)
        assert (steps, mine, looks) == (16, 10, 4)
        assert (other_steps, others, other_looks) == (16, 16, 4)
        assert end == other_end
        assert all(map(math.isfinite, end))


def test_ranks_at_cross_purposes_find_out(ranks: Reports) -> None:
    for report in column(ranks, "cross_purposes"):
        assert "a collective of the trainer on rank 1" in report
        assert "exchange of optimizer" in report


@pytest.mark.parametrize("case", ["ema first", thorough("ema last"), thorough("swa first"), "swa last"])
def test_averages_of_weights_are_of_all_ranks(ranks: Reports, case: str) -> None:
    """Wherever the callback is in the list; what is left is equal to the bit."""
    found = column(ranks, "averages_weights", case)
    assert found[0]["left"] == found[1]["left"]
    for report in found:
        assert report["looks"] == 3
        assert max(report["errors"]) < 1e-12


def test_averages_of_weights_go_on_to_the_bit(ranks: Reports) -> None:
    assert column(ranks, "averages_go_on") == [{"equal": True, "difference": 0.0}] * 2


REFUSED = {
    "ddp": "ValueError: PeriodicCallback needs .* Received: DDPStrategy",
    "auto": "ValueError: PeriodicCallback needs .* Received: SingleDeviceStrategy",
    "no callback": "ValueError: PeriodicStrategy needs a PeriodicCallback",
    "plain": "TypeError: A trainer .* Received: SGD",
    "pruning": "ValueError: ModelPruning replaces parameters during training",
    "weight averaging": "ValueError: StochasticWeightAveraging recomputes the statistics of BatchNorm",
    "finetuning": "ValueError: Finetuning thaws .* not available for several levels of optimizers",
    "batch norm": "ValueError: `Trainer.sync_batchnorm=True.` averages",
    "gradients": "ValueError: all_gather.sync_grads=True.",
    "reduction": "ValueError: `reduce_op` must be .* Received: 'product'",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank(ranks: Reports, case: str) -> None:
    for message in column(ranks, "what_is_refused", case):
        assert re.match(REFUSED[case], message), message


def test_thawed_layers_are_adopted(ranks: Reports) -> None:
    """By averaging that a process computes for all ranks."""
    for report in column(ranks, "thawed_layers"):
        assert report["error"] < 1e-12
        assert report["moved"] > 1e-3
        assert (report["frozen"], report["looks"], report["rounds"]) == (True, 4, 6)


def test_layers_that_two_callbacks_thaw_are_adopted(ranks: Reports) -> None:
    for report in column(ranks, "thawed_layers_of_two_callbacks"):
        assert report["error"] < 1e-12
        assert (report["groups"], report["rounds"]) == ([0.1, 0.05, 0.05], 7)


def test_a_rank_alone_adopts_thawed_layers(with_trainers: None, tmp_path: Path) -> None:  # noqa: F811
    only = ["thawed_layers", "thawed_layers_of_two_callbacks"]
    (alone,) = run_scenarios("mpirun", 1, "lightning_scenarios", tmp_path, 200, framework="trainers", only=only)
    for name in only:
        assert alone[name]["error"] < 1e-12
    assert (alone["thawed_layers"]["moved"] > 1e-3, alone["thawed_layers"]["frozen"]) == (True, True)


def test_thawed_layers_of_uneven_data_end_with_one_center(ranks: Reports) -> None:
    one, other = column(ranks, "thawed_layers_of_all_algorithms")
    assert one == other
    assert all(math.isfinite(x) for end in one for x in end)


def test_thawed_layers_go_on_to_the_bit(ranks: Reports) -> None:
    one, other = column(ranks, "thawed_layers_go_on")
    assert one["equal True"] is other["equal True"] is True
    for each in ("end True", "end False"):
        assert one[each] == other[each]


def test_layers_that_one_rank_thaws_are_an_error_on_all(ranks: Reports) -> None:
    for said in column(ranks, "layers_that_one_rank_thaws"):
        assert said.startswith("ValueError: All ranks must run the same optimizer"), said


def test_a_rank_that_ends_while_another_validates_is_an_error_on_both(ranks: Reports) -> None:
    for said, steps, difference in column(ranks, "ends_at_different_batches"):
        assert said.startswith("RuntimeError: Ranks wait for each other in different places: ")
        assert "a collective of the trainer on rank 0; the end of training on rank 1" in said
        assert (steps, difference < 1e-12) == (6, True)
