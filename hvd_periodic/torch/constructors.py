"""The three well-known periodic optimizers, for PyTorch."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch

from hvd_periodic.algorithms import AGN, EASGD, Averaging
from hvd_periodic.arguments import also_period
from hvd_periodic.options import takes
from hvd_periodic.schedules import Schedule
from hvd_periodic.spellings import renamed
from hvd_periodic.torch.model import Model
from hvd_periodic.torch.optimizer import PeriodicOptimizer
from hvd_periodic.torch.options import TorchOptions
from hvd_periodic.torch.outer import CenterOptimizerLike


class ElasticAverageOptimizer(PeriodicOptimizer):
    """Elastic averaging: replicas and center pull each other; see :class:`hvd_periodic.EASGD` for the equations.

    Args:
        optimizer: the local optimizer. With momentum this is EAMSGD; its state stays local.
        model: the model, or (name, parameter) pairs.
        communication_period: local steps between exchanges (τ), or a schedule.
        moving_rate: α in (0, 2/(n+1)]; default min(0.9/n, 1/(n+1)).
        beta: α = β/n instead, without division by τ.
        rho: strength ρ ≥ 0 of the elastic term in the local loss, in 1/(learning rate).
        asynchronous: exchange with one center at this rank's own pace, without waiting for other ranks. The
            center is on ``root_rank``, or with ``center="sharded"`` in shards on all ranks; the moving rate is in
            (0, 1].
        period: another name for ``communication_period``.
        options: options of :class:`PeriodicOptimizer`; the signature has their defaults.

    Raises:
        TypeError, ValueError, RuntimeError: an invalid argument, or ranks that disagree; on every rank.

    Example:
        >>> import torch
        >>> from hvd_periodic import LocalCommunicator
        >>> model = torch.nn.Linear(2, 1)
        >>> local = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = ElasticAverageOptimizer(local, model, 2, moving_rate=0.25, process_set=LocalCommunicator())
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     _ = optimizer.step()
        >>> optimizer.synchronizer.rounds
        2

    References:
        Zhang, Choromanska, LeCun: Deep Learning with Elastic Averaging SGD. arXiv 1412.6651 (2015).
    """

    _spelling: ClassVar = {"EASGD": "ElasticAverageOptimizer", "period": "communication_period"}

    @renamed(named_parameters="model")
    @also_period("communication_period")
    @takes(TorchOptions)
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: Model,
        communication_period: int | Schedule = 10,
        moving_rate: float | None = None,
        beta: float | None = None,
        rho: float = 0.0,
        asynchronous: bool = False,
        *,
        period: int | Schedule | None = None,
        **options: Unpack[TorchOptions],
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
    """Model averaging (local SGD): replicas are replaced by their mean; see :class:`hvd_periodic.Averaging`.

    Args:
        optimizer: the local optimizer; its state stays local.
        model: the model, or (name, parameter) pairs.
        interval_steps: local steps between exchanges (τ), or a schedule.
        asynchronous: exchange with one center at this rank's own pace, without waiting for other ranks.
        period: another name for ``interval_steps``.
        options: options of :class:`PeriodicOptimizer`; the signature has their defaults.

    Raises:
        TypeError, ValueError, RuntimeError: an invalid argument, or ranks that disagree; on every rank.

    References:
        Stich: Local SGD Converges Fast and Communicates Little. arXiv 1805.09767 (2018).
    """

    _spelling: ClassVar = {"period": "interval_steps"}

    @renamed(named_parameters="model")
    @also_period("interval_steps")
    @takes(TorchOptions)
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: Model,
        interval_steps: int | Schedule = 100,
        asynchronous: bool = False,
        *,
        period: int | Schedule | None = None,
        **options: Unpack[TorchOptions],
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
    """Accumulated gradient normalization: the center takes one step per period; see :class:`hvd_periodic.AGN`.

    Args:
        optimizer: the local optimizer; its state stays local.
        model: the model, or (name, parameter) pairs.
        communication_period: local steps between exchanges (τ), or a schedule.
        outer_optimizer: moves the center: an optimizer over the same parameters, to be copied, or a function from
            parameter groups to an optimizer. Default: a copy of ``optimizer``. A copy has its own state and the
            original's arguments and attributes, and follows the original's hyper-parameters.
        op: ``"sum"`` or ``"average"`` of the workers' normalized gradients.
        asynchronous: exchange with one center at this rank's own pace, without waiting for other ranks. The
            center's optimizer applies the gradients of one worker after another.
        period: another name for ``communication_period``.
        options: options of :class:`PeriodicOptimizer`; the signature has their defaults.

    Raises:
        TypeError, ValueError, RuntimeError: an invalid argument, or ranks that disagree; on every rank.

    References:
        Hermans, Spanakis, Möckel: Accumulated Gradient Normalization. arXiv 1710.02368 (2017).
    """

    _spelling: ClassVar = {"AGN": "AGNOptimizer", "period": "communication_period"}

    @renamed(named_parameters="model", center_optimizer="outer_optimizer")
    @also_period("communication_period")
    @takes(TorchOptions)
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: Model,
        communication_period: int | Schedule = 10,
        outer_optimizer: CenterOptimizerLike | None = None,
        op: str = "sum",
        asynchronous: bool = False,
        *,
        period: int | Schedule | None = None,
        **options: Unpack[TorchOptions],
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
