"""The three well-known optimizers, for numpy arrays."""

from __future__ import annotations

from typing import ClassVar, Unpack

from hvd_periodic.algorithms import AGN, EASGD, Averaging
from hvd_periodic.arguments import also_period
from hvd_periodic.numpy.optimizer import PeriodicOptimizer
from hvd_periodic.numpy.replica import NamedArrays
from hvd_periodic.numpy.sgd import ArrayOptimizer
from hvd_periodic.options import Options, takes
from hvd_periodic.schedules import Schedule
from hvd_periodic.spellings import renamed


class ElasticAverageOptimizer(PeriodicOptimizer):
    """Elastic averaging of numpy arrays; see :class:`hvd_periodic.algorithms.EASGD` for the mathematics.

    Args:
        optimizer: the local optimizer.
        model: a dict, or (name, array) pairs.
        communication_period: local steps between exchanges (τ), or a schedule.
        moving_rate: α in (0, 2/(n+1)]; default min(0.9/n, 1/(n+1)).
        beta: α = β/n instead.
        rho: strength of the elastic term in the local loss.
        asynchronous: exchange with one center without waiting for other ranks.
        period: another name for ``communication_period``.
        options: options of :class:`PeriodicOptimizer`; the signature has their defaults.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range; on every rank.

    Example:
        >>> import numpy as np
        >>> from hvd_periodic.numpy import SGD
        >>> x = np.zeros(1)
        >>> optimizer = ElasticAverageOptimizer(SGD(1.0), {"x": x}, communication_period=2, moving_rate=0.25)
        >>> for _ in range(2):
        ...     optimizer.step([np.array([-1.0])])
        >>> x
        array([1.5])
    """

    _spelling: ClassVar = {"EASGD": "ElasticAverageOptimizer", "period": "communication_period"}

    @renamed(named_parameters="model", communicator="process_set")
    @also_period("communication_period")
    @takes(Options)
    def __init__(
        self,
        optimizer: ArrayOptimizer,
        model: NamedArrays,
        communication_period: int | Schedule = 10,
        moving_rate: float | None = None,
        beta: float | None = None,
        rho: float = 0.0,
        asynchronous: bool = False,
        *,
        period: int | Schedule | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            optimizer,
            model,
            lambda: EASGD(moving_rate, beta, rho),
            communication_period if period is None else period,
            asynchronous=asynchronous,
            **options,
        )


class ModelAverageOptimizer(PeriodicOptimizer):
    """Model averaging of numpy arrays; see :class:`hvd_periodic.algorithms.Averaging` for the mathematics.

    Args:
        optimizer: the local optimizer.
        model: a dict, or (name, array) pairs.
        interval_steps: local steps between exchanges (τ), or a schedule.
        asynchronous: exchange with one center without waiting for other ranks.
        period: another name for ``interval_steps``.
        options: options of :class:`PeriodicOptimizer`; the signature has their defaults.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range; on every rank.
    """

    _spelling: ClassVar = {"period": "interval_steps"}

    @renamed(named_parameters="model", communicator="process_set")
    @also_period("interval_steps")
    @takes(Options)
    def __init__(
        self,
        optimizer: ArrayOptimizer,
        model: NamedArrays,
        interval_steps: int | Schedule = 100,
        asynchronous: bool = False,
        *,
        period: int | Schedule | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            optimizer,
            model,
            Averaging,
            interval_steps if period is None else period,
            asynchronous=asynchronous,
            **options,
        )


class AGNOptimizer(PeriodicOptimizer):
    """Accumulated gradient normalization; see :class:`hvd_periodic.algorithms.AGN` for the mathematics.

    Args:
        optimizer: the local optimizer.
        model: a dict, or (name, array) pairs.
        communication_period: local steps between exchanges (τ), or a schedule.
        outer_optimizer: moves the center; default: a copy of ``optimizer``, with its own state.
        op: ``"sum"`` or ``"average"`` of the workers' gradients.
        asynchronous: exchange with one center without waiting for other ranks.
        period: another name for ``communication_period``.
        options: options of :class:`PeriodicOptimizer`; the signature has their defaults.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range; on every rank.
    """

    _spelling: ClassVar = {"AGN": "AGNOptimizer", "period": "communication_period"}

    @renamed(named_parameters="model", communicator="process_set", center_optimizer="outer_optimizer")
    @also_period("communication_period")
    @takes(Options)
    def __init__(
        self,
        optimizer: ArrayOptimizer,
        model: NamedArrays,
        communication_period: int | Schedule = 10,
        outer_optimizer: ArrayOptimizer | None = None,
        op: str = "sum",
        asynchronous: bool = False,
        *,
        period: int | Schedule | None = None,
        **options: Unpack[Options],
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
