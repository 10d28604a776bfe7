"""What the parallel tests rely on: ranks that share imports are processes of their own, and jobs leave nothing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel import launch

pytest.importorskip("horovod.torch")

pytestmark = pytest.mark.timeout(60)

HOW = [None, "torch"]
"""Started anew, and from a process that has imported the framework."""


def script(folder: Path, text: str) -> str:
    file = folder / "script.py"
    file.write_text(text)
    return str(file)


def popen(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        env=launch.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("framework", HOW)
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("os._exit(4)", 4),
        ("raise ArithmeticError('something')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_a_rank_ends_as_its_program_does(end: str, code: int, framework: str | None, tmp_path: Path) -> None:
    text = "import atexit, os, signal, sys\natexit.register(print, 'at the end')\nprint(sys.argv[1:], flush=True)\n"
    process = popen([*launch.python(framework), script(tmp_path, f"{text}{end}\n"), "an argument"])
    output, errors = process.communicate()
    assert process.returncode == code, errors
    assert "['an argument']" in output
    assert ("at the end" in output) == (code in (0, 1, 3))
    assert ("ArithmeticError: something" in errors) == (code == 1)


def test_a_rank_starts_with_the_frameworks_imported_and_with_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os, sys\nprint('torch' in sys.modules, os.environ.get('SPECIAL'), sys.path[0], os.getcwd())\n"
    for special in ("a", "b"):
        monkeypatch.setenv("SPECIAL", special)
        found = launch.start("python", 1, [script(tmp_path, text)], 30, "torch")
        assert found == f"True {special} {tmp_path} {launch.ROOT}\n"


def test_ranks_differ_as_processes_do(tmp_path: Path) -> None:
    """In the order of their sets, and in numbers that nobody has seeded."""
    # Each into a file of its own: on the way through mpirun lines of two ranks may mix.
    lines = [
        "import os, pathlib, random, sys, numpy",
        "file = pathlib.Path(sys.argv[1], 'rank' + os.environ['OMPI_COMM_WORLD_RANK'])",
        "file.write_text(f\"{hash('a')} {random.random()} {numpy.random.rand()}\")",
    ]
    launch.start("mpirun", 2, [script(tmp_path, "\n".join(lines)), str(tmp_path)], 30, "torch")
    found = [number for rank in range(2) for number in (tmp_path / f"rank{rank}").read_text().split()]
    assert len(set(found)) == len(found) == 6


@pytest.mark.parametrize("framework", HOW)
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_left_of_a_job_that_is_ended(ranks: int, framework: str | None, tmp_path: Path) -> None:
    # In one write, which mpirun does not mix with that of the other rank.
    text = "import os, signal\nos.write(1, b'%d\\n' % os.getpid())\nwhile True:\n    signal.pause()\n"
    words = [*launch.MPIRUN, "-np", str(ranks)] if ranks > 1 else []
    process = popen([*words, *launch.python(framework), script(tmp_path, text)])
    assert process.stdout is not None
    descriptors = [os.pidfd_open(int(process.stdout.readline())) for _ in range(ranks)]
    launch.kill_session(process.pid)
    for descriptor in descriptors:
        assert select.select([descriptor], [], []) == ([descriptor], [], []), "the process has ended"
        os.close(descriptor)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_the_report_names_the_scenario_that_was_under_way(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Under way: rank 0: second") as failure:
        launch.run_scenarios("python", 1, "failing_program", tmp_path, 30)
    assert "ArithmeticError: something in the second scenario" in str(failure.value)


def test_a_module_that_starts_threads_cannot_be_shared(tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    words = [sys.executable, launch.WARM, "server", str(tmp_path / "socket"), str(os.getpid()), "threads"]
    env = launch.environment() | {"PYTHONPATH": str(tmp_path)}
    process = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "A process with several threads cannot be forked" in process.stderr
