"""``hvdp report`` and ``plot``: the numbers of real runs, read back; broken logs; what stands out."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_periodic import EASGD, Algorithm, Averaging, Communicator, read_run_log
from hvd_periodic.cli.main import main
from hvd_periodic.journal import base
from hvd_periodic.journal.runs import read_run
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.helpers import run_ranks
from tests.html_page import Page
from tests.trace_events import events_of

STEPS, PERIOD = 10, 3
AT = [3, 6, 9, 10]


def train(
    folder: Path,
    algorithm: Callable[[], Algorithm] = lambda: EASGD(0.1),
    ranks: int = 2,
    steps: Callable[[int], int] = lambda rank: STEPS,
    loss: bool = True,
    **options: Any,
) -> list[int]:
    """Train on threads, rank r with the constant gradient r + 1; return the bytes that ranks have counted."""

    def work(communicator: Communicator) -> int:
        x = np.zeros(100)
        optimizer = PeriodicOptimizer(
            SGD(0.125), {"x": x}, algorithm(), PERIOD, process_set=communicator, run_log=folder, **options
        )
        for step in range(steps(communicator.rank)):
            if loss:
                optimizer.synchronizer.report(10.0 * (communicator.rank + 1) - step)
            optimizer.step([np.full(100, communicator.rank + 1.0)])
        optimizer.synchronizer.finalize()
        return optimizer.synchronizer.counters.bytes_sent

    return run_ranks(ranks, work)


@pytest.fixture(autouse=True)
def always_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MEASURING_SHARE", float("inf"))


def told(capsys: pytest.CaptureFixture[str], *folders: Path, more: tuple[str, ...] = ()) -> Any:
    assert main(["report", "--json", *more, *map(str, folders)]) == 0
    return json.loads(capsys.readouterr().out)["trainings"]


def shown(folder: Path, *folders: Path) -> Page:
    assert main(["report", "-o", str(folder / "page.html"), *map(str, folders)]) == 0
    return Page((folder / "page.html").read_text())


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    return error


def test_numbers_are_those_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Elastic averaging of two ranks with constant gradients, simulated here in three lines."""
    sent = train(tmp_path / "easgd")
    [found] = told(capsys, tmp_path / "easgd")
    x, c, apart = np.array([0.0, 0.0]), 0.0, []
    for steps in (3, 3, 3, 1):
        x = x - 0.125 * steps * np.array([1.0, 2.0])
        d = x - c
        apart.append(10 * np.abs(d))
        x, c = x - 0.1 * d, c + 0.1 * d.sum()
    assert found["distance"] == {"first": pytest.approx(apart[0].mean()), "last": pytest.approx(apart[3].mean())}
    assert found["loss"] == {"first": pytest.approx((9.0 + 19.0) / 2), "last": pytest.approx((1.0 + 11.0) / 2)}
    assert found["closed"] == pytest.approx(1 - (1 - 0.3) ** 4)
    assert [rank["bytes_sent"] for rank in found["ranks"]] == sent
    for rank in found["ranks"]:
        assert (rank["steps"], rank["exchanges"], rank["left_out"], rank["skipped_updates"]) == (STEPS, 4, 0, 0)
        assert rank["staleness"] is None
        assert 0 < rank["waited"] <= rank["exchange_seconds"] <= rank["seconds"]
    assert sum(rank["last"] for rank in found["ranks"]) == pytest.approx(1)
    assert (found["facts"]["period"], found["facts"]["size"], found["facts"]["host"] != "") == (PERIOD, 2, True)
    assert any("The center has closed 76 % of its distance to the replicas" in finding for finding in found["findings"])


def test_a_page_of_one_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    train(tmp_path / "easgd")
    page = shown(tmp_path, tmp_path / "easgd")
    assert page.row("Local steps per rank") == ["10"]
    assert page.row("Exchanges per rank") == ["4"]
    assert page.row("Loss, first → last") == ["14 → 6"]
    assert page.row("Algorithm") == ["EASGD(moving_rate=0.1, beta=None, rho=0.0)"]
    assert page.row("Ranks") == ["2 (0, 1)"]
    heads = next(row for row in page.rows if row[0] == "rank")
    ranks = [row for row in page.rows if row[0] in ("0", "1")]
    assert [row[heads.index("exchanges")] for row in ranks] == ["4", "4"]
    by_title = {label.partition(":")[0]: label for label in page.labels}
    assert "rank 0: from 9 to 1," in by_title["Loss"]
    assert "rank 1: from 19 to 11," in by_title["Loss"]
    assert re.search(r"waited: \S+ for rank 0, \S+ for rank 1\.", by_title["Waiting"])
    assert "Staleness" not in by_title
    assert any("exchanges are synchronous" in words for words in page.words)
    assert all(address.startswith("#") for address in page.addresses), "the page asks the network for something"
    assert len(set(page.identities)) == len(page.identities)


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    """Another algorithm; an asynchronous one; one without loss, whose center no rank can read by itself."""
    pytest.importorskip("matplotlib")
    train(tmp_path / "easgd")
    train(tmp_path / "<average>", Averaging, center="root", loss=False)
    train(tmp_path / "one by one", asynchronous=True)
    page = shown(tmp_path, *(tmp_path / name for name in ("easgd", "<average>", "one by one")))
    assert page.rows[0] == ["", "easgd", "<average>", "one by one"]
    assert page.row("Exchange") == ["synchronous", "synchronous", "asynchronous"]
    assert page.row("Loss, first → last") == ["14 → 6", "unknown", "14 → 6"]
    assert page.row("Distance to the center, first → last")[1] == "unknown"
    assert page.row("Time waiting for others")[2] == ""
    by_title = {label.partition(":")[0]: label for label in page.labels}
    assert "<average>" not in by_title["Loss"]
    assert "<average>: from 4" not in by_title["Exchanges"]
    assert "<average>: from 1 to 4" in by_title["Exchanges"]
    assert by_title["Staleness"].count("from") == 1


def test_a_page_of_rounds_with_a_quorum(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = written(tmp_path / "run", [[1.0, 1.0, 1.0], [0.5, 0.5, 0.5], [0.0, 0.0]], ranks=[0, 1, 2], quorum=2)
    for log, numbers in zip(sorted(folder.iterdir()), ([1, 2, 3], [1, 2, 3], [1, 3]), strict=True):
        began, *exchanged = map(json.loads, log.read_text().splitlines())
        for line, number in zip(exchanged, numbers, strict=True):
            line |= {"number": number, "members": [0, 1] if number == 2 else [0, 1, 2], "missed": 0}
            line |= {"came": 10.0 * number - line["waited"], "time": 10.0 * number + 0.1}
        log.write_text("".join(json.dumps(line) + "\n" for line in (began, *exchanged)))
    page = shown(tmp_path, folder)
    assert page.row("Rounds, without some ranks") == ["3, 1"]
    assert page.row("Waiting saved by the quorum") == ["10.0 s"]
    assert any(label.startswith("Staleness") for label in page.labels)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    train(tmp_path / "bare", loss=False, center="root", ranks=1)
    page = shown(tmp_path, tmp_path / "bare")
    text = " ".join(page.words)
    assert "No loss was reported: call optimizer.synchronizer.report(loss) before step()" in text
    assert "No distance was measured" in text
    assert "No rank waits for others: there is only one" in text


def lines(rank: int, waits: list[float], **facts: Any) -> list[dict[str, Any]]:
    """Return what a rank of four writes, of exchanges that take a second each, ten seconds apart."""
    of = {"optimizer": 1, "name": "hvd.1"}
    known = {"version": 1, "time": 0.0, "ranks": [0, 1, 2, 3], "algorithm": "Averaging()", "host": f"h{rank}"}
    found: list[dict[str, Any]] = [{"event": "began", **of, **known, **facts}]
    for i, waited in enumerate(waits):
        time = 10.0 * (i + 1)
        report = {"step": i + 1, "rounds": i + 1, "steps": 1, "seconds": waited + 0.1, "bytes_sent": 8}
        found.append(
            {"event": "exchanged", **of, "time": time, "came": time - waited - 0.1, "waited": waited, **report}
        )
    return found


def written(folder: Path, waits: list[list[float]], **facts: Any) -> Path:
    folder.mkdir()
    for rank, of_rank in enumerate(waits):
        text = "\n".join(json.dumps(line) for line in lines(rank, of_rank, **facts))
        (folder / f"rank-{rank}.jsonl").write_text(text + "\n")
    return folder


def test_a_rank_that_all_wait_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers on purpose: rank 2 comes last to nine of ten exchanges, rank 0 to one."""
    late, other = [4.0, 4.0, 0.5, 3.0], [0.0, 1.0, 1.0, 1.0]
    waits = np.array([late] * 9 + [other]).T.tolist()
    [found] = told(capsys, written(tmp_path / "late", waits))
    by_rank = {rank["rank"]: rank for rank in found["ranks"]}
    assert [by_rank[rank]["last"] for rank in range(4)] == [0.1, 0.0, 0.9, 0.0]
    assert by_rank[2]["kept"] == pytest.approx(9 * (3.5 + 3.5 + 2.5))
    assert by_rank[0]["kept"] == pytest.approx(3.0)
    assert by_rank[3]["waited"] == pytest.approx(28.0)
    assert found["waiting_share"] == pytest.approx((36 + 37 + 5.5 + 28) / 400)
    first = next(finding for finding in found["findings"] if "wait" in finding)
    assert first.startswith("Rank 2 (h2) delays the others: it arrived last at 90 % of the exchanges")
    assert any("has no final entry" in finding for finding in found["findings"])


def test_ranks_that_wait_for_each_other_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waits = [[0.0 if i % 4 == rank else 4.0 for i in range(8)] for rank in range(4)]
    [found] = told(capsys, written(tmp_path / "turns", waits))
    assert any("and no single rank is the cause" in finding for finding in found["findings"])


def test_a_restarted_job_and_its_cut_off_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    train(folder)
    with (folder / "rank-1.jsonl").open("a") as file:
        file.write('{"event": "exch')
    train(folder, steps=lambda rank: 3)
    assert len([line for line in read_run_log(folder)[1] if line["event"] == "began"]) == 2
    [found] = told(capsys, folder)
    assert [rank["steps"] for rank in found["ranks"]] == [STEPS + 3] * 2
    assert [rank["exchanges"] for rank in found["ranks"]] == [5, 5]
    assert found["bad_lines"] == {"rank-1.jsonl": {"7": "it is not JSON: a job may have ended while writing it"}}
    assert found["findings"][0].startswith("rank-1.jsonl: skipped 1 bad line: line 7: it is not JSON: a job")
    assert any("Training was started 2 times, at local steps 0, 0" in finding for finding in found["findings"])


def test_several_optimizers_and_sets_of_ranks_in_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two optimizers of the same ranks; and ranks that train among themselves."""

    def work(communicator: Communicator) -> None:
        for _ in range(2):
            x = np.zeros(3)
            optimizer = PeriodicOptimizer(
                SGD(0.1), {"x": x}, Averaging(), 2, process_set=communicator, run_log=tmp_path / "two"
            )
            for _ in range(4):
                optimizer.step([np.ones(3)])
            optimizer.synchronizer.finalize()

    run_ranks(2, work)
    other = [line for rank in (2, 3) for line in lines(rank, [0.1, 0.2], ranks=[2, 3])]
    for rank, part in ((2, other[:3]), (3, other[3:])):
        (tmp_path / "two" / f"rank-{rank}.jsonl").write_text("\n".join(map(json.dumps, part)))
    found = told(capsys, tmp_path / "two")
    assert [[rank["rank"] for rank in each["ranks"]] for each in found] == [[2, 3], [0, 1], [0, 1]]
    assert {each["label"] for each in found[1:]} == {f"two, optimizer {i} of ranks 0 and 1" for i in (1, 2)}
    assert [each["ranks"][0]["exchanges"] for each in found] == [2, 2, 2]


def test_logs_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "nowhere"):
        assert f"There is no run log in {tmp_path / folder}" in refused(capsys, "report", str(tmp_path / folder))

    def with_file(text: str) -> str:
        (tmp_path / "broken").mkdir(exist_ok=True)
        (tmp_path / "broken" / "rank-0.jsonl").write_text(text)
        return refused(capsys, "report", str(tmp_path / "broken"))

    assert "is not a run log: it is empty" in with_file("")
    assert "is not a run log: line 1: it is not JSON:" in with_file("hello\n")
    assert "is not a run log: line 1: it is not a JSON object" in with_file("[1, 2]\n")
    assert "is not a run log: line 1: it has an unknown event=[[]]" in with_file('{"event": [[]]}\n')
    began = {"event": "began", "optimizer": 1, "name": "a", "version": 1, "time": 0.0, "ranks": [0], "algorithm": "A"}
    newer = json.dumps(began | {"version": 7, "package": "9.1"})
    assert "version 7, but this hvd_periodic reads version 1: use hvd_periodic 9.1" in with_file(newer)
    assert "line 1: it lacks time" in with_file('{"event": "began", "version": 1}\n')
    assert "contains no exchange" in with_file(json.dumps(began))
    exchanged = {"event": "exchanged", "optimizer": 1, "name": "a"}
    assert "line 1: the beginning of its training is missing or bad" in with_file(json.dumps(exchanged))
    text = "\n".join(map(json.dumps, (began, exchanged)))
    assert "contains no exchange" in with_file(text)
    assert "rank-0.jsonl: skipped 1 bad line: line 2: it lacks time" in with_file(text)
    assert "Received: the file" in refused(capsys, "report", str(tmp_path / "broken" / "rank-0.jsonl"))


def test_ranks_that_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run")
    (tmp_path / "run" / "rank-1.jsonl").unlink()
    assert "has no log of rank 1: each rank writes on its own host" in refused(capsys, "report", str(tmp_path / "run"))
    [found] = told(capsys, tmp_path / "run", more=("--partial",))
    assert [rank["rank"] for rank in found["ranks"]] == [0]
    assert "There is no log of rank 1" in found["findings"][0]


def test_files_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    run = str(tmp_path)
    assert "`-o` must end in .html or .htm" in refused(capsys, "report", run, "-o", "page.txt")
    assert "`-o`: there is no folder" in refused(capsys, "report", run, "-o", str(tmp_path / "no" / "page.html"))
    assert "`-o` must end in .json" in refused(capsys, "timeline", run, "-o", "trace.txt")
    assert "`-o` must end in one of" in refused(capsys, "plot", run, "-o", "plot.txt")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "`-o` needs matplotlib" in refused(capsys, "report", run, "-o", str(tmp_path / "page.html"))


@pytest.mark.parametrize("what", ["loss", "distance", "exchanges", "sent", "bytes", "waiting"])
def test_a_plot(what: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    train(tmp_path / "run")
    for folders in (["run"], ["run", "run/../run"]):
        runs = [str(tmp_path / folder) for folder in folders]
        assert main(["plot", *runs, "--what", what, "-o", str(tmp_path / "plot.svg")]) == 0
        assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_the_points_of_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON, in which what is apart is null; nothing is drawn for it, and matplotlib not needed."""
    train(tmp_path / "run")
    train(tmp_path / "run", steps=lambda rank: 3)
    assert main(["plot", str(tmp_path / "run"), "--what", "loss", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["what"], told["x"], told["y"]) == ("loss", "local step", "loss")
    assert [curve["label"] for curve in told["curves"]] == ["rank 0", "rank 1"]
    assert told["curves"][1] == {"label": "rank 1", "x": [*AT, None, 3], "y": [19, 16, 13, 11, None, 19]}
    assert "Pass -o FILE to write a file, or --json" in refused(capsys, "plot", str(tmp_path / "run"))


def test_a_plot_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    train(tmp_path / "run", loss=False)
    file = str(tmp_path / "plot.png")
    assert "No loss was reported" in refused(capsys, "plot", str(tmp_path / "run"), "-o", file)
    assert "exchanges are synchronous" in refused(
        capsys, "plot", str(tmp_path / "run"), "--what", "staleness", "-o", file
    )


@pytest.mark.filterwarnings("default")
def test_a_plot_says_what_it_does_not_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody waits in asynchronous training: its bars would be missing without a word."""
    pytest.importorskip("matplotlib")
    train(tmp_path / "together")
    train(tmp_path / "alone", asynchronous=True, loss=False)
    runs = [str(tmp_path / name) for name in ("together", "alone")]
    for what, why in (("waiting", "exchanges are asynchronous"), ("loss", "No loss was reported")):
        assert main(["plot", *runs, "--what", what, "-o", str(tmp_path / "plot.svg")]) == 0
        error = capsys.readouterr().err
        assert error.startswith("warning: Not shown: alone. ")
        assert why in error
    assert main(["plot", *runs, "--what", "waiting", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["absent"] == ["alone"]
    assert main(["report", *runs, "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Not shown: alone. No rank waits for others" in page
    assert "Not shown: together. There is no staleness: exchanges are synchronous" in page


def test_long_runs_have_few_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Means over neighbours: of losses 0, 1, ... the mean stays."""
    from hvd_periodic.cli import run_summary

    x = np.zeros(1)
    optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, Averaging(), 1, run_log=tmp_path / "long")
    for step in range(1000):
        optimizer.synchronizer.report(float(step))
        optimizer.step([np.ones(1)])
    [found] = run_summary.summarize([read_run(tmp_path / "long")])
    steps, losses = run_summary.curve(found, "loss")
    assert len(steps) == len(losses) == run_summary.POINTS
    assert np.mean(losses) == pytest.approx(499.5)
    assert steps == sorted(steps)


def test_a_run_that_has_diverged(tmp_path: Path) -> None:
    """It has a page and a trace, in which losses are no numbers: JSON has no NaN."""
    pytest.importorskip("matplotlib")
    folder = written(tmp_path / "run", [[0.1, 0.2]] * 4)
    for log in folder.iterdir():
        began, *exchanged = map(json.loads, log.read_text().splitlines())
        diverged = [line | {"loss": "nan", "distance": "inf"} for line in exchanged]
        log.write_text("".join(json.dumps(line) + "\n" for line in (began, *diverged)))
    assert any(label.endswith("not a number.") for label in shown(tmp_path, folder).labels)
    assert main(["timeline", str(folder), "-o", str(tmp_path / "trace.json")]) == 0
    events = events_of((tmp_path / "trace.json").read_text())
    assert {event["args"]["loss"] for event in events if "loss" in event.get("args", {})} == {"nan"}
