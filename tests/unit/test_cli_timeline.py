"""``hvdp timeline``: traces of real runs and of logs made up, read by the rules of the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_periodic import EASGD, Averaging, Communicator, Compression, DiLoCo
from hvd_periodic.cli.main import main
from hvd_periodic.cli.rounds import clocks, rounds_of
from hvd_periodic.journal.runs import read_run
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.helpers import run_ranks
from tests.trace_events import events_of
from tests.unit.test_cli_report import AT, lines, refused, train, written


def traced(folder: Path) -> list[dict[str, Any]]:
    file = folder.with_suffix(".json")
    assert main(["timeline", str(folder), "-o", str(file)]) == 0
    return events_of(file.read_text(encoding="utf-8"))


def spans(events: list[dict[str, Any]], name: str = "exchange") -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["name"].startswith(name)]


def test_a_trace(tmp_path: Path) -> None:
    """Exchanges, in them meetings, and an arrow for every rank that has waited for the last one."""
    train(tmp_path / "run", ranks=3)
    events = traced(tmp_path / "run")
    assert sorted((e["pid"], e["args"]["step"]) for e in spans(events)) == [
        (rank, step) for rank in range(3) for step in AT
    ]
    assert len(spans(events, "handshake")) == 3 * len(AT)
    arrows = {kind: [event["id"] for event in events if event["ph"] == kind] for kind in "sf"}
    assert sorted(arrows["s"]) == sorted(arrows["f"])
    assert len(set(arrows["s"])) == 2 * len(AT)
    assert {e["args"]["name"].split(" on ")[0] for e in events if e["name"] == "process_name"} == {
        f"rank {rank}" for rank in range(3)
    }


@pytest.mark.parametrize(
    "options",
    [
        {"asynchronous": True},
        {"overlap": "period"},
        {"overlap": 2, "fragments": 2, "compression": Compression.int8},
        {"center": "root"},
    ],
    ids=str,
)
def test_ways_to_exchange(options: dict[str, Any], tmp_path: Path) -> None:
    def work(communicator: Communicator) -> None:
        x = np.zeros(64)
        tensors = {"a": x[:32], "b": x[32:]}
        algorithm = EASGD(0.1) if options.get("asynchronous") else DiLoCo()
        optimizer = PeriodicOptimizer(
            SGD(0.1), tensors, algorithm, 4, process_set=communicator, run_log=tmp_path / "run", **options
        )
        for _ in range(18):
            optimizer.step([np.ones(32), np.ones(32)])
        optimizer.synchronizer.finalize()

    run_ranks(2, work)
    events = traced(tmp_path / "run")
    assert len(spans(events)) >= 8
    assert bool(spans(events, "handshake")) == (not options.get("asynchronous"))


def test_several_optimizers_and_beginnings(tmp_path: Path) -> None:
    """Each optimizer is a thread of its own on every rank; a job that begins again goes on there."""

    def work(communicator: Communicator) -> None:
        for _ in range(2):
            x = np.zeros(3)
            optimizer = PeriodicOptimizer(
                SGD(0.1), {"x": x}, Averaging(), 2, process_set=communicator, run_log=tmp_path / "run"
            )
            for _ in range(4):
                optimizer.step([np.ones(3)])
            optimizer.synchronizer.finalize()

    for _ in range(2):
        run_ranks(2, work)
    events = traced(tmp_path / "run")
    named = [event for event in events if event["name"] == "thread_name"]
    assert len({event["tid"] for event in named}) == len(named) == 4
    assert len(spans(events)) == 2 * 2 * 2 * 2


def test_clocks_that_are_set_back(tmp_path: Path) -> None:
    """Meetings that end after their exchanges, and exchanges that begin in the one before, are cut to fit."""
    folder = written(tmp_path / "run", [[0.5] * 4, [0.0] * 4], ranks=[0, 1])
    for log in folder.iterdir():
        began, *exchanged = map(json.loads, log.read_text().splitlines())
        exchanged[1] |= {name: exchanged[1][name] - 12.0 for name in ("time", "came")}
        exchanged[3]["waited"] += 7.0
        log.write_text("".join(json.dumps(line) + "\n" for line in (began, *exchanged)))
    assert len(spans(traced(folder))) == 8


@pytest.mark.filterwarnings("default")
def test_a_log_that_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line of a rank is half there, and named: an exchange of which not all tell has no arrow."""
    train(tmp_path / "run")
    log = tmp_path / "run" / "rank-1.jsonl"
    kept = [line for line in log.read_text().splitlines() if '"ended"' not in line]
    log.write_text("\n".join(kept)[:-40])
    events = traced(tmp_path / "run")
    assert "rank-1.jsonl: skipped 1 bad line: line 5: it is not JSON" in capsys.readouterr().err
    assert len(spans(events)) == 2 * len(AT) - 1
    assert len([event for event in events if event["ph"] == "s"]) == len(AT) - 1


def test_names_that_are_not_ascii(tmp_path: Path) -> None:
    """Perfetto reads no escapes of Unicode where it looks for a time."""
    folder = written(tmp_path / "run", [[0.1], [0.2]], ranks=[0, 1], algorithm="Dämpfung()")
    assert any("Dämpfung" in str(event["args"]) for event in traced(folder))
    assert "\\u" not in folder.with_suffix(".json").read_text(encoding="utf-8")


def test_a_trace_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run")
    assert main(["timeline", str(tmp_path / "run"), "--json"]) == 0
    printed = events_of(capsys.readouterr().out)
    assert "Pass -o FILE to write a file, or --json" in refused(capsys, "timeline", str(tmp_path / "run"))
    assert printed == traced(tmp_path / "run")


def test_a_log_without_moments_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a file is begun."""
    folder = written(tmp_path / "run", [[0.1], [0.2]], ranks=[0, 1])
    for log in folder.iterdir():
        log.write_text(log.read_text().replace('"came"', '"else"'))
    file = tmp_path / "trace.json"
    assert "does not record when ranks arrived" in refused(capsys, "timeline", str(folder), "-o", str(file))
    assert not file.exists()


def test_clocks_of_hosts_are_set_by_their_meetings(tmp_path: Path) -> None:
    waits = [[3.0, 2.0, 1.0], [0.0, 0.0, 0.0]]
    folder = written(tmp_path / "run", waits, ranks=[0, 1])
    ahead = [json.loads(line) for line in (folder / "rank-1.jsonl").read_text().splitlines()]
    shifted = [line | {name: line[name] + 100 for name in ("time", "came") if name in line} for line in ahead]
    (folder / "rank-1.jsonl").write_text("\n".join(map(json.dumps, shifted)))
    [part] = read_run(folder).trainings[0].parts
    assert clocks(part) == {0: 0.0, 1: pytest.approx(100.0)}
    begun = {(event["pid"], event["name"]): event["ts"] for event in spans(traced(folder))}
    assert begun[1, "exchange 1"] == pytest.approx(begun[0, "exchange 1"] + 3e6, abs=2)


def a_trace(**changes: Any) -> str:
    """Return a trace of two ranks with one exchange, in which events have been changed, by name and rank."""
    place = [{"pid": rank, "tid": rank} for rank in range(2)]
    made = {
        **{f"p{k}": {"name": "process_name", "ph": "M", **place[k], "args": {"name": "rank"}} for k in range(2)},
        **{f"t{k}": {"name": "thread_name", "ph": "M", **place[k], "args": {"name": "optimizer"}} for k in range(2)},
        **{f"x{k}": {"name": "e", "cat": "c", "ph": "X", "ts": 5, "dur": 9, **place[k], "args": {}} for k in range(2)},
        "y0": {"name": "m", "cat": "c", "ph": "X", "ts": 5, "dur": 4, **place[0], "args": {}},
        "z0": {"name": "e", "cat": "c", "ph": "X", "ts": 14, "dur": 0, **place[0], "args": {}},
        "s": {"name": "a", "cat": "c", "id": 1, "ph": "s", "ts": 5, **place[1]},
        "f": {"name": "a", "cat": "c", "id": 1, "ph": "f", "bp": "e", "ts": 9, **place[0]},
    }
    changed = [event | changes.get(name, {}) for name, event in made.items() if changes.get(name, {}) is not None]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": changed})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"y0": {"dur": 10}}, "ends after the slice"),
        ({"z0": {"ts": 13, "dur": 4}}, "ends after the slice"),
        ({"z0": {"ts": 4}}, "begins before"),
        ({"x1": {"ts": 5.5}}, "no values"),
        ({"x1": {"dur": -1}}, "no values"),
        ({"s": {"id": "0.1.2"}, "f": {"id": "0.1.2"}}, "no values"),
        ({"s": {"id": 2}}, "not a beginning and an end"),
        ({"s": {"ts": 10}}, "ends before it begins"),
        ({"s": {"name": "b"}}, "two names"),
        ({"f": {"ts": 20}}, "in no slice"),
        ({"p1": None}, "named"),
        ({"t1": {"args": {}}}, "no metadata"),
        ({"p1": {"pid": 0, "tid": 0}}, "2 times"),
        ({"x1": {"tid": 0}}, "processes"),
        ({"x1": {"ph": "B"}}, "no phase"),
        ({"f": {"bp": "n"}}, "next slice"),
        ({"x1": {"extra": 1}}, "missing, or unknown"),
    ],
    ids=str,
)
def test_the_rules_find_what_breaks_them(changes: dict[str, Any], problem: str) -> None:
    events_of(a_trace())
    with pytest.raises(AssertionError, match=problem):
        events_of(a_trace(**changes))


def test_rounds_with_a_quorum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who took part in each, in the trace; in the report, how often a rank did, and how many rounds it missed."""
    sets = [[0, 1, 2], [0, 1], [0, 1], [0, 1, 2]]

    def work(communicator: Communicator) -> None:
        x, options = np.zeros(8), {"process_set": communicator, "run_log": tmp_path / "run"}
        optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, DiLoCo(), 1, quorum=2, grace_seconds=0.5, **options)
        optimizer.synchronizer.begin()
        optimizer.synchronizer.exchanger.replay(sets)  # type: ignore[attr-defined]
        communicator.allgather_object(None, "replayed")
        for members in sets:
            if communicator.rank in members:
                optimizer.step([np.ones(8)])
        optimizer.finalize()

    run_ranks(3, work)
    found = [(e["pid"], e["name"], e["args"]["ranks in it"]) for e in spans(traced(tmp_path / "run"), "round")]
    assert sorted(found) == sorted(
        (rank, f"round {number}", ", ".join(map(str, members)))
        for number, members in enumerate(sets, 1)
        for rank in members
    )
    capsys.readouterr()
    assert main(["report", "--json", str(tmp_path / "run")]) == 0
    (training,) = json.loads(capsys.readouterr().out)["trainings"]
    assert (training["facts"]["quorum"], training["facts"]["grace_seconds"]) == (2, 0.5)
    assert [(rank["exchanges"], rank["staleness"]) for rank in training["ranks"]] == [(4, 0), (4, 0), (2, 1)]
    assert [rank["staleness_max"] for rank in training["ranks"]] == [0, 0, 2]
    assert [each["members"] for each in training["rounds"]] == sets
    assert training["rounds"][3]["staleness"] == {"0": 0, "1": 0, "2": 2}
    assert any("2 of 4 rounds closed without some ranks" in finding for finding in training["findings"])


CLOSED = [10.0, 20.0, 24.0, 30.0, 40.0]
CAME = [[9.0, 10.0, 9.5], [19.0, 19.5], [22.0, 23.0], [29.0, 28.0, 26.0], [39.0, 38.0]]
"""When five rounds closed, and when their members came; the third rank is in two of them."""


def test_the_waiting_that_a_quorum_has_saved(tmp_path: Path) -> None:
    """A rank that misses two rounds in a row counts in the first; one that has not come again by the end is unknown.

    The clock of the third rank is 100 s ahead.
    """
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in range(3):
        rounds = [(number, came) for number, came in enumerate(CAME, 1) if rank < len(came)]
        waits, ahead = [CLOSED[number - 1] - came[rank] for number, came in rounds], 100.0 * (rank == 2)
        began, *exchanged = lines(rank, waits, ranks=[0, 1, 2], quorum=2)
        for line, (number, came) in zip(exchanged, rounds, strict=True):
            line |= {"came": came[rank] + ahead, "time": CLOSED[number - 1] + 0.1 + ahead}
            line |= {"number": number, "members": list(range(len(came)))}
        (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (began, *exchanged)))
    [part] = read_run(folder).trainings[0].parts
    assert clocks(part) == {0: 0.0, 1: 0.0, 2: 100.0}
    found = rounds_of(part)
    assert [each.late for each in found] == [{}, {2: 6.0}, {2: 2.0}, {}, {}]
    assert [each.saved for each in found] == [0.0, 6.0, 0.0, 0.0, None]
    details = [event["args"] for event in spans(traced(folder), "round 2")]
    assert [each["came after the close"] for each in details] == ["rank 2: 6.0 s"] * 2
    assert [each["seconds of waiting saved"] for each in details] == [6.0] * 2


def test_a_round_that_moves_nothing_has_the_number_of_the_one_before(tmp_path: Path) -> None:
    """Rounds with other members are rounds of their own; of repeated ones the first counts."""
    folder = tmp_path / "run"
    folder.mkdir()
    members = [[0, 1, 2], [0, 1], [0, 2]]
    for rank in range(3):
        rounds = [(i, ranks) for i, ranks in enumerate(members) if rank in ranks]
        began, *exchanged = lines(rank, [1.0] * len(rounds), ranks=[0, 1, 2], quorum=2)
        for line, (i, ranks) in zip(exchanged, rounds, strict=True):
            line |= {"came": 10.0 * (i + 1), "time": 10.0 * (i + 1) + 1.1, "number": 1, "members": ranks}
        repeated = exchanged[-1] | {"came": 40.0, "time": 41.1}
        text = "".join(json.dumps(line) + "\n" for line in (began, *exchanged, repeated))
        (folder / f"rank-{rank}.jsonl").write_text(text)
    found = rounds_of(read_run(folder).trainings[0].parts[0])
    assert [each.members for each in found] == members
    assert [each.late for each in found] == [{}, {2: 9.0}, {}]
    late = [event["args"].get("came after the close") for event in spans(traced(folder), "round 1")]
    assert list(filter(None, late)) == ["rank 2: 9.0 s"] * 3, "of both members, and once repeated"
