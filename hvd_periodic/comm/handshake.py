"""Handshake of the ranks before data travels: one small record per rank, gathered on all.

All optimizers of a process set use one name for their handshakes, whatever the call. Ranks that wait in different calls
therefore find out, instead of waiting forever.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from hvd_periodic.comm.agreement import Ranks, raise_on_all
from hvd_periodic.comm.collective_tracker import CollectiveTracker
from hvd_periodic.ranks import by_value


class HandshakeRanks(Ranks, Protocol):
    """Ranks that can perform a handshake: a communicator."""

    handshake_name: str
    tracker: CollectiveTracker

    @property
    def global_ranks(self) -> list[int]:
        """Global ranks of all of them."""

    @property
    def handshake_group(self) -> HandshakeRanks:
        """All ranks that share the handshakes of these."""

    def gather_integers(self, values: np.ndarray, name: str) -> np.ndarray:
        """Return the concatenated integers of all ranks, in rank order."""


class Purpose(IntEnum):
    """The call in which a rank enters a handshake."""

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


TRAINER_CALLS = ("a collective of the trainer", "construction of a strategy", "the end of training")
"""Calls in which trainers perform a handshake; their records count these in place of optimizers."""


@dataclass(frozen=True)
class Record:
    """One rank's message in a handshake, as 64-bit integers.

    Attributes:
        purpose: the call in which the rank is.
        optimizer: number of the optimizer in the process set, from 1; while one is constructed: how many there are.
        problem: 1 if this rank cannot go on.
        settings: a number that is equal for equal hyper-parameters of the center optimizer.
        rate: a number that is equal for equal learning rates of the center optimizer.
        local_steps: iterations so far.
        updates: iterations whose update ran.
        pending: iterations since the last exchange.
        period: iterations that the schedule planned between the last exchange and the next.
        learning_rate: learning rate of the local optimizer; None if it is unknown.
        step_seconds: seconds per iteration since the last exchange; None if there was none.
        loss: mean of the losses reported since the last exchange; None if there were none.
        optimizer_state: a number that is equal if local optimizers keep the same tensors; 0 if it does not matter.
        foreseen: iterations at the exchange after this one, if the schedule knows it before the handshake; else 0.
        weight: weight of this rank in means; None if all ranks count equally.
        left_out: 1 if this rank is excluded, as its replica is not finite.
        piggyback_length: number of integers that follow this record: the memory of messages.
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
    piggyback_length: int = 0

    @property
    def training(self) -> bool:
        """Whether the rank exchanges and goes on, instead of having run out of data."""
        return self.purpose == Purpose.EXCHANGE

    @property
    def place(self) -> str:
        """Description of the call in which the rank is."""
        return _place(self)


def is_real(annotation: Any) -> bool:
    """Return whether a field of :class:`Record` holds a float."""
    return str(annotation).startswith("float")


_CODES = ["d" if is_real(field.type) else "q" for field in fields(Record)]
_VALUES, _INTEGERS = struct.Struct(f"<{''.join(_CODES)}"), struct.Struct(f"<{len(_CODES)}q")


def integers(record: Record) -> list[int]:
    """Return a record as the integers to send; a float as the integer with the same 64 bits.

    Example:
        >>> integers(Record(Purpose.START, optimizer=1))[:5]
        [1, 1, 0, 0, 0]
    """
    values = (getattr(record, field.name) for field in fields(Record))
    numbers = [_number(code, value) for code, value in zip(_CODES, values, strict=True)]
    return list(_INTEGERS.unpack(_VALUES.pack(*numbers)))


def _number(code: str, value: Any) -> int | float:
    """Return a value of the type that ``struct`` packs for a code; NaN for None."""
    if code == "q":
        return int(value)
    return math.nan if value is None else float(value)


def _record(packed: Sequence[int]) -> Record:
    """Return the record that :func:`integers` was given."""
    values: list[Any] = [None if math.isnan(value) else value for value in _VALUES.unpack(_INTEGERS.pack(*packed))]
    return Record(*values)


def unpack_records(gathered: Sequence[int] | np.ndarray) -> tuple[list[Record], list[np.ndarray]]:
    """Return the records and piggybacked integers of all ranks, given all their integers, concatenated."""
    width, rest = len(_CODES), np.asarray(gathered, np.int64)
    records, piggybacks = [], []
    while rest.size:
        record = _record(rest[:width].tolist())
        records.append(record)
        piggybacks.append(rest[width : width + record.piggyback_length])
        rest = rest[width + record.piggyback_length :]
    return records, piggybacks


def records_of(gathered: Sequence[int] | np.ndarray) -> list[Record]:
    """Return the records of all ranks, given all their integers, concatenated."""
    return unpack_records(gathered)[0]


def float_bits(value: float | None) -> int:
    """Return a float as the integer with the same 64 bits; None as NaN.

    Example:
        >>> float_bits(1.0), float_from_bits(float_bits(0.1)), float_from_bits(float_bits(None))
        (4607182418800017408, 0.1, None)
    """
    return int(struct.unpack("<q", struct.pack("<d", math.nan if value is None else value))[0])


def float_from_bits(integer: int) -> float | None:
    """Return the float with these 64 bits; None for NaN."""
    value = float(struct.unpack("<d", struct.pack("<q", integer))[0])
    return None if math.isnan(value) else value


def leading(records: Sequence[Record]) -> Record:
    """Return the record of the rank whose learning rates count: the one with the most updates, the first of several.

    A learning-rate scheduler falls behind on a rank that skips updates.
    """
    return max(records, key=lambda record: record.updates)


def handshake(
    communicator: HandshakeRanks,
    record: Record,
    failure: Exception | None = None,
    piggyback: np.ndarray | None = None,
) -> tuple[list[Record], list[np.ndarray]]:
    """Perform a handshake; return the records and piggybacked integers of all its ranks, in rank order.

    Args:
        communicator: the ranks.
        record: this rank's record.
        failure: the error that keeps this rank from going on, if ``record.problem`` is set.
        piggyback: integers to send along with the record.

    Raises:
        Exception: ``failure``, on this rank.
        RuntimeError: another rank cannot go on, or ranks are in conflicting calls; on all ranks.
    """
    piggyback = np.empty(0, np.int64) if piggyback is None else piggyback
    communicator = communicator.handshake_group
    communicator.tracker.last_record = record
    own = np.concatenate([np.array(integers(replace(record, piggyback_length=piggyback.size)), np.int64), piggyback])
    records, piggybacks = unpack_records(communicator.gather_integers(own, communicator.handshake_name))
    check_records(communicator, records, failure)
    return records, piggybacks


def check_records(communicator: HandshakeRanks, records: Sequence[Record], failure: Exception | None) -> None:
    """Raise on all ranks if one cannot go on, or if they are in conflicting calls; as :func:`handshake`."""
    communicator.tracker.last_records = records
    crossed = describe_conflict(records, communicator.global_ranks)
    if crossed or any(record.problem for record in records):
        raise_on_all(communicator, communicator.handshake_name, failure)
    if crossed:
        raise RuntimeError(crossed)


def describe_conflict(records: Sequence[Record], numbers: Sequence[int]) -> str | None:
    """Return an error message that names the calls in which ranks wait, if these conflict; else None.

    Args:
        records: records of all ranks in the handshake.
        numbers: the global ranks of these.

    Example:
        >>> print(describe_conflict([Record(2, 1, local_steps=6), Record(2, 2, local_steps=8)], [1, 3]).split(":")[0])
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
            "If the center is not on every rank, all ranks together call center(), distance() and state_dict(): move "
            "the calls out of `if rank == 0:`, and save the result on one rank"
        )
    elif Purpose.TRAINER in purposes:
        advice = (
            "A rank has run out of batches, or validates, saves or logs at other steps than the others: the trainer's "
            "settings, and the values that it bases decisions on, must be the same on all ranks"
        )
    elif purposes & {Purpose.AUDIT, Purpose.BROADCAST}:
        advice = "Call audit() and broadcast() on all ranks together"
    elif Purpose.START in purposes and len(purposes) > 1:
        advice = "After training has begun, load a state on every rank or on none"
    else:
        advice = (
            "If a process has several optimizers, all ranks step them in the same order and equally often: step() once "
            "per iteration, or skip() if there is no update"
        )
    return f"Ranks wait for each other in different places: {places}. {advice}"


def _place(record: Record) -> str:
    if record.purpose == Purpose.CONSTRUCT:
        return "construction of an optimizer"
    if record.purpose == Purpose.TRAINER:
        return TRAINER_CALLS[record.optimizer]
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
