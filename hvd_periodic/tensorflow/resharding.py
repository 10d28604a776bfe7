"""The state of a Keras optimizer of the center, cut for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_periodic.centers.sharded import Sharded
from hvd_periodic.elastic import resharding
from hvd_periodic.elastic.resharding import Entries, Form, Stretch
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer
from hvd_periodic.tensorflow.outer import DividedVariables, VariableOuterOptimizer


def resharded(saved: Any, synchronizer: ReplicaSynchronizer[Any]) -> Any:
    """Return what a checkpoint holds of the center's optimizer as these ranks hold it.

    Args:
        saved: of ranks of another number, each with its share or with the whole.
        synchronizer: of these ranks, which exchange synchronously.
    """
    first = _first(synchronizer)
    return saved if first is None else resharding.resharded(saved, synchronizer, _Variables(first.slots))


def require_divisible(synchronizer: ReplicaSynchronizer[Any]) -> None:
    """Raise a ValueError where the state of the center's optimizer could not be cut for other ranks."""
    first = _first(synchronizer)
    if first is not None and isinstance(synchronizer.exchanger.placement, Sharded):
        first.slots(1)


def _first(synchronizer: ReplicaSynchronizer[Any]) -> VariableOuterOptimizer | None:
    outer = synchronizer.exchanged.outer
    found = outer.parts[0] if isinstance(outer, DividedVariables) else outer
    return found if isinstance(found, VariableOuterOptimizer) else None


class _Variables(Form):
    """The variables of an optimizer, in their order: slots of its parts of parameters, and what counts for all.

    Args:
        slots: returns of which of so many parts every variable is a slot; None: it counts for all.
    """

    def __init__(self, slots: Callable[[int], list[int | None]]) -> None:
        self._slots = slots

    def entries(self, state: Any, stretches: Sequence[Stretch]) -> Iterable[tuple[Stretch, Entries]]:
        """Return the slots of every part, counted."""
        kept: list[dict[int, Any]] = [{} for _ in stretches]
        for owner, value in zip(self._slots(len(stretches)), state, strict=True):
            if owner is not None:
                kept[owner][len(kept[owner])] = np.asarray(value)
        return zip(stretches, kept, strict=True)

    def state(
        self, kept: Mapping[Stretch, Entries], stretches: Sequence[Stretch], example: Any, of: Sequence[Stretch]
    ) -> Any:
        """Return the variables of an optimizer over these parts; those that count for all are of the example."""
        for_all = iter([value for value, owner in zip(example, self._slots(len(of)), strict=True) if owner is None])
        of_parts = [iter(kept[stretch].values()) for stretch in stretches]
        return [next(for_all if owner is None else of_parts[owner]) for owner in self._slots(len(stretches))]

    def zeros(self, like: Any, size: int) -> Any:
        """Return an array."""
        return np.zeros(size, like.dtype)
