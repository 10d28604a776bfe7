"""Other algorithms for TensorFlow 1 graphs: DiLoCo, SlowMo, BMUF and your own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import numpy as np

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.options import takes
from hvd_periodic.schedules import Schedule
from hvd_periodic.tensorflow.contrib_opt.getters import PeriodicCustomGetter
from hvd_periodic.tensorflow.contrib_opt.optimizer import InitializedByTask
from hvd_periodic.tensorflow.contrib_opt.options import SessionOptions
from hvd_periodic.tensorflow.contrib_opt.request import Request
from hvd_periodic.vectors.space import VectorSpace


class PeriodicOptimizer(InitializedByTask):
    """A TensorFlow 1 optimizer with periodic exchange, with any algorithm and schedule.

    The algorithm's state, such as the momentum of :class:`hvd_periodic.DiLoCo`, is in global variables like
    ``global_center_variable/w/momentum``, which checkpoints hold and all ranks receive from the root.

    Args:
        optimizer: the local optimizer, a ``tf.compat.v1.train.Optimizer``.
        num_worker: number of ranks, ``hvd.size()``.
        custom_getter: the getter with which the model was created; or None, as in :class:`ElasticAverageOptimizer`.
        algorithm: an :class:`~hvd_periodic.Algorithm` whose workers keep no vectors, or a function that makes one.
        period: local steps between exchanges, or a schedule.
        name: name of the optimizer.
        outer_optimizer: a ``tf.compat.v1.train.Optimizer``, for algorithms that take one, such as DiLoCo; a copy with
            its own state moves the center. Default: the algorithm itself moves it.
        options: as in :class:`ElasticAverageOptimizer`.

    Raises:
        TypeError, ValueError: a refused argument, on every rank; ``num_worker`` is not Horovod's size.
        RuntimeError: Horovod is not initialized.

    Example::

        getter = PeriodicCustomGetter("")
        with tf.compat.v1.variable_scope("", custom_getter=getter):
            loss = model()
        local = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)
        optimizer = PeriodicOptimizer(local, hvd.size(), getter, hvdp.DiLoCo(), 100)
        train_op = optimizer.minimize(loss, global_step=tf.compat.v1.train.get_or_create_global_step())
        hooks = [optimizer.make_session_run_hook(is_chief=hvd.rank() == 0, task_index=hvd.rank())]
    """

    @takes(SessionOptions)
    def __init__(
        self,
        optimizer: Any,
        num_worker: int,
        custom_getter: PeriodicCustomGetter | None,
        algorithm: Algorithm | Callable[[], Algorithm],
        period: int | Schedule,
        name: str = "PeriodicOptimizer",
        *,
        outer_optimizer: Any = None,
        **options: Unpack[SessionOptions],
    ) -> None:
        request = Request(
            optimizer,
            num_worker,
            custom_getter,
            PeriodicCustomGetter,
            lambda: _without_workers(algorithm if isinstance(algorithm, Algorithm) else algorithm()),
            ("period", period),
            options,
            outer_optimizer=outer_optimizer,
        )
        super().__init__(request, False, name)


def _without_workers(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm; raise a ValueError if its workers keep vectors or see gradients."""
    if algorithm.uses_gradients or algorithm.init_worker(VectorSpace(), np.zeros(1)):
        raise ValueError(
            "`PeriodicOptimizer` of TensorFlow 1 takes algorithms whose workers keep no vectors and see no gradients, "
            f"such as DiLoCo: use ElasticAverageOptimizer or AGNOptimizer. Received: {algorithm!r}"
        )
    return algorithm
