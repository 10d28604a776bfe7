"""Models that are divided between the ranks of an island, by ``fully_shard()``, and exchanged between islands."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests import oracle
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.torch")
if not pytest.importorskip("torch").distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

pytestmark = pytest.mark.timeout(150)

ISLANDS = [[0, 1], [2, 3]]
Reports = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["mpirun", thorough("torchrun")])
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What four ranks report; with Horovod beside torch.distributed, and without."""
    folder: Path = tmp_path_factory.mktemp("islands")
    return run_scenarios(request.param, 4, "islands_scenarios", folder, 120, framework="torch")


def close(values: Any) -> Any:
    return pytest.approx(values, rel=1e-9, abs=1e-11)


def test_two_levels_agree_with_the_oracle(reports: Reports) -> None:
    """Over a mesh and over Horovod; of one tensor that is divided unevenly, and of one of which a rank has nothing."""
    expected = oracle.island_results(ISLANDS)
    found = column(reports, "two_levels")
    assert set(found[0]) == set(expected)
    for name, (replicas, center) in expected.items():
        for rank, ways in enumerate(column(found, name)):
            assert len(ways) == 3
            for replica, seen in ways:
                assert replica == close(replicas[rank]), name
                assert seen == close(center), name


def test_options_that_change_nothing(reports: Reports) -> None:
    for report in reports:
        for way, (found,) in report["alike"].items():
            name = "average" if "weight" in way else "easgd"
            assert found == report["two_levels"][name][0], way


def test_options_by_element_go_as_for_whole_models(reports: Reports) -> None:
    for report in reports:
        for way, (found, expected) in report["as_whole_models"].items():
            for values, others in zip(found, expected, strict=True):
                assert values == close(others), way


def test_with_other_options_all_end_with_one_center(reports: Reports) -> None:
    for way, (replica, center, distance) in reports[0]["others"].items():
        assert replica == center, way
        assert distance == 0.0
        assert all(map(math.isfinite, center))
        assert all(report["others"][way] == reports[0]["others"][way] for report in reports)


def test_replicas_inside_of_islands(reports: Reports) -> None:
    replicas, center = oracle.island_results(ISLANDS)["diloco"]
    for rank, (replica, seen) in enumerate(column(reports, "hybrid")):
        assert replica == close(replicas[rank])
        assert seen == close(center)


def test_shards_travel_and_nothing_is_put_together(reports: Reports) -> None:
    """What ranks tell each other is gathered over torch.distributed as well, and is small."""
    for gathered, plainly, sent, rounds, held, all_there_is in column(reports, "exchanged"):
        assert gathered <= 8192
        assert plainly >= 4 * held
        assert rounds == 2
        assert 0.4 * all_there_is < held < 0.6 * all_there_is
        assert 4 * held * rounds <= sent < 4 * held * rounds * 1.1


def test_training_resumes_to_the_bit(reports: Reports) -> None:
    for report in reports:
        assert len(report["resumed"]) == 5
        for way, (trained, resumed) in report["resumed"].items():
            assert resumed == trained, way


def test_training_resumes_from_distributed_checkpoints(reports: Reports) -> None:
    for report in reports:
        for name, (trained, resumed, hasty) in report["checkpointed"].items():
            assert resumed == trained, name
            assert bool(hasty) == (name == "agn")
        assert "lacks the state of SGD, which moves the center" in report["checkpointed"]["agn"][2]


def test_parameters_of_other_kinds_and_statistics(reports: Reports) -> None:
    """Every place has statistics and moments of its own; what is frozen is the root's."""
    found = column(reports, "mixed")
    for rank, (center, moments, kind) in enumerate(found):
        peer = found[(rank + 2) % 4]
        assert kind == "DTensor"
        assert center == peer[0]
        assert moments == peer[1]
        assert center["scale"] == found[0][0]["scale"]
        assert center["still"] == found[0][0]["still"]
        assert center["norm.running_mean"] != found[(rank + 1) % 4][0]["norm.running_mean"]


REFUSED = {
    "uneven": r"differ in the shards of 'weight', an uneven sharding across islands: \[2, 4\] of \[4, 4\] by "
    r"Shard\(dim=0\) over a mesh of \[2\] on rank [01]; \[4, 2\] of \[4, 4\] by Shard\(dim=1\) .* on rank [23]",
    "other size": "uneven sharding across islands|their positions in islands",
    "one island": r"their positions in islands, which hold different shards .*: \[0\] on rank [02]; \[1\] on rank [13]",
    "all ranks": r"their positions in islands, .*: \[0\] on ranks 0 and 2; \[1\] on ranks 1 and 3",
    "one mesh": "their positions in islands|This rank owns no parameter elements: shard the model over fewer",
    "asynchronous": "rules out asynchronous=True",
    "skip": "rules out nonfinite='skip'",
    "bounds": "rules out max_message_norm and max_mean_norm",
    "complex": "'weight' is complex and sharded: complex parameters must be whole",
    "seconds": "rules out a period in Seconds",
    "save": r"save\(\), load\(\) and SaveBestCenter need the whole model on every rank",
    "load": r"save\(\), load\(\) and SaveBestCenter need the whole model on every rank",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_an_error_on_every_rank(case: str, reports: Reports) -> None:
    for message in column(reports, "refused", case):
        assert re.search(REFUSED[case], message)


def test_ranks_are_named_as_the_job_numbers_them(reports: Reports) -> None:
    """Also by a rank that was not at fault: its peer of the other island was."""
    for rank, message in enumerate(column(reports, "refused", "uneven")):
        assert re.search(rf"on rank {rank % 2}; .* on rank {rank % 2 + 2}", message)
    for rank, message in enumerate(column(reports, "peers")[:2]):
        assert message.startswith(f"RuntimeError: Rank {rank + 2} failed (1 of 2 ranks did): ")


def test_peers_hear_of_a_shard_that_is_not_finite(reports: Reports) -> None:
    messages = column(reports, "not_finite")
    assert all("parameter 'parts.0' is not finite" in messages[rank] for rank in (1, 3))
    assert "data of this rank" in messages[3]
    assert "nonfinite" not in messages[3], "islands refuse to skip a rank"
    assert messages[0] == messages[2] == ""
