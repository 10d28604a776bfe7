"""Synchronous exchange whose data stays in a graph, while Python judges some integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import tensorflow as tf

from hvd_periodic.algorithms import Exchange
from hvd_periodic.centers.tensor_group import all_buckets
from hvd_periodic.comm.agreement import ADVICE
from hvd_periodic.comm.handshake import Purpose, is_real
from hvd_periodic.sync.left_out import tell
from hvd_periodic.sync.synchronous import Synchronous
from hvd_periodic.tensorflow.host import Numbers, on_host, to_integers, unpacked
from hvd_periodic.tensorflow.ledger import seconds
from hvd_periodic.tensorflow.meeting import GraphMeeting, audit_in_graph, ledger_of
from hvd_periodic.tensorflow.outer import FollowsRate
from hvd_periodic.vectors.fragments import Fragment


@dataclass(frozen=True)
class _Decided:
    """What Python decides at an exchange in a graph.

    Attributes:
        completes: whether a period ends, so that also statistics and the state of local optimizers are exchanged.
        period: local steps that were planned for it.
        gradients: accumulated in it on this rank.
        periods: that had ended before.
        next_exchange: local steps at which the next exchange is due.
        sent: integers that this rank has told the others.
        learning_rate: for the optimizer of the center.
        weight: how much this rank counts in means.
        somebody: whether any rank counts.
        left_out: whether this rank is left out.
        some_left_out: whether any is.
    """

    completes: Any
    period: Any
    gradients: Any
    periods: Any
    next_exchange: Any
    sent: Any
    learning_rate: float
    weight: float
    somebody: Any
    left_out: Any
    some_left_out: Any


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
        meeting = GraphMeeting(setting, self.finite, self._distance())
        concluded, decided = self._decided(meeting)
        plan = _Decided(**{field.name: decided.pop(field.name) for field in fields(_Decided)})
        checks = [concluded, *self._started_alike(concluded)]
        if isinstance(hyperparameters, FollowsRate):
            rate = {"learning_rate": plan.learning_rate} if hyperparameters.follows_rate else None
            hyperparameters.follow(rate)
        with tf.control_dependencies(checks):
            if self.finite.skips:
                self._when(plan.some_left_out > 0, partial(self._start_again, plan.left_out > 0))
            sent = self._when(not self._may_differ or plan.somebody > 0, partial(self._sent, plan, decided))
            setting.exchanged.replica.constrain(self.tensor_groups.parameters.center)
        self._audit()
        added = {"rounds": plan.somebody, "bytes_sent": sent + 8 * plan.sent}
        added |= {"left_out": plan.left_out} if self.finite.skips else {}
        ledger.exchanged(added, {"next_exchange": plan.next_exchange}, decided)
        ledger.timed(started, meeting.finish, meeting.told_by(self))
        return tf.constant(True)

    def _distance(self) -> tf.Tensor | None:
        """Return how far this rank is from the center, if anybody wants to know; NaN while replicas are kept equal."""
        setting, distance = self.setting, self.tensor_groups.distance
        if not setting.journal.wants_distance or self.reads_together:
            return None
        if setting.phase.until is None:
            return distance()
        begun = ledger_of(setting).steps_to(setting.phase.until) <= 0
        return tf.cond(begun, lambda: tf.cast(distance(), tf.float64), lambda: tf.constant(math.nan, tf.float64))

    @property
    def _may_differ(self) -> bool:
        """Whether some ranks may count more than others, or not at all."""
        return self.finite.skips or self.setting.meeting.weight.given is not None

    def _start_again(self, mine: tf.Tensor) -> int:
        """Let this rank start from the centers, if it is left out; all ranks together."""
        setting, groups = self.setting, list(self.tensor_groups)
        membership = setting.membership
        centers = [
            group.fetch(membership.communicator, bucket, membership.name) for group, bucket in all_buckets(groups)
        ]

        def start() -> int:
            for (group, bucket), center in zip(all_buckets(groups), centers, strict=True):
                group.start_from(bucket, center)
            if setting.local_optimizer is not None:
                setting.local_optimizer.reset()
            return 0

        self._when(mine, start)
        return 0

    def _sent(self, plan: _Decided, decided: dict[str, tf.Tensor]) -> Any:
        """Let data travel; return the bytes handed to collectives."""
        size, fragments = self.setting.membership.communicator.size, self.turns.fragments
        weight = plan.weight if self._may_differ else None
        alone = len(fragments) == 1  # Every exchange is its turn, and ends a period: the graph needs no branches.

        def complete() -> Any:
            last = _in_graph(size, plan.period, plan.gradients, weight)
            return self._exchange_state(last, plan.periods) + self.tensor_groups.exchange_statistics(last)

        sent = self._when(alone or plan.completes > 0, complete)
        for fragment in fragments:
            planned, gradients = (decided[name] for name in _names_of(fragment))
            exchange = _in_graph(size, planned, gradients, weight)
            sent += self._when(
                alone or gradients > 0, partial(self.tensor_groups.exchange_parameters, exchange, fragment)
            )
        return sent

    def _decided(self, meeting: GraphMeeting) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Return what Python decides when the graph runs: as it comes, and by name."""
        turns = {name: tf.int64 for fragment in self.turns.fragments for name in _names_of(fragment)}
        kinds = ledger_of(self.setting).kinds_noted | kinds_of(_Decided) | turns

        def conclude(mine: list[int], of_all: list[int]) -> list[int]:
            return to_integers(self._conclude(meeting, mine, of_all), kinds)

        concluded = on_host(conclude, [meeting.before, meeting.gather(Purpose.EXCHANGE)])
        return concluded, unpacked(concluded, kinds)

    def _conclude(self, meeting: GraphMeeting, mine: list[int], of_all: list[int]) -> Numbers:
        """Return the fields of :class:`_Decided`, whose turn it is, and what is kept until the next exchange."""
        setting, records, own = self.setting, meeting.judge(mine, of_all, Purpose.EXCHANGE), meeting.standpoint(mine)
        agreed = setting.meeting.agree(records, own)
        plan, due = setting.planner.following(agreed), self._whose_turn(agreed, own)
        settings = agreed.settings or setting.exchanged.hyperparameters.hyperparameters() or {}
        last, sent = due.turns[-1].exchange, len(of_all) // len(records)
        rate, weight = settings.get("learning_rate", 0.0), 1.0 if last.weight is None else last.weight
        left_out = meeting.left_out(mine)
        if left_out is not None:
            tell(setting.membership, left_out)
        decided = _Decided(
            due.completes,
            last.period,
            last.gradients,
            due.periods,
            plan.next_exchange,
            sent,
            rate,
            weight,
            not agreed.nobody,
            left_out is not None,
            len(agreed.left_out),
        )
        turns = {turn.fragment.index: (turn.exchange.period, turn.exchange.gradients) for turn in due.turns}
        numbers = asdict(decided) | ledger_of(setting).noted(self._noted(own, due, plan))
        for fragment in self.turns.fragments:
            numbers |= zip(_names_of(fragment), turns.get(fragment.index, (0, 0)), strict=True)
        meeting.enter()
        meeting.completes = due.completes
        return numbers

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

    def _audit(self) -> None:
        """Compare the centers, where that is due after this exchange."""
        setting = self.setting
        if setting.audit_every:
            due = tf.equal((ledger_of(setting).variables["rounds"] + 1) % setting.audit_every, 0)
            tf.cond(due, lambda: audit_in_graph(self.tensor_groups, setting, ADVICE), lambda: tf.constant(True))

    def _when(self, condition: Any, run: Callable[[], int]) -> Any:
        """Return what ``run`` does where the condition holds, 0 elsewhere; in a graph, a branch of it."""
        if tf.executing_eagerly() or condition is True:
            return super()._when(condition, run)
        return tf.cond(condition, lambda: tf.cast(run(), tf.int64), lambda: tf.constant(0, tf.int64))


def _in_graph(size: int, period: tf.Tensor, gradients: tf.Tensor, weight: Any) -> Any:
    """Return an exchange whose numbers are tensors."""
    return Exchange(size, tf.cast(period, tf.float64), tf.cast(gradients, tf.float64), weight=weight)


def _names_of(fragment: Fragment) -> tuple[str, str]:
    """Return the names of the period and of the gradients of a fragment, of which there are none if it has no turn."""
    return f"period of fragment {fragment.index}", f"gradients of fragment {fragment.index}"
