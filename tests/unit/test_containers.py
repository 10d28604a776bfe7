"""The recipes of images, without a builder: what they copy and run is there, and the same in both."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "run_scripts/containers"
DOCKER = (FOLDER / "Dockerfile").read_text()
APPTAINER = (FOLDER / "apptainer.def").read_text()
INSTALL = (FOLDER / "install.sh").read_text()

INSIDE = "/opt/hvd_periodic"
"""Where the project is in an image."""


def instructions(name: str) -> list[str]:
    """Return what follows each instruction of the Dockerfile with this name."""
    whole = re.sub(r"\\\n\s*", "", DOCKER)
    return re.findall(rf"^{name} (.*)$", whole, re.MULTILINE)


def section(name: str) -> str:
    """Return the lines of a section of the Apptainer definition, without their indentation."""
    found = re.search(rf"^%{name}\n((?:    .*\n|\n)+)", APPTAINER, re.MULTILINE)
    assert found, name
    return re.sub(r"^ +", "", found[1], flags=re.MULTILINE).strip()


def variables(assignments: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for line in assignments for word in shlex.split(line))


def test_both_copy_the_whole_project() -> None:
    assert instructions("COPY") == [f". {INSIDE}"]
    assert section("files") == f". {INSIDE}"
    left_out = (FOLDER / "Dockerfile.dockerignore").read_text().split()
    assert not {"hvd_periodic", "run_scripts", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"} & set(left_out)


def test_what_they_run_is_there() -> None:
    for text in (DOCKER, APPTAINER, INSTALL):
        for name in re.findall(r"run_scripts/[\w./]+", text):
            assert (ROOT / name).is_file(), name
    assert f"bash {INSIDE}/run_scripts/containers/install.sh ${{OPTIONS}}" in instructions("RUN")[0]
    assert section("post") == f"bash {INSIDE}/run_scripts/containers/install.sh {{{{ options }}}}"
    assert 'bash "$SCRIPTS/setup.sh" --use-current-env "$@"' in INSTALL


def test_both_begin_and_end_alike() -> None:
    base, *options = [line.partition("=")[2] for line in section("arguments").splitlines()]
    assert instructions("ARG")[:2] == [f"BASE={base}", 'OPTIONS=""']
    assert options == [""]
    assert variables(instructions("ENV")) == variables(
        [line.removeprefix("export ") for line in section("environment").splitlines()]
    )
    assert instructions("CMD") == ['["hvdp", "doctor"]']
    assert section("runscript") == 'exec hvdp doctor "$@"'


def test_the_user_is_not_root() -> None:
    ((user, _),) = (line.split(":") for line in instructions("USER"))
    assert int(user) > 0
    assert f"useradd --uid {user} " in instructions("RUN")[-1]


OPTIONS = sorted({*re.findall(r'--build-arg (?:OPTIONS|options)="([^"]+)"', DOCKER + APPTAINER)})


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "HVD_PERIODIC_WITHOUT"}
"""What the tests were told of frameworks is not for what they start."""


@pytest.mark.parametrize("options", ["", "--without horovod --without torch", *OPTIONS])
def test_setup_knows_the_options(options: str) -> None:
    """It reads them in their order, and explains itself at the last."""
    assert OPTIONS
    command = ["bash", str(ROOT / "run_scripts/setup.sh"), "--use-current-env", *options.split(), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE * 10, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    for option in options.split()[::2]:
        assert option in done.stdout


@pytest.mark.parametrize(
    "options",
    [
        "--without",
        "--without jax",
        "--without torch --without tensorflow",
        "--frameworks torch",
        "--cuda --use-current-env",
        "--use-current-env --cuda",
        "--cuda --without torch",
    ],
)
def test_setup_refuses_others(options: str) -> None:
    command = ["bash", str(ROOT / "run_scripts/setup.sh"), *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE * 10, check=False, env=ENVIRONMENT)
    assert done.returncode > 0
    assert done.stderr.startswith("error: ")
    assert options.split()[-1] in done.stderr


COMPILERS = re.compile(r"(.*-)?(cc|c\+\+|g\+\+|gcc|clang|clang\+\+|make|gmake)(-\d+)?|c\d\d")


@pytest.mark.parametrize(
    ("options", "needs"), [([], ["a C++ compiler", "a C compiler", "make"]), (["--without", "horovod"], [])]
)
def test_without_horovod_setup_needs_no_compiler(options: list[str], needs: list[str], tmp_path: Path) -> None:
    """Its Python makes no environment here, which is the first step after the check of what is there."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for program in Path(folder).iterdir():
            if not COMPILERS.fullmatch(program.name) and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    python = programs / "the_python"
    python.write_text(f'#!/bin/bash\n[[ $1 == -c ]] && exec {sys.executable} "$@"\nexit 9\n')
    python.chmod(0o755)
    env = {"HOME": str(tmp_path), "PATH": str(programs), "PYTHON": python.name, "HVD_PERIODIC_VENV": f"{tmp_path}/venv"}
    command = ["bash", str(ROOT / "run_scripts/setup.sh"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE * 10, check=False, env=env)
    assert done.returncode == 1
    for need in needs:
        assert f"  - {need}" in done.stderr
    assert done.stderr.startswith("Something is missing" if needs else "error: python -m venv failed")
