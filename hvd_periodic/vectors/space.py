"""The operations on vectors (verbs) in which the algorithms are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import numpy as np

from hvd_periodic.vectors.coding import Coding

V = TypeVar("V")


class VectorSpace(Generic[V]):
    """Vector arithmetic over values of type ``V``; this default uses plain operators.

    It serves numpy arrays as it is, and other array types once ``copy`` and ``zeros_like`` are overridden. A front end
    whose tensors can be updated in place overrides the verbs: each may write its result into ``out`` or, where the
    docstring says *may overwrite*, into that argument. A caller therefore uses the returned value only, and never reads
    an overwritten argument again.

    Attributes:
        coding: the verbs of wires.

    Example:
        >>> import numpy as np
        >>> VectorSpace().axpy(2.0, np.array([1.0, 2.0]), np.array([10.0, 20.0]))
        array([12., 24.])
    """

    coding: Coding[V] = Coding()

    def sub(self, x: Any, y: Any, out: V | None = None) -> V:
        """Return ``x - y``."""
        result: V = x - y
        return result

    def axpy(self, a: float, x: Any, y: Any) -> V:
        """Return ``a x + y``; may overwrite ``y``."""
        result: V = y + a * x
        return result

    def add_difference(self, a: float, x: Any, y: Any, g: Any) -> V:
        """Return ``g + a (x - y)``; may overwrite ``g``."""
        return self.axpy(a, self.sub(x, y), g)

    def scale(self, a: float, x: Any, out: V | None = None) -> V:
        """Return ``a x``; may overwrite ``x``, or be written into ``out``."""
        result: V = x * a
        return result

    def weigh(self, weight: float, x: Any) -> V:
        """Return ``weight x``, and zeros for a weight of 0, whatever ``x`` holds; may overwrite ``x``."""
        return self.zeros_like(x, out=x) if weight == 0 else self.scale(weight, x)

    def lerp(self, x: Any, y: Any, weight: float) -> V:
        """Return ``x + weight (y - x)``; may overwrite ``x``."""
        result: V = x + weight * (y - x)
        return result

    def maximum(self, x: Any, y: Any) -> V:
        """Return the larger of ``x`` and ``y``, element by element."""
        return cast(V, np.maximum(x, y))

    def where_finite(self, condition: Any, x: Any, otherwise: Any) -> V:
        """Return a new value: ``x`` where ``condition`` is finite, ``otherwise``, which may be a number, elsewhere."""
        return cast(V, np.where(np.isfinite(condition), x, otherwise))

    def copy(self, x: Any, out: V | None = None) -> V:
        """Return a value equal to ``x`` that shares no memory with it."""
        return cast(V, np.copy(x))

    def zeros_like(self, x: Any, out: V | None = None) -> V:
        """Return zeros of the shape and dtype of ``x``, which may be ``out`` itself."""
        return cast(V, np.zeros_like(x))

    def dot(self, x: Any, y: Any) -> float:
        """Return the inner product ``x · y``."""
        return float((x * y).sum())

    def square(self, x: Any) -> float:
        """Return ``x · x``, computed in float64, in one order on all ranks."""
        return float(np.square(x, dtype=np.float64).sum())

    def concatenate(self, parts: Sequence[Any]) -> V:
        """Return the vectors joined into one."""
        return cast(V, np.concatenate(parts))

    def if_zero(self, a: Any, then: Callable[[], tuple[V, V]], otherwise: Callable[[], tuple[V, V]]) -> tuple[V, V]:
        """Return the vectors of ``then`` if the scalar ``a`` is zero, the vectors of ``otherwise`` if not."""
        return then() if a == 0 else otherwise()


class ArraySpace(VectorSpace[np.ndarray]):
    """The verbs on numpy arrays, in place."""

    def sub(self, x: Any, y: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Return ``x - y``, in ``out`` if given."""
        return cast(np.ndarray, np.subtract(x, y, out=out))

    def axpy(self, a: float, x: Any, y: Any) -> np.ndarray:
        """Add ``a x`` to ``y``."""
        y += np.multiply(x, a, dtype=y.dtype)
        return cast(np.ndarray, y)

    def copy(self, x: Any, out: np.ndarray | None = None) -> np.ndarray:
        """Return a copy, in ``out`` if given."""
        if out is None:
            return np.copy(x)
        np.copyto(out, x)
        return out
