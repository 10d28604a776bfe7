"""Ranks that meet while a graph runs: what they tell each other is gathered there, and judged in Python."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import tensorflow as tf

from hvd_periodic.comm.agreement import audit
from hvd_periodic.comm.handshake import Purpose, Record, integers, records_of
from hvd_periodic.sync.counters import Counters
from hvd_periodic.sync.course import Course, Setting
from hvd_periodic.sync.finite import Finite
from hvd_periodic.sync.knowledge import Standpoint
from hvd_periodic.sync.membership import Membership
from hvd_periodic.sync.telling import tell, tell_beginning
from hvd_periodic.sync.tensor_groups import TensorGroups, named_parts
from hvd_periodic.tensorflow.coding import GraphCoding
from hvd_periodic.tensorflow.host import from_integers, in_session, on_host, packed
from hvd_periodic.tensorflow.ledger import VariableLedger

_NOT_FINITE, _DISTANCE = "not finite", "distance"


class GraphMeeting:
    """One meeting in a graph.

    Args:
        setting: of the exchange.
        finite: says what has to be finite; None where nothing has.
        distance: of this rank's replica to the center, a scalar; NaN where there is none yet, None where nobody wants
            to know.

    Attributes:
        before: what this rank knew by itself, as one vector of integers.
        completes: the exchange ends a period.
    """

    def __init__(
        self, setting: Setting[Any], finite: Finite[Any] | None = None, distance: tf.Tensor | None = None
    ) -> None:
        self._setting, self._finite = setting, finite
        self._own: Standpoint | None = None
        self.completes = True
        self._came = self._met = self._waited = 0.0
        known = ledger_of(setting).known() | {_NOT_FINITE: _first_not_finite(finite)}
        known |= {} if distance is None else {_DISTANCE: tf.cast(distance, tf.float64)}
        self._kinds = {name: scalar.dtype for name, scalar in known.items()}
        self.before = packed(known)

    def gather(self, purpose: Purpose) -> tf.Tensor:
        """Return what all ranks have come for, and where they stand, in integers."""
        meeting, membership = self._setting.meeting, self._setting.membership

        def announce(mine: list[int]) -> list[int]:
            own = self.standpoint(mine)
            self.come()
            meeting.weigh(own, purpose)
            record = meeting.record(own, purpose, self.problem(mine, purpose), self.left_out(mine) is not None)
            membership.communicator.tracker.last_record = record
            self.enter()
            return integers(record)

        announced = on_host(announce, [self.before])
        with tf.device("CPU:0"):
            return membership.communicator.allgather(announced, _meeting_name(membership))

    def come(self) -> None:
        """Note that this rank is ready to exchange now."""
        self._came, self._met = time.time(), time.perf_counter()

    def enter(self) -> None:
        """Note that this rank waits in the graph; in sessions, where several optimizers have no order, nothing."""
        communicator = self._setting.membership.communicator
        if not (in_session() and communicator.constructed > 1):
            communicator.tracker.enter(_no_graph_runs)

    def leave(self) -> None:
        """Note that this rank waits no longer."""
        self._setting.membership.communicator.tracker.leave()

    def finish(self) -> None:
        """Note that the exchange is over, as in the core."""
        self.leave()
        self._setting.meeting.have_exchanged()

    def standpoint(self, before: list[int]) -> Standpoint:
        """Return in Python what this rank knew by itself."""
        known = from_integers(before, self._kinds)
        self._own = replace(ledger_of(self._setting).standpoint_of(known), distance=known.get(_DISTANCE))
        return self._own

    def measured(self, distance: float | None) -> None:
        """Note in Python how far from the center this rank is, where only Python can read that."""
        if self._own is not None:
            self._own = replace(self._own, distance=distance)

    def told_by(self, course: Course[Any]) -> Callable[[Counters], None] | None:
        """Return what tells the journal of an exchange, given the counters after it; None where nobody listens."""
        journal, sessions = self._setting.journal, in_session()

        def told(counters: Counters) -> None:
            if self._own is not None:
                if sessions and not journal.begun:  # The graph has begun by itself; known is where it was before.
                    before = self._own.counters
                    tell_beginning(course, replace(before, local_steps=before.last_exchange))
                waited = self._waited if course.steps_agree else None
                tell(course, self._own, lambda: counters, self._came, waited, self.completes)

        return told if journal.listeners else None

    def judge(self, before: list[int], gathered: Sequence[int], purpose: Purpose) -> list[Record]:
        """Return in Python what was gathered.

        Raises:
            RuntimeError, ValueError: on all ranks, where one cannot go on, or where they have come for other things.
        """
        self.leave()
        self._waited = time.perf_counter() - self._met
        problem = self.problem(before, purpose)
        communicator, records = self._setting.membership.communicator, records_of(gathered)
        # hvd.elastic.run takes no notice of errors of unknown kind, which RuntimeErrors become in a graph.
        kind = RuntimeError if communicator.changed() is None else ValueError
        communicator.check_records(records, None if problem is None else kind(problem))
        self._setting.meeting.have_met(purpose)
        return records

    def left_out(self, before: list[int]) -> str | None:
        """Return in Python why this rank is left out, if it is."""
        return self._not_finite(before) if self._finite is not None and self._finite.skips else None

    def problem(self, before: list[int], purpose: Purpose) -> str | None:
        """Return in Python why this rank cannot do what it has come for, or None."""
        problem = self._setting.meeting.problem(self.standpoint(before), purpose)
        return problem or (None if self.left_out(before) else self._not_finite(before))

    def _not_finite(self, before: list[int]) -> str | None:
        index = from_integers(before, self._kinds)[_NOT_FINITE]
        if self._finite is None or index < 0:
            return None
        return self._finite.text(index, self.standpoint(before).counters.local_steps)


def _no_graph_runs() -> bool:
    """Return whether no thread of this process is inside of TensorFlow, as after an error in a graph."""
    return not any(_INSIDE in frame.f_code.co_filename for frame in sys._current_frames().values())


_INSIDE = f"tensorflow{os.sep}python{os.sep}"


def _first_not_finite(finite: Finite[Any] | None) -> tf.Tensor:
    """Return the index of the first tensor that holds NaN or infinity, in a graph; -1 if none does."""
    checked = [] if finite is None else finite.checked()
    if not checked:
        return tf.constant(-1, tf.int64)
    coding = GraphCoding()
    right = [
        tf.reduce_all(tf.math.is_finite(each.tensor))
        if each.center is None
        else coding.is_finite_or(each.tensor, each.center)
        for each in checked
    ]
    found = tf.stack(right)
    return tf.where(tf.reduce_all(found), tf.constant(-1, tf.int64), tf.argmin(tf.cast(found, tf.int8)))


def ledger_of(setting: Setting[Any]) -> VariableLedger:
    """Return the ledger, which in this front end is one of variables."""
    return cast(VariableLedger, setting.ledger)


def audit_in_graph(groups: TensorGroups[Any], setting: Setting[Any], advice: str) -> tf.Tensor:
    """Let all ranks check, when the graph runs, that they hold the same centers, to the bit; ``advice`` if not."""
    alike = [group for group in groups.held_alike if group.placement.everywhere]
    places = [(group.values.layout, bucket) for group in alike for bucket in group.values.layout.buckets]
    centers = [group.center.read(bucket) for group in alike for bucket in group.values.layout.buckets]
    alike_ranks, to_bytes = setting.membership.alike, setting.exchanged.replica.to_bytes

    def compare(*vectors: tf.Tensor) -> tf.Tensor:
        def parts() -> Iterator[tuple[str, Any]]:
            for place, vector in zip(places, vectors, strict=True):
                yield from named_parts(*place, to_bytes(vector))

        audit(alike_ranks, "center", parts, advice)
        return tf.constant(True)

    with tf.device("CPU:0"):
        return tf.ensure_shape(tf.py_function(compare, centers, tf.bool), [])


def _meeting_name(membership: Membership) -> str:
    """Return the name of the collective in which ranks meet; in TensorFlow 1 of this optimizer alone.

    Exchanges of several optimizers in one session might run at the same time.
    """
    return f"{membership.name}.meeting" if in_session() else membership.communicator.handshake_name
