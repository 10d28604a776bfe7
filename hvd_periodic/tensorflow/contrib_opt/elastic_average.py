"""Elastic averaging for TensorFlow 1 graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import tensorflow as tf

from hvd_periodic.algorithms import Exchange
from hvd_periodic.algorithms.easgd import ContribEASGD
from hvd_periodic.options import takes
from hvd_periodic.schedules import Schedule
from hvd_periodic.tensorflow.contrib_opt.getters import ElasticAverageCustomGetter
from hvd_periodic.tensorflow.contrib_opt.gradient_averaging import plain
from hvd_periodic.tensorflow.contrib_opt.optimizer import InitializedByTask
from hvd_periodic.tensorflow.contrib_opt.options import SessionOptions
from hvd_periodic.tensorflow.contrib_opt.pairs import Pairs
from hvd_periodic.tensorflow.contrib_opt.rates import default_rho
from hvd_periodic.tensorflow.contrib_opt.request import Request
from hvd_periodic.tensorflow.space import TensorSpace


class ElasticAverageOptimizer(InitializedByTask):
    """Elastic averaging of the local replicas; see :class:`hvd_periodic.EASGD` for the equations.

    Every rank takes ``communication_period`` local steps; then all exchange once, synchronously by default.

    Args:
        opt: the local optimizer, a ``tf.compat.v1.train.Optimizer``.
        num_worker: number of ranks, ``hvd.size()``.
        ea_custom_getter: the getter with which the model was created; or None, for scripts without one: their own
            trainable variables are the replicas; centers, slots and counters are global variables. If ranks start with
            different values, without ``hvd.broadcast_global_variables(0)``, the first step broadcasts the root's.
        communication_period: local steps between exchanges (τ), or a schedule.
        moving_rate: α in (0, 2/(n+1)]; default 0.9/(τ n), as in ``tf.contrib.opt``.
        rho: strength ρ ≥ 0 of the elastic term, which :meth:`compute_gradients` and ``minimize`` add; in
            1/(learning rate). Default: ``moving_rate`` over the learning rate of ``opt``, as in ``tf.contrib.opt``,
            with a warning if ``opt`` rescales gradients, as Adam does; 0 without a getter.
        use_locking: in asynchronous exchange through shared memory, whether ranks wait for their turn to read and add;
            without it, those that collide compute again. Synchronous exchanges never write concurrently.
        synchronous: accepted and ignored; all ranks start together.
        name: name of the optimizer.
        asynchronous: every rank exchanges with one center at its own pace, without waiting for other ranks, as in
            ``tf.contrib.opt``. The center variables hold the center as this rank last left it, and the final
            center after :meth:`get_final_op`. ``moving_rate`` is in (0, 1].
        options: those of :class:`~hvd_periodic.tensorflow.contrib_opt.options.SessionOptions`; the signature has their
            defaults.

    Raises:
        TypeError, ValueError: a refused argument, on every rank; ``num_worker`` is not Horovod's size; no ``rho``
            although the learning rate is not a number.
        RuntimeError: Horovod is not initialized.

    Example::

        getter = ElasticAverageCustomGetter("")
        with tf.compat.v1.variable_scope("", custom_getter=getter):
            loss = model()
            optimizer = ElasticAverageOptimizer(
                tf.compat.v1.train.MomentumOptimizer(0.1, 0.9), hvd.size(), getter, communication_period=10
            )
        train_op = optimizer.minimize(loss, global_step=tf.compat.v1.train.get_or_create_global_step())
        hooks = [optimizer.make_session_run_hook(is_chief=hvd.rank() == 0, task_index=hvd.rank())]

    References:
        Zhang, Choromanska, LeCun: Deep Learning with Elastic Averaging SGD. arXiv 1412.6651 (2015).
    """

    @takes(SessionOptions)
    def __init__(
        self,
        opt: Any,
        num_worker: int,
        ea_custom_getter: ElasticAverageCustomGetter | None,
        communication_period: int | Schedule = 10,
        moving_rate: float | None = None,
        rho: float | None = None,
        use_locking: bool = True,
        synchronous: bool = False,
        name: str = "ElasticAverageOptimizer",
        *,
        asynchronous: bool = False,
        **options: Unpack[SessionOptions],
    ) -> None:
        def algorithm() -> ContribEASGD:
            made = ContribEASGD(moving_rate)
            if rho is not None:
                return replace(made, rho=rho)
            if ea_custom_getter is None:
                return made
            if made.moving_rate is None and callable(communication_period):
                raise ValueError(
                    "`rho` has no default, which would be moving_rate / learning_rate, where the default of "
                    "`moving_rate` follows a schedule: pass `rho`, 0.0 for no elastic term"
                )
            period = 1 if callable(communication_period) else communication_period
            rate = made.rate(Exchange(num_worker, period))
            return replace(made, rho=default_rho(rate, plain(opt)))

        request = Request(
            opt,
            num_worker,
            ea_custom_getter,
            ElasticAverageCustomGetter,
            algorithm,
            ("communication_period", communication_period),
            options,
            asynchronous,
        )
        super().__init__(request, use_locking, name)

    def compute_gradients(
        self,
        loss: Any,
        var_list: Any = None,
        gate_gradients: int = tf.compat.v1.train.Optimizer.GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> Pairs:
        """Return (gradient, variable) pairs of ``loss + ρ/2 ‖x − lc‖²``, where lc is the center as last read.

        A variable that was not created through the getter has no such term; :meth:`apply_gradients` refuses it on all
        ranks.
        """
        pairs = super().compute_gradients(
            loss, var_list, gate_gradients, aggregation_method, colocate_gradients_with_ops, grad_loss
        )
        if not self._algorithm.uses_gradients:
            return pairs
        # Without a getter, the very first step sets the centers to the replicas.
        since = max(self._schedule.synchronous_until or 0, int(self._without_getter))
        if not since:
            return [(self._elastic(g, variable), variable) for g, variable in pairs]
        counted = self._counters.local_steps()
        with tf.control_dependencies(self._counters.check):
            begun = counted.read_value() >= since
            elastic = [(self._elastic(g, variable), variable) for g, variable in pairs]
        return [(g if g is None else tf.where(begun, e, g), v) for (e, v), (g, _) in zip(elastic, pairs, strict=True)]

    def _elastic(self, gradient: Any, variable: Any) -> Any:
        if gradient is None or variable.ref() not in self._getter.companions:
            return gradient
        read = {"local_center": self._getter.companions[variable.ref()].read_value()}
        return self._algorithm.local(TensorSpace(), variable, gradient, read)[0]

    def _vectors(self, references: Sequence[Any]) -> dict[str, list[tf.Variable]]:
        companions = [self._getter.companions[reference] for reference in references]
        return super()._vectors(references) | {"parameters.local_center": companions}
