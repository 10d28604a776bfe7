"""What a checkpoint holds of the vectors of a group of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Generic, TypeVar

import numpy as np

from hvd_periodic.centers.outbox import UNSENT
from hvd_periodic.centers.tensor_group import TensorGroup
from hvd_periodic.comm.base import Communicator
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.layout import Layout
from hvd_periodic.vectors.lending import Deferred, defers

V = TypeVar("V")

Saved = Mapping[str, Mapping[str, Any]]
"""Tensors by the name of the vector, then by that of the parameter."""


class SavedVectors(Generic[V]):
    """Saves and loads the worker's vectors and those of the center, which is whole in what is saved.

    Args:
        group: whose vectors they are.
        replica: knows how its framework saves.
    """

    def __init__(self, group: TensorGroup[V], replica: Replica[V]) -> None:
        self._group, self._replica = group, replica

    def save(self, communicator: Communicator, prefix: str) -> dict[str, Any]:
        """Return copies of all vectors by name; collective, unless the center is everywhere."""
        group, replica = self._group, self._replica
        saved = self.save_own()
        for key in [] if group.placement.everywhere else group.center_state:
            if defers():
                saved[key] = self._deferred(communicator, prefix, key)
                continue
            whole = replica.new_temporary_store(group.values.layout)
            for bucket in group.values.layout.buckets:
                whole.write(bucket, group.fetch(communicator, bucket, prefix, key))
            saved[key] = replica.save(whole)
        return saved

    def _deferred(self, communicator: Communicator, prefix: str, key: str) -> dict[str, Deferred]:
        """Return a vector of the center, each bucket of which travels when its tensors are read."""
        group, replica, layout = self._group, self._replica, self._group.values.layout

        def pieces() -> Iterator[tuple[int, np.ndarray]]:
            for bucket in layout.buckets:
                whole = replica.to_host(group.fetch(communicator, bucket, prefix, key), bucket)
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
        """Return copies of what this rank has whole: of a center of shares, nothing. Local."""
        everywhere = self._group.placement.everywhere
        center = self._group.center_state if everywhere else {}
        return self._save_workers() | {key: self._replica.save(store) for key, store in center.items()}

    def save_initial(self) -> dict[str, Any]:
        """Return what :meth:`save` returns at the start of training from the values of now; nothing is communicated."""
        group, replica, saved = self._group, self._replica, self._save_workers()
        stores = {key: replica.new_temporary_store(group.values.layout) for key in group.center_state}
        for bucket in group.values.layout.buckets:
            x = group.values.read(bucket, out=replica.scratch(bucket, 0))
            for key, vector in group.initial_center(x).items():
                stores[key].write(bucket, vector)
        return saved | {key: replica.save(store) for key, store in stores.items()}

    def load(self, saved: Saved) -> None:
        """Set the worker's vectors and this rank's share of the center's to what :meth:`save` returned."""
        group, replica = self._group, self._replica
        group.outbox.forget()  # A state that was saved without compression has left nothing.
        for key, store in group.worker.items():
            if key in saved or key != UNSENT:
                replica.load(store, dict(saved[key]))
        sums, of_rank = group.outbox.unsent_sums, saved.get(group.outbox.saved_sums, {})
        # Other ranks sum other parts; and so does this one where the same tensors are packed otherwise.
        if sums is not None and of_rank.keys() == {spec.name for spec in sums.layout.specs}:
            replica.load(sums, dict(of_rank))
        for key, store in group.center_state.items():
            share: dict[str, Any] = {}
            for spec, (tensor, start, stop) in zip(group.share.specs, group.share.sources, strict=True):
                whole = saved[key][group.values.layout.specs[tensor].name]
                share[spec.name] = whole.reshape(-1)[start:stop].reshape(spec.shape)
            replica.load(store, share)

    def check(self, saved: Saved) -> None:
        """Check that saved vectors have the names and shapes of these.

        Raises:
            ValueError: names the first tensor that differs.
        """
        group = self._group
        for key in group.vectors:
            if key == UNSENT and key not in saved:
                continue
            if key not in saved and saved:
                raise ValueError(
                    f"The saved state has no {key!r} of the {group.name}: it was saved by an algorithm of other "
                    "settings"
                )
            check_names(f"{key!r} of the {group.name}", group.values.layout, saved.get(key, {}))

    def _save_workers(self) -> dict[str, Any]:
        outbox = self._group.outbox
        stores = dict(self._group.worker)
        if outbox.unsent_sums is not None:
            stores[outbox.saved_sums] = outbox.unsent_sums
        return {key: self._replica.save(store) for key, store in stores.items()}


def check_names(what: str, layout: Layout, saved: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first tensor whose name or shape is not that of the layout."""
    here = {spec.name: spec.shape for spec in layout.specs}
    there = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if differing:
        raise ValueError(
            f"The saved {what} is of another model: {differing[0]!r} is {_shape(there, differing[0])} there and "
            f"{_shape(here, differing[0])} here"
        )


def _shape(shapes: dict[str, tuple[int, ...]], name: str) -> str:
    return f"of shape {shapes[name]}" if name in shapes else "missing"
