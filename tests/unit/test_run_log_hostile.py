"""Run logs with anything in them: commands leave bad lines out and name them, or refuse in one line."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

import pytest

from hvd_periodic.cli.main import main
from tests.parallel.tiers import thorough

pytestmark = pytest.mark.filterwarnings("default")

DEEP = "[" * 100_000 + "]" * 100_000
NESTED = "[" * 400 + "]" * 400
VALUES = (
    *("null", "true", "false", "0", "-1", "1", "1.5", "-0.0", "1e999", "-1e999", "NaN", "Infinity", "1e308", "-1e308"),
    *("1" + "0" * 30, "1" + "0" * 400, "-1" + "0" * 400, "9" * 5000, "1e-320", "253402300800", "6e10", "-6e10"),
    *('""', '"nan"', '"inf"', '"x"', '"\\ud800"', '"\\u0000"', '"%s {0} $x^$ <b>"', '"' + "y" * 10_000 + '"'),
    *("[]", "{}", "[0]", "[0, 0]", "[1, 0]", "[-1]", "[0, 99999999999999999999]", '["a"]', "[[0]]", '{"a": {}}'),
    *(NESTED, '{"a":' * 400 + "0" + "}" * 400, DEEP),
)
"""Of JSON, as texts."""

HOSTILE = 50
"""Logs."""

EVENTS: dict[str, dict[str, object]] = {
    "began": {
        "optimizer": 1, "name": "hvd.1", "version": 1, "time": 1e9, "ranks": [0, 1], "algorithm": "EASGD()",
        "package": "0.2", "framework": "numpy", "python": "3.11", "host": "h", "process": 5, "rank": 0, "size": 2,
        "root": 0, "outer_optimizer": "SGD", "schedule": "Every(3)", "period": 3, "step": 0, "closes": 0.3,
        "asynchronous": False, "center": "replicated", "transport": "MPI", "elements": 3, "tensors": 1, "bytes": 12,
        "overlap": 1, "fragments": 2, "compression": "int8",
    },
    "exchanged": {
        "optimizer": 1, "name": "hvd.1", "time": 1e9 + 10, "step": 3, "rounds": 1, "steps": 3, "seconds": 0.5,
        "waited": 0.1, "bytes_sent": 24, "step_seconds": 0.1, "loss": 0.5, "learning_rate": 0.1, "missed": 0,
        "left_out": False, "came": 1e9 + 9, "distance": 0.25, "skipped_updates": 0,
    },
    "ended": {
        "optimizer": 1, "name": "hvd.1", "time": 1e9 + 30, "step": 6, "rounds": 2, "steps": 6, "exchanges": 2,
        "wall_seconds": 30.0, "seconds": 1.0, "waited": 0.2, "bytes_sent": 48, "left_out": 0, "missed": 0,
        "closed": 0.5, "skipped_updates": 0,
    },
}  # fmt: skip
"""All that lines say."""


def line(event: str, changes: dict[str, str | None]) -> str:
    """Return a line in which some values have other texts, or are gone."""
    texts = {"event": json.dumps(event)} | {name: json.dumps(value) for name, value in EVENTS[event].items()}
    return "{" + ", ".join(f'"{k}": {v}' for k, v in (texts | changes).items() if v is not None) + "}"


def write(folder: Path, rank: int, changed: dict[int, dict[str, str | None]], extra: str = "") -> None:
    """Write a beginning, two exchanges and an end; some lines with changes."""
    again = {"step": "6", "rounds": "2", "time": str(1e9 + 20), "came": str(1e9 + 19)}
    events = [("began", {}), ("exchanged", {}), ("exchanged", again), ("ended", {})]
    texts = [line(event, {**usual, **changed.get(i, {})}) for i, (event, usual) in enumerate(events)]
    (folder / f"rank-{rank}.jsonl").write_text("\n".join([*texts, extra]) + "\n")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of a command; a traceback is an error of the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        code = main(words)
    out, error = capsys.readouterr()
    assert code in (0, 2)
    assert (code == 2) == ("error: " in error)
    return code, out, error


PLACES = [
    (number, name)
    for event, number in (("began", 0), ("exchanged", 2), ("ended", 3))
    for name in ("event", "unknown", *EVENTS[event])
]
"""In the beginning, the second exchange and the end."""


@pytest.mark.parametrize("every_run", [True, thorough(False)])
@pytest.mark.parametrize("value", VALUES, ids=lambda text: text[:12])
def test_values_of_all_kinds_everywhere(
    value: str, every_run: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In each place of one rank, of which every run has some for each value; the first rank is still told."""
    write(tmp_path, 0, {})
    for i, (number, name) in enumerate(PLACES):
        if every_run == ((i + VALUES.index(value)) % 10 == 0):
            write(tmp_path, 1, {number: {name: value}})
            code, out, _ = run(capsys, "report", "--json", str(tmp_path))
            if number and name not in ("optimizer", "name"):
                assert code == 0
                exchanges = [rank["exchanges"] for each in json.loads(out)["trainings"] for rank in each["ranks"]]
                assert exchanges[0] == 2
                assert exchanges[1] in (1, 2)
            run(capsys, "timeline", "--json", str(tmp_path))


def test_hostile_logs_at_random(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(0)
    for _ in range(HOSTILE):
        for rank in range(chance.choice((1, 2))):
            changes: dict[int, dict[str, str | None]] = {}
            for _ in range(chance.choice((1, 2, 5))):
                number = chance.randrange(4)
                name = chance.choice(("event", *EVENTS[("began", "exchanged", "exchanged", "ended")[number]]))
                changes.setdefault(number, {})[name] = chance.choice((None, *VALUES))
            write(tmp_path, rank, changes, chance.choice(("", "{", "\0", "[1]", DEEP, line("exchanged", {}))))
        for words in (("report", "--json"), ("timeline", "--json"), ("plot", "--json", "--what", "waiting")):
            run(capsys, *words, "--partial", str(tmp_path))


def test_a_page_and_plots_of_enormous_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    enormous: dict[str, str | None] = {"loss": "1e100", "distance": "-1e100", "bytes_sent": str(2**63 - 1)}
    infinite: dict[str, str | None] = {"loss": "-1e308", "distance": "1e308", "time": "-6e10", "step": str(2**63 - 1)}
    for rank in range(2):
        write(tmp_path, rank, {1: enormous | {"waited": "6e10"}, 2: infinite, 3: {"wall_seconds": "6e10"}})
    code, *_ = run(capsys, "report", "-o", str(tmp_path / "page.html"), str(tmp_path))
    assert code == 0
    for what in ("loss", "distance", "exchanges", "sent", "bytes", "waiting"):
        code, *_ = run(capsys, "plot", "--what", what, "-o", str(tmp_path / "plot.png"), str(tmp_path))
        assert code == 0


def test_bad_lines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, {2: {"step": '"six"'}}, DEEP)
    write(tmp_path, 1, {})
    named = "rank-0.jsonl: skipped 2 bad lines: line 3: step='six' is not a count; line 5: it is not JSON"
    code, out, _ = run(capsys, "report", "--json", str(tmp_path))
    assert named in json.loads(out)["trainings"][0]["findings"][0]
    for command in ("timeline", "plot"):
        code, _, error = run(capsys, command, "--json", str(tmp_path))
        assert code == 0
        assert named in error


def test_a_folder_of_odd_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "rank-1.jsonl").mkdir()
    code, _, error = run(capsys, "report", "--json", str(tmp_path))
    assert code == 2
    assert "There is no run log in" in error
