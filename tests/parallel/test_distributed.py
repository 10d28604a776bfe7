"""Around an ``hvd.DistributedOptimizer``: groups of ranks, two levels, and local steps after a synchronous phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import oracle
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.torch")

pytestmark = pytest.mark.timeout(150)

JOBS = [
    ("mpirun", [[0, 3], [1, 2]]),
    thorough(("mpirun", [[0, 1], [2, 3], [4, 5]])),
    thorough(("mpirun", [[0, 2, 4], [1, 3]])),
    thorough(("horovodrun --gloo", [[0, 1], [2]])),
]

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module", params=JOBS, ids=str)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], Reports]:
    """The groups of a job, and what each of its ranks reports; all tests of a job share it."""
    launcher, groups = request.param
    ranks = sum(map(len, groups))
    folder = tmp_path_factory.mktemp("job")
    return groups, run_scenarios(launcher, ranks, "distributed_scenarios", folder, 120, str(groups), framework="torch")


def test_members(job: tuple[list[list[int]], Reports]) -> None:
    groups, reports = job
    equal = len({len(group) for group in groups}) == 1
    for rank, (all_groups, local, cross) in enumerate(column(reports, "members")):
        group = next(group for group in groups if rank in group)
        place = group.index(rank)
        assert all_groups == groups
        assert local == group
        assert cross == (sorted(other[place] for other in groups) if equal else list(range(len(reports))))


def test_all_ranks_start_from_the_root_whatever_the_order_of_groups(job: tuple[list[list[int]], Reports]) -> None:
    """Gradients of the first step are of other weights than those that rank 0 has loaded: no group steps with them."""
    found = column(job[1], "started")
    for case in found[0]:
        for report in column(found, case):
            assert report == [oracle.START, [7.0] * len(oracle.START), 1], case


def test_two_levels_agree_with_the_oracle(job: tuple[list[list[int]], Reports]) -> None:
    groups, reports = job
    for name, (replicas, center) in oracle.grouped_results(groups).items():
        for rank, (x, c, rounds) in enumerate(column(reports, "hierarchical", name)):
            assert x == pytest.approx(replicas[rank], rel=1e-12, abs=1e-12), (name, rank)
            assert c == pytest.approx(center, rel=1e-12, abs=1e-12), (name, rank)
            assert rounds == (3 if name == "agn" else 6)
        for group in groups:
            of_group = [reports[rank]["hierarchical"][name] for rank in group]
            assert of_group == [of_group[0]] * len(group), "the members of a group stay equal to the bit"


def test_groups_agree_on_when_to_exchange(job: tuple[list[list[int]], Reports]) -> None:
    """Mean losses of all ranks: 4, then (n + 1)/4; √((n + 1)/16) 4 is 2 on three ranks, and up to 3 on more."""
    found = column(job[1], "schedules")
    assert found == [found[0]] * len(found)
    assert found[0]["AdaComm"] == ([4, 8, 10, 11, 12] if len(found) == 3 else [4, 8, 11, 12])
    assert found[0]["Seconds"][0] == 1


def test_what_a_distributed_optimizer_offers_keeps_working(job: tuple[list[list[int]], Reports]) -> None:
    """Clipping between synchronize() and step(), compression, several backward passes per step."""
    for report in column(job[1], "variants"):
        assert report["two passes"] == pytest.approx(report["plain"], rel=1e-12)
        assert report["compressed"] == pytest.approx(report["plain"], abs=1e-3)
        assert report["compressed"] != report["plain"]
        assert report["clipped"] != pytest.approx(report["plain"], rel=0.1)
    clipped = column(job[1], "variants", "clipped")
    assert clipped == [pytest.approx(clipped[0])] * len(clipped), "all have just taken the mean"


def test_post_local(job: tuple[list[list[int]], Reports]) -> None:
    """The switch comes at the same step on all ranks; resumed before and after it, training goes on to the bit."""
    reports = job[1]
    for name, (replicas, center) in oracle.post_local_results(len(reports), 4).items():
        for rank, report in enumerate(column(reports, "post_local")):
            x, c, rounds = report[f"{name} None"]
            assert x == pytest.approx(replicas[rank], rel=1e-12, abs=1e-12), (name, rank)
            assert c == pytest.approx(center, rel=1e-12, abs=1e-12), (name, rank)
            assert rounds == 3
            assert report[f"{name} 3"] == report[f"{name} 6"] == report[f"{name} None"]
    for report in column(reports, "post_local"):
        for key in ("center before", "center after"):
            center, x = report[key]
            assert center == x, "until the switch the center is the replica"
            assert x != oracle.START


def test_statistics_join_at_the_switch(job: tuple[list[list[int]], Reports]) -> None:
    """Which no DistributedOptimizer averages: equal from there on after exchanges, and only then."""
    found = column(job[1], "statistics")
    for step in range(5):
        of_step = [ranks[step] for ranks in found]
        parameters, means, counts = zip(*of_step, strict=True)
        assert all(values == parameters[0] for values in parameters) == (step in (0, 1, 4)), step
        assert all(mean == means[0] for mean in means) == (step in (1, 4)), step
        assert counts == (step + 1,) * len(found)


def test_groups_end_together(job: tuple[list[list[int]], Reports]) -> None:
    """The first process to end would end Horovod for those that still exchange."""
    found = column(job[1], "ends_together")
    assert found == [[f"{rank}.ended" for rank in range(len(found))]] * len(found)


def test_the_state_of_the_root_alone(job: tuple[list[list[int]], Reports]) -> None:
    """It is enough after the switch of post-local; in groups members would go on with other momenta."""
    found = column(job[1], "restored_on_the_root")
    start = found[0]["post-local"][0]
    after = []
    for report in found:
        assert "load the state on every rank. Received: states of steps [0, 7]" in report["groups"]
        assert report["post-local"][0] == start
        assert report["post-local"][2] == 8
        after.append(report["post-local"][1])
    assert all(x != after[0] for x in after[1:]), "no rank averages gradients any longer"


def test_gradients_are_averaged_before_a_scaler_looks_at_them(job: tuple[list[list[int]], Reports]) -> None:
    for plain, scaled, error in column(job[1], "scaled"):
        assert scaled == pytest.approx(plain, rel=1e-12)
        assert "A GradScaler must not read gradients while" in error


@pytest.mark.parametrize("scenario", ["levels", "levels_in_step"])
def test_averages_of_averages(scenario: str, job: tuple[list[list[int]], Reports]) -> None:
    """One optimizer of this package in another, each with a period and ranks of its own."""
    groups, reports = job
    averaged = oracle.averages_of_averages(groups)
    for rank, (seen, inner_rounds, rounds) in enumerate(column(reports, scenario)):
        for step, expected in enumerate(averaged):
            assert seen[step] == pytest.approx(expected[rank], rel=1e-12, abs=1e-12), (step, rank)
        assert (inner_rounds, rounds) == (6, 2)


def test_refused(job: tuple[list[list[int]], Reports]) -> None:
    groups, reports = job
    texts = {
        "over all": "so that nothing would be left to exchange. Remove it; or average inside of groups",
        "inside the group": "so that nothing would be left to exchange",
        "asynchronous": "would exchange at different moments",
        "another group": "`process_set` must contain this rank",
        "closure": "takes no closures",
        "other periods": "All ranks must run the same optimizer",
        "other groups": "All ranks must pass the same groups",
        "a string": "`node_groups(size=...)` must be an int",
        "copy": "cannot be copied or pickled",
        "around": "goes inside of an optimizer of hvd_periodic, not around it",
        "overlap": "Groups must not overlap: rank 0 is in several",
        "missing": f"must hold every rank from 0 to {len(reports) - 1} and no other",
        "size": "`node_groups(size=...)` must be an int >= 1",
    }
    for rank, report in enumerate(column(reports, "refused")):
        alone = len(next(group for group in groups if rank in group)) == 1
        for case, text in texts.items():
            assert text in report[case] or (alone and case in ("inside the group", "asynchronous")), (case, rank)


def test_one_group_per_host(tmp_path: Path) -> None:
    """All ranks of this job are on one host."""
    for rank, (groups, local, cross) in enumerate(
        column(run_scenarios("mpirun", 2, "distributed_scenarios", tmp_path, 60, "nodes", framework="torch"), "members")
    ):
        assert groups == [[0, 1]]
        assert local == [0, 1]
        assert cross == [rank]
