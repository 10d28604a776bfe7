"""The verbs on tensors compute what the default computes on numpy arrays."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_periodic import AGN, EASGD, LocalCommunicator
from hvd_periodic.algorithms import Algorithm
from hvd_periodic.vectors.coding import BLOCK
from hvd_periodic.vectors.space import VectorSpace
from tests.helpers import readable

torch = pytest.importorskip("torch")

from hvd_periodic.torch import PeriodicOptimizer  # noqa: E402
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


def test_a_difference_is_added_to_tensors_of_all_sizes_as_by_two_kernels() -> None:
    """Block by block in one buffer, or in few kernels, or where memory is not contiguous: the same to the bit."""
    torch.manual_seed(0)
    sizes = (0, 1, 1000, 16 * 2**10, 16 * 2**10 + 3, BLOCK, 2 * BLOCK + 17)
    x, y, g = ([torch.randn(size) for size in sizes] for _ in range(3))
    x.append(torch.randn(300, 200).t())
    y.append(torch.randn(200, 300))
    g.append(torch.randn(200, 300, dtype=torch.bfloat16))
    expected = [c.clone().add_(a - b, alpha=0.3) for a, b, c in zip(x, y, g, strict=True)]
    found = TensorListSpace().add_difference(0.3, x, y, g)
    assert all(one is other for one, other in zip(found, g, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_sparse_gradient_is_refused_before_others_change() -> None:
    g = [torch.zeros(2), torch.zeros(2).to_sparse()]
    with pytest.raises(TypeError, match="A dense term cannot be added to a sparse gradient"):
        TensorListSpace().add_difference(1.0, [torch.ones(2)] * 2, [torch.zeros(2)] * 2, g)
    assert not g[0].any()


@pytest.mark.parametrize("algorithm", [AGN(), EASGD(rho=0.1)], ids=readable)
def test_what_python_does_in_a_local_step_does_not_grow_with_the_number_of_tensors(algorithm: Algorithm) -> None:
    """Of small tensors; where a step is short, each call would show."""

    def calls(count: int) -> int:
        model = torch.nn.ParameterList([torch.ones(3) for _ in range(count)])
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = PeriodicOptimizer(sgd, model, algorithm, 100, process_set=LocalCommunicator())
        for parameter in model:
            parameter.grad = torch.ones(3)
        optimizer.step()
        counted = 0

        def count_calls(frame: object, event: str, argument: object) -> None:
            nonlocal counted
            counted += event == "call"

        gc.disable()  # Finalizers of what other tests left would be counted.
        sys.setprofile(count_calls)
        try:
            optimizer.synchronizer.prepare_gradients()
        finally:
            sys.setprofile(None)
            gc.enable()
        return counted

    more = (calls(20) - calls(10)) / 10
    assert more <= 1  # An iteration of a generator counts as a call.


@pytest.mark.parametrize("space", [VectorSpace(), TensorSpace()], ids=["default", "torch"])
def test_copies_share_no_memory_and_zeros_hide_no_nan(space: Any) -> None:
    x = np.array([1.0, np.nan]) if type(space) is VectorSpace else torch.tensor([1.0, float("nan")])
    copy = space.copy(x)
    copy[0] = 7.0
    assert float(x[0]) == 1.0
    assert [float(value) for value in space.zeros_like(x)] == [0.0, 0.0]
