"""An optimizer of arrays that moves the center."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from hvd_periodic.arguments import outer_name
from hvd_periodic.numpy.complex_numbers import as_real
from hvd_periodic.numpy.sgd import Array, ArrayOptimizer
from hvd_periodic.outer.elementwise import require_elementwise
from hvd_periodic.outer.framework import misfit
from hvd_periodic.outer.per_fragment import CloneableOptimizer
from hvd_periodic.outer.stretches import Entries, Form, Stretch, shape
from hvd_periodic.vectors.layout import Layout
from hvd_periodic.vectors.store import FlatStore, Store


class ArrayOuterOptimizer(CloneableOptimizer):
    """A copy of an optimizer of arrays, over the arrays of the center.

    Args:
        source: the optimizer to copy, including its state: numbers that its step changes, and arrays; complex ones
            become pairs of reals, as in the center.
    """

    def __init__(self, source: ArrayOptimizer) -> None:
        self._source = copy.deepcopy(source)
        for key, value in vars(self._source).items():
            if isinstance(value, list):
                setattr(self._source, key, [as_real(each) if isinstance(each, np.ndarray) else each for each in value])
        self._optimizer = copy.deepcopy(source)
        self._counters: list[str] = []

    def clone(self) -> ArrayOuterOptimizer:
        """Return a copy that has no center yet."""
        return ArrayOuterOptimizer(self._source)

    def renewed(self, then: Layout, now: Layout) -> ArrayOuterOptimizer:
        """Return an optimizer for other parameters that is as new, except that its lists of arrays are zeros."""
        source = copy.deepcopy(self._source)
        rearrange(source, [spec.shape for spec in then.specs], [np.zeros(s.shape, s.kind) for s in now.specs], {})
        return ArrayOuterOptimizer(source)

    @property
    def name(self) -> str:
        """The class of the optimizer."""
        return type(self._source).__name__

    def bind(self, center: Store[Array], gradient: Store[Array], whole: Layout) -> None:
        """Keep views of the center and of its gradient."""

        def steps(x: Array, gradients: list[Array]) -> Array:
            optimizer, moved = copy.deepcopy(self._source), x.copy()
            for gradient in gradients:
                optimizer.step([moved], [gradient])
            return moved

        require_elementwise(self.name, center.layout, whole, steps)
        self._counters = self._changed_by_step(whole)
        self._optimizer = copy.deepcopy(self._source)
        _restrict(self._optimizer, center.layout, whole)
        self._views = (center.tensors(), gradient.tensors())
        self._owners = [owner for owner, _, _ in center.layout.sources]

    def step(self, without: Set[int] = frozenset()) -> None:
        """Take a step on the center."""
        centers, gradients = self._views
        owners = zip(self._owners, gradients, strict=True)
        self._optimizer.step(centers, [None if owner in without else gradient for owner, gradient in owners])

    def settings(self) -> dict[str, object]:
        """Return the hyper-parameters, by readable name."""
        return {f"{key} of the center optimizer": value for key, value in self.hyperparameters().items()}

    def hyperparameters(self) -> dict[str, Any]:
        """Return the attributes that are numbers or strings and that no step changes."""
        settings = _settings(self._optimizer)
        return {key: value for key, value in settings.items() if key not in self._counters}

    def follow(self, settings: Any) -> None:
        """Set these attributes; None leaves all unchanged."""
        vars(self._optimizer).update(settings or {})

    def take_hyperparameters(self, settings: Any) -> None:
        """Set these attributes."""
        self.follow(settings)

    def state(self) -> Any:
        """Return a copy of the attributes."""
        return copy.deepcopy(vars(self._optimizer))

    def check(self, state: Any) -> None:
        """Check that a state has all attributes, and arrays of the shapes that they have at first or after a step.

        Raises:
            ValueError: an attribute is missing, or its arrays have other shapes.
        """
        trial = copy.deepcopy(self._optimizer)
        trial.step(*([np.ones_like(center) for center in self._views[0]] for _ in range(2)))
        for key, value in vars(self._optimizer).items():
            if not isinstance(state, Mapping) or key not in state:
                raise misfit(self.name, f"it has no {key!r}")
            found, *expected = (_shapes(each) for each in (state[key], vars(trial)[key], value))
            if found not in (*expected, _shapes(getattr(self._source, key, None))):
                raise misfit(self.name, f"{key!r} has arrays of shapes {found}, and {expected[0]} here")

    def load(self, state: Any) -> None:
        """Set the attributes from a copy of the state."""
        vars(self._optimizer).update(copy.deepcopy(state))

    def bind_host(self, center: FlatStore[Any], gradient: FlatStore[Any], whole: Layout) -> None:
        """Call :meth:`bind`, because the center is in host memory anyway."""
        self.bind(center, gradient, whole)

    def shapes(self, layout: Layout) -> list[tuple[tuple[int, ...], str]]:
        """Return the shapes and dtypes of the state, found from a step of a copy."""
        zeros = [FlatStore(layout, lambda kind, size: np.zeros(size, kind)) for _ in range(2)]
        self.bind(zeros[0], zeros[1], layout)
        trial = copy.deepcopy(self._source)
        trial.step(zeros[0].tensors(), zeros[1].tensors())
        hidden = [
            key
            for key, value in vars(trial).items()
            if not _is_shared(value) and repr(value) != repr(vars(self._source).get(key))
        ]
        if hidden:
            raise ValueError(
                f"{self.name} changes its attribute {hidden[0]!r} when it steps, but processes can share only tensors "
                f"and numbers in its state. Pass another `{outer_name()}`"
            )
        return [((), "float64") for _ in self._counters] + [(a.shape, a.dtype.name) for a in _arrays(trial)]

    def reset(self) -> None:
        """Replace the optimizer with a new copy of its source."""
        self._optimizer = copy.deepcopy(self._source)

    def pull(self, arrays: Sequence[Array]) -> None:
        """Copy the state from the arrays, which a step has filled."""
        if not _arrays(self._optimizer):
            centers = [center.copy() for center in self._views[0]]
            self._optimizer.step(centers, [np.zeros_like(center) for center in centers])
        counters, others = arrays[: len(self._counters)], arrays[len(self._counters) :]
        for key, array in zip(self._counters, counters, strict=True):
            setattr(self._optimizer, key, type(getattr(self._optimizer, key))(array))
        for mine, array in zip(_arrays(self._optimizer), others, strict=True):
            mine[...] = array

    def push(self, arrays: Sequence[Array]) -> None:
        """Copy the state into the arrays."""
        counters = [getattr(self._optimizer, key) for key in self._counters]
        for mine, array in zip(counters + _arrays(self._optimizer), arrays, strict=True):
            array[...] = mine

    def _changed_by_step(self, whole: Layout) -> list[str]:
        """Return the numbers among the attributes that a step of a copy changes, such as a step counter."""
        trial, before = copy.deepcopy(self._source), _settings(self._source)
        arrays = [np.ones(spec.shape, spec.kind) for spec in whole.specs]
        trial.step(arrays, [np.ones_like(array) for array in arrays])
        return sorted(key for key, value in _settings(trial).items() if before.get(key) != value)


class ArrayStates(Form):
    """Attributes of optimizers of arrays: lists with one array per stretch, and values for all."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def entries(self, state: Any, stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, Entries]]:
        """Yield the arrays of every stretch, by attribute."""
        lists = self._lists(state, stretches)
        for i, stretch in enumerate(stretches):
            yield stretch, {key: arrays[i] for key, arrays in lists.items()}

    def state(
        self, kept: Mapping[Stretch, Entries], stretches: Sequence[Stretch], example: Any, of: Sequence[Stretch]
    ) -> Any:
        """Return the attributes; arrays of stretches without state are zeros."""
        lists = {
            key: [
                kept[part][key] if part in kept else np.zeros(shape(part, self._layout), self._kind(part))
                for part in stretches
            ]
            for key, value in example.items()
            if isinstance(value, list) and not value
        }
        return example | lists

    def begun(self, fresh: Any, stretches: Sequence[Stretch], former: Any, of: Sequence[Stretch]) -> Any:
        """Return the attributes of the former optimizer, with empty lists in place of those of its arrays."""
        return former | {key: [] for key in self._lists(former, of)}

    def zeros(self, like: Any, size: int) -> Any:
        """Return a flat array of zeros."""
        return np.zeros(size, like.dtype)

    def _lists(self, state: Any, stretches: Sequence[Stretch]) -> dict[str, list[Array]]:
        """Return the attributes that are lists with one array per stretch, in its shape."""
        shapes = [shape(part, self._layout) for part in stretches]
        return {
            key: value
            for key, value in state.items()
            if isinstance(value, list) and [getattr(array, "shape", None) for array in value] == shapes
        }

    def _kind(self, part: Stretch) -> str:
        return self._layout.specs[part[0]].kind


def rearrange(
    optimizer: ArrayOptimizer,
    shapes: Sequence[tuple[int, ...]],
    arrays: Sequence[Array],
    stays: Mapping[int, int],
) -> None:
    """Rearrange what an optimizer keeps in lists with one array per parameter, for other parameters.

    Args:
        optimizer: the optimizer.
        shapes: the shapes of the former parameters.
        arrays: the new parameters; those that come start from zeros like these.
        stays: of the parameters that stay, the number among the new ones, with that among the former ones.
    """
    for key, value in vars(optimizer).items():
        if isinstance(value, list) and [getattr(array, "shape", None) for array in value] == list(shapes):
            kept = [value[stays[i]] if i in stays else np.zeros_like(array) for i, array in enumerate(arrays)]
            setattr(optimizer, key, kept)


def _restrict(optimizer: ArrayOptimizer, share: Layout, whole: Layout) -> None:
    """Reduce the state that an optimizer keeps for all tensors to the state of a share."""
    if share is whole:
        return
    shapes = [spec.shape for spec in whole.specs]
    for key, value in vars(optimizer).items():
        if isinstance(value, list) and [getattr(array, "shape", None) for array in value] == shapes:
            sources = zip(share.sources, share.specs, strict=True)
            parts = [value[i].reshape(-1)[start:stop].reshape(spec.shape) for (i, start, stop), spec in sources]
            setattr(optimizer, key, [part.copy() for part in parts])


def _settings(optimizer: ArrayOptimizer) -> dict[str, Any]:
    """Return the attributes that are numbers or strings."""
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, (int, float, str))}


def _is_shared(value: Any) -> bool:
    """Return whether processes can share the changes of an attribute, through arrays."""
    if isinstance(value, list):
        return all(isinstance(each, np.ndarray) for each in value)
    return isinstance(value, (int, float, str, np.ndarray))


def _shapes(value: Any) -> list[tuple[int, ...] | None] | None:
    """Return the shapes of an array or of the values in a list; None for other values."""
    if isinstance(value, np.ndarray):
        return [value.shape]
    return [getattr(each, "shape", None) for each in value] if isinstance(value, list) else None


def _arrays(optimizer: ArrayOptimizer) -> list[Array]:
    """Return the arrays among the attributes of an optimizer, including arrays in lists."""
    found: list[Array] = []
    for value in vars(optimizer).values():
        found += [array for array in (value if isinstance(value, list) else [value]) if isinstance(array, np.ndarray)]
    return found
