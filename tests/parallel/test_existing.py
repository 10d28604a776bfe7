"""Scripts that users have: each runs as it is, and again after the few lines of change that the documents show."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import PATIENCE
from tests.parallel.launch import ROOT, start
from tests.parallel.tiers import thorough

FOLDER = ROOT / "examples" / "existing"
SMALL = ["--batch-size", "2", "--image-size", "32", "--num-warmup-batches", "1", "--num-iters", "2"]
NARROW = ["--width", "4", "--blocks", "1"]


@dataclass(frozen=True)
class Job:
    """How to run a script, what it needs, its steps, and how often its changed form exchanges."""

    modules: tuple[str, ...]
    flags: tuple[str, ...]
    steps: int
    exchanges: int
    launcher: str = "mpirun"
    averages_gradients: bool = True


JOBS = {
    "torch_synthetic": Job(("horovod.torch",), (*SMALL, *NARROW), 21, 2),
    "torch_images": Job(("horovod.torch", "sklearn"), ("--epochs", "6"), 6 * 23, 13, "horovodrun --gloo"),
    "keras_synthetic": Job(("horovod.tensorflow",), (*SMALL, "--model", "VGG16"), 21, 2),
    # The last exchange is that of finalize(). Horovod 0.28.1 averages no gradients in fit() of Keras 3.
    "keras_images": Job(("horovod.tensorflow", "sklearn"), (), 12 * 23, 28, averages_gradients=False),
    "tensorflow1_synthetic": Job(("horovod.tensorflow",), (*SMALL, *NARROW), 21, 2),
    "tensorflow1_images": Job(("horovod.tensorflow", "sklearn"), (), 250, 25),
}

ELSEWHERE = ("torch_elastic", "keras_elastic")
"""Scripts that run in tests of their own, with changes of up to five lines."""

FIRST = ("torch_synthetic",)

pytestmark = pytest.mark.timeout(400)


def diff_of(name: str) -> str:
    return (FOLDER / f"{name}.diff").read_text()


def apply(name: str, folder: Path) -> Path:
    """Apply the change to a copy of the script, as the page says."""
    copy = Path(shutil.copy(FOLDER / f"{name}.py", folder))
    words = ["patch", "-p1"] if shutil.which("patch") else ["git", "apply"]
    with (FOLDER / f"{name}.diff").open() as file:
        subprocess.run(words, cwd=folder, stdin=file, check=True, capture_output=True, timeout=PATIENCE * 30)
    return copy


def run(
    script: Path, job: Job, folder: Path, monkeypatch: pytest.MonkeyPatch, framework: str
) -> tuple[str, Counter[str]]:
    """Run a script on two ranks; return what it printed, and how often each tensor was reduced or gathered."""
    timeline = folder / "timeline.json"
    monkeypatch.setenv("HOROVOD_TIMELINE", str(timeline))
    output = start(job.launcher, 2, [str(script), *job.flags], 180, framework)
    names: dict[int, str] = {}
    exchanged: Counter[str] = Counter()
    for event in json.loads(timeline.read_text()):
        if event.get("name") == "process_name":
            names[event["pid"]] = event["args"].get("name", "")
        elif event.get("name") in ("ALLREDUCE", "ALLGATHER"):
            exchanged[names[event["pid"]]] += 1
    return output, exchanged


def check_output(name: str, output: str) -> None:
    """Require what the script promises: a speed, or a test accuracy."""
    pattern = r"on 2 ranks: ([\d.]+)" if name.endswith("synthetic") else r"[Tt]est accuracy ([\d.]+)"
    value = float(re.findall(pattern, output)[-1])
    assert value > (0 if name.endswith("synthetic") else 0.9), output


@pytest.mark.parametrize("name", [name if name in FIRST else thorough(name) for name in JOBS])
def test_before_and_after_the_change(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JOBS[name]
    for module in job.modules:
        pytest.importorskip(module)
    framework = "torch" if name.startswith("torch") else "tensorflow"
    output, before = run(FOLDER / f"{name}.py", job, tmp_path, monkeypatch, framework)
    check_output(name, output)
    output, after = run(apply(name, tmp_path), job, tmp_path, monkeypatch, framework)
    check_output(name, output)
    # A process does not wait until Horovod has written the end of the timeline: much, where cores are busy.
    gradients = {tensor for tensor, times in before.items() if 0.5 * job.steps <= times <= job.steps}
    assert bool(gradients) == job.averages_gradients, before
    assert not gradients & after.keys()
    assert not any("hvd_periodic" in tensor for tensor in before)
    exchanges = max(times for tensor, times in after.items() if "hvd_periodic" in tensor)
    # Ranks also meet at the beginning and at the end.
    assert 0.5 * job.exchanges <= exchanges <= job.exchanges + 2, after


@pytest.mark.parametrize("name", JOBS)
def test_the_change_is_small(name: str) -> None:
    """A line that is added, removed or replaced counts one."""
    signs = "".join(line[:1] for line in diff_of(name).splitlines()[2:])
    changed = [max(block.count("+"), block.count("-")) for block in re.findall(r"[+-]+", signs)]
    assert 2 <= sum(changed) <= 3
    assert "hvd_periodic" not in (FOLDER / f"{name}.py").read_text()


def test_the_page_shows_every_change() -> None:
    page = (FOLDER / "README.md").read_text()
    assert re.findall(r"```diff\n(.*?)```", page, re.DOTALL) == [diff_of(name) for name in (*JOBS, *ELSEWHERE)]
    assert {path.stem for path in FOLDER.glob("*.py")} == {*JOBS, *ELSEWHERE}
