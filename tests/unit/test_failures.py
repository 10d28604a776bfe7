"""Ranks that fail together: one prints its traceback and a summary, and the others are silent."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from hvd_periodic.comm import exit_notice, stall_monitor
from hvd_periodic.comm.exit_notice import OVER, Failures
from hvd_periodic.comm.stall_protocol import Datagram, MessageType
from tests.conftest import PATIENCE
from tests.unit.test_waiting import ranks

ERROR = "ValueError: a bad batch (train.py:31)"


def note(rank: int, text: str, kind: MessageType = MessageType.ERROR) -> Datagram:
    return Datagram(kind, bytes(16), 0, rank, text=text)


@pytest.mark.parametrize(
    ("texts", "first"),
    [
        ([ERROR] * 4, 0),
        (
            [
                "RuntimeError: Rank 2 failed (1 of 4 ranks did): BadError: of its own (train.py:9)",
                "RuntimeError: Rank 2 failed (1 of 4 ranks did): BadError: of its own (train.py:9)",
                "package.BadError: of its own (train.py:9)",
                "OSError: something else (train.py:9)",
            ],
            2,
        ),
    ],
    ids=["the same error", "errors that quote another"],
)
def test_of_ranks_that_fail_at_once_one_prints(texts: list[str], first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest of those whose error is their own; the others return once it has printed."""
    monkeypatch.setattr(stall_monitor, "_SOON", PATIENCE)
    printed: list[int] = []

    def fail(rank: int, of_rank: Any) -> None:
        if of_rank.monitor.is_first(texts[rank]):
            printed.append(rank)
        of_rank.monitor.announce_exit(texts[rank])

    with ranks(len(texts)) as made:
        threads = [threading.Thread(target=fail, args=each, daemon=True) for each in enumerate(made)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert printed == [first]


def test_a_rank_that_hears_of_no_traceback_prints_its_own() -> None:
    failures = Failures()
    failures.record(note(0, ERROR))
    assert failures.is_first(1, ERROR, [0], 0.01), "rank 0 has not printed in time"
    failures.record(note(0, OVER, MessageType.EXIT))
    assert failures.is_first(1, ERROR, [0], 0.01), "sys.exit() prints nothing"
    failures.record(note(2, ERROR, MessageType.EXIT))
    assert not failures.is_first(1, "RuntimeError: another", [0], PATIENCE)


def test_the_summary() -> None:
    failures = Failures()
    for rank in range(1, 48, 2):
        failures.record(note(rank, f"ValueError: a bad batch of {rank} (train.py:31)"))
    failures.record(
        note(2, "RuntimeError: Rank 1 failed (24 of 48 ranks did): ValueError: a bad batch of 1 (train.py:9)")
    )
    failures.record(note(6, "OSError: of its own (train.py:31)"))
    failures.record(note(8, "OSError: of its own (train.py:31)"))
    failures.record(note(10, OVER, MessageType.EXIT))
    assert failures.summary(1, "ValueError: a bad batch of 1 (train.py:31)", 48, " at local step 7").splitlines() == [
        "Ranks 6 and 8 failed at the same time: OSError: of its own (train.py:31)",
        "Ranks 1, 3 and 22 more of 48 have ended at local step 7, and the job with them: "
        "ValueError: a bad batch of 1 (train.py:31). HVD_PERIODIC_TRACEBACKS=all prints the traceback of every rank",
    ]
    assert "Rank 3 of 4 has ended, and the job with it: " in Failures().summary(3, ERROR, 4, "")


class Others:
    """Other ranks, of which one has failed before if this rank is not the first."""

    def __init__(self, first: bool) -> None:
        self.first, self.told = first, [""]

    def first_error(self, error: BaseException) -> str | None:
        """Return that of rank 3."""
        return None if self.first else "rank 3 has ended: OSError: a bad disk"

    def is_first(self, text: str) -> bool:
        """Return what was given."""
        return self.first

    def summary(self, text: str) -> str | None:
        """Return the error."""
        return f"The job has ended: {text}"

    def announce_exit(self, text: str) -> None:
        """Datagram it."""
        self.told.append(text)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_one_rank_prints_its_traceback(
    first: bool, everything: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them where the environment asks for that."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(exit_notice.atexit, "register", lambda function: None)
    monkeypatch.setenv("HVD_PERIODIC_TRACEBACKS", "all" if everything else "")
    others = Others(first)
    exit_notice.send_exit_notices(others)
    sys.excepthook(ValueError, ValueError("a bad batch"), None)
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("ValueError: a bad batch") == int(first or everything)
    last = (
        "The job has ended: ValueError: a bad batch" if first else "Before that: rank 3 has ended: OSError: a bad disk"
    )
    assert lines[-1:] == ([last] if first or everything else [])
    assert others.told[-1] == ("ValueError: a bad batch" if first else "rank 3 has ended: OSError: a bad disk")


def test_a_hook_of_the_user_is_called_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may send errors elsewhere."""
    called: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: called.append(error))
    monkeypatch.setattr(exit_notice.atexit, "register", lambda function: None)
    exit_notice.send_exit_notices(Others(False))
    error = ValueError("a bad batch")
    sys.excepthook(ValueError, error, None)
    assert called == [error]
