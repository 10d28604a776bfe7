"""Synchronous exchange whose data stays in a graph, while Python judges some integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import tensorflow as tf

from hvd_periodic.algorithms import Exchange
from hvd_periodic.comm.meeting import Purpose
from hvd_periodic.comm.packing import is_real
from hvd_periodic.sync.synchronous import Synchronous
from hvd_periodic.tensorflow.host import Numbers, in_session, on_host, to_integers, unpacked
from hvd_periodic.tensorflow.ledger import seconds
from hvd_periodic.tensorflow.meeting import GraphMeeting, audit_in_graph, ledger_of
from hvd_periodic.tensorflow.outer import FollowsRate


@dataclass(frozen=True)
class _Decided:
    """What Python decides at an exchange in a graph.

    Attributes:
        period: local steps that were planned for the round that ends.
        next_exchange: local steps at which the next exchange is due.
        sent: integers that this rank has told the others.
        learning_rate: for the optimizer of the center.
    """

    period: Any
    next_exchange: Any
    sent: Any
    learning_rate: float


def kinds_of(decision: type) -> dict[str, tf.DType]:
    """Return the dtypes of the fields of a dataclass of numbers."""
    return {field.name: tf.float64 if is_real(field.type) else tf.int64 for field in fields(decision)}


class GraphSynchronous(Synchronous[Any]):
    """Outside of graphs as in the core.

    Attributes:
        how_to_start: what a user may have forgotten who has to start all ranks alike, which the first exchange checks.
    """

    how_to_start: str | None = None

    def exchange(self, leaving: bool = False) -> Any:
        """Exchange; in a graph, return a boolean scalar."""
        if tf.executing_eagerly():
            return super().exchange(leaving)
        setting, ledger, started = self.setting, ledger_of(self.setting), seconds()
        hyperparameters = setting.exchanged.hyperparameters
        with tf.control_dependencies(_take_turn()):
            concluded, decided = self._decided(GraphMeeting(setting, self.finite))
        plan = _Decided(**{field.name: decided.pop(field.name) for field in fields(_Decided)})
        checks = [concluded, *self._started_alike(concluded)]
        if isinstance(hyperparameters, FollowsRate):
            rate = {"learning_rate": plan.learning_rate} if hyperparameters.follows_rate else None
            hyperparameters.follow(rate)
        with tf.control_dependencies(checks):
            gradients = tf.maximum(ledger.variables["gradients"], 1)
            size = setting.membership.communicator.size
            exchange: Any = Exchange(size, tf.cast(plan.period, tf.float64), tf.cast(gradients, tf.float64))
            sent = self._exchange_state(exchange, ledger.variables["rounds"].read_value())
            sent += self.tensor_groups.exchange(exchange)
            setting.exchanged.replica.constrain(self.tensor_groups.parameters.center)
        ledger.exchanged(sent + 8 * plan.sent, {"next_exchange": plan.next_exchange}, decided)
        ledger.timed(started)
        return tf.constant(True)

    def _decided(self, meeting: GraphMeeting) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Return what Python decides when the graph runs: as it comes, and by name."""
        kinds = ledger_of(self.setting).kinds_remembered | kinds_of(_Decided)

        def conclude(mine: list[int], of_all: list[int]) -> list[int]:
            return to_integers(self._conclude(meeting, mine, of_all), kinds)

        concluded = on_host(conclude, [meeting.before, meeting.gather(Purpose.EXCHANGE)])
        return concluded, unpacked(concluded, kinds)

    def _conclude(self, meeting: GraphMeeting, mine: list[int], of_all: list[int]) -> Numbers:
        """Return the fields of :class:`_Decided`, and what the schedule wants to be remembered."""
        setting, records = self.setting, meeting.judge(mine, of_all, Purpose.EXCHANGE)
        agreed = setting.meeting.agree(records, meeting.standpoint(mine))
        plan = setting.planner.following(agreed)
        settings = agreed.settings or setting.exchanged.hyperparameters.hyperparameters() or {}
        sent = len(of_all) // len(records)
        decided = _Decided(agreed.period, plan.next_exchange, sent, settings.get("learning_rate", 0.0))
        return asdict(decided) | ledger_of(setting).remembered(plan)

    def _started_alike(self, concluded: tf.Tensor) -> list[tf.Tensor]:
        """Return what checks at the first exchange that all ranks have started alike, where nothing else does."""
        if self.how_to_start is None:
            return []
        advice = self.how_to_start
        with tf.control_dependencies([concluded]):
            first = tf.equal(ledger_of(self.setting).variables["rounds"], 0)
        return [
            tf.cond(first, lambda: audit_in_graph(self.tensor_groups, self.setting, advice), lambda: tf.constant(True))
        ]

    def _when(self, condition: Any, run: Callable[[], int]) -> Any:
        """Return what ``run`` does where the condition holds, 0 elsewhere; in a graph, a branch of it."""
        if tf.executing_eagerly():
            return super()._when(condition, run)
        return tf.cond(condition, lambda: tf.constant(run(), tf.int64), lambda: tf.constant(0, tf.int64))


_turns: list[tf.Variable] = []


def _take_turn() -> list[tf.Operation]:
    """Return what lets exchanges of one compiled function happen one after another, in the order of the program.

    All optimizers meet under one name, of which no process can have two collectives under way.
    """
    if in_session():
        return []
    with tf.init_scope():
        if not _turns:
            _turns.append(tf.Variable(0, dtype=tf.int64, trainable=False))
    return [_turns[0].assign_add(1).op]
