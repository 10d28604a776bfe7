"""TensorFlow 1 graphs without a getter and around a DistributedOptimizer, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests import oracle
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.tensorflow")

pytestmark = pytest.mark.timeout(200)

JOBS = [
    thorough(("horovodrun --gloo", "v1", [[0, 1], [2]])),
    thorough(("mpirun", "v2", [[0, 3], [1, 2]], "hierarchical", "embedding", "refused")),
]
"""Launcher, version, groups, and what the job runs; default: everything."""

whole = pytest.mark.parametrize("job", JOBS[:1], ids=str, indirect=True)

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module", params=JOBS, ids=str)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], Reports]:
    """The groups of a job, and what each of its ranks reports; all tests of a job share it."""
    launcher, version, groups, *only = request.param
    ranks, folder = sum(map(len, groups)), tmp_path_factory.mktemp("job")
    arguments = (version, str(groups))
    return groups, run_scenarios(
        launcher, ranks, "distributed_contrib_scenarios", folder, 180, *arguments, framework="tensorflow", only=only
    )


def close(values: Any) -> Any:
    """The rate of TensorFlow's optimizers is a float32."""
    return pytest.approx(values, rel=1e-6, abs=1e-6)


@whole
def test_scripts_without_a_getter(job: tuple[list[list[int]], Reports]) -> None:
    """The script's own broadcast starts all; checkpoints of all variables bring everything back."""
    reports = job[1]
    n = len(reports)
    expected = oracle.named_results(n)
    for name in ("easgd", "easgd_rho", "average", "agn"):
        replicas, center = expected[name]
        for rank, (x, c, restored, mean, names, local) in enumerate(column(reports, "without_getter", name)):
            assert x == close(replicas[rank]), (name, rank)
            assert c == close(center), (name, rank)
            assert restored
            others = 12 * (sum(range(1, n + 1)) / n)
            assert mean == [close(others + (1.0 + rank)), oracle.STEPS], "a mean at step 12, and one more step"
            assert {"w", "mean", "global_step", "global_center_variable/w", "local_step", "w/Momentum"} <= set(names)
            assert local == 0, "everything is in the script's checkpoints and broadcast"


@whole
def test_centers_start_where_a_script_without_a_getter_has_restored_its_variables(
    job: tuple[list[list[int]], Reports],
) -> None:
    for report in column(job[1], "weights_of_another_training"):
        assert report == dict.fromkeys(("easgd_rho", "agn"), [[100.0, 50.0]] * 2)


def test_two_levels_agree_with_the_oracle(job: tuple[list[list[int]], Reports]) -> None:
    groups, reports = job
    for name, (replicas, center) in oracle.grouped_results(groups).items():
        found = column(reports, "hierarchical", name)
        for rank, (x, c) in enumerate(found):
            assert x == close(replicas[rank]), (name, rank)
            assert c == close(center), (name, rank)
        for group in groups:
            assert [found[rank] for rank in group] == [found[group[0]]] * len(group), "members stay equal"


@whole
def test_post_local(job: tuple[list[list[int]], Reports]) -> None:
    reports = job[1]
    for name, (replicas, center) in oracle.post_local_results(len(reports), 4).items():
        for rank, (early, late) in enumerate(column(reports, "post_local", name)):
            assert early[0] == early[1], "until the switch the center is the replica"
            assert early[0] != oracle.START
            assert late == [close(replicas[rank]), close(center)], (name, rank)


@whole
def test_a_restart_does_not_fall_back_into_the_synchronous_phase(job: tuple[list[list[int]], Reports]) -> None:
    found = column(job[1], "resumed")
    for with_getter in (True, False):
        before, after = ([report[f"{steps} {with_getter}"] for report in found] for steps in (2, 6))
        assert all(x == before[0] for x in before), "gradients are averaged still"
        assert all(x != after[0] for x in after[1:]), "and no longer"


def test_sparse_gradients_on_both_sides_of_the_switch(job: tuple[list[list[int]], Reports]) -> None:
    """Rows that no rank touched do not move; all are equal while gradients are averaged, and after the exchange."""
    found = column(job[1], "embedding")
    n = len(found)
    for step in range(5):
        tables = [seen[step] for seen in found]
        assert all(table == tables[0] for table in tables) == (step != 3), step
    table = [[2.0 * row, 2.0 * row + 1] for row in range(4)]
    for _ in range(3):
        for row in range(4):
            touched = sum((rank % 4 == row) + (row == 3) for rank in range(n))
            table[row] = [value * (1 - 0.2 * touched / n) for value in table[row]]
    assert [value for row in found[0][2] for value in row] == close([value for row in table for value in row])


def test_refused(job: tuple[list[list[int]], Reports]) -> None:
    texts = {
        "over all": "so that nothing would be left to exchange",
        "asynchronous": "asynchronous=True needs a ElasticAverageCustomGetter",
        "passes": "backward_passes_per_step > 1 inside is for PyTorch only",
        "levels": "takes no optimizer that exchanges already",
        "rho": "`rho` has no default",
        "workers": "`num_worker` must be the number of Horovod ranks that exchange",
        "never started": "Has a session begun without the hook",
    }
    for report in column(job[1], "refused"):
        for case, text in texts.items():
            assert text in report[case], case
