"""Optimizers of numpy arrays whose ranks exchange periodically."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any, ClassVar, Unpack

import numpy as np

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.arguments import as_typed, spelled
from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.comm.agreement import build_on_all
from hvd_periodic.comm.subset import require_possible
from hvd_periodic.numpy.communicator import communicator_of
from hvd_periodic.numpy.optimizer_state import ArrayOptimizerState
from hvd_periodic.numpy.outer import ArrayOuterOptimizer, ArrayStates, rearrange
from hvd_periodic.numpy.replica import NamedArrays, NumpyReplica
from hvd_periodic.numpy.sgd import Array, ArrayOptimizer
from hvd_periodic.options import Options, of_exchange, takes
from hvd_periodic.outer.per_fragment import PerFragmentOptimizer
from hvd_periodic.schedules import Schedule, as_schedule
from hvd_periodic.spellings import RenamedAttribute, renamed
from hvd_periodic.sync.adoption import Successor
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer


class PeriodicOptimizer:
    """An optimizer of numpy arrays whose ranks exchange periodically, with any algorithm and schedule.

    Args:
        optimizer: the local optimizer.
        model: a dict, or (name, array) pairs; the arrays are updated in place.
        algorithm: the computation of an exchange.
        period: local steps between exchanges, or a schedule.
        outer_optimizer: copied, including its state, for algorithms that optimize the center. Default: ``optimizer``.
        asynchronous: exchange with one center without waiting for other ranks.
        options: the options of :class:`~hvd_periodic.options.Options`; the signature has their defaults.

    Attributes:
        inner: the local optimizer.
        synchronizer: counters, ``sync()``, ``finalize()`` and ``state_dict()`` of the exchanges.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range; on every rank.
    """

    _spelling: ClassVar[Mapping[str, str]] = {}
    """Names that a named constructor uses for classes and arguments of the core."""
    optimizer = RenamedAttribute("inner")

    @renamed(named_parameters="model", communicator="process_set")
    @takes(Options)
    def __init__(
        self,
        optimizer: ArrayOptimizer,
        model: NamedArrays,
        algorithm: Algorithm | Callable[[], Algorithm],
        period: int | Schedule,
        *,
        outer_optimizer: ArrayOptimizer | None = None,
        asynchronous: bool = False,
        **options: Unpack[Options],
    ) -> None:
        comm = communicator_of(options["process_set"])
        name = comm.unique_name(options["timeout_seconds"])

        self.inner, self._policies = optimizer, options["parameters"]

        def build() -> ReplicaSynchronizer[Array]:
            replica = NumpyReplica(model, parameters=self._policies)
            require_possible(comm, options["center"], options["nonfinite"], asynchronous, options["overlap"])
            made = algorithm if isinstance(algorithm, Algorithm) else algorithm()
            moving = made.outer_optimizer(optimizer, outer_optimizer)
            return ReplicaSynchronizer(
                replica,
                made,
                as_schedule(period, as_typed("period")),
                comm,
                comm.rank_of(options["root_rank"]),
                name,
                asynchronous=asynchronous,
                outer=None if moving is None else ArrayOuterOptimizer(moving),
                **self._of_replica(replica),
                **of_exchange(options),
            )

        with spelled(self._spelling):
            self.synchronizer = build_on_all(comm, name, build)
        self.synchronizer.learning_rate = lambda: getattr(optimizer, "learning_rate", None)
        self._replica: Any = self.synchronizer.replica
        self.synchronizer.start()

    def _of_replica(self, replica: NumpyReplica) -> dict[str, Any]:
        """Return the arguments of the synchronizer that depend on the replica, but for the outer optimizer."""
        return {
            "rates": LearningRates(lambda: [_learning_rate(self.inner)] * len(replica.exchanged)),
            "local_optimizer": ArrayOptimizerState(self.inner, replica),
        }

    def adopt(self, model: NamedArrays) -> None:
        """Go on with other arrays, after some were added or left out; on all ranks, after the same step.

        First all ranks exchange the former arrays, unless they have just done so. Then, with x the arrays and c the
        center:

        - an array stays if name, shape, dtype and policy do: x, c, outer state, accumulators and error memory are kept
          to the bit; if the array itself is another one, it takes the values of the former one;
        - one that leaves takes x ← c on all ranks (BMUF: W), and its outer state is dropped;
        - one that comes takes x ← x_root and c ← x_root, with outer state, accumulators and error memory of zeros.

        The arrays in lists of the local optimizer stay, leave and come likewise; those that come are zeros. Counters
        go on; the next exchange is a period from here.

        Args:
            model: all arrays to train from now on, as at construction.

        Raises:
            RuntimeError: called inside ``center()``; in asynchronous training before ``finalize()``, or after further
                steps; or other ranks are in another call.
            TypeError, ValueError: the arrays are refused, or differ between ranks. On all ranks; training goes on with
                the former ones.

        Example:
            >>> from hvd_periodic import Averaging
            >>> from hvd_periodic.numpy import SGD
            >>> w, v = np.ones(2), np.ones(3)
            >>> optimizer = PeriodicOptimizer(SGD(0.5), {"w": w, "v": v}, Averaging(), period=2)
            >>> optimizer.adopt({"w": w})
            >>> for _ in range(2):
            ...     optimizer.step({"w": w.copy()})
            >>> w, v
            (array([0.25, 0.25]), array([1., 1., 1.]))
        """
        pairs = list(model.items() if isinstance(model, Mapping) else model)
        former, kept = self._replica, dict(vars(self.inner))
        try:
            self.synchronizer.adopt(lambda: self._successor(former, pairs))
        except BaseException:
            vars(self.inner).update(kept)
            raise
        self._replica = self.synchronizer.replica

    def _successor(self, former: NumpyReplica, pairs: list[tuple[str, Array]]) -> Successor[Array]:
        """Return the replica of other arrays, after the local optimizer has been rearranged for them."""
        replica = NumpyReplica(pairs, parameters=self._policies, former=former.known_names)
        shapes = dict(zip(former.names, (array.shape for array in former.arrays), strict=True))
        stays = {
            i: former.names.index(name)
            for i, (name, array) in enumerate(zip(replica.names, replica.arrays, strict=True))
            if shapes.get(name) == array.shape and former.arrays[former.names.index(name)].dtype == array.dtype
        }
        rearrange(self.inner, list(shapes.values()), replica.arrays, stays)
        outer = self.synchronizer.exchanged.outer
        first = outer.parts[0] if isinstance(outer, PerFragmentOptimizer) else outer
        if isinstance(first, ArrayOuterOptimizer):
            first = first.renewed(former.parameters.layout, replica.parameters.layout)
        return Successor(replica, {"outer": first, **self._of_replica(replica)}, lambda _, layout: ArrayStates(layout))

    def step(self, gradients: Mapping[str, Array] | Sequence[Array | None], examples: float | None = None) -> None:
        """Take one local step, and exchange if one is due.

        Args:
            gradients: one per parameter, in order or by name; None, or a missing name, for no gradient.
            examples: number of examples of the gradients, for ``weight="examples"``.

        Raises:
            TypeError: a gradient is not a floating-point array, or a complex one for a complex parameter.
            ValueError: a gradient has no parameter, or another shape; or ``examples`` is negative or not finite.
            RuntimeError: called inside ``center()``; or as an exchange raises.
        """
        replica = self._replica
        if isinstance(gradients, Mapping):
            unknown = gradients.keys() - set(replica.names)
            if unknown:
                raise ValueError(f"No parameter has the name of the gradient {min(unknown)!r}")
            gradients = [gradients.get(name) for name in replica.names]
        if len(gradients) != len(replica.arrays):
            raise ValueError(f"{len(replica.arrays)} parameters take as many gradients. Received: {len(gradients)}")
        for name, array, gradient in zip(replica.names, replica.arrays, gradients, strict=True):
            if gradient is None:
                continue
            kind = np.complexfloating if np.iscomplexobj(array) else np.floating
            if not isinstance(gradient, (np.ndarray, np.inexact)) or not np.issubdtype(gradient.dtype, kind):
                found = gradient.dtype if isinstance(gradient, np.ndarray) else type(gradient).__name__
                wanted = "complex numbers, as the parameter is" if np.iscomplexobj(array) else "floating point"
                raise TypeError(f"The gradient of {name!r} must be a numpy array of {wanted}. Received: {found}")
            if gradient.shape != array.shape:
                raise ValueError(f"The gradient of {name!r} must have shape {array.shape}. Received: {gradient.shape}")
        replica.gradients = list(gradients)
        self.synchronizer.prepare_gradients()
        self.inner.step(replica.arrays, replica.gradients)
        self.synchronizer.step(examples=examples)

    def skip(self) -> None:
        """Count an iteration without an update; every rank that has nothing to step with must call this."""
        self.synchronizer.step(updated=False)

    def finalize(self) -> None:
        """Leave training, after a last exchange; see ``synchronizer.finalize()``."""
        self.synchronizer.finalize()

    def center(self) -> AbstractContextManager[None]:
        """Hold the center in the arrays inside a ``with`` block, and the local values again after it."""
        return self.synchronizer.center()


def _learning_rate(optimizer: ArrayOptimizer) -> float:
    rate = getattr(optimizer, "learning_rate", None)
    if not isinstance(rate, Real):
        raise TypeError(
            f"The algorithm needs the learning rate of local steps, and {type(optimizer).__name__} has no attribute "
            f"`learning_rate` that is a number. Received: {rate!r}"
        )
    return float(rate)
