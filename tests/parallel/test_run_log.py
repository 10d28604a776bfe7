"""Real ranks keep a run log, of which the command line makes a page: its numbers, beside those of a calculation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hvd_periodic import read_run_log
from hvd_periodic.cli.main import main
from hvd_periodic.journal.lines import bytes_of
from tests.html_page import Page
from tests.parallel.launch import start
from tests.parallel.run_log_program import IN_TURN, PERIOD, RATE, STEPS, SWITCH
from tests.parallel.tiers import thorough
from tests.trace_events import events_of


def distances(periods: Sequence[int] = (PERIOD, PERIOD, PERIOD, STEPS % PERIOD)) -> list[list[float]]:
    """Return how far each of two ranks is from the center before every exchange, by the equations of the paper."""
    x, c, found = np.zeros(2), 0.0, []
    for steps in periods:
        x -= 0.5 * steps * np.array([1.0, 2.0])
        d = x - c
        found.append((2.0 * np.abs(d)).tolist())
        x, c = x - RATE * d, c + RATE * d.sum()
    return found


def distances_in_turn() -> list[list[float]]:
    """Return the same where rank 1 begins to exchange when rank 0 has done so for the last time, by rank."""
    c, found = 0.0, []
    for gradient in (1.0, 2.0):
        x, of_rank = 0.0, []
        for _ in range(STEPS // PERIOD):
            x -= 0.5 * PERIOD * gradient
            d = x - c
            of_rank.append(2.0 * abs(d))
            x, c = x - RATE * d, c + RATE * d
        found.append(of_rank)
    return found


@pytest.mark.timeout(240)
def test_run_logs_of_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They know distances in compiled asynchronous exchange and after a synchronous phase, and where sessions end."""
    pytest.importorskip("horovod.tensorflow")
    start("mpirun", 2, ["-m", "tests.parallel.run_log_graphs_program", str(tmp_path)], 180, "tensorflow")
    together, in_turn = np.transpose(distances()).tolist(), distances_in_turn()
    after_phase = np.transpose(distances((PERIOD, PERIOD))).tolist()
    expected = {
        "compiled asynchronous": ([3, 6, 9], in_turn, IN_TURN),
        "compiled phase": ([SWITCH + PERIOD, SWITCH + 2 * PERIOD], after_phase, STEPS),
        "session": ([3, 6, 9], [of_rank[:3] for of_rank in together], STEPS),
        "session asynchronous": ([3, 6, 9], in_turn, IN_TURN),
        "plain session": ([3, 6, 9], [of_rank[:3] for of_rank in together], 9),  # That of its last exchange.
    }
    for name, (steps, far, end) in expected.items():
        log = read_run_log(tmp_path / name)
        for rank in range(2):
            began, *exchanged, ended = log[rank]
            assert [line["step"] for line in exchanged] == steps
            assert [line["distance"] for line in exchanged] == pytest.approx(far[rank])
            assert (began["event"], ended["event"]) == ("began", "ended"), name
            assert (ended["step"], ended["exchanges"]) == (end, len(steps)), name
        assert main(["report", "--json", str(tmp_path / name)]) == 0
        [told] = json.loads(capsys.readouterr().out)["trainings"]
        assert not any("has no final entry" in finding for finding in told["findings"])


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("framework", "launcher"),
    [("torch", "mpirun"), ("tensorflow", "mpirun"), thorough("torch", "horovodrun --gloo")],
)
def test_a_page_of_a_real_run(
    framework: str, launcher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(f"horovod.{framework}")
    start(launcher, 2, ["-m", "tests.parallel.run_log_program", framework, str(tmp_path)], 120, framework)
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    log = read_run_log(tmp_path / "run")
    for rank in range(2):
        exchanged = [line for line in log[rank] if line["event"] == "exchanged"]
        assert [line["step"] for line in exchanged] == [3, 6, 9, 10]
        assert exchanged[0]["distance"] == pytest.approx(distances()[0][rank])
        for line, expected in zip(exchanged, distances(), strict=True):
            assert line.get("distance", expected[rank]) == pytest.approx(expected[rank])
    assert main(["report", "--json", str(tmp_path / "run")]) == 0
    [told] = json.loads(capsys.readouterr().out)["trainings"]
    ranks = told["ranks"]
    assert [(each["bytes_sent"], each["exchanges"]) for each in ranks] == [(s["bytes"], s["rounds"]) for s in seen]
    assert [each["exchange_seconds"] for each in ranks] == pytest.approx([s["seconds"] for s in seen])
    assert told["closed"] == pytest.approx(1 - (1 - 3 * RATE) ** 4)
    title = {"torch": "PyTorch", "tensorflow": "TensorFlow"}[framework]
    assert told["facts"]["framework"].startswith(title)
    pytest.importorskip("matplotlib")
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")]) == 0
    page = Page((tmp_path / "page.html").read_text())
    # Of the first period rank 0 has noted 16, 15, 14, rank 1 four more; of the last step 7 and 11.
    assert page.row("Loss, first → last") == ["17 → 9"]
    assert page.row("Exchanges per rank") == ["4"]
    assert page.row("Sent per rank") == [bytes_of(sum(s["bytes"] for s in seen) / 2)]
    assert page.row("Ranks") == ["2 (0, 1)"]
    assert page.row("Versions")[0].startswith(title)
    assert main(["timeline", str(tmp_path / "run"), "-o", str(tmp_path / "trace.json")]) == 0
    events = events_of((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert len([event for event in events if event["name"].startswith("exchange ")]) == 2 * 4
