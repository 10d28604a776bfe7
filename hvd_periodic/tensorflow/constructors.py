"""The three well-known optimizers, for Keras."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

import keras

from hvd_periodic.algorithms import AGN, EASGD, Averaging
from hvd_periodic.arguments import also_period
from hvd_periodic.options import takes
from hvd_periodic.schedules import Schedule
from hvd_periodic.spellings import renamed
from hvd_periodic.tensorflow.config import encode
from hvd_periodic.tensorflow.optimizer import PeriodicOptimizer
from hvd_periodic.tensorflow.options import KerasOptions


@keras.saving.register_keras_serializable("hvd_periodic")
class ElasticAverageOptimizer(PeriodicOptimizer):
    """Elastic averaging: replicas and center pull each other; see :class:`hvd_periodic.EASGD` for the equations.

    Args:
        optimizer: the local optimizer, any Keras optimizer. With momentum this is EAMSGD; its state stays local.
        model: the model, so that its batch-norm statistics are averaged; or None.
        communication_period: local steps between exchanges (τ), or a schedule.
        moving_rate: α in (0, 2/(n+1)]; default min(0.9/n, 1/(n+1)).
        beta: α = β/n instead, without division by τ.
        rho: strength ρ ≥ 0 of the elastic term in the local loss, in 1/(learning rate).
        asynchronous: each rank exchanges with one center on its own clock, without waiting for other ranks.
            The center is on ``root_rank``, or with ``center="sharded"`` in shards on all ranks; the rate is in (0, 1].
        period: another name for ``communication_period``.
        options: options of :class:`PeriodicOptimizer`; the signature has their defaults.

    Raises:
        TypeError, ValueError, RuntimeError: an invalid argument, or ranks that disagree; on every rank.

    Example:
        >>> import keras, numpy as np
        >>> from hvd_periodic import LocalCommunicator
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> local = keras.optimizers.SGD(0.1)
        >>> optimizer = ElasticAverageOptimizer(local, model, 2, moving_rate=0.25, process_set=LocalCommunicator())
        >>> model.compile(optimizer, loss="mse")
        >>> history = model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=1, verbose=0)
        >>> optimizer.synchronizer.rounds
        2

    References:
        Zhang, Choromanska, LeCun: Deep Learning with Elastic Averaging SGD. arXiv 1412.6651 (2015).
    """

    _spelling: ClassVar = {"EASGD": "ElasticAverageOptimizer", "period": "communication_period"}

    @also_period("communication_period")
    @takes(KerasOptions)
    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        model: keras.Model | None = None,
        communication_period: int | Schedule = 10,
        moving_rate: float | None = None,
        beta: float | None = None,
        rho: float = 0.0,
        asynchronous: bool = False,
        *,
        period: int | Schedule | None = None,
        **options: Unpack[KerasOptions],
    ) -> None:
        super().__init__(
            optimizer,
            model,
            lambda: EASGD(moving_rate, beta, rho),
            communication_period if period is None else period,
            asynchronous=asynchronous,
            **options,
        )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain values."""
        own = {"communication_period": encode(self._schedule), "asynchronous": self._lifecycle.spec.asynchronous}
        return self._common_config() | own | vars(self._algorithm)


@keras.saving.register_keras_serializable("hvd_periodic")
class ModelAverageOptimizer(PeriodicOptimizer):
    """Model averaging (local SGD): replicas are replaced by their mean; see :class:`hvd_periodic.Averaging`.

    Args:
        optimizer: the local optimizer, any Keras optimizer; its state stays local.
        model: the model, so that its batch-norm statistics are averaged; or None.
        interval_steps: local steps between exchanges (τ), or a schedule.
        asynchronous: each rank exchanges with one center on its own clock, without waiting for other ranks.
        period: another name for ``interval_steps``.
        options: options of :class:`PeriodicOptimizer`; the signature has their defaults.

    Raises:
        TypeError, ValueError, RuntimeError: an invalid argument, or ranks that disagree; on every rank.

    References:
        Stich: Local SGD Converges Fast and Communicates Little. arXiv 1805.09767 (2018).
    """

    _spelling: ClassVar = {"period": "interval_steps"}

    @also_period("interval_steps")
    @takes(KerasOptions)
    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        model: keras.Model | None = None,
        interval_steps: int | Schedule = 100,
        asynchronous: bool = False,
        *,
        period: int | Schedule | None = None,
        **options: Unpack[KerasOptions],
    ) -> None:
        super().__init__(
            optimizer,
            model,
            Averaging,
            interval_steps if period is None else period,
            asynchronous=asynchronous,
            **options,
        )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain values."""
        own = {"interval_steps": encode(self._schedule), "asynchronous": self._lifecycle.spec.asynchronous}
        return self._common_config() | own


@keras.saving.register_keras_serializable("hvd_periodic")
class AGNOptimizer(PeriodicOptimizer):
    """Accumulated gradient normalization: the center takes one step per period; see :class:`hvd_periodic.AGN`.

    Args:
        optimizer: the local optimizer, any Keras optimizer; its state stays local.
        model: the model, so that its batch-norm statistics are averaged; or None.
        communication_period: local steps between exchanges (τ), or a schedule.
        outer_optimizer: an unused Keras optimizer that moves the center. Default: a copy of ``optimizer`` with its own
            state, which uses the learning rate of ``optimizer`` at the time of the exchange.
        op: ``"sum"`` or ``"average"`` of the workers' normalized gradients.
        asynchronous: each rank exchanges with one center on its own clock, without waiting for other ranks.
            The center's optimizer applies the gradients of one worker after another.
        period: another name for ``communication_period``.
        options: options of :class:`PeriodicOptimizer`; the signature has their defaults.

    Raises:
        TypeError, ValueError, RuntimeError: an invalid argument, or ranks that disagree; on every rank.

    References:
        Hermans, Spanakis, Möckel: Accumulated Gradient Normalization. arXiv 1710.02368 (2017).
    """

    _spelling: ClassVar = {"AGN": "AGNOptimizer", "period": "communication_period"}
    _outer_key = "center_optimizer"

    @renamed(center_optimizer="outer_optimizer")
    @also_period("communication_period")
    @takes(KerasOptions)
    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        model: keras.Model | None = None,
        communication_period: int | Schedule = 10,
        outer_optimizer: keras.optimizers.Optimizer | None = None,
        op: str = "sum",
        asynchronous: bool = False,
        *,
        period: int | Schedule | None = None,
        **options: Unpack[KerasOptions],
    ) -> None:
        super().__init__(
            optimizer,
            model,
            lambda: AGN(op),
            communication_period if period is None else period,
            outer_optimizer=outer_optimizer,
            asynchronous=asynchronous,
            **options,
        )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain values."""
        own = {"communication_period": encode(self._schedule), "asynchronous": self._lifecycle.spec.asynchronous}
        return self._common_config() | own | vars(self._algorithm)
