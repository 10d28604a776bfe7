"""Background saves in elastic jobs over torch.distributed, of whose ranks one is killed before the set is complete."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.rendezvous_scenarios import SAVES, read_file
from tests.parallel.test_rendezvous import ScriptedJob, is_replaced, run

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ScriptedJob]]:
    """Run all jobs at once."""
    yield from run(SAVES, tmp_path_factory)


@pytest.mark.parametrize("name", SAVES)
def test_a_save_is_completed_or_undone_on_all_ranks_alike(jobs: dict[str, ScriptedJob], name: str) -> None:
    """The others hear of it, sets without all files are gone, and the newest has the center of that step."""
    import hvd_periodic.torch as hvdp
    from tests.parallel.elastic_scenarios import policies_of
    from tests.parallel.rendezvous_program import Quadratics, optimizer_of

    job = jobs[name]
    is_replaced(job)
    step, undone = job.scenario.step - 1, job.scenario.saves != "manifest"
    ranks_of = {2: job.scenario.workers - 1} | ({} if undone else {1: job.scenario.workers})
    wanted = {
        f"{number:06}-step{step}": {"manifest.json", *(f"rank-{rank}.npz" for rank in range(ranks))}
        for number, ranks in ranks_of.items()
    }
    assert {left.name: {file.name for file in left.iterdir()} for left in (job.folder / "sets").iterdir()} == wanted

    *heard, of_joined = [job.end(rank)["heard"] for rank in range(job.scenario.workers)]
    why = "the ranks of the job have changed before all of them had written it" if undone else "another rank has ended"
    assert all(why in text for text in heard), job.output()
    assert of_joined is None

    policies = {"own": "local", **policies_of(job.scenario)}
    model = Quadratics(0, policies)
    optimizer = optimizer_of(job.scenario, model, policies)
    hvdp.load(job.folder / "sets", model, optimizer)
    assert optimizer.synchronizer.local_steps == step
    with optimizer.center():
        assert model.x.tolist() == read_file(job.folder / "saved.0")
