"""Who has what at the first step of a session: told in its graph, judged in Python."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.sync.course import Setting
from hvd_periodic.sync.startup import Standing, Start, decide, replaces
from hvd_periodic.tensorflow.host import on_host
from hvd_periodic.tensorflow.meeting import GraphMeeting

logger = logging.getLogger("hvd_periodic")


@dataclass(frozen=True)
class Beginning:
    """What a graph has to do before its first step; boolean scalars.

    Attributes:
        anew: the center becomes what the parameters are.
        given: all ranks take over the root's values.
        replaced: this rank gets other parameters by that than it has gradients of.
    """

    anew: tf.Tensor
    given: tf.Tensor
    replaced: tf.Tensor


def begin_in_graph(setting: Setting[Any], center: tf.Tensor, replica: tf.Tensor) -> Beginning:
    """Find out on all ranks who has what, as :meth:`ReplicaSynchronizer.begin`, when the graph of a session runs.

    State that was loaded shows by its local steps.

    Args:
        setting: of the exchanges.
        center: a number that is the same where the centers are, which may have been loaded.
        replica: a number that is the same where the values are that gradients are of.
    """
    membership, meeting = setting.membership, GraphMeeting(setting)
    together = membership.together

    def judge(mine: list[int], of_all: list[int]) -> list[int]:
        meeting.judge(mine, of_all, Purpose.START)
        return []

    def stand(mine: list[int], digests: list[int]) -> list[int]:
        counters = meeting.standpoint(mine).counters
        steps = [counters.local_steps, counters.last_exchange, counters.next_exchange]
        return [membership.global_rank, int(membership.in_groups), *steps, *digests]

    met = on_host(judge, [meeting.before, meeting.gather(Purpose.START)])
    with tf.control_dependencies([met]):
        standings = on_host(stand, [meeting.before, tf.stack([center, replica])])
    with tf.device("CPU:0"):
        if together.group is not None:
            standings = together.group.allgather(standings, f"{together.group_name}.start")
        standings = membership.communicator.allgather(standings, f"{membership.name}.start")
    decided = on_host(lambda gathered: _decide(setting, gathered), [standings])
    anew, given, replaced = tf.unstack(tf.ensure_shape(decided, [3]))
    return Beginning(anew > 0, given > 0, replaced > 0)


def _decide(setting: Setting[Any], gathered: list[int]) -> list[int]:
    """Return whether training starts anew, whether all take over the root's values, and whether others than its own
    are new to this rank.
    """
    membership = setting.membership
    rows, standings = np.reshape(gathered, (-1, 7)).tolist(), {}
    for rank, _, steps, last, following, center, replica in rows:
        standings[rank] = Standing(steps > 0, steps, (last, following), "", f"{center:014x}", f"{replica:014x}")
    root, own = membership.global_root, membership.global_rank
    start = decide(standings, root)  # The root brings the state of the local optimizer as well.
    most = max(standing.local_steps for standing in standings.values())
    averaging = any(row[1] for row in rows) or most < (setting.phase.until or 0)
    different = len({standing.replica for standing in standings.values()}) > 1
    given = start is Start.FROM_ROOT or (start is Start.ANEW and different)
    replaced = replaces(start, standings, own, root, averaging)
    if given and own == root:
        logger.warning("The ranks have not started alike: all take over what rank %d has", root)
    return [int(start is Start.ANEW), int(given), int(replaced)]


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
