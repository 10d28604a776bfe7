"""Reshards the state of a Keras optimizer of the center for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    return saved if first is None else resharding.resharded(saved, synchronizer, SlotValues(first.slots))


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


class SlotValues(Form):
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
        """Return the variables of an optimizer over these parts; the example has those for all parts, and the rest."""
        known = dict(self.entries(example, of))
        of_parts = [iter(kept.get(stretch, known.get(stretch, {})).values()) for stretch in stretches]
        for_all = self._for_all(example, len(of))
        return [next(for_all if owner is None else of_parts[owner]) for owner in self._slots(len(stretches))]

    def begun(self, fresh: Any, stretches: Sequence[Stretch], former: Any, of: Sequence[Stretch]) -> Any:
        """Return the new variables, with the values of the former ones that are for all parts."""
        for_all, slots = self._for_all(former, len(of)), self._slots(len(stretches))
        return [next(for_all) if owner is None else value for owner, value in zip(slots, fresh, strict=True)]

    def _for_all(self, state: Any, parts: int) -> Iterator[Any]:
        """Return the values that belong to no part."""
        return (value for value, owner in zip(state, self._slots(parts), strict=True) if owner is None)

    def zeros(self, like: Any, size: int) -> Any:
        """Return an array of zeros."""
        return np.zeros(size, like.dtype)
