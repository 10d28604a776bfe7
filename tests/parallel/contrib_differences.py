"""Variables of sessions that no exchange touches, and that differ between ranks; see ``scenarios.py``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from hvd_periodic.tensorflow import contrib_opt
from tests.parallel.program import Scenarios, attempt, log
from tests.parallel.tensorflow_job import hvd

scenario = Scenarios()


class Script:
    """A trained weight and a mean, which are exchanged, and variables of all kinds that are not.

    Args:
        with_getter: as a script of tf.contrib.opt, or as one of Horovod.
        options: of the optimizer.
    """

    def __init__(self, with_getter: bool, **options: Any) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            getter = contrib_opt.ModelAverageCustomGetter("") if with_getter else None
            one, count = tf.constant([1.0]), tf.constant([1])
            with tf.variable_scope("", custom_getter=getter):
                w, teacher, head = (tf.get_variable(name, initializer=one) for name in ("w", "teacher", "head"))
                untrained = {"trainable": False, "initializer": count}
                pointer, kept, seed = (tf.get_variable(name, **untrained) for name in ("pointer", "kept", "noise_seed"))
                mean = tf.get_variable("mean", initializer=one, trainable=False)
            differing = [teacher, head, pointer, kept, seed, mean]
            if with_getter:  # Otherwise it would be averaged.
                differing.append(tf.get_variable("outside", initializer=one, trainable=False))
            step = tf.train.get_or_create_global_step()
            self.optimizer = contrib_opt.ModelAverageOptimizer(
                tf.train.GradientDescentOptimizer(0.1),
                hvd.size(),
                hvd.rank() == 0,
                getter,
                1,
                parameters={"head": "local"},
                buffers={"kept": "local"},
                **options,
            )
            self.train = self.optimizer.minimize(tf.reduce_sum(w), step, [w])
            self.differ = tf.group(*(v.assign_add(tf.ones_like(v) * hvd.rank()) for v in differing))
            self.audit = self.optimizer.get_audit_op()
            self.final = self.optimizer.get_final_op() if "asynchronous" in options else tf.no_op()
            self.initialize = tf.group(tf.global_variables_initializer(), tf.local_variables_initializer())
            self.start = self.optimizer.get_init_op() if with_getter else hvd.broadcast_global_variables(0)
            self.saver = tf.train.Saver()

    def session(self, *operations: Any) -> tf.Session:
        """Return a session that has run the initializers, and then these."""
        session = tf.Session(graph=self.graph)
        for operation in (self.initialize, *operations):
            session.run(operation)
        return session


def at_audits(script: Script) -> None:
    session = script.session(script.start)
    for operation in (script.train, script.differ, script.train, script.train):
        session.run(operation)


def in_an_audit(script: Script) -> None:
    script.session(script.start, script.train, script.differ, script.audit, script.audit, script.final)


def at_the_end(script: Script) -> None:
    with script.graph.as_default():
        hooks = [script.optimizer.make_session_run_hook(), tf.train.StopAtStepHook(last_step=2)]
        with tf.train.MonitoredTrainingSession(hooks=hooks, is_chief=hvd.rank() == 0) as session:
            session.run(script.train)
            session.run_step_fn(lambda step_context: step_context.session.run(script.differ))
            while not session.should_stop():
                session.run(script.train)


def at_the_start(script: Script) -> None:
    """Initialized before with a getter; without one, ranks restore what they have saved."""
    session = script.session(script.train if script.optimizer._without_getter else script.start, script.differ)
    if not script.optimizer._without_getter:
        session.run(script.start)
        session.run(script.final)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = script.saver.save(session, f"{folder}/{hvd.rank()}")
        again = script.session()
        script.saver.restore(again, path)
        again.run(script.train)


CASES: dict[str, tuple[Callable[[Script], None], dict[str, Any]]] = {
    "audit_every": (at_audits, {"audit_every": 1}),
    "get_audit_op()": (in_an_audit, {}),
    "the end": (at_the_end, {}),
    "the start": (at_the_start, {}),
    "no audit": (at_audits, {}),
    "get_audit_op(), asynchronous": (in_an_audit, {"asynchronous": True}),
    "the end, asynchronous": (at_the_end, {"asynchronous": True}),
    "the start, asynchronous": (at_the_start, {"asynchronous": True}),
}


@scenario
def variables_that_differ() -> Any:
    """What the log says where ranks compare, with a getter and without."""
    found = {}
    for case, (run, options) in CASES.items():
        for with_getter in (True, False)[: 1 if options.get("asynchronous") else 2]:
            with log() as lines:
                run(Script(with_getter, **options))
            found[f"{case} {with_getter}"] = lines
    return found


@scenario
def what_another_optimizer_exchanges() -> Any:
    """It is constructed later, and one of its variables is each rank's own: nothing is left to compare."""
    with tf.Graph().as_default(), log() as lines:
        a, b, c = (tf.get_variable(name, initializer=tf.constant([1.0 + hvd.rank()])) for name in "abc")
        first, second = (
            contrib_opt.ModelAverageOptimizer(
                tf.train.GradientDescentOptimizer(0.1), hvd.size(), hvd.rank() == 0, None, 2, audit_every=1, **options
            )
            for options in ({}, {"parameters": {"c": "local"}})
        )
        step, loss = tf.train.get_or_create_global_step(), tf.reduce_sum(a * b * c) * (1.0 + hvd.rank())
        train = [first.minimize(loss, step, [a])]
        with tf.control_dependencies(train):
            train.append(second.minimize(loss, step, [b, c]))
        session = tf.Session()
        session.run(tf.global_variables_initializer())
        for _ in range(4):
            session.run(train)
        return lines


@scenario
def a_rank_that_ends_early() -> Any:
    """The last rank ends its session after one step, while the others exchange once more."""
    script, last = Script(True), hvd.rank() == hvd.size() - 1

    def train() -> None:
        with script.graph.as_default():
            hook = script.optimizer.make_session_run_hook()
            with tf.train.MonitoredTrainingSession(hooks=[hook], is_chief=hvd.rank() == 0) as session:
                for _ in range(1 if last else 2):
                    session.run(script.train)

    return attempt(train, tf.errors.OpError)
