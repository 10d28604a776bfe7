"""Reshards the state of an outer optimizer for another number of ranks."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hvd_periodic.centers.sharded import Sharded
from hvd_periodic.outer.per_fragment import PerFragmentOptimizer
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer
from hvd_periodic.vectors.fragments import Fragment
from hvd_periodic.vectors.layout import Layout, chunk

Stretch = tuple[int, int, int]
"""A part of a parameter: the parameter's index, and the first and the past-the-last element."""

Entries = Mapping[Any, Any]
"""State of a stretch, by key: tensors in its shape, or values for the whole parameter."""


class Form(ABC):
    """The format in which a framework's optimizers save the state of parts of parameters."""

    @abstractmethod
    def entries(self, state: Any, stretches: Sequence[Stretch]) -> Iterable[tuple[Stretch, Entries]]:
        """Return the entries of each stretch in the saved state of an optimizer over these stretches."""

    @abstractmethod
    def state(
        self, kept: Mapping[Stretch, Entries], stretches: Sequence[Stretch], example: Any, of: Sequence[Stretch]
    ) -> Any:
        """Return the saved state of an optimizer over these stretches.

        Args:
            kept: the entries of the stretches; stretches without state may be missing.
            stretches: the stretches, in the order of the layout.
            example: one of the saved states, of an optimizer with stretches if there is one.
            of: the stretches of that optimizer.
        """

    @abstractmethod
    def zeros(self, like: Any, size: int) -> Any:
        """Return a flat vector of zeros with the type of ``like``."""


def resharded(saved: Any, synchronizer: ReplicaSynchronizer[Any], form: Form) -> Any:
    """Return the saved state of the center's optimizer, resharded for the current ranks.

    The optimizer of a sharded center is elementwise. State in the shape of a part of the center is therefore
    concatenated and split again; state for a whole tensor, such as Adam's step count, is copied.

    Args:
        saved: the state saved by another number of ranks, with one entry per shard or in full.
        synchronizer: the synchronizer of the current ranks, which exchange synchronously.
        form: the format of the states.
    """
    exchanger, layout = synchronizer.exchanger, synchronizer.tensor_groups.parameters.values.layout
    divided = isinstance(synchronizer.exchanged.outer, PerFragmentOptimizer)
    sharded = isinstance(exchanger.placement, Sharded)
    was_sharded = isinstance(saved, dict) and "sharded" in saved
    shares = saved["sharded"] if was_sharded else [saved]
    count = synchronizer.membership.communicator.size if sharded else 1
    if saved is None or (len(shares) == count and was_sharded == sharded):
        return saved
    made: list[list[Any]] = [[] for _ in range(count)]
    for index, fragment in enumerate(exchanger.context.fragments if divided else [None]):
        states = [share["fragments"][index] if divided else share for share in shares]
        held = [_stretches(layout, rank, len(shares), fragment) for rank in range(len(shares))]
        whole: dict[int, dict[Any, Any]] = {}
        for state, stretches in zip(states, held, strict=True):
            for stretch, entries in form.entries(state, stretches):
                _put(whole.setdefault(stretch[0], {}), stretch, entries, layout, form)
        example = next((rank for rank, stretches in enumerate(held) if stretches), 0)
        for rank in range(count):
            stretches = _stretches(layout, rank, count, fragment)
            kept = {part: _cut(whole[part[0]], part, layout, form) for part in stretches if part[0] in whole}
            made[rank].append(form.state(kept, stretches, states[example], held[example]))
    cut = [{"fragments": parts} if divided else parts[0] for parts in made]
    return {"sharded": cut} if sharded else cut[0]


def _stretches(layout: Layout, rank: int, size: int, fragment: Fragment | None) -> list[Stretch]:
    """Return the stretches of parameters that a rank holds, of one fragment or of all."""
    share = layout if size == 1 else layout.restrict(lambda bucket: chunk(bucket.size, rank, size))
    if fragment is None:
        return list(share.sources)
    indices = {bucket.index for bucket in fragment.buckets}
    part = share.restrict(lambda bucket: (0, bucket.size if bucket.index in indices else 0))
    of_share = [(share.sources[tensor], start, stop) for tensor, start, stop in part.sources]
    return [(owner, first + start, first + stop) for (owner, first, _), start, stop in of_share]


def _put(whole: dict[Any, Any], stretch: Stretch, entries: Entries, layout: Layout, form: Form) -> None:
    """Write the entries of a stretch into those of the parameter: flat vectors, or values for the whole parameter."""
    owner, start, stop = stretch
    for key, value in entries.items():
        if _shape_of(value) == _shape(stretch, layout):
            if key not in whole:
                whole[key] = form.zeros(value, layout.specs[owner].size)
            whole[key][start:stop] = value.reshape(-1)
        else:
            whole.setdefault(key, value)


def _cut(whole: Mapping[Any, Any], stretch: Stretch, layout: Layout, form: Form) -> dict[Any, Any]:
    """Return the entries of a stretch, given those of the parameter."""
    owner, start, stop = stretch
    kept = {}
    for key, value in whole.items():
        if _shape_of(value) == (layout.specs[owner].size,):
            part = form.zeros(value, stop - start)
            part[:] = value[start:stop]
            kept[key] = part.reshape(_shape(stretch, layout))
        else:
            kept[key] = copy.deepcopy(value)  # Each stretch counts its own steps.
    return kept


def _shape(stretch: Stretch, layout: Layout) -> tuple[int, ...]:
    owner, start, stop = stretch
    spec = layout.specs[owner]
    return spec.shape if stop - start == spec.size else (stop - start,)


def _shape_of(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if hasattr(value, "shape") else None
