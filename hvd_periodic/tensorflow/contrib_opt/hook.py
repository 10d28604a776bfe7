"""The hook that starts and ends training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class InitializationHook(tf.compat.v1.train.SessionRunHook):
    """Runs the initialization of an optimizer when the session has been created or restored, on every rank.

    Every rank has a session of its own. A rank that is not chief would wait for the chief to initialize its variables;
    here it does so itself, and then gets the values of the root.

    Args:
        get_init_op: makes the operation.
        is_chief: what ``MonitoredTrainingSession`` is told.
        wait: waits for what other ranks still have to do together.
        get_end_op: makes the operation that ends training.
    """

    def __init__(
        self,
        get_init_op: Callable[[], tf.Operation],
        is_chief: bool,
        wait: Callable[[], None],
        get_end_op: Callable[[], tf.Operation],
    ) -> None:
        self._get_init_op = get_init_op
        self._wait = wait
        self._get_end_op = get_end_op
        self._is_chief = is_chief
        self._end: Any = None
        self._operation: Any = None

    def begin(self) -> None:
        """Make the operation, before the graph is finalized."""
        self._operation = self._get_init_op()
        self._end = self._get_end_op()
        keys = tf.compat.v1.GraphKeys
        graph = tf.compat.v1.get_default_graph()
        if not self._is_chief and not graph.get_collection(keys.LOCAL_INIT_OP):
            initializers = (
                tf.compat.v1.global_variables_initializer(),
                tf.compat.v1.local_variables_initializer(),
                tf.compat.v1.tables_initializer(),
            )
            graph.add_to_collection(keys.LOCAL_INIT_OP, tf.group(*initializers))
            graph.add_to_collection(keys.READY_FOR_LOCAL_INIT_OP, tf.constant([], dtype=tf.string))

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Run it."""
        session.run(self._operation)

    def end(self, session: tf.compat.v1.Session) -> None:
        """Wait for the other ranks; where training is asynchronous, until they have ended it."""
        session.run(self._end)
        self._wait()
