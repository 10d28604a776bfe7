"""What exchanges tell of themselves: in the log, in files, and to whoever listens."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_periodic import (
    BMUF,
    EASGD,
    Algorithm,
    Communicator,
    Listener,
    LocalCommunicator,
    Report,
    Total,
    logs,
    read_run_log,
)
from hvd_periodic.algorithms.easgd import ContribEASGD
from hvd_periodic.journal import base
from hvd_periodic.numpy import SGD, ElasticAverageOptimizer, ModelAverageOptimizer, PeriodicOptimizer
from tests.conftest import PATIENCE
from tests.helpers import errors, run_ranks

STEPS, PERIOD = 10, 3
AT = [3, 6, 9, 10]


@dataclass
class Heard(Listener):
    """Keeps all that it hears."""

    facts: list[Any] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    totals: list[Total] = field(default_factory=list)

    def began(self, facts: Any) -> None:
        """Keep it."""
        self.facts.append(facts)

    def exchanged(self, report: Report) -> None:
        """Keep it."""
        self.reports.append(report)

    def ended(self, total: Total) -> None:
        """Keep it."""
        self.totals.append(total)


def of_numpy(communicator: Communicator, asynchronous: bool, **options: Any) -> Any:
    x = np.zeros(100)
    optimizer = ElasticAverageOptimizer(
        SGD(0.125), {"x": x}, PERIOD, process_set=communicator, asynchronous=asynchronous, moving_rate=0.1, **options
    )
    return optimizer.synchronizer, lambda: optimizer.step([np.ones(100)])


def of_torch(communicator: Communicator, asynchronous: bool, **options: Any) -> Any:
    torch = pytest.importorskip("torch")
    pytest.importorskip("horovod.torch")
    import hvd_periodic.torch as hvdp

    x = torch.nn.Parameter(torch.zeros(100, dtype=torch.float64))
    optimizer = hvdp.ElasticAverageOptimizer(
        torch.optim.SGD([x], lr=0.125),
        [("x", x)],
        PERIOD,
        0.1,
        process_set=communicator,
        asynchronous=asynchronous,
        **options,
    )

    def step() -> None:
        x.grad = torch.ones_like(x)
        optimizer.step()

    return optimizer.synchronizer, step


def of_keras(communicator: Communicator, asynchronous: bool, compiled: bool = False, **options: Any) -> Any:
    keras = pytest.importorskip("keras")
    tf = pytest.importorskip("tensorflow")
    pytest.importorskip("horovod.tensorflow")
    import hvd_periodic.tensorflow as hvdp

    x = keras.Variable(np.zeros(100), dtype="float64")
    optimizer = hvdp.ElasticAverageOptimizer(
        keras.optimizers.SGD(0.125),
        None,
        PERIOD,
        0.1,
        process_set=communicator,
        asynchronous=asynchronous,
        **options,
    )
    optimizer.build([x])

    def step() -> None:
        optimizer.apply([tf.ones([100], tf.float64)])

    return optimizer.synchronizer, tf.function(step) if compiled else step


def of_compiled_keras(communicator: Communicator, asynchronous: bool, **options: Any) -> Any:
    return of_keras(communicator, asynchronous, compiled=True, **options)


FRONT_ENDS: dict[str, Any] = {
    "numpy": of_numpy,
    "torch": of_torch,
    "keras": of_keras,
    "compiled keras": of_compiled_keras,
}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_every_exchange_is_told(
    front_end: str, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank, in every front end: what is told adds up to the counters, and the file says the same."""
    monkeypatch.setattr(base, "MEASURING_SHARE", float("inf"))
    folder = tmp_path / "run"
    synchronizer, step = FRONT_ENDS[front_end](LocalCommunicator(), asynchronous, run_log=folder)
    heard = Heard()
    synchronizer.journal.listeners.append(heard)
    for i in range(STEPS):
        synchronizer.report(1.0 + i)
        step()
    synchronizer.finalize()
    counters = synchronizer.counters
    assert [report.step for report in heard.reports] == AT
    assert [report.rounds for report in heard.reports] == [1, 2, 3, 4]
    assert [report.steps for report in heard.reports] == [3, 3, 3, 1]
    assert [report.loss for report in heard.reports] == [2.0, 5.0, 8.0, 10.0]
    assert [report.learning_rate for report in heard.reports] == [0.125] * 4
    assert all(report.seconds > 0 and (report.step_seconds or 0) > 0 for report in heard.reports)
    assert all((report.waited is None) == asynchronous for report in heard.reports)
    times = [when for report in heard.reports for when in (report.came, report.time)]
    assert times == sorted(times)
    # Each local step adds 0.125 per element; an exchange takes 2 α = 0.2 of what is between the two away.
    apart = [3.75, 0.8 * 3.75 + 3.75, 0.8 * (0.8 * 3.75 + 3.75) + 3.75]
    apart.append(0.8 * apart[-1] + 1.25)
    assert [report.distance for report in heard.reports] == [pytest.approx(distance) for distance in apart]
    total = heard.totals[0]
    assert (total.step, total.steps, total.exchanges, total.rounds) == (STEPS, STEPS, 4, 4)
    assert total.bytes_sent == counters.bytes_sent >= sum(report.bytes_sent for report in heard.reports) > 0
    assert total.closed == (None if asynchronous else pytest.approx(1 - (1 - 0.2) ** 4))
    assert total.wall_seconds > total.seconds == counters.exchange_seconds
    assert total.wall_seconds > sum(report.seconds for report in heard.reports)
    began, *exchanged, ended = read_run_log(folder)[0]
    assert (began["event"], began["elements"], began["size"], began["period"]) == ("began", 100, 1, PERIOD)
    title = {"numpy": "numpy", "torch": "PyTorch"}.get(front_end, "TensorFlow")
    assert began["framework"].startswith(f"{title} ")
    assert began["asynchronous"] == asynchronous
    known = [{name: value for name, value in asdict(report).items() if value is not None} for report in heard.reports]
    of = {name: began[name] for name in ("optimizer", "name")}
    assert exchanged == [{"event": "exchanged", **of, **report} for report in known]
    assert ended["exchanges"] == 4


def test_distances_take_little_of_the_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first is measured; where that has taken more than is allowed, the next are not. Without a log, none is."""
    monkeypatch.setattr(base, "MEASURING_SHARE", 0.0)
    for options in ({"run_log": tmp_path}, {}):
        synchronizer, step = of_numpy(LocalCommunicator(), False, **options)
        heard = Heard()
        synchronizer.journal.listeners.append(heard)
        for _ in range(STEPS):
            step()
        expected = [pytest.approx(3.75), None, None] if options else [None] * 3
        assert [report.distance for report in heard.reports] == expected


@pytest.mark.parametrize(("place", "measured"), [("replicated", True), ("root", False), ("sharded", False)])
def test_no_rank_is_asked_for_its_center(place: str, measured: bool, tmp_path: Path) -> None:
    def train(communicator: Communicator) -> None:
        synchronizer, step = of_numpy(communicator, False, run_log=tmp_path, center=place)
        for _ in range(3 + communicator.rank):
            step()
        synchronizer.finalize()

    run_ranks(2, train)
    assert ["distance" in next(line for line in read_run_log(tmp_path)[rank] if line["event"] == "exchanged")
            for rank in (0, 1)] == [measured] * 2  # fmt: skip


def test_updates_that_did_not_run_are_told(tmp_path: Path) -> None:
    x = np.zeros(3)
    optimizer = ModelAverageOptimizer(SGD(0.1), {"x": x}, 2, run_log=tmp_path)
    for skips in (False, True, True, True, False, False):
        optimizer.skip() if skips else optimizer.step([np.ones(3)])
    exchanged = [line for line in read_run_log(tmp_path)[0] if line["event"] == "exchanged"]
    assert [line["skipped_updates"] for line in exchanged] == [1, 2, 0]


def test_ranks_tell_what_they_saw(tmp_path: Path) -> None:
    """Uneven data: who is done takes part; the last meeting, in which nobody has anything to send, is not told."""

    def train(communicator: Communicator) -> Heard:
        synchronizer, step = of_numpy(communicator, False, run_log=tmp_path)
        heard = Heard()
        synchronizer.journal.listeners.append(heard)
        for _ in range(4 + 4 * communicator.rank):
            step()
        synchronizer.finalize()
        return heard

    first, second = run_ranks(2, train)
    assert [report.step for report in second.reports] == [3, 6, 8]
    assert [report.rounds for report in first.reports] == [1, 2, 3]
    assert all(report.waited is not None for report in first.reports + second.reports)
    log = read_run_log(tmp_path)
    assert [line["event"] for line in log[1]] == [*["exchanged"] * 3, "ended"] or log[1][0]["event"] == "began"
    assert sorted(log) == [0, 1]
    assert log[0][0]["ranks"] == [0, 1]
    assert [log[rank][-1]["bytes_sent"] for rank in (0, 1)] == [heard.totals[0].bytes_sent for heard in (first, second)]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG, "hvd_periodic"):
        yield caplog


def test_the_root_says_what_training_is_and_what_it_came_to(said: pytest.LogCaptureFixture) -> None:
    def train(communicator: Communicator) -> None:
        synchronizer, step = of_numpy(communicator, False)
        for _ in range(STEPS):
            step()
        synchronizer.finalize()

    run_ranks(2, train)
    first, *exchanges, summary, advice = said.messages
    assert first == (
        "EASGD(moving_rate=0.1, beta=None, rho=0.0) on 2 ranks every 3 steps (Every(period=3)): 100 parameters in 1 "
        "tensors, 800 B per exchange; center replicated, through threads of one process"
    )
    assert [line.split(":")[0] for line in exchanges] == [f"Exchange {i + 1} at step {at}" for i, at in enumerate(AT)]
    assert summary.startswith("10 steps and 4 exchanges in ")
    assert "waiting for other ranks), " in summary
    assert advice == (
        "In 4 exchanges the center has closed 76 % of its distance to the replicas, and may be worse than they are: "
        "exchange more often (a shorter period), or move it further (a larger moving rate)"
    )


@pytest.mark.parametrize(
    ("algorithm", "shown"),
    [
        (EASGD(), "EASGD(moving_rate=0.3333, beta=None, rho=0.0)"),
        (EASGD(beta=0.5), "EASGD(moving_rate=0.25, beta=0.5, rho=0.0)"),
        (ContribEASGD(), "EASGD(moving_rate=0.15, beta=None, rho=0.0)"),
        (BMUF(), "BMUF(block_momentum=0.5, block_learning_rate=1.0, nesterov=True)"),
    ],
)
def test_the_log_shows_the_rates_in_force(
    said: pytest.LogCaptureFixture, tmp_path: Path, algorithm: Algorithm, shown: str
) -> None:
    def train(communicator: Communicator) -> None:
        parameters = {"x": np.zeros(3)}
        optimizer = PeriodicOptimizer(SGD(0.1), parameters, algorithm, 3, process_set=communicator, run_log=tmp_path)
        for _ in range(3):
            optimizer.step([np.ones(3)])

    run_ranks(2, train)
    assert said.messages[0].startswith(f"{shown} on 2 ranks")
    assert read_run_log(tmp_path)[0][0]["algorithm"] == shown


def test_lines_name_one_of_several_optimizers(said: pytest.LogCaptureFixture) -> None:
    communicator = LocalCommunicator()
    steps = [of_numpy(communicator, False)[1] for _ in range(2)]
    for step in steps[::-1]:
        for _ in range(PERIOD):
            step()
    assert [line.partition(":")[0] for line in said.messages] == ["Optimizer 2"] * 2 + ["Optimizer 1"] * 2


def test_lines_of_one_rank_name_it_too(said: pytest.LogCaptureFixture) -> None:
    """Of two optimizers, the second is excluded from an exchange, and its ranks have started from other values."""

    def train(communicator: Communicator) -> None:
        of_numpy(communicator, False)
        x = np.full(2, float(communicator.rank))
        optimizer = ModelAverageOptimizer(SGD(1.0), {"x": x}, 1, process_set=communicator, nonfinite="skip")
        x[:] = communicator.rank
        optimizer.step([np.ones(2)])
        optimizer.step([np.full(2, math.nan if communicator.rank else 1.0)])

    run_ranks(2, train)
    told = [line for line in said.messages if "excluded" in line or "differ at the first step" in line]
    assert len(told) == 2
    assert all(line.startswith("Optimizer 2: ") for line in told)


def test_a_center_that_arrives_gets_no_advice(said: pytest.LogCaptureFixture) -> None:
    x = np.zeros(3)
    optimizer = ModelAverageOptimizer(SGD(1.0), {"x": x}, 2)
    for _ in range(4):
        optimizer.step([np.ones(3)])
    optimizer.synchronizer.finalize()
    assert not any("of its distance" in line for line in said.messages)
    assert EASGD().contraction.__doc__


@pytest.mark.parametrize(("level", "lines_seen"), [("info", 2), ("DEBUG", 4), ("warning", 0), ("loud", 1)])
def test_the_environment_asks_for_the_log(level: str, lines_seen: int) -> None:
    program = (
        "import numpy as np; from hvd_periodic import LocalCommunicator\n"
        "from hvd_periodic.numpy import SGD, ModelAverageOptimizer\n"
        "optimizer = ModelAverageOptimizer(SGD(1.0), {'x': np.zeros(3)}, 2, process_set=LocalCommunicator())\n"
        "for _ in range(4): optimizer.step([np.ones(3)])\n"
        "optimizer.synchronizer.finalize()"
    )
    environment = {**os.environ, logs.VARIABLE: level}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60 * PATIENCE, check=True)
    assert len(done.stderr.splitlines()) == lines_seen, done.stderr
    if level == "loud":
        assert "HVD_PERIODIC_LOG must be one of debug, info, warning, error. Received: 'loud'" in done.stderr


def test_the_environment_asks_for_a_run_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_PERIODIC_RUN_LOG", str(tmp_path / "of the environment"))
    for options in ({}, {"run_log": tmp_path / "given"}):
        _, step = of_numpy(LocalCommunicator(), False, **options)
        for _ in range(STEPS):
            step()
    assert [len(read_run_log(tmp_path / name)[0]) for name in ("of the environment", "given")] == [4, 4]


def test_a_folder_that_cannot_be_made_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for kind, text in errors(2, lambda communicator: of_numpy(communicator, False, run_log=tmp_path / "file")):
        assert kind is FileExistsError or "File exists" in text
    with pytest.raises(
        TypeError, match=r"`run_log` must be the path of a folder, None, or False for none\. Received: 3"
    ):
        of_numpy(LocalCommunicator(), False, run_log=3)


def test_a_full_disk_ends_the_log_and_not_the_training(said: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").symlink_to("/dev/full")
    synchronizer, step = of_numpy(LocalCommunicator(), False, run_log=tmp_path)
    for _ in range(STEPS):
        step()
    synchronizer.finalize()
    assert synchronizer.rounds == 4
    assert sum("rank-0.jsonl: [Errno 28] No space left on device" in line for line in said.messages) == 1


def test_a_log_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text('{"event": "began"}\n{"event": "exch')
    synchronizer, step = of_numpy(LocalCommunicator(), False, run_log=tmp_path)
    for _ in range(STEPS):
        step()
    synchronizer.finalize()
    assert [line["event"] for line in read_run_log(tmp_path)[0]] == ["began", "began", *["exchanged"] * 4, "ended"]


def test_a_listener_that_fails_hears_no_more(said: pytest.LogCaptureFixture) -> None:
    """And training goes on as on the other ranks, and so do other listeners."""

    class Failing(Listener):
        def exchanged(self, report: Report) -> None:
            raise OSError("the board is not reached")

    def train(communicator: Communicator) -> int:
        synchronizer, step = of_numpy(communicator, False)
        heard = Heard()
        synchronizer.journal.listeners += [Failing(), heard] if communicator.rank == 0 else [heard]
        for _ in range(STEPS):
            step()
        synchronizer.finalize()
        return len(heard.reports)

    assert run_ranks(2, train) == [4, 4]
    assert [line for line in said.messages if "Failing" in line] == [
        "Listener Failing raised and was removed: the board is not reached"
    ]


def test_counters_that_are_taken_over_are_a_new_beginning() -> None:
    synchronizer, step = of_numpy(LocalCommunicator(), False)
    heard = Heard()
    synchronizer.journal.listeners.append(heard)
    state = synchronizer.state_dict()
    for _ in range(STEPS):
        step()
    synchronizer.load_state_dict(state)
    synchronizer.broadcast()
    for _ in range(PERIOD):
        step()
    assert [report.steps for report in heard.reports] == [3, 3, 3, 3]
    assert all(report.seconds > 0 and report.bytes_sent > 0 for report in heard.reports)


@pytest.mark.parametrize(("fragments", "periods"), [(1, 4), (3, 5)])
def test_what_fragments_close_counts_once(fragments: int, periods: int) -> None:
    """In every period; at the end, fragments whose turn was before the last step are exchanged once more."""

    def train(communicator: Communicator) -> float | None:
        x = {f"x{i}": np.zeros(10) for i in range(3)}
        optimizer = ElasticAverageOptimizer(
            SGD(0.1), x, 3, moving_rate=0.1, process_set=communicator, fragments=fragments
        )
        heard = Heard()
        optimizer.synchronizer.journal.listeners.append(heard)
        for _ in range(12):
            optimizer.step([np.ones(10)] * 3)
        optimizer.synchronizer.finalize()
        return heard.totals[0].closed

    assert run_ranks(2, train) == [pytest.approx(1 - (1 - 0.3) ** periods)] * 2


def test_a_log_that_was_cut_off_is_read(tmp_path: Path) -> None:
    (tmp_path / "rank-10.jsonl").write_text(json.dumps({"event": "began"}) + '\n{"event": "exch')
    (tmp_path / "rank-2.jsonl").write_text('{"event": "began"}\n')
    assert read_run_log(tmp_path) == {2: [{"event": "began"}], 10: [{"event": "began"}]}
    with pytest.raises(FileNotFoundError, match="There is no run log in"):
        read_run_log(tmp_path / "none")


def test_trainings_of_one_job_have_logs_of_their_own(tmp_path: Path) -> None:
    for first in (0, 1):
        folder = tmp_path / f"training-of-rank-{first}"
        folder.mkdir()
        (folder / "rank-0.jsonl").write_text('{"event": "began"}\n')
    ends = r"rank-0.jsonl. Each of several trainings of a job has its own: .*/training-of-rank-0, .*/training-of-rank-1"
    with pytest.raises(FileNotFoundError, match=ends):
        read_run_log(tmp_path)
