"""The hook that starts and ends the training of a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_READY = tf.compat.v1.GraphKeys.READY_FOR_LOCAL_INIT_OP

_UNUSED = ("hvd_periodic", "hooks that no session has been given")
"""Collection of a graph. Its key is not a string, so that it is not exported with the graph."""

_CHECK = "hook_was_not_passed_to_the_session"
"""Name of the operations that fail; TensorFlow's errors begin with it."""


class InitializationHook(tf.compat.v1.train.SessionRunHook):
    """Runs the initialization of an optimizer when the session has been created or restored, on every rank.

    Every rank has its own session. A rank that is not chief would wait for the chief to initialize its variables;
    the hook makes the rank initialize them itself and then receive the root's values.

    Args:
        is_chief: as passed to ``MonitoredTrainingSession``.
        wait: waits until the other ranks have ended their joint work.
        cls: class name of the optimizer.
        needed: ranks cannot train without the hook or the initialization that it runs.
    """

    def __init__(
        self,
        get_init_op: Callable[[], tf.Operation],
        is_chief: bool,
        wait: Callable[[], None],
        get_end_op: Callable[[], tf.Operation],
        cls: str,
        needed: bool,
    ) -> None:
        self._get_init_op = get_init_op
        self._wait = wait
        self._get_end_op = get_end_op
        self._is_chief = is_chief
        self._end: Any = None
        self._operation: Any = None
        self.cls, self.needed = cls, needed
        self._graph = tf.compat.v1.get_default_graph()
        self._graph.add_to_collection(_UNUSED, self)
        _refuse_sessions(self._graph)

    def use(self) -> None:
        """Record that a session has this hook, or that something else does the work of the hook."""
        unused = self._graph.get_collection_ref(_UNUSED)
        if self in unused:
            unused.remove(self)
            _refuse_sessions(self._graph)

    def begin(self) -> None:
        """Make the operations, before the graph is finalized."""
        self.use()
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
            if not graph.get_collection(_READY):  # Otherwise it holds the check of another, unused hook.
                graph.add_to_collection(_READY, tf.constant([], dtype=tf.string))

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Run the initialization."""
        session.run(self._operation)

    def end(self, session: tf.compat.v1.Session) -> None:
        """End training and wait for the other ranks; in asynchronous training, until all of them have ended it."""
        session.run(self._end)
        self._wait()


def _refuse_sessions(graph: tf.Graph) -> None:
    """Make ``MonitoredTrainingSession`` fail if it creates a session without the hook made for it.

    Otherwise a rank that is not chief would wait for its variables, and the others for that rank. The operation with
    which a session checks whether variables are initialized raises the error. If the hook is optional, it does so only
    if the variables are not initialized, as on a rank that is not chief.
    """
    ready, unused = graph.get_collection_ref(_READY), graph.get_collection_ref(_UNUSED)
    ready[:] = [each for each in ready if not each.op.name.startswith(_CHECK)]
    hook = next((hook for hook in unused if hook.needed), unused[0] if unused else None)
    variables = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    if hook is None or ready or graph.finalized or not (hook.needed or variables):
        return
    message = (
        f"This session was created without the hook that `{hook.cls}.make_session_run_hook()` made, and ranks would "
        "wait for each other: pass it, as in MonitoredTrainingSession(hooks=[hook]), on all ranks"
    )
    with graph.as_default(), tf.control_dependencies(None), tf.device(None), tf.compat.v1.name_scope(None):
        used = False if hook.needed else tf.compat.v1.is_variable_initialized(variables[0])
        with tf.control_dependencies([tf.debugging.Assert(used, [message], name=_CHECK)]):
            ready.append(tf.constant([], dtype=tf.string, name=_CHECK))
