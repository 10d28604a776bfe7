"""Around Horovod's DistributedOptimizer of Keras: groups of ranks, levels, local steps after a synchronous phase."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import oracle
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.tensorflow")

pytestmark = pytest.mark.timeout(300)

JOBS = [
    thorough(("horovodrun --gloo", [[0, 1], [2]])),
    ("mpirun", [[0, 3], [1, 2]], "hierarchical", "levels", "levels_in_step", "refused"),
]
"""Launcher, groups, and what the job runs; default: everything."""

whole = pytest.mark.parametrize("job", JOBS[:1], ids=str, indirect=True)

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module", params=JOBS, ids=str)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], Reports]:
    """The groups of a job, and what each of its ranks reports; all tests of a job share it."""
    launcher, groups, *only = request.param
    ranks, folder = sum(map(len, groups)), tmp_path_factory.mktemp("job")
    return groups, run_scenarios(
        launcher, ranks, "distributed_tensorflow_scenarios", folder, 280, str(groups), framework="tensorflow", only=only
    )


def close(values: Any) -> Any:
    """Keras keeps rate and momentum in float32."""
    return pytest.approx(values, rel=1e-6, abs=1e-6)


def test_two_levels_agree_with_the_oracle(job: tuple[list[list[int]], Reports]) -> None:
    groups, reports = job
    expected = oracle.grouped_results(groups)
    for name in reports[0]["hierarchical"]:
        replicas, center = expected[name]
        found = column(reports, "hierarchical", name)
        for rank, (x, c, rounds) in enumerate(found):
            assert x == close(replicas[rank]), (name, rank)
            assert c == close(center), (name, rank)
            assert rounds == (3 if name == "agn" else 6)
        for group in groups:
            assert [found[rank] for rank in group] == [found[group[0]]] * len(group), "members stay equal to the bit"


@whole
def test_post_local(job: tuple[list[list[int]], Reports]) -> None:
    """The switch comes at the same step on all ranks; resumed before and after it, training goes on to the bit."""
    reports = column(job[1], "post_local")
    for name, (replicas, center) in oracle.post_local_results(len(reports), 4).items():
        for rank, report in enumerate(reports):
            straight, *resumed = (report[key] for key in report if key.startswith(f"{name} "))
            assert straight == [close(replicas[rank]), close(center), 3], (name, rank)
            assert resumed == [straight] * (name in ("easgd_rho", "agn"))
    for report in reports:
        for key in ("center before", "center after"):
            center, x, distance = report[key]
            assert center == x, "until the switch the center is the replica"
            assert distance == 0
            assert x != oracle.START


@pytest.mark.parametrize("scenario", ["levels", "levels_in_step"])
def test_averages_of_averages(scenario: str, job: tuple[list[list[int]], Reports]) -> None:
    """One optimizer of this package in another, each with a period and ranks of its own."""
    groups, reports = job
    seen = oracle.averages_of_averages(groups)
    for loop in reports[0][scenario]:
        for rank, (values, inner_rounds, rounds, said) in enumerate(column(reports, scenario, loop)):
            assert said == next(group for group in groups if rank in group)
            for step, expected in enumerate(seen):
                assert values[step] == close(expected[rank]), (loop, step, rank)
            assert (inner_rounds, rounds) == (6, 2)


@whole
def test_in_fit(job: tuple[list[list[int]], Reports]) -> None:
    """Sparse gradients, compression, clipping, accumulation and loss scaling; members of a group stay equal."""
    groups, reports = job
    found = {name: column(reports, "in_fit", name) for name in reports[0]["in_fit"]}
    for name, of_ranks in found.items():
        for group in groups:
            equal = [of_ranks[rank] == of_ranks[group[0]] for rank in group]
            assert all(equal) == (name != "apart" or len(group) == 1), (name, group)
    plain = np.array(found["sgd"])
    np.testing.assert_allclose(found["dense"], plain, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["scaled"], plain, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["compressed"], plain, rtol=0, atol=1e-2)
    for other in ("compressed", "clipped", "accumulated"):
        assert np.abs(np.array(found[other]) - plain).max() > 1e-6, other


@whole
def test_post_local_in_fit(job: tuple[list[list[int]], Reports]) -> None:
    """All ranks are equal before the switch, and not after a local step that follows the exchange."""
    found = column(job[1], "post_local_in_fit")
    for before, after, rounds in found:
        assert before == found[0][0]
        assert rounds == 1
        assert np.isfinite(after).all()
    assert any(after != found[0][1] for _, after, _ in found[1:]), "the last step was a local one"


@whole
def test_saved_and_loaded(job: tuple[list[list[int]], Reports]) -> None:
    for kept, loaded, error in column(job[1], "saved_and_loaded"):
        assert loaded == pytest.approx(kept, rel=1e-5, abs=1e-7), "Gloo sums three ranks in an order that varies"
        assert "call optimizer.attach(distributed=hvd.DistributedOptimizer(" in error


def test_refused(job: tuple[list[list[int]], Reports]) -> None:
    groups, reports = job
    texts = {
        "over all": "so that nothing would be left to exchange. Remove it; or average inside of groups",
        "inside the group": "so that nothing would be left to exchange",
        "asynchronous": "would exchange at different moments",
        "passes": "pass gradient_accumulation_steps to the optimizer inside",
        "around": "goes inside of an optimizer of hvd_periodic, not around it",
        "used": "has been used already: pass a new one",
        "overlap": "Groups must not overlap: rank 0 is in several",
        "size": "`node_groups(size=...)` must be an int >= 1",
    }
    for rank, report in enumerate(column(reports, "refused")):
        alone = len(next(group for group in groups if rank in group)) == 1
        for case, text in texts.items():
            assert text in report[case] or (alone and case in ("inside the group", "asynchronous")), (case, rank)
