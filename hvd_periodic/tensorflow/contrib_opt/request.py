"""Checks the arguments of the constructors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.arguments import require_int, spelled
from hvd_periodic.centers import placement_of
from hvd_periodic.comm.base import Communicator
from hvd_periodic.participation import PARAMETERS
from hvd_periodic.schedules import Schedule, as_schedule
from hvd_periodic.sync.warmup import schedule_around
from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator
from hvd_periodic.tensorflow.contrib_opt.getters import CustomGetter
from hvd_periodic.tensorflow.contrib_opt.gradient_averaging import gradient_group_of, plain
from hvd_periodic.tensorflow.contrib_opt.options import SessionOptions
from hvd_periodic.tensorflow.contrib_opt.unexchanged import BUFFERS
from hvd_periodic.wires import as_wire


def spelled_as(cls: str) -> AbstractContextManager[None]:
    """Name the class of an optimizer in messages inside a ``with`` block, in place of the core's algorithm."""
    return spelled({"ContribEASGD": cls, "AGN": cls})


@dataclass(frozen=True)
class Request:
    """The arguments of one of the optimizers.

    Attributes:
        opt: the local optimizer.
        num_worker: number of ranks; must be Horovod's.
        getter: the custom getter that created the variables. None: the variables of the script are the replicas.
        getter_class: required class of the getter.
        algorithm: makes the algorithm, or raises.
        period: name of the argument, and the local steps between exchanges.
        options: all other options.
        asynchronous: exchange without waiting for other ranks.
        outer_optimizer: the user's optimizer for the center; None if there is none.
    """

    opt: Any
    num_worker: int
    getter: CustomGetter | None
    getter_class: type[CustomGetter]
    algorithm: Callable[[], Algorithm]
    period: tuple[str, int | Schedule]
    options: SessionOptions
    asynchronous: bool = False
    outer_optimizer: Any = None

    def validate(
        self, cls: str, communicator: Communicator
    ) -> tuple[Algorithm, Any, Schedule, TensorFlowCommunicator | None]:
        """Check the arguments; return algorithm, outer optimizer, schedule and gradient group.

        A copy of the outer optimizer moves the center; it is None if the algorithm does. The gradient group is the
        ranks whose gradients a DistributedOptimizer inside averages, or None.
        """
        self._check_optimizer(cls)
        self._check_getter(cls)
        self._check_center()
        if require_int(self.num_worker, "`num_worker`", minimum=1) != communicator.size:
            raise ValueError(
                f"`num_worker` must be the number of Horovod ranks that exchange, {communicator.size}: pass "
                f"hvd.size(), or that of the process set. Received: num_worker={self.num_worker!r}"
            )
        PARAMETERS.check(self.options["parameters"])
        BUFFERS.check(self.options["buffers"])
        as_wire(self.options["compression"])
        name, period = self.period
        planned = as_schedule(period, name)
        with spelled_as(cls):
            algorithm = self.algorithm()
            (algorithm.asynchronous_variant if self.asynchronous else algorithm.check)(communicator.size)
            moving = algorithm.outer_optimizer(plain(self.opt), self.outer_optimizer)
        averaged = gradient_group_of(self.opt)
        return algorithm, moving, schedule_around(averaged, communicator, planned, self.asynchronous), averaged

    def _check_optimizer(self, cls: str) -> None:
        if not isinstance(self.opt, tf.compat.v1.train.Optimizer):
            raise TypeError(
                f"`{cls}` wraps a tf.compat.v1.train.Optimizer; for Keras optimizers there is "
                f"hvd_periodic.tensorflow.{cls}. Received: {type(self.opt).__name__}"
            )
        given = self.outer_optimizer
        if given is not None and not isinstance(given, tf.compat.v1.train.Optimizer):
            raise TypeError(
                f"`outer_optimizer` must be a tf.compat.v1.train.Optimizer. Received: {type(given).__name__}"
            )

    def _check_center(self) -> None:
        place = placement_of(self.options["center"]).name
        if place == "sharded":
            raise ValueError(
                "`center='sharded'` is not for sessions: a checkpoint holds the variables of one rank, which would "
                "not have the whole center. Use 'root' or 'replicated'. Received: center='sharded'"
            )
        if place == "root" and self.getter is None:
            raise ValueError(
                f"`center='root'` needs a {self.getter_class.__name__}: scripts without a getter broadcast all global "
                "variables, but the state kept with the center would exist on rank 0 only. Received: None"
            )

    def _check_getter(self, cls: str) -> None:
        getter_class = self.getter_class.__name__
        if not isinstance(self.getter, self.getter_class) and self.getter is not None:
            raise TypeError(f"`{cls}` needs a {getter_class}. Received: {type(self.getter).__name__}")
        if self.asynchronous and self.getter is None:
            raise ValueError(
                f"asynchronous=True needs a {getter_class}, and the hook of make_session_run_hook() or "
                "get_init_op(), which make the center. Received: None"
            )
