"""Jobs without Horovod, under torchrun: what is torch.distributed's own, and that training is the same to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_periodic.ranks import named
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(180)

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[4, thorough(2), thorough(3)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What each rank of one job reports; all tests of a job share it."""
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios("torchrun", request.param, "torch_distributed_scenarios", folder, 150, framework="torch")


def averaged(start: float, own: float, slopes: list[float]) -> list[float]:
    """Return x after each of four steps, where replicas of these slopes are averaged after every second."""
    mean = 2 * sum(slopes) / len(slopes)
    return [start + own, start + mean, start + mean + own, start + 2 * mean]


def slope(rank: int) -> float:
    return 1.0 + 2.0 * rank


def test_nothing_is_initialized(ranks: Reports) -> None:
    for error in column(ranks, "not_initialized"):
        assert error.startswith(
            "RuntimeError: Neither Horovod nor torch.distributed is initialized: call hvd.init() or"
        )


def test_some_ranks(ranks: Reports) -> None:
    """Roots are named as the job counts, values start from there."""
    last = len(ranks) - 1
    for rank, found in enumerate(column(ranks, "some_ranks")):
        if rank >= last - 1:
            assert found == averaged(last, slope(rank), [slope(last - 1), slope(last)])
        else:
            assert found.startswith(f"ValueError: `process_set` must contain this rank ({rank})")


def test_arrays(ranks: Reports) -> None:
    for x, error in column(ranks, "arrays"):
        assert x == 2.0 * sum(map(slope, range(len(ranks)))) / len(ranks)
        assert error.startswith("TypeError: A communicator that is passed as `process_set` is used as it is")
        assert "does not carry numpy.ndarray" in error
        assert error.endswith("Received: TorchDistributedCommunicator")


def test_two_groups_at_once(ranks: Reports) -> None:
    middle = (len(ranks) + 1) // 2
    for members in (range(middle), range(middle, len(ranks))):
        for rank in members:
            expected = averaged(members[0], slope(rank), [slope(other) for other in members])
            assert ranks[rank]["two_groups_at_once"] == expected


def test_meshes(ranks: Reports) -> None:
    for rank, found in enumerate(column(ranks, "meshes")):
        first = rank % 2
        assert found[0] == averaged(first, slope(rank), [slope(first), slope(first + 2)])
        assert found[1].startswith("ValueError: `process_set` must be a DeviceMesh of one dimension")
        assert "mesh['islands']" in found[1]


def test_islands(ranks: Reports) -> None:
    """Each counts as one worker with the mean of its gradients."""
    for rank, (seen, error, groups) in enumerate(column(ranks, "islands")):
        means = [sum(map(slope, group)) / len(group) for group in groups]
        assert seen == averaged(0.0, means[rank // 2], means)
        assert error.startswith("TypeError: A DistributedDataParallel's optimizer cannot be copied")


def test_gradients_that_are_averaged_over_the_same_ranks_are_refused(ranks: Reports) -> None:
    start = f"ValueError: The DistributedDataParallel averages the gradients of {named(range(len(ranks)))} at"
    for found in column(ranks, "averaged_anyway"):
        assert all(error.startswith(start) for error in found.values())


def test_collectives_of_the_user_come_between(ranks: Reports) -> None:
    reports = column(ranks, "collectives_of_the_user")
    slopes = [slope(rank) for rank in range(len(ranks))]
    for rank, (seen, heard) in enumerate(reports):
        own, mean = slope(rank), 2 * sum(slopes) / len(slopes)
        # The mean of two steps is taken one step later, on top of what this rank did meanwhile.
        assert seen == [own, 2 * own, mean + own, mean + 2 * own]
        assert heard == [sum(range(len(ranks)))] * 4


def test_what_is_refused_is_an_error_on_every_rank(ranks: Reports) -> None:
    found, last = column(ranks, "refused"), len(ranks) - 1
    for case in ("none", "afterwards"):
        assert column(found, case) == [""] * len(ranks)
    everywhere = {
        "size": " of 1 of Horovod, and rank {rank} of {size}",
        "not installed": "Horovod is not installed",
        "process set": "Horovod is not installed",
        "device": "The process group carries no tensors of a cpu device (nccl for cuda)",
    }
    for case, text in everywhere.items():
        for rank, error in enumerate(column(found, case)):
            assert text.format(rank=rank, size=len(ranks)) in error, case
    for case, wrong, text in (
        ("numbers", {last - 1, last}, "Horovod and torch.distributed are both initialized"),
        ("variable", {last}, "HVD_PERIODIC_COMM must be 'horovod', 'torch' or 'mpi'. Received: 'nccl'"),
    ):
        for rank, error in enumerate(column(found, case)):
            assert text in error
            assert error.startswith("ValueError: " if rank in wrong else f"RuntimeError: Rank {min(wrong)} failed")


def test_devices_of_gloo(ranks: Reports) -> None:
    for on_cpu, on_cuda, on_xpu in column(ranks, "refused", "gloo"):
        assert on_cpu == on_cuda == ""
        assert on_xpu.startswith("ValueError: The process group carries no tensors of a xpu device (gloo for cpu, gloo")


def test_copies(ranks: Reports) -> None:
    for same, error in column(ranks, "copies"):
        assert same == [True, True]
        assert "can be unpickled only in the process that created the group" in error


def test_saved_in_the_background(ranks: Reports) -> None:
    assert column(ranks, "saved_in_the_background") == [[0.0, 0]] * len(ranks)


def test_initialized_anew(ranks: Reports) -> None:
    for rank, (errors, seen) in enumerate(column(ranks, "initialized_anew")):
        texts = ("Neither Horovod nor torch.distributed", "has been shut down", "has been reinitialized")
        assert all(text in error for text, error in zip(texts, errors, strict=True)), errors
        assert seen == averaged(0.0, slope(rank), [slope(other) for other in range(len(ranks))])
