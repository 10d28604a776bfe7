"""Answers about a Python environment, for setup.sh; standard library only.

`environment.py COMMAND ARGUMENT...`, run by the Python of the environment in question:

- ``versions NAME...``: one line ``name==version`` for each of these distributions, ``name`` alone when it is absent.
- ``constraints NAME...``: ``name==version`` for every installed distribution except the ones named.
- ``pins FILE WHICH NAME...``: the requirement lines of FILE, without those named. WHICH is ``all``, or ``missing`` for
  those whose distribution the environment does not have in any version.
- ``relocatable``: the prefix of the environment if libraries below it can be found relative to site-packages.
- ``repair``: removes the metadata of distributions that an interrupted pip left incomplete; pip then installs them.
- ``check-wheel WHEEL FRAMEWORK...``: fails unless the wheel is a sound archive with a library for each framework.
"""

import os
import re
import shutil
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path


def canonical(name: str) -> str:
    """Returns the name under which a package index knows a distribution."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Returns the versions of the installed distributions by canonical name, first on the path first."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(canonical(name), distribution.version)
    return found


def versions(*names: str) -> None:
    """Prints what is there of the named distributions."""
    found = installed()
    for name in names:
        print(f"{name}=={found[canonical(name)]}" if canonical(name) in found else name)


def constraints(*excluded: str) -> None:
    """Prints a constraint for each installed distribution."""
    left_out = {canonical(name) for name in excluded}
    for name, version in sorted(installed().items()):
        if name not in left_out:
            print(f"{name}=={version}")


def pins(file: str, which: str, *excluded: str) -> None:
    """Prints the requirement lines of a file that are wanted."""
    left_out = {canonical(name) for name in excluded}
    if which == "missing":
        left_out |= installed().keys()
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        requirement = line.partition("#")[0].strip()
        if requirement and canonical(requirement.partition("==")[0]) not in left_out:
            print(requirement)


def relocatable() -> None:
    """Prints the prefix if site-packages is where a virtual environment has it, and pip may write there."""
    platlib = Path(sysconfig.get_path("platlib"))
    usual = re.fullmatch(r"lib(64)?/python\d+\.\d+/site-packages", platlib.relative_to(sys.prefix).as_posix())
    if usual and os.access(platlib, os.W_OK):
        print(sys.prefix)


def repair() -> None:
    """Removes the metadata of incomplete distributions: pip writes RECORD last, and RECORD names every file."""
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for info in Path(folder).glob("*.dist-info"):
            files = metadata.PathDistribution(info).files
            if files is None or not all(Path(file.locate()).exists() for file in files):
                print(f"{info.name} is incomplete")
                shutil.rmtree(info)


def check_wheel(wheel: str, *frameworks: str) -> None:
    """Fails unless all members of the wheel have the right checksum and each framework's library is there."""
    with zipfile.ZipFile(wheel) as archive:
        damaged = archive.testzip()
        if damaged:
            raise SystemExit(f"{wheel}: {damaged} is damaged")
        for framework in frameworks:
            if not any(re.match(rf"horovod/{framework}/mpi_lib.*\.so$", name) for name in archive.namelist()):
                raise SystemExit(f"{wheel} has no library for {framework}")


COMMANDS = {
    "check-wheel": check_wheel,
    "constraints": constraints,
    "pins": pins,
    "relocatable": relocatable,
    "repair": repair,
    "versions": versions,
}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
