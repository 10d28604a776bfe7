"""What ranks tell each other before data travels: one small record per rank, gathered on all.

All optimizers of a process set meet under one name, whatever they meet for. So ranks that wait in different places find
out, instead of waiting forever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Protocol

import numpy as np

from hvd_periodic.comm.agreement import Ranks, raise_on_all
from hvd_periodic.comm.attendance import Attendance
from hvd_periodic.comm.packing import pack, unpack
from hvd_periodic.ranks import by_value


class MeetingRanks(Ranks, Protocol):
    """Ranks that can meet: a communicator."""

    meeting_name: str
    attendance: Attendance

    @property
    def global_ranks(self) -> list[int]:
        """All of them, as the job numbers them."""

    @property
    def meets_with(self) -> MeetingRanks:
        """All that meet when these do."""

    def gather_integers(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return the integers of all ranks, one rank after another."""


class Purpose(IntEnum):
    """What a rank has come for."""

    CONSTRUCT = 0
    START = 1
    EXCHANGE = 2
    LEAVE = 3
    SAVE = 4
    READ = 5
    AUDIT = 6
    BROADCAST = 7
    COMMIT = 8
    TRAINER = 9
    COMPLETE = 10


TRAINER_PLACES = ("a collective of the trainer", "construction of a strategy", "the end of training")
"""Where trainers meet, which count these in the place of optimizers."""


@dataclass(frozen=True)
class Record:
    """What one rank tells the others, in integers of 64 bits.

    Attributes:
        purpose: what it has come for.
        optimizer: which optimizer of the process set this is, counted from 1; to construct one: how many there are.
        problem: 1 where this rank cannot go on.
        settings: a number that is the same where the hyper-parameters of the center optimizer are.
        rate: a number that is the same where its learning rates are.
        local_steps: iterations so far.
        updates: iterations whose update ran.
        pending: iterations since the last exchange.
        period: iterations that the schedule planned between the last exchange and the next.
        learning_rate: of the local optimizer; None where it is unknown.
        step_seconds: seconds per iteration since the last exchange; None where there was none.
        loss: mean of what was reported since the last exchange; None where nothing was.
        optimizer_state: a number that is the same where local optimizers keep the same; 0 where it does not matter.
        foreseen: iterations at the exchange after this one, where the schedule can say so before ranks meet; else 0.
        weight: how much this rank counts in means; None where all count alike.
        left_out: 1 where its replica is not finite, and it is left out.
        enclosed: integers that follow this record: messages, as memory.
    """

    purpose: int
    optimizer: int
    problem: int = 0
    settings: int = 0
    rate: int = 0
    local_steps: int = 0
    updates: int = 0
    pending: int = 0
    period: int = 0
    learning_rate: float | None = None
    step_seconds: float | None = None
    loss: float | None = None
    optimizer_state: int = 0
    foreseen: int = 0
    weight: float | None = None
    left_out: int = 0
    enclosed: int = 0

    @property
    def training(self) -> bool:
        """Whether the rank exchanges and goes on, as opposed to one that has run out of data."""
        return self.purpose == Purpose.EXCHANGE

    @property
    def place(self) -> str:
        """What the rank has come for, in words."""
        return _place(self)


def integers(record: Record) -> list[int]:
    """Return a record as it travels.

    Example:
        >>> integers(Record(Purpose.START, optimizer=1))[:5]
        [1, 1, 0, 0, 0]
    """
    return pack(record)


def opened(gathered: Sequence[int] | np.ndarray) -> tuple[list[Record], list[np.ndarray]]:
    """Return the records of all ranks and what each has enclosed, given their integers one after another."""
    width, rest = len(fields(Record)), np.asarray(gathered, np.int64)
    records, enclosures = [], []
    while rest.size:
        records.append(unpack(Record, rest[:width].tolist()))
        enclosures.append(rest[width : width + records[-1].enclosed])
        rest = rest[width + records[-1].enclosed :]
    return records, enclosures


def records_of(gathered: Sequence[int] | np.ndarray) -> list[Record]:
    """Return the records of all ranks, given their integers one after another."""
    return opened(gathered)[0]


def leading(records: Sequence[Record]) -> Record:
    """Return the record of the rank whose learning rates count: the one with most updates, of several the first.

    A learning-rate scheduler is behind on a rank whose updates were skipped.
    """
    return max(records, key=lambda record: record.updates)


def meet(
    communicator: MeetingRanks,
    record: Record,
    failure: Exception | None = None,
    enclosed: np.ndarray | None = None,
) -> tuple[list[Record], list[np.ndarray]]:
    """Return the records of all ranks that meet and what each has enclosed, in rank order.

    Args:
        communicator: the ranks.
        record: of this one.
        failure: why this rank cannot go on, where ``record.problem`` says so.
        enclosed: integers that travel along.

    Raises:
        Exception: ``failure``, on this rank.
        RuntimeError: another rank cannot go on, or ranks have come for different things; on all of them.
    """
    enclosed = np.empty(0, np.int64) if enclosed is None else enclosed
    communicator = communicator.meets_with
    communicator.attendance.last = record
    own = np.concatenate([np.array(integers(replace(record, enclosed=enclosed.size)), np.int64), enclosed])
    records, enclosures = opened(communicator.gather_integers(own, communicator.meeting_name))
    check(communicator, records, failure)
    return records, enclosures


def check(communicator: MeetingRanks, records: Sequence[Record], failure: Exception | None) -> None:
    """Raise on all ranks where one cannot go on, or where they have come for different things; as :func:`meet`."""
    communicator.attendance.seen = records
    crossed = cross_purposes(records, communicator.global_ranks)
    if crossed or any(record.problem for record in records):
        raise_on_all(communicator, communicator.meeting_name, failure)
    if crossed:
        raise RuntimeError(crossed)


def cross_purposes(records: Sequence[Record], numbers: Sequence[int]) -> str | None:
    """Return where ranks wait for each other, if they have come for different things; None if they have not.

    Args:
        records: of all ranks that have met.
        numbers: of these, as the job numbers them.

    Example:
        >>> print(cross_purposes([Record(2, 1, local_steps=6), Record(2, 2, local_steps=8)], [1, 3]).split(":")[0])
        Ranks wait for each other in different places
    """
    purposes = {record.purpose for record in records}
    together = len(purposes) == 1 or purposes <= {Purpose.EXCHANGE, Purpose.LEAVE}
    if together and (Purpose.CONSTRUCT in purposes or len({record.optimizer for record in records}) == 1):
        return None
    places = by_value(dict(zip(numbers, map(_place, records), strict=True)))
    if Purpose.CONSTRUCT in purposes:
        advice = "All ranks construct their optimizers together, in the same order and equally many"
    elif Purpose.COMPLETE in purposes:
        advice = "After save(background=True) all ranks call wait() together, and finalize() before their program ends"
    elif Purpose.SAVE in purposes:
        advice = "All ranks save together, at the same local step"
    elif Purpose.COMMIT in purposes:
        advice = "With a center that is not on every rank, all ranks commit together, at the same local step"
    elif Purpose.READ in purposes:
        advice = (
            "Where the center is not on every rank, center(), distance() and state_dict() are for all ranks together: "
            "take them out of `if rank == 0:`, and save on one rank what all have read"
        )
    elif Purpose.TRAINER in purposes:
        advice = (
            "A rank has come to the end of its batches, or validates, saves or logs at other steps than the others: "
            "the trainer's settings have to be the same on all ranks, and so has what it decides from"
        )
    elif purposes & {Purpose.AUDIT, Purpose.BROADCAST}:
        advice = "audit() and broadcast() are for all ranks together"
    elif Purpose.START in purposes and len(purposes) > 1:
        advice = "A state that is loaded after training has begun has to be loaded on every rank"
    else:
        advice = (
            "Where a process has several optimizers, all ranks step them in the same order and equally often: step() "
            "once per iteration, or skip() where there is no update"
        )
    return f"Ranks wait for each other in different places: {places}. {advice}"


def _place(record: Record) -> str:
    if record.purpose == Purpose.CONSTRUCT:
        return "construction of an optimizer"
    if record.purpose == Purpose.TRAINER:
        return TRAINER_PLACES[record.optimizer]
    what = {
        Purpose.START: "first step",
        Purpose.EXCHANGE: "exchange",
        Purpose.LEAVE: "finalize()",
        Purpose.SAVE: "save()",
        Purpose.READ: "reading of the center",
        Purpose.AUDIT: "audit()",
        Purpose.BROADCAST: "broadcast()",
        Purpose.COMMIT: "commit()",
        Purpose.COMPLETE: "completion of a background save",
    }
    where = "" if record.purpose == Purpose.START else f" at local step {record.local_steps}"
    return f"{what[Purpose(record.purpose)]} of optimizer {record.optimizer}{where}"
