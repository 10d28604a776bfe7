"""Jobs that are saved and started again: by as many ranks, to the bit; by others, from the center; from damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.launch import run_scenarios, start
from tests.parallel.program import column, repeated, skip
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.torch")

pytestmark = pytest.mark.timeout(400)

Reports = list[dict[str, Any]]

CHAINS = [
    (("horovodrun --gloo", 2), ("python", 1, "among_others")),
    (("mpirun, MPI", 2, "exact", "among_others"), ("mpirun, MPI", 1, "among_others")),
    thorough((("horovodrun --gloo", 2), ("python", 1))),
    thorough((("mpirun, MPI", 2), ("mpirun, MPI", 1))),
    thorough((("mpirun", 2), ("mpirun", 3), ("python", 1), ("mpirun", 2))),
    thorough((("torchrun", 2), ("torchrun", 3), ("torchrun", 1), ("torchrun", 2))),
]
"""Jobs one after another, which find what those before have saved: launcher, ranks, and what they run; default: all."""


@pytest.fixture(scope="module", params=CHAINS, ids=lambda chain: " ".join(f"{job[0]} {job[1]}" for job in chain))
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Reports]:
    """What each rank of each job reports."""
    shared = tmp_path_factory.mktemp("chain") / "shared"
    shared.mkdir()
    reports: list[Reports] = []
    for launcher, size, *chosen in request.param:
        only = chosen if all(len(report) != size for report in reports) else ["among_others"]
        folder = tmp_path_factory.mktemp("job")
        framework = "torch alone" if launcher == "mpirun, MPI" else "torch"  # There, Horovod is not imported.
        arguments = (launcher, size, "checkpoint_scenarios", folder, 150, str(shared))
        reports.append(run_scenarios(*arguments, framework=framework, only=only))
        for rank in range(size):  # The last save, for which no process has waited, is complete.
            (file,) = (shared.parent / f"shared-{size}-end" / str(rank)).glob("000001-step2/manifest.json")
            assert len(json.loads(file.read_text())["manifest"]["files"]) == size
    return reports


@pytest.fixture
def ranks(jobs: list[Reports]) -> Reports:
    """What the ranks of the first job report."""
    return jobs[0]


def test_a_rank_that_is_killed_while_it_saves_leaves_the_set_before(tmp_path: Path) -> None:
    """Rank 1 before its file has its name, then rank 0 before the manifest has; of two saves each, with ``keep=1``."""
    for rank, name in ((1, "rank-1.npz"), (0, "manifest.json")):
        command = ["-m", "tests.parallel.checkpoint_crash_program", str(tmp_path), str(rank), name]
        with pytest.raises(AssertionError, match=r"^Exit "):
            start("mpirun", 2, command, 60, "torch")
        complete = [file.parent.name for file in tmp_path.glob("*/manifest.json")]
        assert complete == (["000001-step4"] if rank == 1 else ["000003-step8"])
        assert len([folder for folder in tmp_path.iterdir() if folder.is_dir()]) == 2
    start("mpirun", 2, ["-m", "tests.parallel.checkpoint_crash_program", str(tmp_path)], 60, "torch")
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["from 8"] * 2
    assert [folder.name for folder in tmp_path.iterdir() if folder.is_dir()] == ["000006-step16"]


def test_training_goes_on_to_the_bit(jobs: list[Reports]) -> None:
    assert "exact" in jobs[0][0]
    for reports in jobs:
        for report in reports:
            found = report.get("exact", {})
            # Without those around Horovod's own; and, in every run, each over Horovod or over MPI.
            everywhere = bool(repeated(0))
            if found:
                number_of_cases = {(True, True): 18, (True, False): 10, (False, True): 16, (False, False): 6}
                assert len(found) == number_of_cases["distributed" in found, everywhere]
            for number, (name, seen) in enumerate(found.items()):
                assert seen["values"] == [number, "default", name, "tuple", 5], name
                uninterrupted, resumed = seen["ends"]
                assert resumed == uninterrupted, name
                assert seen["rates"][0] in (0.05 / 4, 0.01 / 4), name


def centers(jobs: list[Reports]) -> dict[str, str]:
    """Return the center that each job has saved, by number of ranks and case."""
    return {
        f"{len(reports)} {name}": seen["center"]
        for reports in jobs
        for name, seen in reports[0].get("exact", {}).items()
    }


def test_other_numbers_of_ranks_start_from_the_center(jobs: list[Reports]) -> None:
    saved = centers(jobs)
    for before, reports in enumerate(jobs):
        found = column(reports, "among_others")
        sizes = {len(job) for job in jobs[:before]} - {len(reports)}
        assert found[0].keys() == {case for case in saved if int(case.split()[0]) in sizes}
        for case, seen in found[0].items():
            for loaded, epoch, steps, error, end in column(found, case):
                assert loaded == saved[case], case
                assert epoch == [name for name in saved if name.split()[0] == case.split()[0]].index(case)
                assert (steps, error) == (5, ""), case
                assert end == seen[-1], case


def test_the_state_of_a_divided_center_is_cut_anew(jobs: list[Reports]) -> None:
    """On up to two ranks, a center that is divided goes where the whole one goes, to the bit; also after it was cut."""
    if "agn sharded" not in jobs[0][0]["exact"]:
        skip("This chain follows other cases")
    compared = 0
    for reports in jobs:
        found = reports[0]["among_others"]
        for case in found:
            if case.endswith(" sharded") and "diloco" not in case and len(reports) < 3 and not case.startswith("3"):
                assert found[case][-1] == found[case.removesuffix(" sharded")][-1], case
                compared += 1
    assert compared >= 2


def test_the_file_of_the_root_alone(ranks: Reports) -> None:
    found = column(ranks, "the_file_of_the_root_alone")
    for case, values in (("visible", [5, 5]), ("not visible", [5, -1]), ("on the root", [5, None])):
        of_ranks = column(found, case)
        assert [report[0] for report in of_ranks] == values, case
        # Gradients of the first step are of other parameters, where a rank takes them over in it.
        assert [report[2] for report in of_ranks] == [0, int(case != "visible")], case
    for case in found[0]:
        assert [report[1] for report in column(found, case)] == [6] * len(ranks), case
        assert len({report[3] for report in column(found, case)}) == 1, case
    assert found[0]["visible"][3] == found[0].get("broadcasts", found[0]["visible"])[3]
    assert found[0]["not visible"][3] == found[0]["on the root"][3]


def test_damage_is_an_error_on_all_ranks(ranks: Reports) -> None:
    found = column(ranks, "damage")
    for rank, (loading, step, older, older_step) in enumerate(found):
        named = (
            "000002-step5/rank-1.npz is damaged or belongs to another checkpoint: its SHA-256 differs from the manifest"
        )
        assert (named in loading) == (rank == 1)
        assert "RuntimeError: Training cannot start: loading the checkpoint failed on rank 1: " in step
        assert named in step
        assert "pass at_step=...: there are steps 2" in step
        assert [older, older_step] == ["", ""]


def test_ranks_may_have_disks_of_their_own(ranks: Reports) -> None:
    for rank, report in enumerate(column(ranks, "disks_of_their_own")):
        assert report["exact"] == [5, ""]
        assert report["seen"] == ["manifest.json"] * 2 + [f"rank-{rank}.npz"] * 2
        assert report["between"][0] == (5, 2)[rank]
        assert "different runs or steps: step 5 on rank 0; step 2 on rank 1" in report["between"][1]
        assert report["older"] == [2, ""]


def test_ranks_that_do_not_save_together_find_out(ranks: Reports) -> None:
    for behind, elsewhere in column(ranks, "in_different_places"):
        assert (
            behind
            == "RuntimeError: All ranks must save at the same local step. Received: step 5 on rank 0; step 4 on rank 1"
        )
        assert "save() of optimizer" in elsewhere
        assert "exchange of optimizer" in elsewhere
        assert elsewhere.endswith("All ranks save together, at the same local step")


def test_a_thread_writes_a_copy_while_ranks_exchange(ranks: Reports) -> None:
    for meanwhile, seen, (uninterrupted, resumed) in column(ranks, "in_the_background"):
        assert meanwhile == [2, 0]
        assert seen == [1]  # The second save has waited for the first before it asked for states.
        assert resumed == uninterrupted


def test_what_a_thread_cannot_write_is_an_error_on_all_ranks(ranks: Reports) -> None:
    for waited, saved, worked, left in column(ranks, "failing_in_the_background"):
        assert "RuntimeError: A checkpoint that was written in the background failed: " in waited
        assert "The previous checkpoint, written in the background, failed: " in saved
        for error in (waited, saved):
            assert "No space left on device" in error
        assert worked == ""
        assert left == ["manifest.json", "rank-0.npz", "rank-1.npz"]


def test_a_thread_that_writes_disturbs_no_collectives_without_names(ranks: Reports) -> None:
    for means, meanwhile, at_last in column(ranks, "beside_collectives_without_names"):
        assert means == [step + (len(ranks) - 1) / 2 for step in range(20)]
        assert (meanwhile, at_last) == (0, 1)


def test_around_the_beginning(ranks: Reports) -> None:
    for report in column(ranks, "around_the_beginning"):
        for name, (nothing, same, steps, inside) in report.items():
            assert (nothing, same, steps) == ({"epoch": 0}, True, 5), name
            assert inside.startswith("RuntimeError: save() inside the center() block"), name


def test_loops_of_ones_own(ranks: Reports) -> None:
    for (uninterrupted, none), (resumed, first) in column(ranks, "a_loop_of_its_own"):
        assert (none, first) == (0, 5)
        assert resumed == uninterrupted


def test_asynchronously_each_rank_has_its_own_steps(jobs: list[Reports]) -> None:
    found = [reports for reports in jobs if "asynchronous" in reports[0]]
    for reports in found or jobs[:1]:
        for rank, (steps, center, steps_loaded, center_loaded) in enumerate(column(reports, "asynchronous")):
            assert steps == steps_loaded == 4 + rank
            assert center == center_loaded == reports[0]["asynchronous"][1]


def test_nothing_but_sets_is_left(ranks: Reports, tmp_path_factory: pytest.TempPathFactory) -> None:
    for folder in Path(tmp_path_factory.getbasetemp()).glob("chain*/shared*/*/00*"):
        assert {file.suffix for file in folder.iterdir()} <= {".npz", ".json"}, folder
