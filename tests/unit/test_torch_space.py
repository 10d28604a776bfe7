"""The verbs on tensors compute what the default computes on numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_periodic.vectors.space import VectorSpace

torch = pytest.importorskip("torch")

from hvd_periodic.torch.space import TensorListSpace, TensorSpace  # noqa: E402

VERBS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "sub": lambda space, x, y, out: space.sub(x, y),
    "sub, out": lambda space, x, y, out: space.sub(x, y, out=out),
    "axpy": lambda space, x, y, out: space.axpy(-1.5, x, y),
    "scale": lambda space, x, y, out: space.scale(2.5, x),
    "lerp": lambda space, x, y, out: space.lerp(x, y, 0.3),
    "copy": lambda space, x, y, out: space.copy(x),
    "copy, out": lambda space, x, y, out: space.copy(x, out=out),
    "zeros_like": lambda space, x, y, out: space.zeros_like(x),
    "zeros_like, out": lambda space, x, y, out: space.zeros_like(x, out=out),
    "dot": lambda space, x, y, out: space.dot(x, y),
}


def arrays() -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(5) for _ in range(3)]


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_agree_with_the_default(verb: str) -> None:
    expected = VERBS[verb](VectorSpace(), *arrays())
    one = VERBS[verb](TensorSpace(), *(torch.from_numpy(array) for array in arrays()))
    np.testing.assert_allclose(one, expected, rtol=1e-14)
    split = [[torch.from_numpy(array[:2]), torch.from_numpy(array[2:])] for array in arrays()]
    many = VERBS[verb](TensorListSpace(), *split)
    found = many if verb == "dot" else np.concatenate([np.asarray(tensor) for tensor in many])
    np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize("space", [VectorSpace(), TensorSpace()], ids=["default", "torch"])
def test_copies_share_no_memory_and_zeros_hide_no_nan(space: Any) -> None:
    x = np.array([1.0, np.nan]) if type(space) is VectorSpace else torch.tensor([1.0, float("nan")])
    copy = space.copy(x)
    copy[0] = 7.0
    assert float(x[0]) == 1.0
    assert [float(value) for value in space.zeros_like(x)] == [0.0, 0.0]
