"""Model averaging for TensorFlow 1 graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import tensorflow as tf

from hvd_periodic.algorithms import Averaging
from hvd_periodic.options import takes
from hvd_periodic.schedules import Schedule
from hvd_periodic.tensorflow.contrib_opt.getters import ModelAverageCustomGetter
from hvd_periodic.tensorflow.contrib_opt.hook import InitializationHook
from hvd_periodic.tensorflow.contrib_opt.optimizer import GraphOptimizer
from hvd_periodic.tensorflow.contrib_opt.options import SessionOptions
from hvd_periodic.tensorflow.contrib_opt.request import Request


class ModelAverageOptimizer(GraphOptimizer):
    """Model averaging of the local replicas; see :class:`hvd_periodic.Averaging` for the equation.

    Args:
        opt: the local optimizer, a ``tf.compat.v1.train.Optimizer``.
        num_worker: number of ranks, ``hvd.size()``.
        is_chief: accepted and passed to the hook; every rank updates its own copy of the center.
        ma_custom_getter: the getter with which the model was created; or None, for scripts without one: their own
            trainable variables are the replicas; centers, slots and counters are global variables. If ranks start with
            different values, without ``hvd.broadcast_global_variables(0)``, the first step broadcasts the root's.
        interval_steps: local steps between exchanges (τ), or a schedule.
        use_locking: in asynchronous exchange through shared memory, whether ranks wait for their turn to read and add;
            without it, those that collide compute again. Synchronous exchanges never write concurrently.
        name: name of the optimizer.
        asynchronous: every rank exchanges with one center at its own pace: it adds one n-th of what its replica has
            moved since it last took the center, and takes the center. The center variables hold the center as this
            rank last left it. :meth:`get_final_op` pushes what is left, and then replicas and center variables hold the
            final center.
        options: as in :class:`ElasticAverageOptimizer`.

    Raises:
        TypeError, ValueError: a refused argument, on every rank; ``num_worker`` is not Horovod's size.
        RuntimeError: Horovod is not initialized.

    References:
        Stich: Local SGD Converges Fast and Communicates Little. arXiv 1805.09767 (2018).
    """

    @takes(SessionOptions)
    def __init__(
        self,
        opt: Any,
        num_worker: int,
        is_chief: bool,
        ma_custom_getter: ModelAverageCustomGetter | None,
        interval_steps: int | Schedule = 100,
        use_locking: bool = True,
        name: str = "ModelAverageOptimizer",
        *,
        asynchronous: bool = False,
        **options: Unpack[SessionOptions],
    ) -> None:
        request = Request(
            opt,
            num_worker,
            ma_custom_getter,
            ModelAverageCustomGetter,
            Averaging,
            ("interval_steps", interval_steps),
            options,
            asynchronous,
        )
        super().__init__(request, use_locking, name)
        self._is_chief = is_chief

    def get_init_op(self) -> tf.Operation:
        """Return the operation that broadcasts the root's centers and sets the local replicas to them.

        All ranks run it after the initializers; the hook of :meth:`make_session_run_hook` does so.
        """
        return self._initialize()

    def make_session_run_hook(self) -> InitializationHook:
        """Return the hook that runs :meth:`get_init_op` when the session is created."""
        return self._hook(self.get_init_op, self._is_chief)

    def _vectors(self, references: Sequence[Any]) -> dict[str, list[tf.Variable]]:
        vectors = super()._vectors(references)
        if self._asynchronous:
            vectors["parameters.taken"] = [self._getter.keep_read(reference.deref()) for reference in references]
        return vectors

    def _require_global_step(self, global_step: Any) -> None:
        if global_step is None:
            raise ValueError(
                "`global_step` is needed for model averaging: pass tf.compat.v1.train.get_or_create_global_step()"
            )
