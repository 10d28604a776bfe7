"""Who has what at the first step of a session: told in its graph, judged in Python."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.sync.startup import LoadStatus, Start, decide, parameters_replaced
from hvd_periodic.tensorflow.contrib_opt.python_call import python_call
from hvd_periodic.tensorflow.contrib_opt.turns import SessionTurn
from hvd_periodic.tensorflow.graph import VariableSynchronizer

logger = logging.getLogger("hvd_periodic")


@dataclass(frozen=True)
class Startup:
    """What a graph has to do before its first step; boolean scalars.

    Attributes:
        anew: the center becomes what the parameters are.
        given: all ranks take over the root's values.
        replaced: this rank gets other parameters by that than it has gradients of.
    """

    anew: tf.Tensor
    given: tf.Tensor
    replaced: tf.Tensor


def begin_in_graph(
    synchronizer: VariableSynchronizer, turn: SessionTurn, center: tf.Tensor, replica: tf.Tensor
) -> Startup:
    """Find out on all ranks who has what, as :meth:`ReplicaSynchronizer.begin`, when the graph of a session runs.

    State that was loaded shows by its local steps.

    Args:
        synchronizer: of the exchanges.
        turn: waits until all ranks begin with this one.
        center: a number that is the same where the centers are, which may have been loaded.
        replica: a number that is the same where the values are that gradients are of.
    """

    def begin_in_turn(center: np.ndarray, replica: np.ndarray) -> list[np.ndarray]:
        with turn.turn():
            return begin(center, replica)

    def begin(center: np.ndarray, replica: np.ndarray) -> list[np.ndarray]:
        synchronizer.handshake.meet(Purpose.START)
        counters, membership = synchronizer.progress.counters, synchronizer.membership
        standing = LoadStatus(
            counters.local_steps > 0,
            counters.local_steps,
            (counters.last_exchange, counters.next_exchange),
            "",
            f"{center:014x}",
            f"{replica:014x}",
        )
        standings = membership.all_ranks.gather((standing, membership.in_groups), "start")
        return [np.array(_decide(synchronizer, standings))]

    stores = [synchronizer.progress.store()]
    (decided,), _ = python_call(begin_in_turn, synchronizer.replica.values, stores, [center, replica], [tf.bool])
    anew, given, replaced = tf.unstack(tf.ensure_shape(decided, [3]))
    return Startup(anew, given, replaced)


def _decide(synchronizer: VariableSynchronizer, found: Mapping[int, tuple[LoadStatus, bool]]) -> list[bool]:
    """Return whether training starts anew, whether all take over the root's values, and whether others than its own
    are new to this rank.
    """
    membership = synchronizer.membership
    standings = {rank: standing for rank, (standing, _) in found.items()}
    root, own = membership.global_root, membership.global_rank
    start = decide(standings, root)  # The root brings the state of the local optimizer as well.
    most = max(standing.local_steps for standing in standings.values())
    averaging = any(in_groups for _, in_groups in found.values()) or most < (synchronizer.warmup.until or 0)
    different = len({standing.replica for standing in standings.values()}) > 1
    given = start is Start.FROM_ROOT or (start is Start.FROM_PARAMETERS and different)
    replaced = parameters_replaced(start, standings, own, root, averaging)
    if given and own == root:
        logger.warning("The ranks have not started alike: all take over what rank %d has", root)
    return [start is Start.FROM_PARAMETERS, given, replaced]


def digest_of(tensors: Sequence[Any], chosen: Callable[[], Sequence[bool]] | None = None) -> tf.Tensor:
    """Return a number that is the same where values are, to the bit; when the graph runs.

    Args:
        tensors: the values.
        chosen: which of them count.
    """

    def digest(*values: tf.Tensor) -> tf.Tensor:
        total = hashlib.sha256()
        for value, counts in zip(values, [True] * len(values) if chosen is None else chosen(), strict=True):
            total.update(value.numpy().tobytes() if counts else b"")
        return tf.constant(int.from_bytes(total.digest()[:7], "big"), tf.int64)

    with tf.device("CPU:0"):
        return tf.ensure_shape(tf.py_function(digest, list(tensors), tf.int64), [])
