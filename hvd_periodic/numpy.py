"""The numpy front end: parameters are arrays that are updated in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from hvd_periodic.algorithms import AGN, EASGD, Algorithm, Averaging
from hvd_periodic.comm import Communicator, LocalCommunicator
from hvd_periodic.consistency import build_on_all
from hvd_periodic.elementwise import require_elementwise
from hvd_periodic.layout import DEFAULT_BUCKET_BYTES, Bucket, Layout, TensorSpec
from hvd_periodic.named import unique_pairs
from hvd_periodic.schedules import Schedule, as_schedule
from hvd_periodic.store import FlatStore, PackedStore, Store
from hvd_periodic.synchronizer import Synchronizer
from hvd_periodic.vector import VectorSpace

Array = np.ndarray[Any, Any]
NamedArrays = Mapping[str, Array] | Iterable[tuple[str, Array]]


class ArrayOptimizer(Protocol):
    """An optimizer of numpy arrays."""

    def step(self, parameters: Sequence[Array], gradients: Sequence[Array | None]) -> None:
        """Update the parameters in place; a gradient of None leaves its parameter alone."""


class SGD:
    """Gradient descent with momentum, on numpy arrays.

        v ← μ v + g
        x ← x − η v

    Args:
        learning_rate: η.
        momentum: μ.

    Example:
        >>> x = np.zeros(2)
        >>> SGD(0.1).step([x], [np.array([1.0, -1.0])])
        >>> x
        array([-0.1,  0.1])
    """

    def __init__(self, learning_rate: float, momentum: float = 0.0) -> None:
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.velocities: list[Array] | None = None

    def step(self, parameters: Sequence[Array], gradients: Sequence[Array | None]) -> None:
        """Update the parameters in place."""
        if self.velocities is None:
            self.velocities = [np.zeros_like(x) for x in parameters]
        for x, g, v in zip(parameters, gradients, self.velocities, strict=True):
            if g is not None:
                v *= self.momentum
                v += g
                x -= np.asarray(self.learning_rate * v, dtype=x.dtype)


class NumpyReplica:
    """Named numpy arrays as a replica; 16-bit arrays have a float32 center."""

    buffers: Store[Array] | None = None
    integers: Store[Array] | None = None
    from_root: Store[Array] | None = None
    constants: Store[Array] | None = None

    def __init__(
        self,
        named_parameters: NamedArrays,
        center_optimizer: ArrayOptimizer | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        pairs = named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
        self.names, self.arrays = [], []
        for name, array in unique_pairs(pairs, "named_parameters"):
            if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, np.floating):
                found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                raise TypeError(f"Parameter {name!r} must be a numpy array of floating point. Received: {found}")
            self.names.append(name)
            self.arrays.append(array)
        if not any(array.size for array in self.arrays):
            raise ValueError("`named_parameters` must hold at least one element. Received: no parameters")
        specs = []
        for name, array in zip(self.names, self.arrays, strict=True):
            kind = np.promote_types(array.dtype, np.float32)
            specs.append(TensorSpec(name, array.shape, kind.name, kind.itemsize))
        self.space: VectorSpace[Array] = VectorSpace()
        self.gradients: list[Array | None] = [None] * len(self.arrays)
        self.parameters: Store[Array] = PackedStore(
            Layout(specs, bucket_bytes), self.arrays, lambda bucket: np.empty(bucket.size, bucket.kind)
        )
        self._center_source = center_optimizer
        self._center_optimizer: ArrayOptimizer | None = None
        self._signature = [(array.shape, array.dtype) for array in self.arrays]

    def facts(self) -> dict[str, object]:
        """Return names, shapes and dtypes."""
        arrays = zip(self.names, self.arrays, strict=True)
        return {
            "center optimizer": type(self._center_source).__name__,
            "number of parameters": len(self.arrays),
            **{f"parameter {i}": f"{n} {a.dtype}{list(a.shape)}" for i, (n, a) in enumerate(arrays)},
        }

    def changes(self) -> str | None:
        """Return which array changed its shape or dtype in place."""
        for name, array, signature in zip(self.names, self.arrays, self._signature, strict=True):
            if (array.shape, array.dtype) != signature:
                return f"Parameter {name!r} changed from {signature} to {(array.shape, array.dtype)} after construction"
        return None

    def new_store(self, layout: Layout, name: str) -> Store[Array]:
        """Return zeros."""
        return FlatStore(layout, lambda kind, size: np.zeros(size, kind))

    def new_temporary_store(self, layout: Layout) -> Store[Array]:
        """Return zeros."""
        return self.new_store(layout, "temporary")

    def scratch(self, bucket: Bucket, slot: int) -> None:
        """Numpy allocates as it goes."""
        return

    def local(self, algorithm: Algorithm, state: dict[str, Store[Array]]) -> int:
        """Run the local rule on one array at a time; it replaces gradients and updates the state in place."""
        views = {key: store.tensors() for key, store in state.items()}
        present = 0
        for i, (x, g) in enumerate(zip(self.arrays, self.gradients, strict=True)):
            if g is None:
                continue
            present = 1
            old = {key: tensors[i] for key, tensors in views.items()}
            self.gradients[i], new = algorithm.local(self.space, x, g, old)
            for key, value in new.items():
                old[key][...] = value
        return present

    def bind_center(self, center: Store[Array], gradient: Store[Array]) -> None:
        """Keep views of the center and of its gradient for the center optimizer."""
        if self._center_source is None:
            raise ValueError("This algorithm moves the center by an optimizer: pass `center_optimizer`")
        source = self._center_source

        def steps(x: Array, gradients: list[Array]) -> Array:
            optimizer, moved = copy.deepcopy(source), x.copy()
            for gradient in gradients:
                optimizer.step([moved], [gradient])
            return moved

        require_elementwise(type(source).__name__, center.layout, self.parameters.layout, steps)
        self._center_optimizer = copy.deepcopy(self._center_source)
        self._center_views = (center.tensors(), gradient.tensors())

    def step_center(self) -> None:
        """Let the center optimizer step."""
        if self._center_optimizer is not None:
            self._center_optimizer.step(*self._center_views)

    def center_settings(self) -> dict[str, object]:
        """Return the numbers and texts among the attributes of the center optimizer."""
        return {f"{key} of the center optimizer": value for key, value in self.center_hyperparameters().items()}

    def center_hyperparameters(self) -> Any:
        """Return the numbers and texts among the attributes of the center optimizer."""
        attributes = {} if self._center_optimizer is None else vars(self._center_optimizer)
        return {key: value for key, value in attributes.items() if isinstance(value, (int, float, str))}

    def follow(self, settings: Any) -> None:
        """Set them."""
        if self._center_optimizer is not None and settings is not None:
            vars(self._center_optimizer).update(settings)

    def frozen(self) -> bytes:
        """Return nothing: all arrays are trained."""
        return b""

    def discard_gradients(self) -> None:
        """Leave the parameters without gradients."""
        self.gradients = [None] * len(self.arrays)

    def center_optimizer_state(self) -> Any:
        """Return a copy of the center optimizer's attributes."""
        return None if self._center_optimizer is None else copy.deepcopy(vars(self._center_optimizer))

    def load_center_optimizer_state(self, state: Any) -> None:
        """Set the center optimizer's attributes."""
        if self._center_optimizer is not None:
            vars(self._center_optimizer).update(copy.deepcopy(state))

    def bind_host_center(self, center: FlatStore[Any], total: FlatStore[Any]) -> None:
        """The center is in host memory anyway."""
        self.bind_center(center, total)

    def center_optimizer_shapes(self, layout: Layout) -> list[tuple[tuple[int, ...], str]]:
        """Let a copy step, and look."""
        zeros = self.new_temporary_store(layout)
        self.bind_center(zeros, self.new_temporary_store(layout))
        trial = copy.deepcopy(self._center_source)
        if trial is not None:
            trial.step(zeros.tensors(), [np.zeros_like(center) for center in zeros.tensors()])
        arrays = _arrays(trial)
        return [(array.shape, array.dtype.name) for array in arrays]

    def reset_center_optimizer(self) -> None:
        """Copy it anew."""
        self._center_optimizer = copy.deepcopy(self._center_source)

    def pull_center_optimizer(self, arrays: Sequence[Array]) -> None:
        """Copy from the arrays, which a step has filled."""
        if not _arrays(self._center_optimizer) and self._center_optimizer is not None:
            velocities = [np.zeros_like(center) for center in self._center_views[0]]
            copies = ([center.copy() for center in self._center_views[0]], velocities)
            self._center_optimizer.step(*copies)
        for mine, array in zip(_arrays(self._center_optimizer), arrays, strict=True):
            mine[...] = array

    def push_center_optimizer(self, arrays: Sequence[Array]) -> None:
        """Copy into the arrays."""
        for mine, array in zip(_arrays(self._center_optimizer), arrays, strict=True):
            array[...] = mine

    def to_host(self, value: Array, bucket: Bucket) -> Array:
        """It is there."""
        return value

    def from_host(self, array: Array, bucket: Bucket) -> Array:
        """It is there."""
        return array

    def to_bytes(self, value: Array) -> bytes:
        """Return the raw memory."""
        return value.tobytes()

    def save(self, store: Store[Array]) -> dict[str, Any]:
        """Return copies by name."""
        return {spec.name: np.copy(array) for spec, array in zip(store.layout.specs, store.tensors(), strict=True)}

    def load(self, store: Store[Array], tensors: dict[str, Any]) -> None:
        """Copy by name."""
        for spec, array in zip(store.layout.specs, store.tensors(), strict=True):
            array[...] = tensors[spec.name]


def _arrays(optimizer: ArrayOptimizer | None) -> list[Array]:
    """Return the arrays among the attributes of an optimizer, and in the lists among them."""
    found: list[Array] = []
    for value in [] if optimizer is None else vars(optimizer).values():
        found += [array for array in (value if isinstance(value, list) else [value]) if isinstance(array, np.ndarray)]
    return found


class PeriodicOptimizer:
    """An optimizer of numpy arrays whose ranks exchange now and then, by any algorithm and schedule.

    Args:
        optimizer: the local optimizer.
        named_parameters: a dict, or (name, array) pairs; the arrays are updated in place.
        algorithm: what an exchange computes.
        period: local steps between exchanges, or a schedule.
        center_optimizer: copied, with what state it has, for algorithms that optimize the center. Default:
            ``optimizer``.
        asynchronous: exchange with one center without waiting for other ranks; for EASGD and AGN.
        center: ``"replicated"``, ``"root"`` or ``"sharded"``: where the center lives.
        root_rank: the rank whose values all start from.
        communicator: the ranks that exchange. Default: this process alone.
        argument: what the caller calls ``period``, for its error messages.

    Attributes:
        optimizer: the local optimizer.
        synchronizer: counters, ``sync()``, ``finalize()`` and ``state_dict()`` of the exchanges.
    """

    def __init__(
        self,
        optimizer: ArrayOptimizer,
        named_parameters: NamedArrays,
        algorithm: Algorithm | Callable[[], Algorithm],
        period: int | Schedule,
        *,
        center_optimizer: ArrayOptimizer | None = None,
        asynchronous: bool = False,
        center: str = "replicated",
        root_rank: int | None = None,
        communicator: Communicator | None = None,
        argument: str = "period",
    ) -> None:
        comm = LocalCommunicator() if communicator is None else communicator
        name = comm.unique_name()

        def build() -> Synchronizer[Array]:
            replica = NumpyReplica(named_parameters, optimizer if center_optimizer is None else center_optimizer)
            made = algorithm if isinstance(algorithm, Algorithm) else algorithm()
            root = comm.rank_of(root_rank)
            return Synchronizer(replica, made, as_schedule(period, argument), comm, root, name, center, asynchronous)

        self.optimizer = optimizer
        self.synchronizer = build_on_all(comm, name, build)
        self._replica: Any = self.synchronizer.replica
        self.synchronizer.start()

    def step(self, gradients: Mapping[str, Array] | Sequence[Array | None]) -> None:
        """Take one local step, and exchange if one is due.

        Args:
            gradients: one per parameter, in their order or by name; None, or a missing name, for no gradient.

        Raises:
            TypeError: a gradient that is not an array of floating point.
            ValueError: a gradient without parameter, or of another shape.
            RuntimeError: called inside ``center()``; or what an exchange raises.
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
            if not isinstance(gradient, (np.ndarray, np.floating)) or not np.issubdtype(gradient.dtype, np.floating):
                found = gradient.dtype if isinstance(gradient, np.ndarray) else type(gradient).__name__
                raise TypeError(f"The gradient of {name!r} must be a numpy array of floating point. Received: {found}")
            if gradient.shape != array.shape:
                raise ValueError(f"The gradient of {name!r} must have shape {array.shape}. Received: {gradient.shape}")
        replica.gradients = list(gradients)
        self.synchronizer.prepare_gradients()
        self.optimizer.step(replica.arrays, replica.gradients)
        self.synchronizer.step()

    def skip(self) -> None:
        """Count an iteration without update, as every rank has to that has nothing to step with."""
        self.synchronizer.step(updated=False)

    def center(self) -> AbstractContextManager[None]:
        """Hold the center in the arrays inside a ``with`` block, the local values again after it."""
        return self.synchronizer.center()


class ElasticAverageOptimizer(PeriodicOptimizer):
    """Elastic averaging of numpy arrays; the mathematics is that of :class:`hvd_periodic.algorithms.EASGD`.

    Args:
        optimizer: the local optimizer.
        named_parameters: a dict, or (name, array) pairs.
        communication_period: local steps between exchanges (τ), or a schedule.
        moving_rate: α in (0, 2/(n+1)]; default min(0.9/n, 1/(n+1)).
        beta: α = β/n instead.
        rho: strength of the elastic term in the local loss.
        asynchronous: exchange with one center without waiting for other ranks.
        center: ``"replicated"``, ``"root"`` or ``"sharded"``: where the center lives.
        root_rank: the rank whose values all start from.
        communicator: the ranks that exchange. Default: this process alone.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range; on every rank.

    Example:
        >>> x = np.zeros(1)
        >>> optimizer = ElasticAverageOptimizer(SGD(1.0), {"x": x}, communication_period=2, moving_rate=0.25)
        >>> for _ in range(2):
        ...     optimizer.step([np.array([-1.0])])
        >>> x
        array([1.5])
    """

    def __init__(
        self,
        optimizer: ArrayOptimizer,
        named_parameters: NamedArrays,
        communication_period: int | Schedule = 10,
        moving_rate: float | None = None,
        beta: float | None = None,
        rho: float = 0.0,
        asynchronous: bool = False,
        *,
        center: str = "replicated",
        root_rank: int | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            named_parameters,
            lambda: EASGD(moving_rate, beta, rho),
            communication_period,
            argument="communication_period",
            asynchronous=asynchronous,
            center=center,
            root_rank=root_rank,
            communicator=communicator,
        )


class ModelAverageOptimizer(PeriodicOptimizer):
    """Model averaging of numpy arrays; the mathematics is that of :class:`hvd_periodic.algorithms.Averaging`.

    Args:
        optimizer: the local optimizer.
        named_parameters: a dict, or (name, array) pairs.
        interval_steps: local steps between exchanges (τ), or a schedule.
        center: ``"replicated"``, ``"root"`` or ``"sharded"``: where the center lives.
        root_rank: the rank whose values all start from.
        communicator: the ranks that exchange. Default: this process alone.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range; on every rank.
    """

    def __init__(
        self,
        optimizer: ArrayOptimizer,
        named_parameters: NamedArrays,
        interval_steps: int | Schedule = 100,
        *,
        center: str = "replicated",
        root_rank: int | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            named_parameters,
            Averaging,
            interval_steps,
            argument="interval_steps",
            center=center,
            root_rank=root_rank,
            communicator=communicator,
        )


class AGNOptimizer(PeriodicOptimizer):
    """Accumulated gradient normalization; the mathematics is that of :class:`hvd_periodic.algorithms.AGN`.

    Args:
        optimizer: the local optimizer.
        named_parameters: a dict, or (name, array) pairs.
        communication_period: local steps between exchanges (τ), or a schedule.
        center_optimizer: moves the center; default: a copy of ``optimizer``, with a state of its own.
        op: ``"sum"`` or ``"average"`` of the workers' gradients.
        asynchronous: exchange with one center without waiting for other ranks.
        center: ``"replicated"``, ``"root"`` or ``"sharded"``: where the center lives.
        root_rank: the rank whose values all start from.
        communicator: the ranks that exchange. Default: this process alone.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range; on every rank.
    """

    def __init__(
        self,
        optimizer: ArrayOptimizer,
        named_parameters: NamedArrays,
        communication_period: int | Schedule = 10,
        center_optimizer: ArrayOptimizer | None = None,
        op: str = "sum",
        asynchronous: bool = False,
        *,
        center: str = "replicated",
        root_rank: int | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            named_parameters,
            lambda: AGN(op),
            communication_period,
            center_optimizer=center_optimizer,
            argument="communication_period",
            asynchronous=asynchronous,
            center=center,
            root_rank=root_rank,
            communicator=communicator,
        )
