"""Asynchronous exchange in a graph: one call of Python on host memory, between reading the replica and its pull."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.algorithms import Exchange
from hvd_periodic.centers.tensor_group import all_buckets
from hvd_periodic.comm.meeting import Purpose
from hvd_periodic.sync.asynchronous import Asynchronous
from hvd_periodic.sync.counters import Notes
from hvd_periodic.sync.left_out import tell
from hvd_periodic.tensorflow.host import to_integers, unpacked
from hvd_periodic.tensorflow.ledger import seconds
from hvd_periodic.tensorflow.meeting import GraphMeeting, ledger_of
from hvd_periodic.tensorflow.outer import FollowsRate
from hvd_periodic.tensorflow.store import VariableStore
from hvd_periodic.tensorflow.synchronous import kinds_of
from hvd_periodic.vectors.layout import Bucket


@dataclass(frozen=True)
class _Pushed:
    """What Python knows after an asynchronous exchange in a graph.

    Attributes:
        missed: pushes of other workers since this one's last.
        staleness_max: the most of them at one exchange.
        next_exchange: local steps at which the next exchange is due.
        left_out: whether this worker has pushed nothing, as its replica was not finite, and has read the center.
    """

    missed: Any
    staleness_max: Any
    next_exchange: Any
    left_out: Any


class GraphAsynchronous(Asynchronous[Any]):
    """Outside of graphs as in the core.

    Attributes:
        as_read, as_left: where a graph keeps the center of the parameters as this rank read it last, and as it was
            after its own push.
    """

    as_read: VariableStore | None = None
    as_left: VariableStore | None = None

    def exchange(self, leaving: bool = False) -> Any:
        """Exchange with the center; in a graph, return a boolean scalar."""
        if tf.executing_eagerly():
            return super().exchange(leaving)
        setting, ledger, started = self.setting, ledger_of(self.setting), seconds()
        variables = ledger.variables
        period = variables["next_exchange"] - variables["last_exchange"]
        gradients = tf.maximum(variables["gradients"], 1)
        size = setting.membership.communicator.size
        exchange: Any = Exchange(size, tf.cast(period, tf.float64), tf.cast(gradients, tf.float64))
        meeting = GraphMeeting(setting, self.finite)
        decided, pulled = self._pushed(meeting, exchange)
        pushed = _Pushed(**{field.name: decided.pop(field.name) for field in fields(_Pushed)})
        if self.finite.skips:
            left_out = pushed.left_out > 0
            tf.cond(left_out, partial(self._start_again, pulled), partial(self._pull, pulled, exchange))
            took_place = tf.cast(tf.logical_not(left_out), tf.int64)
        else:
            took_place = self._pull(pulled, exchange)
        sent = sum(bucket.nbytes for _, bucket in all_buckets(self.tensor_groups))
        counted = {"next_exchange": pushed.next_exchange, "staleness_max": pushed.staleness_max}
        added = {"rounds": took_place, "bytes_sent": sent * took_place, "pushes_missed": pushed.missed}
        ledger.exchanged(added | ({"left_out": pushed.left_out} if self.finite.skips else {}), counted, decided)
        ledger.timed(started, setting.meeting.have_exchanged, meeting.told_by(self))
        return tf.constant(True)

    def _pull(self, pulled: Sequence[tf.Tensor], exchange: Any) -> tf.Tensor:
        """Let the replica pull; return that it has."""
        for (group, bucket), vector in zip(all_buckets(self.tensor_groups), pulled, strict=True):
            center = tf.ensure_shape(vector, [bucket.size])
            if group is self.tensor_groups.parameters:
                self._mirror(bucket, center, exchange)
            group.pull(bucket, center, exchange)
        return tf.constant(1, tf.int64)

    def _start_again(self, centers: Sequence[tf.Tensor]) -> tf.Tensor:
        """Let this rank start from the centers, with a new local optimizer's state; return that it has not pulled."""
        for (group, bucket), center in zip(all_buckets(self.tensor_groups), centers, strict=True):
            group.start_from(bucket, tf.ensure_shape(center, [bucket.size]))
        if self.setting.local_optimizer is not None:
            self.setting.local_optimizer.reset()
        return tf.constant(0, tf.int64)

    def _pushed(self, meeting: GraphMeeting, exchange: Any) -> tuple[dict[str, tf.Tensor], list[tf.Tensor]]:
        """Push what this rank has; return what Python knows after it by name, and what is to be pulled."""
        setting, ledger, worker = self.setting, ledger_of(self.setting), self.worker
        kinds = ledger.kinds_noted | kinds_of(_Pushed)
        payloads = [group.payload(bucket, exchange) for group, bucket in all_buckets(self.tensor_groups)]
        pushes, replicas = len(payloads), self._replicas()

        def run(before: tf.Tensor, *vectors: tf.Tensor) -> list[Any]:
            mine = before.numpy().tolist()
            meeting.come()
            own, problem = meeting.standpoint(mine), meeting.problem(mine, Purpose.EXCHANGE)
            if problem is not None:
                raise ValueError(problem)
            plan = setting.planner.following_alone(own)
            alone = Exchange(setting.membership.communicator.size, own.clock.period, max(own.counters.gradients, 1))
            left_out, missed = meeting.left_out(mine), 0
            if left_out is not None:
                tell(setting.membership, left_out)
                pulled = worker.centers()
            else:
                meeting.measured(setting.journal.measure_distance(lambda: self._distance(vectors[pushes:] or vectors)))
                with worker.transaction():
                    payload = (vector.numpy() for vector in vectors[:pushes])
                    pulled = list(worker.transport.exchange(alone, payload))
                missed = worker.transport.missed
            staleness_max = max(missed, own.counters.staleness_max)
            pushed = _Pushed(missed, staleness_max, plan.next_exchange, left_out is not None)
            return [np.array(to_integers(asdict(pushed) | ledger.noted(Notes(memory=plan.memory)), kinds)), *pulled]

        # What Python reads by itself, a local step in the same graph must have written.
        follower = setting.exchanged.hyperparameters
        followed = follower.followed() if isinstance(follower, FollowsRate) else []
        written = [tf.convert_to_tensor(variable) for variable in followed]
        with tf.device("CPU:0"), tf.control_dependencies(written):
            results = tf.py_function(
                run, [meeting.before, *payloads, *replicas], [tf.int64, *(payload.dtype for payload in payloads)]
            )
        return unpacked(tf.ensure_shape(results[0], [len(kinds)]), kinds), results[1:]

    def _replicas(self) -> list[tf.Tensor]:
        """Return what Python needs beside what is pushed, to know how far it is from the center."""
        parameters = self.tensor_groups.parameters
        if not self.setting.journal.wants_distance or parameters.algorithm.reads_before:
            return []  # What is pushed is the replica.
        return [parameters.values.read(bucket) for bucket in parameters.values.layout.buckets]

    def _distance(self, replicas: Sequence[tf.Tensor]) -> float:
        """Return in Python ‖x − c‖₂, given the buckets of x first."""
        total = 0.0
        for bucket, x in zip(self.tensor_groups.parameters.values.layout.buckets, replicas, strict=False):
            d = x.numpy() - self.worker.transport.read(bucket.index)
            total += float(np.vdot(d, d))
        return total**0.5

    def _mirror(self, bucket: Bucket, center: Any, exchange: Exchange) -> None:
        """Keep what was pulled of the center, and what the transaction made of it."""
        if self.as_read is not None:
            self.as_read.write(bucket, center)
        if self.as_left is None:
            return
        parameters, space = self.tensor_groups.parameters, self.setting.exchanged.replica.space
        algorithm = parameters.algorithm
        if not algorithm.reads_after:
            message, _ = algorithm.message(space, parameters.values.read(bucket), {}, center, exchange)
            center = algorithm.move(space, {"center": center}, message, exchange)["center"]
        self.as_left.write(bucket, center)
