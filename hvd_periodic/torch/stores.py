"""Stores of flat vectors: the tensors of the model, and host memory for vectors that a device computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hvd_periodic.torch import foreach
from hvd_periodic.torch.dtypes import INTEGERS, REALS, as_real
from hvd_periodic.torch.sharded_parameters import is_sharded, shard_of
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.store import FlatStore, PackedStore


class TensorStore(PackedStore[torch.Tensor]):
    """Tensors of the model, or their shards, read and written outside autograd; one by one if not contiguous."""

    def __init__(
        self, layout: Layout, tensors: Sequence[torch.Tensor], empty: Callable[[Bucket], torch.Tensor]
    ) -> None:
        super().__init__(layout, tensors, empty)
        self._any_sharded = any(map(is_sharded, tensors))
        self._views: dict[tuple[str, int, int], tuple[list[int], list[torch.Tensor]]] = {}

    def view(self, bucket: Bucket) -> torch.Tensor | None:
        """Return the memory of a bucket that is a part of one tensor of the layout's dtype; None for other buckets."""
        views = self._flat_views(bucket) if len(bucket.pieces) == 1 else None
        if views is None or (REALS | INTEGERS).get(views[0].dtype) != views[0].dtype:
            return None
        return views[0]

    def read(self, bucket: Bucket, out: torch.Tensor | None = None) -> torch.Tensor:
        """Pack the tensors of a bucket into ``out``, or into a new vector."""
        with torch.no_grad():
            views = self._flat_views(bucket)
            if views is None or len({view.dtype for view in views}) > 1:
                return super().read(bucket, out)
            return torch.cat(views, out=self._empty(bucket) if out is None else out)

    def write(self, bucket: Bucket, value: torch.Tensor) -> None:
        """Unpack a flat vector into the tensors of a bucket."""
        with torch.no_grad():
            views = self._flat_views(bucket)
            if views is None:
                super().write(bucket, value)
            else:
                foreach.copy(views, torch.split_with_sizes(value, [view.shape[0] for view in views]))

    def _flat_views(self, bucket: Bucket) -> list[torch.Tensor] | None:
        """Return the memory of the pieces of a bucket; None if some tensor is not contiguous.

        Views are cached as long as the tensors stay in place.
        """
        tensors = self._held([self._tensors[piece.tensor] for piece in bucket.pieces])
        if not tensors or not all(map(torch.Tensor.is_contiguous, tensors)):
            return None
        places = list(map(torch.Tensor.data_ptr, tensors))
        key = bucket.kind, bucket.start, bucket.stop
        if key not in self._views or self._views[key][0] != places:
            pieces = zip(bucket.pieces, tensors, strict=True)
            self._views[key] = places, [t.detach().view(-1)[piece.start : piece.stop] for piece, t in pieces]
        return self._views[key][1]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors, or this rank's shards."""
        return self._held(list(self._tensors))

    def _tensor(self, index: int) -> torch.Tensor:
        """Return a tensor, or this rank's shard of it."""
        return self._held([self._tensors[index]])[0]

    def _held(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors, or this rank's shards of them, which FSDP may move."""
        return list(map(shard_of, tensors)) if self._any_sharded else tensors


class ComplexTensorStore(TensorStore):
    """Tensors of the model, of which complex ones are read and written as pairs of reals."""

    def _held(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors; of a complex one, its memory as reals, wherever it is now."""
        return list(map(as_real, super()._held(tensors)))


class OffloadedStore(FlatStore[torch.Tensor]):
    """Vectors in host memory, initially zero and pinned for CUDA, that the device of their kind computes with."""

    offloaded = True

    def __init__(self, layout: Layout, kinds: Mapping[str, tuple[torch.dtype, torch.device]]) -> None:
        self._kinds = kinds

        def zeros(kind: str, size: int) -> torch.Tensor:
            dtype, device = kinds[kind]
            return torch.zeros(size, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")

        super().__init__(layout, zeros)

    def read(self, bucket: Bucket, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy on the device, in ``out`` if given."""
        values = super().view(bucket)
        return values.to(self._kinds[bucket.kind][1], copy=True) if out is None else out.copy_(values)

    def view(self, bucket: Bucket) -> None:  # type: ignore[override]
        """Return None: the device has no memory of the bucket."""
        return


def as_center_device(device: torch.device | str | None) -> torch.device | None:
    """Return the device where centers are kept: the host; or None, for the device of the parameters."""
    if device is None:
        return None
    if str(device) != "cpu":
        raise ValueError(
            "`center_device` must be None, for the device of the parameters, or 'cpu', for host memory. "
            f"Received: {device!r}"
        )
    return torch.device("cpu")
