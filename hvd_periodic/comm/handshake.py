"""The handshake before data travels: the record that each rank sends, and what the records of all ranks say."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from typing import Any

import numpy as np

from hvd_periodic.ranks import by_value


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
    ADOPT = 11
    SESSION_END = 12


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
        known = self.purpose in (Purpose.CONSTRUCT, Purpose.TRAINER, Purpose.START)
        return f"{called(Purpose(self.purpose), self.optimizer)}{'' if known else f' at local step {self.local_steps}'}"


_CODES = ["d" if str(field.type).startswith("float") else "q" for field in fields(Record)]
_in_order = attrgetter(*(field.name for field in fields(Record)))
_VALUES, _INTEGERS = struct.Struct(f"<{''.join(_CODES)}"), struct.Struct(f"<{len(_CODES)}q")


def integers(record: Record) -> list[int]:
    """Return a record as the integers to send; a float as the integer with the same 64 bits.

    Example:
        >>> integers(Record(Purpose.START, optimizer=1))[:5]
        [1, 1, 0, 0, 0]
    """
    numbers = [math.nan if value is None else value for value in _in_order(record)]
    return list(_INTEGERS.unpack(_VALUES.pack(*numbers)))


def unpack_records(gathered: Sequence[int] | np.ndarray) -> tuple[list[Record], list[np.ndarray]]:
    """Return the records that :func:`integers` was given and the piggybacked integers, given all of them in a row."""
    width, rest = len(_CODES), np.asarray(gathered, np.int64)
    records, piggybacks = [], []
    while rest.size:
        numbers = _VALUES.unpack(_INTEGERS.pack(*rest[:width].tolist()))
        values: list[Any] = [None if math.isnan(number) else number for number in numbers]
        record = Record(*values)
        records.append(record)
        piggybacks.append(rest[width : width + record.piggyback_length])
        rest = rest[width + record.piggyback_length :]
    return records, piggybacks


def leading(records: Sequence[Record]) -> Record:
    """Return the record of the rank whose learning rates count: the one with the most updates, the first of several.

    A learning-rate scheduler falls behind on a rank that skips updates.
    """
    return max(records, key=lambda record: record.updates)


_ADVICE = {
    Purpose.CONSTRUCT: "All ranks construct their optimizers together, in the same order and equally many",
    Purpose.COMPLETE: "After save(background=True) all ranks call wait() together, and finalize() before their program "
    "ends",
    Purpose.SAVE: "All ranks save together, at the same local step",
    Purpose.COMMIT: "With a center that is not on every rank, all ranks commit together, at the same local step",
    Purpose.READ: "If the center is not on every rank, all ranks together call center(), distance() and state_dict(): "
    "move the calls out of `if rank == 0:`, and save the result on one rank",
    Purpose.TRAINER: "A rank has run out of batches, or validates, saves or logs at other steps than the others: the "
    "trainer's settings, and the values that it bases decisions on, must be the same on all ranks",
    Purpose.AUDIT: "Call audit() and broadcast() on all ranks together",
    Purpose.BROADCAST: "Call audit() and broadcast() on all ranks together",
    Purpose.ADOPT: "Call adopt() on all ranks together, after the same local step",
    Purpose.SESSION_END: "Run equally many steps on all ranks in a session of TensorFlow 1",
    Purpose.START: "After training has begun, load a state on every rank or on none",
}
"""What to do about ranks that are in different calls, of which one is this; the first that applies counts."""

_SEVERAL_OPTIMIZERS = (
    "If a process has several optimizers, all ranks step them in the same order and equally often: step() once per "
    "iteration, or skip() if there is no update"
)

_CALLS = {
    Purpose.START: "first step",
    Purpose.EXCHANGE: "exchange",
    Purpose.LEAVE: "finalize()",
    Purpose.SAVE: "save()",
    Purpose.READ: "reading of the center",
    Purpose.AUDIT: "audit()",
    Purpose.BROADCAST: "broadcast()",
    Purpose.COMMIT: "commit()",
    Purpose.COMPLETE: "completion of a background save",
    Purpose.ADOPT: "adopt()",
    Purpose.SESSION_END: "end of a session",
}


def called(purpose: Purpose, optimizer: int) -> str:
    """Return the name of a call, given the number of its optimizer.

    Example:
        >>> called(Purpose.SAVE, 2)
        'save() of optimizer 2'
    """
    if purpose == Purpose.CONSTRUCT:
        return "construction of an optimizer"
    if purpose == Purpose.TRAINER:
        return TRAINER_CALLS[optimizer]
    return f"{_CALLS[purpose]} of optimizer {optimizer}"


def describe_conflict(records: Sequence[Record], numbers: Sequence[int]) -> str | None:
    """Return an error message that names the calls in which global ranks wait, if these conflict; else None.

    Example:
        >>> print(describe_conflict([Record(2, 1, local_steps=6), Record(2, 2, local_steps=8)], [1, 3]).split(":")[0])
        Ranks wait for each other in different places
    """
    purposes = {Purpose(record.purpose) for record in records}
    compatible = len(purposes) == 1 or purposes <= {Purpose.EXCHANGE, Purpose.LEAVE}
    if compatible and (Purpose.CONSTRUCT in purposes or len({record.optimizer for record in records}) == 1):
        return None
    places = by_value({number: record.place for number, record in zip(numbers, records, strict=True)})
    advice = next((text for purpose, text in _ADVICE.items() if purpose in purposes), _SEVERAL_OPTIMIZERS)
    if purposes == {Purpose.START}:  # All are in their first step, of different optimizers.
        advice = _SEVERAL_OPTIMIZERS
    return f"Ranks wait for each other in different places: {places}. {advice}"
