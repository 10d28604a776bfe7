"""Saves and loads the vectors of a group of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Generic, TypeVar

import numpy as np

from hvd_periodic.centers.error_feedback import RESIDUAL
from hvd_periodic.centers.tensor_group import TensorGroup
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.layout import Layout
from hvd_periodic.vectors.lending import Deferred, defers

V = TypeVar("V")

Saved = Mapping[str, Mapping[str, Any]]
"""Tensors by the name of the vector, then by the name of the parameter."""


class SavedVectors(Generic[V]):
    """Saves and loads the worker's and the center's vectors; the center is saved whole.

    Args:
        group: the group.
        replica: saves and loads tensors of its framework.
    """

    def __init__(self, group: TensorGroup[V], replica: Replica[V]) -> None:
        self._group, self._replica = group, replica

    def save(self) -> dict[str, Any]:
        """Return copies of all vectors by name; collective, unless the center is everywhere."""
        group, replica = self._group, self._replica
        saved = self.save_own()
        for key in [] if group.placement.everywhere else group.center_state:
            if defers():
                saved[key] = self._deferred(key)
                continue
            whole = replica.new_temporary_store(group.values.layout)
            for bucket in group.values.layout.buckets:
                whole.write(bucket, group.fetch(bucket, key))
            saved[key] = replica.save(whole)
        return saved

    def _deferred(self, key: str) -> dict[str, Deferred]:
        """Return a vector of the center whose buckets travel when its tensors are read."""
        group, replica, layout = self._group, self._replica, self._group.values.layout

        def pieces() -> Iterator[tuple[int, np.ndarray]]:
            for bucket in layout.buckets:
                whole = replica.to_host(group.fetch(bucket, key), bucket)
                for piece in bucket.pieces:
                    yield piece.tensor, whole[piece.offset : piece.offset + piece.stop - piece.start]

        of_tensors = groupby(pieces(), itemgetter(0))

        def parts_of_next() -> Iterator[np.ndarray]:
            for _, part in next(of_tensors)[1]:
                yield part

        empty = Layout([replace(spec, shape=(0,)) for spec in layout.specs])
        like = replica.save(replica.new_temporary_store(empty))
        read = dict.fromkeys(piece.tensor for bucket in layout.buckets for piece in bucket.pieces)
        order = [*read, *(i for i in range(len(layout.specs)) if i not in read)]
        return {
            spec.name: Deferred(spec.shape, like[spec.name], parts_of_next() if i in read else ())
            for i, spec in ((i, layout.specs[i]) for i in order)
        }

    def save_own(self) -> dict[str, Any]:
        """Return copies of the vectors that this rank holds whole: of a sharded center, none. Local."""
        everywhere = self._group.placement.everywhere
        center = self._group.center_state if everywhere else {}
        return self._save_workers() | {key: self._replica.save(store) for key, store in center.items()}

    def save_initial(self) -> dict[str, Any]:
        """Return what :meth:`save` would return if training started from the present values; without communication."""
        group, replica, saved = self._group, self._replica, self._save_workers()
        stores = {key: replica.new_temporary_store(group.values.layout) for key in group.center_state}
        for bucket in group.values.layout.buckets:
            x = group.values.read(bucket, out=replica.scratch(bucket, 0))
            for key, vector in group.initial_center(x).items():
                stores[key].write(bucket, vector)
        return saved | {key: replica.save(store) for key, store in stores.items()}

    def load(self, saved: Saved) -> None:
        """Set the worker's vectors, and this rank's shard of the center's, to the values that :meth:`save` returned."""
        group, replica = self._group, self._replica
        group.error_feedback.reset()  # A state that was saved without compression has no residual.
        for key, store in group.worker.items():
            if key in saved or key != RESIDUAL:
                replica.load(store, dict(saved[key]))
        sums, of_rank = group.error_feedback.second_hop_residual, saved.get(group.error_feedback.second_hop_key, {})
        # A rank sums other elements on another number of ranks, or if tensors are packed in another order.
        if sums is not None and of_rank.keys() == {spec.name for spec in sums.layout.specs}:
            replica.load(sums, dict(of_rank))
        if group.error_feedback.untouched is not None:
            group.error_feedback.untouched.load(saved)
        for key, store in group.center_state.items():
            shard: dict[str, Any] = {}
            for spec, (tensor, start, stop) in zip(group.shard.specs, group.shard.sources, strict=True):
                whole = saved[key][group.values.layout.specs[tensor].name]
                shard[spec.name] = whole.reshape(-1)[start:stop].reshape(spec.shape)
            replica.load(store, shard)

    def check(self, saved: Saved) -> None:
        """Check that saved vectors have the names and shapes of this group's vectors.

        Raises:
            ValueError: a name or shape differs; names the first such tensor.
        """
        group = self._group
        for key in group.vectors:
            if key == RESIDUAL and key not in saved:
                continue
            if key not in saved and saved:
                raise ValueError(
                    f"The saved state has no {key!r} of the {group.name}: it was saved by an algorithm with other "
                    "settings"
                )
            check_names(f"{key!r} of the {group.name}", group.values.layout, saved.get(key, {}))

    def _save_workers(self) -> dict[str, Any]:
        stores = self._group.worker | self._group.error_feedback.stores()
        return {key: self._replica.save(store) for key, store in stores.items()}


def check_names(what: str, layout: Layout, saved: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first tensor whose name or shape differs from the layout."""
    here = {spec.name: spec.shape for spec in layout.specs}
    there = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if differing:
        raise ValueError(
            f"The saved {what} belongs to another model: {differing[0]!r} is {_shape(there, differing[0])} there and "
            f"{_shape(here, differing[0])} here"
        )


def _shape(shapes: dict[str, tuple[int, ...]], name: str) -> str:
    return f"of shape {shapes[name]}" if name in shapes else "missing"
