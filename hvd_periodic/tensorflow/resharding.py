"""Reshards the state of a Keras optimizer of the center for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_periodic.centers.sharded import Sharded
from hvd_periodic.elastic import resharding
from hvd_periodic.outer.per_fragment import PerFragmentOptimizer
from hvd_periodic.outer.stretches import Entries, Form, Stretch
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer
from hvd_periodic.tensorflow.outer import VariableOuterOptimizer


def resharded(saved: Any, synchronizer: ReplicaSynchronizer[Any]) -> Any:
    """Return the saved state of the center's optimizer, resharded for the current ranks, which exchange synchronously.

    ``saved`` is the state of another number of ranks, with one entry per shard or in full.
    """
    first = first_outer(synchronizer)
    return saved if first is None else resharding.resharded(saved, synchronizer, _Variables(first.slots))


def require_divisible(synchronizer: ReplicaSynchronizer[Any]) -> None:
    """Raise a ValueError if the state of the center's optimizer cannot be resharded."""
    first = first_outer(synchronizer)
    if first is not None and isinstance(synchronizer.exchanger.placement, Sharded):
        first.slots(1)


def first_outer(synchronizer: ReplicaSynchronizer[Any]) -> VariableOuterOptimizer | None:
    """Return the optimizer of the center, or of its first fragment; None if there is none."""
    outer = synchronizer.exchanged.outer
    found = outer.parts[0] if isinstance(outer, PerFragmentOptimizer) else outer
    return found if isinstance(found, VariableOuterOptimizer) else None


class _Variables(Form):
    """The variables of an optimizer, in their order: slots of parts of parameters, and variables for all.

    Args:
        slots: returns, for a number of parts, the index of each variable's part; None for a variable for all parts.
    """

    def __init__(self, slots: Callable[[int], list[int | None]]) -> None:
        self._slots = slots

    def entries(self, state: Any, stretches: Sequence[Stretch]) -> Iterable[tuple[Stretch, Entries]]:
        """Return the slots of every part, numbered."""
        kept: list[dict[int, Any]] = [{} for _ in stretches]
        for owner, value in zip(self._slots(len(stretches)), state, strict=True):
            if owner is not None:
                kept[owner][len(kept[owner])] = np.asarray(value)
        return zip(stretches, kept, strict=True)

    def state(
        self, kept: Mapping[Stretch, Entries], stretches: Sequence[Stretch], example: Any, of: Sequence[Stretch]
    ) -> Any:
        """Return the variables of an optimizer over these parts; variables for all parts come from the example."""
        for_all = iter([value for value, owner in zip(example, self._slots(len(of)), strict=True) if owner is None])
        of_parts = [iter(kept[stretch].values()) for stretch in stretches]
        return [next(for_all if owner is None else of_parts[owner]) for owner in self._slots(len(stretches))]

    def zeros(self, like: Any, size: int) -> Any:
        """Return an array of zeros."""
        return np.zeros(size, like.dtype)
