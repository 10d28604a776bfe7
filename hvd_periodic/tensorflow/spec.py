"""The checked arguments of a Keras optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.arguments import as_typed
from hvd_periodic.centers import placement_of
from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.subset import require_possible
from hvd_periodic.keras.model import check_policy, described
from hvd_periodic.local_state import LocalState
from hvd_periodic.participation import PARAMETERS
from hvd_periodic.schedules import Schedule, as_schedule
from hvd_periodic.sync.combinations import refuse_quorum
from hvd_periodic.sync.warmup import schedule_around
from hvd_periodic.tensorflow.center_optimizer import CenterOptimizer
from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator
from hvd_periodic.tensorflow.config import encode
from hvd_periodic.tensorflow.gradient_averaging import split_distributed
from hvd_periodic.tensorflow.options import KerasOptions
from hvd_periodic.tensorflow.rank_binding import RANKS, RankBinding
from hvd_periodic.tensorflow.settings import innermost, optimizers_inside
from hvd_periodic.wires import as_wire


@dataclass(frozen=True)
class OptimizerSpec:
    """The arguments of a constructor, checked.

    Attributes:
        optimizer: the optimizer inside; for an ``hvd.DistributedOptimizer``, the optimizer from which it was made.
        center: the optimizer of the center, if the algorithm has one.
        asynchronous: whether ranks exchange without waiting for each other.
        options: all other arguments.
    """

    optimizer: Any
    algorithm: Algorithm
    schedule: Schedule
    center: CenterOptimizer | None
    asynchronous: bool
    options: KerasOptions

    @classmethod
    def of(
        cls,
        binding: RankBinding,
        optimizer: object,
        model: object,
        algorithm: Algorithm | Callable[[], Algorithm],
        period: int | Schedule,
        outer_optimizer: object,
        asynchronous: bool,
        options: KerasOptions,
    ) -> OptimizerSpec:
        """Check the arguments and return them; set the binding's average of gradients.

        For a loaded optimizer, :meth:`check` later checks the arguments that depend on the ranks.
        """
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(f"`optimizer` must be a keras.optimizers.Optimizer. Received: {described(optimizer)}")
        inside, binding.average = split_distributed(optimizer)
        _check_levels(inside, options["overlap"], options["quorum"])
        check_policy(options["buffers"], model, binding.loaded)
        PARAMETERS.check(options["parameters"])
        if options["parameters"] is not None and any(each.use_ema for each in optimizers_inside(inside)):
            raise ValueError(
                "`parameters` cannot be combined with use_ema=True, whose moving averages become the mean over all "
                "ranks at the end: leave out one of the two"
            )
        placement_of(options["center"])
        as_wire(options["compression"])
        made = algorithm if isinstance(algorithm, Algorithm) else algorithm()
        if not binding.loaded:
            binding.communicator.rank_of(options["root_rank"])
            _check_ranks(binding.communicator, made, asynchronous, options)
        local = innermost(inside)
        moving = made.outer_optimizer(local, outer_optimizer)
        center = None if moving is None else CenterOptimizer(local, outer_optimizer)
        schedule = as_schedule(period, as_typed("period"))
        if not binding.loaded:
            group = binding.gradient_group or gradient_group_inside(inside)
            _refuse_averaging(group, options["quorum"])
            schedule = schedule_around(group, binding.communicator, schedule, asynchronous)
        return cls(inside, made, schedule, center, asynchronous, options)

    def check(self, binding: RankBinding, gradient_group: TensorFlowCommunicator | None) -> None:
        """Raise a ValueError if the arguments do not suit the ranks, which a loaded optimizer knows only at its start.

        Too many ranks for the rate; ranks of the saved optimizer are missing; gradients are averaged over all ranks
        that exchange.
        """
        _check_ranks(binding.communicator, self.algorithm, self.asynchronous, self.options)
        binding.refuse_other_ranks(gradient_group)
        _refuse_averaging(gradient_group, self.options["quorum"])
        schedule_around(gradient_group, binding.communicator, self.schedule, self.asynchronous)

    def config(self, outer_optimizer: str) -> dict[str, Any]:
        """Return the arguments that all constructors share as plain values, except for the ranks.

        ``outer_optimizer`` is the key of the optimizer that moves the center.
        """
        config: dict[str, Any] = {key: value for key, value in self.options.items() if key not in RANKS}
        for key in ("optimizer_state", "weight", "buffers", "parameters"):
            if callable(config[key]) or isinstance(config[key], LocalState):
                config[key] = encode(config[key])
        config["compression"] = encode(as_wire(self.options["compression"]))
        config["optimizer"] = keras.saving.serialize_keras_object(self.optimizer)
        if self.center is not None and not self.center.copied:
            config[outer_optimizer] = keras.saving.serialize_keras_object(self.center.optimizer)
        return config


def gradient_group_inside(optimizer: object) -> TensorFlowCommunicator | None:
    """Return the ranks whose gradients are averaged inside an optimizer of this package; None for others."""
    group: TensorFlowCommunicator | None = getattr(optimizer, "gradient_group", None)
    return group


def _check_levels(inside: Any, overlap: int | str, quorum: int | None) -> None:
    """Refuse on several levels what needs one.

    With overlap, two exchanges would remove the same difference; with a quorum, ranks that wait at one level would not
    come to rounds at the other.
    """
    level = getattr(inside, "_lifecycle", None)
    inner = 0 if level is None else level.spec.options["overlap"]
    if level is not None:
        for each in (quorum, level.spec.options["quorum"]):
            refuse_quorum(each, "for several levels of optimizers")
    if level is not None and not overlap == inner == 0:
        raise ValueError(
            "`overlap` needs a single level: an exchange of one would be in flight while the other moves the replica. "
            f"Received: overlap={overlap!r} around an optimizer with overlap={inner!r}"
        )


def _refuse_averaging(gradient_group: TensorFlowCommunicator | None, quorum: int | None) -> None:
    """Refuse a quorum where ranks average their gradients: they would wait for each other at every step."""
    if gradient_group is not None:
        refuse_quorum(quorum, "where gradients are averaged")


def _check_ranks(ranks: Communicator, algorithm: Algorithm, asynchronous: bool, options: KerasOptions) -> None:
    """Raise a ValueError if the number of ranks, or groups in lockstep, do not support the arguments."""
    (algorithm.asynchronous_variant if asynchronous else algorithm.check)(ranks.size)
    require_possible(ranks, options["center"], options["nonfinite"], asynchronous, options["overlap"])
