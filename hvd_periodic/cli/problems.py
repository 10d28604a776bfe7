"""Problems that simulated workers train on: three problems, and functions of users.

Each worker draws its own noise or its own examples. With heterogeneity each worker draws from a different problem, as
with data that are not shuffled: replicas then drift apart, and long periods cost accuracy. The objective of all is the
mean over workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_periodic.cli.usage_error import UsageError

Array = np.ndarray[Any, Any]
Sample = tuple[float, Array]
"""Loss and gradient of a worker's minibatch."""


@dataclass(frozen=True)
class Problem:
    """A problem to train on.

    Attributes:
        start: initial parameters of all workers, a vector.
        sample: loss and gradient of one worker at some parameters, with the worker's own generator.
        loss: loss of all workers together, without noise.
    """

    start: Array
    sample: Callable[[int, Array, np.random.Generator], Sample]
    loss: Callable[[Array], float]


@dataclass(frozen=True)
class Shape:
    """Size and difficulty of a problem.

    Attributes:
        workers: n.
        dimension: number of parameters, or of inputs.
        condition: ratio of the largest to the smallest curvature.
        noise: standard deviation of a gradient's elements, or of targets.
        heterogeneity: how far the optima of workers are apart: the standard deviation of each element.
        batch: examples per step.
    """

    workers: int
    dimension: int = 20
    condition: float = 100.0
    noise: float = 1.0
    heterogeneity: float = 0.0
    batch: int = 16


EXAMPLES = 512
"""Number of examples of each worker."""


def quadratic(shape: Shape, generator: np.random.Generator) -> Problem:
    """Return a noisy quadratic: curvatures from 1 down to 1/condition, the optimum at 0, where the loss is 0.

    F_i(x) = ½ (x − b_i)ᵀ H (x − b_i) − ½ b_iᵀ H b_i,  Σ_i b_i = 0
    """
    curvatures = np.geomspace(1.0, 1.0 / shape.condition, shape.dimension)
    optima = shape.heterogeneity * generator.standard_normal((shape.workers, shape.dimension))
    optima -= optima.mean(axis=0)

    def sample(rank: int, x: Array, own: np.random.Generator) -> Sample:
        gradient = curvatures * (x - optima[rank]) + shape.noise * own.standard_normal(x.shape)
        return float(0.5 * x @ (curvatures * (x - 2 * optima[rank]))), gradient

    return Problem(generator.standard_normal(shape.dimension), sample, lambda x: float(0.5 * x @ (curvatures * x)))


def logistic(shape: Shape, generator: np.random.Generator) -> Problem:
    """Return logistic regression on generated examples, slightly regularized: convex.

    F(w) = mean log(1 + exp(−y aᵀw)) + 5e-4 ‖w‖²
    """
    inputs = _inputs(shape, generator)
    weights = generator.standard_normal(shape.dimension) + _shifts(shape, generator, shape.dimension)
    margins = np.einsum("rmd,rd->rm", inputs, weights)
    labels = np.sign(margins + shape.noise * generator.standard_normal(margins.shape))

    def loss_and_gradient(w: Array, a: Array, y: Array) -> Sample:
        margin = y * (a @ w)
        weight = -y / (1 + np.exp(np.clip(margin, -500, 500)))
        return float(np.logaddexp(0, -margin).mean() + 5e-4 * w @ w), a.T @ weight / len(y) + 1e-3 * w

    return _of_examples(np.zeros(shape.dimension), inputs, labels, shape, loss_and_gradient)


def network(shape: Shape, generator: np.random.Generator) -> Problem:
    """Return a network of 16 tanh units and a linear output that learns the outputs of such a network: not convex.

    F(W, v) = mean ½ (vᵀ tanh(W a) − y)²
    """
    units, inputs = 16, _inputs(shape, generator)
    count = units * (shape.dimension + 1)
    scale = np.concatenate([np.full(units * shape.dimension, shape.dimension**-0.5), np.full(units, units**-0.5)])
    teachers = 2 * scale * (generator.standard_normal(count) + _shifts(shape, generator, count))

    def outputs(x: Array, a: Array) -> tuple[Array, Array]:
        hidden = np.tanh(a @ x[:-units].reshape(units, shape.dimension).T)
        return hidden, hidden @ x[-units:]

    clean = np.stack([outputs(teacher, a)[1] for teacher, a in zip(teachers, inputs, strict=True)])
    targets = clean + 0.1 * shape.noise * generator.standard_normal(clean.shape)

    def loss_and_gradient(x: Array, a: Array, y: Array) -> Sample:
        hidden, output = outputs(x, a)
        error = (output - y) / len(y)
        below = (error[:, None] * x[-units:] * (1 - hidden**2)).T @ a
        return float(0.5 * len(y) * error @ error), np.concatenate([below.ravel(), hidden.T @ error])

    start = scale * generator.standard_normal(count)
    return _of_examples(start, inputs, targets, shape, loss_and_gradient)


PROBLEMS: dict[str, Callable[[Shape, np.random.Generator], Problem]] = {
    "quadratic": quadratic,
    "logistic": logistic,
    "network": network,
}


def from_function(
    function: Callable[[Array, np.random.Generator], Any], dimension: int, seed: int, name: str
) -> Problem:
    """Return the problem that a user's function defines.

    Args:
        function: takes parameters, a float64 vector, and a generator; returns a loss and the gradient in the shape of
            the parameters. Its attribute ``start``, if there is one, holds the initial parameters; otherwise zeros.
        dimension: number of parameters, if the function has no ``start``.
        seed: seed of the generator with which the loss of a center is computed, the same one each time.
        name: name of the function, for errors.

    Raises:
        UsageError: it is not such a function.
    """
    if not callable(function):
        raise UsageError(f"{name} must be a function of (parameters, rng). Received: {type(function).__name__}")
    given = getattr(function, "start", None)
    start = np.zeros(dimension) if given is None else np.array(given, dtype=np.float64)

    def sample(rank: int, x: Array, own: np.random.Generator) -> Sample:
        found = function(x, own)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise UsageError(f"{name} must return (loss, gradient). Received: {type(found).__name__}")
        gradient = np.asarray(found[1], dtype=np.float64)
        if gradient.shape != x.shape:
            raise UsageError(f"{name} must return a gradient of shape {x.shape}. Received: {gradient.shape}")
        return float(found[0]), gradient

    sample(0, start.copy(), np.random.default_rng(seed))
    return Problem(start, sample, lambda x: sample(0, x, np.random.default_rng(seed))[0])


def _inputs(shape: Shape, generator: np.random.Generator) -> Array:
    """Return examples of each worker, scaled so that the directions have the requested curvatures."""
    scales = np.geomspace(1.0, shape.condition**-0.5, shape.dimension)
    return generator.standard_normal((shape.workers, EXAMPLES, shape.dimension)) * scales


def _shifts(shape: Shape, generator: np.random.Generator, count: int) -> Array:
    return shape.heterogeneity * generator.standard_normal((shape.workers, count))


def _of_examples(
    start: Array,
    inputs: Array,
    targets: Array,
    shape: Shape,
    loss_and_gradient: Callable[[Array, Array, Array], Sample],
) -> Problem:
    """Return a problem whose workers draw minibatches of their own examples."""

    def sample(rank: int, x: Array, own: np.random.Generator) -> Sample:
        chosen = own.integers(EXAMPLES, size=shape.batch)
        return loss_and_gradient(x, inputs[rank, chosen], targets[rank, chosen])

    everything = inputs.reshape(-1, shape.dimension), targets.reshape(-1)
    return Problem(start, sample, lambda x: loss_and_gradient(x, *everything)[0])
