"""Vector operations on torch tensors, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_periodic.torch import foreach
from hvd_periodic.torch.coding import TensorCoding
from hvd_periodic.vectors.coding import BLOCK
from hvd_periodic.vectors.space import VectorSpace

_SMALL = 16 * 2**10
"""Number of elements up to which a separate kernel for each tensor costs more than it saves."""

_ALONE = 2**15
"""Number of elements up to which torch sums in one thread."""


class TensorSpace(VectorSpace[torch.Tensor]):
    """One tensor at a time: the flat vectors of an exchange."""

    coding = TensorCoding()

    def sub(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x - y``, in ``out`` if given."""
        return torch.sub(x, y, out=out)

    def axpy(self, a: float, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add ``a x`` to ``y``."""
        return y.add_(x, alpha=a)

    def scale(self, a: float, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply ``x`` by ``a``."""
        return x.mul_(a)

    def lerp(self, x: torch.Tensor, y: torch.Tensor, weight: float) -> torch.Tensor:
        """Move ``x`` towards ``y``."""
        return x.lerp_(y, weight)

    def maximum(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum."""
        return torch.maximum(x, y)

    def where_finite(self, condition: torch.Tensor, x: torch.Tensor, otherwise: torch.Tensor | float) -> torch.Tensor:
        """Return ``x`` where the condition is finite, elsewhere ``otherwise``."""
        return torch.where(condition.isfinite(), x, otherwise)

    def copy(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy, in ``out`` if given."""
        return x.clone() if out is None else out.copy_(x)

    def zeros_like(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return zeros, in ``out`` if given."""
        return torch.zeros_like(x) if out is None else out.zero_()

    def dot(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Return the inner product."""
        return float(torch.dot(x, y))

    def square(self, x: torch.Tensor) -> float:
        """Return ``x · x`` in float64; on a CPU in parts that one thread sums, in an order that no setting changes."""
        parts = torch.split(x, _ALONE) if x.is_cpu else (x,)
        norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts])
        return float(norms.square().sum())

    def concatenate(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return several vectors joined into one."""
        return torch.cat(list(parts))


class TensorListSpace(VectorSpace[list[torch.Tensor]]):
    """Many tensors in few kernels: parameters and gradients of a local step."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def sub(
        self, x: list[torch.Tensor], y: list[torch.Tensor], out: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Return ``x - y``."""
        return list(foreach.subtract(x, y))

    def axpy(self, a: float, x: list[torch.Tensor], y: list[torch.Tensor]) -> list[torch.Tensor]:
        """Add ``a x`` to ``y``."""
        foreach.add(y, x, alpha=a)
        return y

    def add_difference(
        self, a: float, x: list[torch.Tensor], y: list[torch.Tensor], g: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Add ``a (x - y)`` to ``g``; for large tensors block by block, without memory for the whole difference."""
        if any(tensor.is_sparse for tensor in g):
            raise TypeError(
                "A dense term cannot be added to a sparse gradient: with rho > 0 all gradients must be dense "
                "(torch.nn.Embedding(sparse=False))"
            )
        small: list[tuple[torch.Tensor, ...]] = []
        for group in zip(x, y, g, strict=True):
            if group[0].numel() <= _SMALL or not self._add_in_blocks(a, *group):
                small.append(group)
        if small:
            super().add_difference(a, *map(list, zip(*small, strict=True)))
        return g

    def _add_in_blocks(self, a: float, x: torch.Tensor, y: torch.Tensor, g: torch.Tensor) -> bool:
        """Add ``a (x - y)`` to ``g`` if all are contiguous in host memory; return whether they were."""
        tensors = x, y, g
        if not all(t.is_cpu and t.is_contiguous() for t in tensors):
            return False
        dtype = torch.promote_types(x.dtype, y.dtype)
        if dtype not in self._buffers:
            with torch.inference_mode(False):
                self._buffers[dtype] = torch.empty(BLOCK, dtype=dtype, device="cpu")
        buffer = self._buffers[dtype]
        blocks = zip(*(torch.split(tensor.detach().view(-1), BLOCK) for tensor in tensors), strict=True)
        for of_x, of_y, of_g in blocks:
            of_g.add_(torch.sub(of_x, of_y, out=buffer[: of_g.shape[0]]), alpha=a)
        return True

    def scale(self, a: float, x: list[torch.Tensor], out: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Multiply ``x`` by ``a``."""
        foreach.multiply(x, a)
        return x

    def lerp(self, x: list[torch.Tensor], y: list[torch.Tensor], weight: float) -> list[torch.Tensor]:
        """Move ``x`` towards ``y``."""
        foreach.lerp(x, y, weight)
        return x

    def maximum(self, x: list[torch.Tensor], y: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the elementwise maximum."""
        return list(foreach.maximum(x, y))

    def copy(self, x: list[torch.Tensor], out: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return a copy, in ``out`` if given."""
        if out is None:
            return [tensor.clone() for tensor in x]
        foreach.copy(out, x)
        return out

    def zeros_like(self, x: list[torch.Tensor], out: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return zeros, in ``out`` if given."""
        if out is None:
            return [torch.zeros_like(tensor) for tensor in x]
        foreach.zero(out)
        return out

    def dot(self, x: list[torch.Tensor], y: list[torch.Tensor]) -> float:
        """Return the inner product."""
        return sum(float((a * b).sum()) for a, b in zip(x, y, strict=True))
