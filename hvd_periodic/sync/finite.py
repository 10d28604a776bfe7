"""Looks for NaN and infinity in what a lossy wire would spread over all ranks."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from hvd_periodic.centers.tensor_group import TensorGroup
from hvd_periodic.vectors.coding import Coding
from hvd_periodic.wires.base import Wire

V = TypeVar("V")


class Finite(Generic[V]):
    """What has to be finite before an exchange: the parameters and the worker's own vectors, where the wire is lossy.

    Args:
        group: of the parameters.
        wire: by which they travel.
        coding: the verbs of the front end.
    """

    def __init__(self, group: TensorGroup[V], wire: Wire, coding: Coding[V]) -> None:
        self._group, self._wire, self._coding = group, wire, coding

    def tensors(self) -> list[tuple[str, Any]]:
        """Return all tensors, by readable name."""
        if not self._wire.lossy:
            return []
        stores = {"parameter": self._group.values, **self._group.worker}
        return [
            (f"{key} {spec.name!r}", tensor)
            for key, store in stores.items()
            for spec, tensor in zip(store.layout.specs, store.tensors(), strict=True)
        ]

    def problem(self, steps: int) -> str | None:
        """Return which tensor is not finite after so many local steps, if one is not."""
        named = self.tensors()
        if self._coding.are_finite([tensor for _, tensor in named]):
            return None
        return self.text(next(i for i, (_, tensor) in enumerate(named) if not self._coding.are_finite([tensor])), steps)

    def text(self, index: int, steps: int) -> str:
        """Return what is wrong where the tensor at a place of :meth:`tensors` is not finite."""
        name, _ = self.tensors()[index]
        return f"{name} is not finite at step {steps}: it cannot travel with compression={self._wire!r}"
