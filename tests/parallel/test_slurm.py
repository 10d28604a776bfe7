"""The batch scripts under a real Slurm: submit, stop in training, queue again, go on, and end as if undisturbed.

Debian has it: ``apt-get install --no-install-recommends slurm-wlm munge libpmix-dev`` takes 20 s. The daemons are for
root, and start and end with the tests.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import PATIENCE
from tests.parallel.elastic_scenarios import PERIOD, expected
from tests.parallel.launch import ROOT, environment, python, start
from tests.parallel.rendezvous_job import Job, numbered, rendezvous_server
from tests.parallel.rendezvous_scenarios import EVENTS, read_file, replace_file
from tests.parallel.slurm import CPUS, NoSlurmError, slurm
from tests.parallel.tiers import thorough
from tests.parallel.waiting_digits import EPOCH

pytest.importorskip("horovod.torch")

pytestmark = pytest.mark.timeout(300)

EXAMPLE = "examples/torch_digits.py"
SECONDS = PATIENCE * 100


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands find a running one."""
    try:
        with slurm(tmp_path_factory.mktemp("slurm")) as found:
            yield {**environment(), **{key: found[key] for key in ("SLURM_CONF",)}}
    except NoSlurmError as error:
        pytest.skip(f"There is no Slurm here: {error}")


def run(cluster: dict[str, str], *words: str) -> str:
    finished = subprocess.run(
        words, env=cluster, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE * 60, check=False
    )
    assert finished.returncode == 0, f"{words}: {finished.stdout}{finished.stderr}"
    return finished.stdout


def require_pmix(cluster: dict[str, str], script: str) -> None:
    if script != "slurm_srun":
        return
    words = ["srun", "--mpi=pmix", "-n", "1", "true"]
    tried = subprocess.run(words, env=cluster, capture_output=True, text=True, timeout=PATIENCE * 60, check=False)
    if tried.returncode != 0:
        pytest.skip(f"This Slurm has no PMIx: {tried.stderr.splitlines()[:1]}; it loads libpmix.so, of libpmix-dev")


def submit(cluster: dict[str, str], script: str, log: Path, *arguments: str) -> str:
    options = ["--parsable", f"--output={log}", "--ntasks-per-node=2", "--time=5"]
    return run(cluster, "sbatch", *options, f"run_scripts/{script}.sbatch", *arguments).strip()


def wait_until(condition: Callable[[], bool], cluster: dict[str, str], job: str, log: Path) -> None:
    for _ in range(10 * SECONDS):
        if condition():
            return
        time.sleep(0.1)
    state = run(cluster, "scontrol", "show", "job", job)
    raise AssertionError(f"Not within {SECONDS} s\n{log.read_text() if log.exists() else ''}\n{state}")


def end_of(cluster: dict[str, str], job: str) -> tuple[str, str]:
    """Return state and exit code of a job, once it has ended."""
    released = False
    for _ in range(10 * SECONDS):
        shown = run(cluster, "scontrol", "show", "job", job)
        state = re.search(r"JobState=(\w+)", shown)
        code = re.search(r"ExitCode=(\d+):", shown)
        assert state is not None
        assert code is not None
        if state[1] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
            return state[1], code[1]
        # Slurm lets a job wait that is queued again, and the next step finds the socket of the last one if it does not.
        left = list((Path(cluster["SLURM_CONF"]).parent / "spool").glob("*pmix*"))
        if "BeginTime" in shown and state[1] == "PENDING" and not left and not released:
            run(cluster, "scontrol", "update", f"jobid={job}", "starttime=now+3seconds")
            released = True
        time.sleep(0.1)
    raise AssertionError(f"Job {job} has not ended within {SECONDS} s: {shown}")


@pytest.mark.parametrize("script", ["slurm_mpirun", "slurm_srun"])
def test_a_job_that_is_stopped_goes_on(script: str, cluster: dict[str, str], tmp_path: Path) -> None:
    """SIGUSR1 is what Slurm sends before the time limit; the result is that of a job that was left alone."""
    require_pmix(cluster, script)
    log, common = tmp_path / "log", ["--algorithm", "easgd", "--epochs", "12", "--no-progress"]
    folders = ["--checkpoints", str(tmp_path / "saved"), "--output", str(tmp_path / "stopped")]
    job = submit(cluster, script, log, "tests/parallel/waiting_digits.py", *common, *folders)
    wait_until(lambda: len(list((tmp_path / "saved").glob(f"rank*-{EPOCH:06}.pt"))) == 2, cluster, job, log)
    run(cluster, "scancel", "--batch", "--signal=USR1", job)
    assert end_of(cluster, job) == ("COMPLETED", "0"), log.read_text()
    for text in ("was told to stop after", "goes on after"):
        assert re.findall(rf"Rank \d {text} epoch (\d+)", log.read_text()) == [str(EPOCH)] * 2
    start("mpirun", 2, [EXAMPLE, *common, "--output", str(tmp_path / "alone")], 120, "torch")
    stopped, alone = (json.loads((tmp_path / name / "easgd.json").read_text()) for name in ("stopped", "alone"))
    for key in ("losses", "distances", "exchange_steps", "worker_accuracy", "center_accuracy"):
        assert stopped[key] == alone[key], key
    assert stopped["center_accuracy"] > 0.95


@pytest.mark.parametrize("script", ["slurm_mpirun", "slurm_srun"])
def test_the_exit_code_is_that_of_the_ranks(script: str, cluster: dict[str, str], tmp_path: Path) -> None:
    require_pmix(cluster, script)
    job = submit(cluster, script, tmp_path / "log", "-c", "import sys; sys.exit(7)")
    assert end_of(cluster, job) == ("FAILED", "7"), (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("script", "place", "how", "told"),
    [
        ("slurm_mpirun", "loader", "error", "ValueError: a bad batch"),
        ("slurm_srun", "closure", "exit", "sys.exit()"),
        ("slurm_srun", "loader", "interrupt", "KeyboardInterrupt"),
        ("slurm_srun", "training", "hang", "rank 1 at local step 4 has not arrived: it is in end_at(), "),
    ],
)
def test_what_ends_one_rank_ends_all(
    script: str, place: str, how: str, told: str, cluster: dict[str, str], tmp_path: Path
) -> None:
    require_pmix(cluster, script)
    log = tmp_path / "log"
    job = submit(cluster, script, log, "-m", "tests.parallel.ending_program", "torch", place, how)
    assert end_of(cluster, job)[0] == "FAILED", log.read_text()
    assert told in log.read_text()


@pytest.mark.parametrize("script", ["slurm_mpirun", "slurm_srun"])
def test_a_rank_that_is_killed_ends_all(script: str, cluster: dict[str, str], tmp_path: Path) -> None:
    require_pmix(cluster, script)
    log, endless = tmp_path / "log", str(10**9)
    job = submit(
        cluster, script, log, "-m", "tests.parallel.dying_program", str(tmp_path), "easgd", "1", "between", endless
    )
    assert end_of(cluster, job) == ("FAILED", str(128 + 9)), log.read_text()


SAVES_LATE = """import os, pathlib, sys, time
if os.environ.get("SLURM_RESTART_COUNT"):
    sys.exit(print("goes on", flush=True))
while os.environ["SLURM_PROCID"] == "1" and not pathlib.Path(os.environ["REQUEUE_NOTE"]).exists():
    time.sleep(0.01)
print("has saved", flush=True)
sys.exit(75)
"""


def test_srun_waits_for_who_saves_when_others_have(cluster: dict[str, str], tmp_path: Path) -> None:
    """Rank 1 saves only when rank 0 has ended, with the exit code that asks for another turn."""
    require_pmix(cluster, "slurm_srun")
    log, program = tmp_path / "log", tmp_path / "saves_late.py"
    program.write_text(SAVES_LATE)
    job = submit(cluster, "slurm_srun", log, str(program))
    assert end_of(cluster, job) == ("COMPLETED", "0"), log.read_text()
    assert [log.read_text().count(text) for text in ("has saved", "goes on")] == [2, 2], log.read_text()
    assert not list(ROOT.glob(".slurm-*"))


def task_of(worker: tuple[int, int]) -> int:
    """Return the number of the task of an array whose process a worker is."""
    found = re.search(r"\bSLURM_ARRAY_TASK_ID=(\d+)", Path(f"/proc/{worker[0]}/environ").read_text())
    assert found is not None
    return int(found[1])


class Array:
    """An elastic job whose workers are the tasks of an array, and train until they are told to end.

    Args:
        cluster: the environment of Slurm's commands.
        folder: for the files of the job.
        address: of the rendezvous.
    """

    def __init__(self, cluster: dict[str, str], folder: Path, address: str) -> None:
        self._cluster, self.job = cluster, Job(next(iter(EVENTS)), folder, address)
        self.train(10**6, to_the_end=False)
        told = {"HVD_PERIODIC_RENDEZVOUS": address, "HVD_PERIODIC_RANKS": "2:2", "HVD_PERIODIC_LOST_SECONDS": "30"}
        words = ["sbatch", "--parsable", "--array=0-3", f"--output={folder}/output.%a", "--time=10"]
        program = ["-m", "tests.parallel.rendezvous_program", self.job.name, str(folder), "0"]
        self.number = run(cluster | told, *words, "run_scripts/slurm_array.sbatch", *program).strip()

    def train(self, steps: int, to_the_end: bool) -> None:
        """Let the workers take steps until there are so many; then end, or wait."""
        replace_file(self.job.folder / "fence", (steps, to_the_end))

    def states(self) -> dict[int, str]:
        """Return the states of tasks by number, as Slurm calls them."""
        shown = run(self._cluster, "scontrol", "show", "job", "-o", self.number)
        found = re.findall(r"ArrayTaskId=(\d+) .*?JobState=(\w+)", shown)
        return {int(number): state for number, state in found}

    def running(self) -> set[int]:
        """Return the numbers of tasks that run."""
        return {number for number, state in self.states().items() if state == "RUNNING"}

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so."""
        for _ in range(2 * SECONDS):
            if condition():
                return
            time.sleep(0.5)
        raise AssertionError(f"{self.states()}\n{self.job.begun()}\n{self.job.output()}")

    def trains(self, stretches: int) -> bool:
        """Return whether there have been so many stretches of training, with exchanges in the last of them."""
        begun, file = self.job.stretches(), self.job.folder / "progress"
        return len(begun) == stretches and file.exists() and read_file(file) >= begun[-1][0] + 2 * PERIOD

    def told(self, number: int, text: str) -> int:
        """Return how often a task has printed something."""
        file = self.job.folder / f"output.{number}"
        return file.read_text().count(text) if file.exists() else 0


@pytest.mark.timeout(900)
def test_tasks_of_an_array_are_workers_that_come_and_go(cluster: dict[str, str], tmp_path: Path) -> None:
    """Of four tasks, three run; two train, which is the minimum and the maximum, and one waits for a place."""
    with rendezvous_server() as (address, _):
        array = Array(cluster, tmp_path, address)
        array.wait(lambda: array.trains(1) and len(array.running()) == CPUS)
        array.wait(lambda: sum(array.told(number, f"of job '{array.number}' waits at") for number in range(4)) == CPUS)
        first, second = map(task_of, array.job.stretches()[0][1])
        [spare] = array.running() - {first, second}
        [left_out] = set(range(4)) - array.running()

        # Preempted: its worker ends, the one that waited joins, and the queue lets the task start that it had left out.
        run(cluster, "scancel", "--batch", "--signal=USR1", f"{array.number}_{first}")
        array.wait(lambda: array.told(first, "queueing job") == 1 and left_out in array.running())
        array.wait(lambda: array.trains(2))
        # Cancelled: the next one joins, and the one that was preempted starts again as soon as it may.
        run(cluster, "scancel", f"{array.number}_{second}")
        array.wait(lambda: array.states().get(second) == "CANCELLED")
        run(cluster, "scontrol", "update", f"jobid={array.number}_{first}", "starttime=now")
        array.wait(lambda: array.trains(3) and array.running() == {spare, left_out, first})
        # Killed and queued again by Slurm itself.
        run(cluster, "scontrol", "requeue", f"{array.number}_{spare}")
        array.wait(lambda: array.trains(4))

        array.train(read_file(tmp_path / "progress") + 10 * PERIOD, to_the_end=True)
        array.wait(lambda: not array.running())
    stretches = array.job.stretches()
    assert [len(workers) for _, workers in stretches] == [2] * 4
    for (_, before), (_, after) in pairwise(stretches):
        assert len(set(before) & set(after)) == 1, "One of the two goes on in the same process"
    assert {array.states()[number] for number in (left_out, first)} == {"COMPLETED"}
    ends = [array.job.end(rank) for rank in range(2)]
    center, _ = expected(array.job.scenario.algorithm, numbered(stretches), overlap=2, steps=ends[0]["steps"])
    for end in ends:
        np.testing.assert_allclose(end["center"], center, rtol=0, atol=1e-9)


def test_a_job_can_be_cancelled(cluster: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = submit(cluster, "slurm_mpirun", log, "-c", "import time; print('here', flush=True); time.sleep(600)")
    wait_until(lambda: log.exists() and "here" in log.read_text(), cluster, job, log)
    run(cluster, "scancel", job)
    assert end_of(cluster, job)[0] == "CANCELLED"


PROGRAM = """import torch, horovod.torch as hvd, hvd_periodic.torch as hvdp
hvd.init()
model = torch.nn.Linear(1, 1)
hvdp.ModelAverageOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
"""


def test_ranks_that_slurm_starts_without_pmi_fail(cluster: dict[str, str]) -> None:
    """Each would train alone, without a word. Open MPI itself says so."""
    words = ["srun", "--mpi=none", "-n", "2", "python3", "-c", PROGRAM]
    finished = subprocess.run(
        words, env=cluster, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE * 60, check=False
    )
    assert finished.returncode != 0
    assert "srun" in finished.stderr


@pytest.mark.parametrize(
    "variable",
    ["SLURM_STEP_NUM_TASKS", *(thorough(name) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"))],
)
def test_one_of_several_processes_that_takes_itself_for_all_is_told(variable: str, tmp_path: Path) -> None:
    """Where MPI does not notice; this needs no Slurm."""
    told = {**environment(), variable: "2"}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = [*python("torch"), str(program)]
    finished = subprocess.run(
        words, env=told, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE * 60, check=False
    )
    assert finished.returncode != 0
    assert f"has started 2 processes ({variable}), and Horovod knows of one" in finished.stderr
