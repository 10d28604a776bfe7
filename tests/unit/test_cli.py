"""The command line as a whole: one program, two names; what it prints into a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path

import pytest

from hvd_periodic.cli import main as cli
from hvd_periodic.cli import output
from hvd_periodic.version import __version__
from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[2]


def started(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hvd_periodic", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 60,
        check=False,
    )


def test_both_names_are_one_program() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    name, _, target = config["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = target.partition(":")
    assert name == "hvdp"
    assert getattr(import_module(module), function) is cli.main
    done = started("--version")
    assert (done.returncode, done.stdout) == (0, f"hvd_periodic {__version__}\n")


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for command, module in cli.COMMANDS.items():
        with pytest.raises(SystemExit, match="0"):
            cli.main([command, "--help"])
        shown = capsys.readouterr().out
        assert str(module.__doc__).splitlines()[0] in shown
        assert max(map(len, shown.splitlines())) <= 120


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "COMMAND" in capsys.readouterr().err


def test_warnings_of_the_core_are_in_words() -> None:
    done = started("simulate", "--steps", "20", "--algorithm", "easgd(0.3)", "--json")
    assert done.returncode == 0
    [line] = done.stderr.splitlines()
    assert line.startswith("warning: `EASGD(moving_rate=0.3)` makes the center overshoot")


def test_a_reader_that_has_seen_enough() -> None:
    """``hvdp simulate | head -1``."""
    command = f"{sys.executable} -m hvd_periodic simulate --json --steps 2000 --algorithm average --workers 1"
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE * 60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


@pytest.mark.parametrize(("variables", "colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colors_are_for_terminals(
    variables: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And for those who have not asked for none."""
    pytest.importorskip("rich")
    for name in ("NO_COLOR", "FORCE_COLOR", *output.LAUNCHED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(output, "terminal", lambda stream: True)
    output.item("problem", "bold red", "this is missing")
    output.show("steps", ["algorithm", "n"], [["easgd", "10"]])
    assert ("\x1b" in capsys.readouterr().out) == colored
