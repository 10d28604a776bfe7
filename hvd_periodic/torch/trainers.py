"""Helpers that all trainers share: find optimizers of this package, read their centers, and end training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.handshake import Purpose, Record
from hvd_periodic.sync.combinations import refuse_quorum
from hvd_periodic.torch.center import copied
from hvd_periodic.torch.dtypes import as_real
from hvd_periodic.torch.neutral import neutral
from hvd_periodic.torch.optimizer import PeriodicOptimizer
from hvd_periodic.torch.reporting import Reporter, Values
from hvd_periodic.torch.synchronizer import Synchronizer


def unwrap(optimizer: Any) -> PeriodicOptimizer:
    """Return the optimizer of this package that a trainer has wrapped, with ``center()`` and its other methods.

    Args:
        optimizer: from accelerate, after ``prepare``; from Lightning; or one of this package, which is returned.

    Raises:
        TypeError: it wraps no optimizer of this package.

    Example::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with hvdp.unwrap(optimizer).center():
            evaluate(model)
    """
    found, inside = None, optimizer
    while inside is not None:
        found, attributes = inside, getattr(inside, "__dict__", {})
        # Lightning's wrapper has the class of the optimizer it wraps, and copies of its attributes.
        inside = attributes.get("_optimizer", attributes.get("optimizer"))
        if inside is None and isinstance(found, PeriodicOptimizer):
            return found
    raise TypeError(
        "A trainer of several ranks needs optimizers of hvd_periodic.torch, such as "
        f"hvdp.ElasticAverageOptimizer(optimizer, model, 10). Received: {type(found).__name__}"
    )


class Centers:
    """The centers of all optimizers that a trainer drives, as one.

    Args:
        optimizers: the optimizers, as the trainer has them.

    Attributes:
        synchronizers: their synchronizers.

    Raises:
        TypeError: one of them is not an optimizer of this package.
        ValueError: one of them has a quorum.
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._optimizers = [unwrap(optimizer) for optimizer in optimizers]
        self.synchronizers: list[Synchronizer] = [optimizer.synchronizer for optimizer in self._optimizers]
        for synchronizer in self.synchronizers:
            quorum = synchronizer.exchanger.context.quorum
            if quorum is not None:
                refuse_quorum(quorum.size, "in a trainer, whose ranks wait for each other outside of exchanges")
        self._block = ExitStack()

    @property
    def inside(self) -> bool:
        """Whether the model holds the centers."""
        return all(synchronizer.center_reader.in_center_block for synchronizer in self.synchronizers)

    @property
    def left(self) -> bool:
        """Whether, at the last exchange of an optimizer, another rank was leaving training."""
        return not all(synchronizer.handshake.everyone_trains for synchronizer in self.synchronizers)

    def enter(self) -> None:
        """Hold the centers in the model until :meth:`leave`; do nothing if it holds them already."""
        if not self.inside:
            self._block.push(self._entered())

    def leave(self) -> None:
        """Put the replica back into the model."""
        self._block.close()

    def state_of(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return a copy of ``model.state_dict()`` with the values of the centers, under the same names."""
        with self._entered():
            return copied(model.state_dict())

    def _entered(self) -> ExitStack:
        """Return a block, already entered, in which the model holds the centers: all of them, or none."""
        with ExitStack() as block:
            for synchronizer in self.synchronizers:
                if not synchronizer.center_reader.in_center_block:
                    block.enter_context(synchronizer.center())
            return block.pop_all()

    def finalize(self) -> None:
        """End training on all ranks, with the same center."""
        for optimizer in self._optimizers:
            optimizer.finalize()

    def adopt(self, communicator: Communicator) -> None:
        """Let each optimizer adopt the parameters that are trained now, if they have changed on any rank; collective.

        Args:
            communicator: the ranks, all of which call this after the same local step.

        Raises:
            RuntimeError, TypeError, ValueError: as :meth:`.PeriodicOptimizer.adopt`; or ranks call different
                collectives.
        """
        changed = gather(communicator, [each.replica.changes() is not None for each in self.synchronizers])
        for optimizer, of_ranks in zip(self._optimizers, zip(*changed, strict=True), strict=True):
            if any(of_ranks):
                optimizer.adopt()

    def settle(self, model: torch.nn.Module) -> None:
        """Put the centers into the model permanently."""
        model.load_state_dict(self.state_of(model))

    def report(self, sink: Callable[[Values, int], object], every: int) -> None:
        """Show one in ``every`` exchanges of the first optimizer as ``exchange/...``, with the step; 0: none."""

        def show(step: int, values: Values) -> None:
            sink({f"exchange/{name}": value for name, value in values.items()}, step)

        if every:
            Reporter(self.synchronizers[0], show, every=every)


def gather(communicator: Communicator, value: Any, failure: Exception | None = None, place: int = 0) -> list[Any]:
    """Return the values of all ranks, in rank order: tensors of any shapes, or objects that can be pickled.

    Args:
        communicator: the ranks.
        value: the value of this rank.
        failure: the error to report on all ranks if the others call another collective.
        place: the purpose of this call: an index of ``TRAINER_CALLS`` in :mod:`hvd_periodic.comm.handshake`.

    Raises:
        RuntimeError: ranks call different collectives; on all of them.
    """
    with neutral():
        communicator.handshake(Record(Purpose.TRAINER, place), failure)
        at_hand = value.detach().cpu() if isinstance(value, torch.Tensor) else value
        found = communicator.allgather_object(at_hand, f"{communicator.handshake_name}.trainer")
        return [other.to(value.device) for other in found] if isinstance(value, torch.Tensor) else found


def share_average(communicator: Communicator, average: torch.nn.Module, updates: int) -> None:
    """Replace a trainer's average of replicas, which each rank has, with the mean over ranks; collective.

    Averaging of later replicas continues from this mean: if it is linear, the time of sharing makes no difference.

    Args:
        communicator: the ranks.
        average: the parameters and buffers; integers, which are counters, are taken from the root.
        updates: number of this rank's replicas in the average. If a rank has none yet, all take the root's values.
    """
    begun = all(gather(communicator, updates))
    name = f"{communicator.handshake_name}.trainer.average"
    with neutral():
        for tensor in (*average.parameters(), *average.buffers()):
            real = as_real(tensor)
            wide = torch.float64 if real.dtype == torch.float64 else torch.float32
            own = real.detach().to("cpu", wide if real.is_floating_point() else torch.int64, copy=True).reshape(-1)
            if begun and real.is_floating_point():
                found = communicator.allreduce(own, name)() / communicator.size
            else:
                found = communicator.broadcast(own, name, root=0)
            real.copy_(found.view_as(real))
