"""Optimizers that need whole tensors are not cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_periodic.numpy import SGD, AGNOptimizer
from hvd_periodic.outer.elementwise import require_elementwise
from hvd_periodic.vectors.layout import Layout, TensorSpec
from tests.conformance.test_front_ends import Delegate
from tests.helpers import errors, run_ranks

WHOLE = Layout([TensorSpec("w", (7, 5), "float64", 8)])
HALF = WHOLE.restrict(lambda bucket: (0, 18))

CUT = "`center='sharded'` cuts tensors, but {} gives other results on parts"


def normalized(x: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    for gradient in gradients:
        x = x - gradient / np.linalg.norm(gradient)
    return x


def picky(x: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    rows, columns = x.shape
    return x / (rows * columns)


@pytest.mark.parametrize(
    ("steps", "cause"), [(normalized, ""), (picky, r" than on the whole \(ValueError: not enough")]
)
def test_steps_that_need_the_whole_tensor(steps: Any, cause: str) -> None:
    with pytest.raises(ValueError, match=CUT.format("Picky") + cause):
        require_elementwise("Picky", HALF, WHOLE, steps)


def test_whole_and_empty_shares_may_have_any_optimizer() -> None:
    require_elementwise("Picky", WHOLE, WHOLE, picky)
    require_elementwise("Picky", WHOLE.restrict(lambda bucket: (0, 0)), WHOLE, picky)


class NormalizedSGD(SGD):
    """A rate per tensor."""

    def step(self, parameters: Any, gradients: Any) -> None:
        super().step(parameters, [g / (np.linalg.norm(g) + 1e-9) for g in gradients])


@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
def test_numpy(center: str) -> None:
    def work(communicator: Any) -> None:
        AGNOptimizer(NormalizedSGD(0.1), {"w": np.zeros((7, 5))}, 2, center=center, process_set=communicator)

    if center == "sharded":
        assert all(CUT.format("NormalizedSGD") in message for _, message in errors(2, work))
    else:
        run_ranks(2, work)


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adamax", "Rprop", "Adafactor", "Muon"]
)
def test_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    import hvd_periodic.torch as hvdp

    def work(communicator: Any) -> None:
        w = torch.nn.Parameter(torch.zeros(7, 5))
        optimizer = getattr(torch.optim, name)([w], lr=0.1)
        hvdp.AGNOptimizer(optimizer, [("w", w)], 2, center="sharded", process_set=communicator)

    if name == "Adafactor":
        assert all(CUT.format(name) in message for _, message in errors(2, work))
    elif name == "Muon":
        assert all("only supports 2D parameters" in message for _, message in errors(2, work))
    else:
        run_ranks(2, work)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Lion", "Lamb", "clipvalue", "clipnorm", "global_clipnorm"])
def test_keras(name: str) -> None:
    pytest.importorskip("tensorflow")
    keras = pytest.importorskip("keras")
    import hvd_periodic.tensorflow as hvdp

    def work(communicator: Any) -> None:
        made = keras.optimizers.SGD(0.1, **{name: 1.0}) if "clip" in name else getattr(keras.optimizers, name)(0.1)
        optimizer = hvdp.AGNOptimizer(made, None, 2, center="sharded", process_set=Delegate(communicator))
        optimizer.build([keras.Variable(np.zeros((7, 5)), dtype="float32")])

    if name in ("Lamb", "clipnorm", "global_clipnorm"):
        assert all("cuts tensors" in message for _, message in errors(2, work))
    else:
        run_ranks(2, work)
