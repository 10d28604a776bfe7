"""What bad input gets: an error that names the argument and the value received."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from hvd_periodic import AGN, EASGD, Averaging, Communicator, Every, PostLocal
from hvd_periodic.arguments import require_int, require_real
from hvd_periodic.numpy import SGD, AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer, PeriodicOptimizer
from hvd_periodic.participation.named import unique_pairs
from tests.helpers import readable, run_ranks

PERIODS: dict[str, Callable[[Any], object]] = {
    "ElasticAverageOptimizer:communication_period": lambda p: ElasticAverageOptimizer(SGD(1.0), {"x": np.zeros(1)}, p),
    "AGNOptimizer:communication_period": lambda p: AGNOptimizer(SGD(1.0), {"x": np.zeros(1)}, p),
    "ModelAverageOptimizer:interval_steps": lambda p: ModelAverageOptimizer(SGD(1.0), {"x": np.zeros(1)}, p),
    "PeriodicOptimizer:period": lambda p: PeriodicOptimizer(SGD(1.0), {"x": np.zeros(1)}, Averaging(), p),
}


@pytest.mark.parametrize("make", PERIODS)
@pytest.mark.parametrize(
    ("period", "error"), [(0, ValueError), (-3, ValueError), (2.5, TypeError), (True, TypeError), ("4", TypeError)]
)
def test_periods(make: str, period: object, error: type[Exception]) -> None:
    argument = make.partition(":")[2]
    with pytest.raises(error, match=rf"`{argument}`.* must be an int >= 1\. Received: {period!r}$"):
        PERIODS[make](period)


@pytest.mark.parametrize("make", PERIODS)
def test_schedules_that_return_nonsense(make: str) -> None:
    with pytest.raises(ValueError, match=r"returned at step 0 must be an int >= 1\. Received: 0"):
        PERIODS[make](lambda step: 0)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda: Every(0), r"`Every\(period=\.\.\.\)` must be an int >= 1\. Received: 0"),
        (lambda: Every(1.5), r"`Every\(period=\.\.\.\)` must be an int >= 1\. Received: 1\.5"),  # type: ignore[arg-type]
        (lambda: PostLocal(start=-1), r"`PostLocal\(start=\.\.\.\)` must be an int >= 0\. Received: -1"),
        (lambda: PostLocal(period=0), r"`PostLocal\(period=\.\.\.\)` must be an int >= 1\. Received: 0"),
    ],
)
def test_arguments_of_schedules(schedule: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        schedule()


def elastic(communicator: Communicator | None = None, **arguments: Any) -> ElasticAverageOptimizer:
    return ElasticAverageOptimizer(SGD(1.0), {"x": np.zeros(1)}, 2, process_set=communicator, **arguments)


@pytest.mark.parametrize("argument", ["moving_rate", "beta", "rho"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-0.1, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        ("0.5", TypeError),
        (True, TypeError),
        ([0.5], TypeError),
        (1j, TypeError),
    ],
)
def test_rates_that_are_no_rates(argument: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"`ElasticAverageOptimizer\({argument}=\.\.\.\)` must be .*Received: ") as caught:
        elastic(**{argument: value})
    assert str(caught.value).endswith(f"Received: {value!r}")


@pytest.mark.parametrize("argument", ["moving_rate", "beta"])
def test_zero_is_no_rate(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"`ElasticAverageOptimizer\({argument}=\.\.\.\)` must be positive.*: 0\.0$"):
        elastic(**{argument: 0.0})


def test_zero_is_a_rho() -> None:
    elastic(rho=0)


def test_moving_rate_and_beta_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"`moving_rate` or `beta`.*not both.*moving_rate=0\.1, beta=0\.9"):
        elastic(moving_rate=0.1, beta=0.9)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("argument", ["moving_rate", "beta"])
def test_rates_that_diverge_or_overshoot(n: int, argument: str) -> None:
    """α(n+1) > 2 is refused, above 1 warned of, at 1 accepted; β = n α."""
    unit = (n if argument == "beta" else 1) / (n + 1)
    pattern = rf"`EASGD\({argument}=\.\.\.\)` must be in \(0, .*/\(n\+1\)\].* n={n} .*Received: {argument}="
    for growth in (2.01, 2.5):
        with pytest.raises(ValueError, match=pattern):
            EASGD(**{argument: growth * unit}).check(n)
    for growth in (1.01, 1.99, 2.0):
        with pytest.warns(UserWarning, match=rf"`EASGD\({argument}=.*overshoot.* n={n} workers"):
            EASGD(**{argument: growth * unit}).check(n)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for growth in (0.01, 0.5, 0.99):
            EASGD(**{argument: growth * unit}).check(n)


def test_the_number_of_workers_is_that_of_the_communicator() -> None:
    """α = .6 suits one worker, and is too much for three."""

    def work(communicator: Communicator) -> str:
        with pytest.raises(ValueError, match=r"n=3 workers.*Received: moving_rate=0\.6") as caught:
            elastic(communicator, moving_rate=0.6)
        return str(caught.value)

    assert len(set(run_ranks(3, work))) == 1
    elastic(moving_rate=0.45)


@pytest.mark.parametrize("value", [Fraction(1, 4), Decimal("0.25"), np.float32(0.25), np.array(0.25)], ids=readable)
def test_a_rate_that_is_accepted_works(value: Any) -> None:
    """What is not refused at construction must not fail at the first exchange."""
    x = np.zeros(1)
    try:
        optimizer = ElasticAverageOptimizer(SGD(1.0), {"x": x}, 2, moving_rate=value)
    except (TypeError, ValueError) as error:
        assert "moving_rate" in str(error)  # noqa: PT017
        return
    for _ in range(2):
        optimizer.step([-np.ones(1)])
    assert x == [1.5]


@pytest.mark.parametrize("op", ["max", "SUM", None, 1])
def test_op(op: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"`AGNOptimizer\(op=\.\.\.\)` must be .*Received: op={op!r}"):
        AGNOptimizer(SGD(1.0), {"x": np.zeros(1)}, op=op)
    with pytest.raises((TypeError, ValueError)):
        AGN(op)


@pytest.mark.parametrize("named", [{}, [], iter(()), {"empty": np.zeros((0, 3))}], ids=readable)
def test_no_parameters(named: Any) -> None:
    with pytest.raises(ValueError, match=r"`model` must hold at least one element\. Received: no"):
        ModelAverageOptimizer(SGD(1.0), named)


def test_duplicate_names() -> None:
    with pytest.raises(ValueError, match=r"`model` must have unique names\. Received: 'w' for two"):
        ModelAverageOptimizer(SGD(1.0), [("w", np.zeros(1)), ("w", np.zeros(1))])


def test_tied_parameters_take_part_once() -> None:
    tied, other = np.zeros(2), np.zeros(1)
    pairs = [("a", tied), ("b", other), ("also a", tied), ("a", tied)]
    assert [name for name, _ in unique_pairs(iter(pairs))] == ["a", "b"]
    optimizer = ModelAverageOptimizer(SGD(1.0), iter(pairs), 1)
    optimizer.step([np.ones(2), np.ones(1)])
    np.testing.assert_array_equal(tied, [-1, -1])


@pytest.mark.parametrize("element", [np.zeros(1), ["w", np.zeros(1)], (1, np.zeros(1)), ("w",), "wx"])
def test_elements_that_are_no_pairs(element: Any) -> None:
    message = rf"`model` must give \(name, tensor\) pairs.*Received an element of type {type(element).__name__}"
    with pytest.raises(TypeError, match=message):
        ModelAverageOptimizer(SGD(1.0), [element])


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros(1, "int64"), "int64"),
        (np.zeros(1, "clongdouble"), "complex256"),
        (np.zeros(1, "bool"), "bool"),
        ([0.0], "list"),
        (np.float64(0), "float64"),
    ],
    ids=lambda value: str(value),
)
def test_parameters_that_are_no_float_arrays(array: Any, found: str) -> None:
    message = rf"Parameter 'w' must be a numpy array of floating point, complex64 or complex128\. Received: {found}"
    with pytest.raises(TypeError, match=message):
        ModelAverageOptimizer(SGD(1.0), [("w", array)])


@pytest.mark.parametrize("root_rank", [-1, 1, 0.5, "0"])
def test_root_rank(root_rank: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"`root_rank`.*Received: {root_rank!r}"):
        ModelAverageOptimizer(SGD(1.0), {"x": np.zeros(1)}, root_rank=root_rank)


def two_parameters(algorithm: str = "average") -> PeriodicOptimizer:
    named = {"matrix": np.zeros((2, 3)), "scalar": np.zeros(())}
    if algorithm == "easgd":
        return ElasticAverageOptimizer(SGD(1.0), named, 2, moving_rate=0.25, rho=0.25)
    return AGNOptimizer(SGD(1.0), named, 2) if algorithm == "agn" else ModelAverageOptimizer(SGD(1.0), named, 2)


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ([np.zeros((2, 3))], r"2 parameters take as many gradients\. Received: 1"),
        ([np.zeros((2, 3)), np.zeros(()), np.zeros(1)], r"2 parameters .*Received: 3"),
        ([np.zeros((3, 2)), None], r"gradient of 'matrix' must have shape \(2, 3\)\. Received: \(3, 2\)"),
        ([None, np.zeros(1)], r"gradient of 'scalar' must have shape \(\)\. Received: \(1,\)"),
        ({"matrix": np.zeros(6)}, r"gradient of 'matrix' must have shape \(2, 3\)\. Received: \(6,\)"),
        ({"vector": np.zeros(6)}, r"No parameter has the name of the gradient 'vector'"),
    ],
)
@pytest.mark.parametrize("algorithm", ["average", "easgd", "agn"])
def test_gradients(gradients: Any, message: str, algorithm: str) -> None:
    optimizer = two_parameters(algorithm)
    with pytest.raises(ValueError, match=message):
        optimizer.step(gradients)
    assert optimizer.synchronizer.local_steps == 0


@pytest.mark.parametrize("algorithm", ["average", "easgd", "agn"])
def test_a_gradient_that_is_no_array_is_refused_or_converted(algorithm: str) -> None:
    try:
        two_parameters(algorithm).step([[[0.0] * 3] * 2, 0.0])  # type: ignore[list-item]
    except (TypeError, ValueError) as error:
        assert "matrix" in str(error)  # noqa: PT017


@pytest.mark.parametrize("algorithm", ["average", "easgd", "agn"])
def test_the_gradient_of_a_scalar_may_be_a_numpy_scalar(algorithm: str) -> None:
    """Arithmetic on 0-d arrays gives np.float64, not an array: 2 * x is the gradient of x²."""
    optimizer = two_parameters(algorithm)
    for _ in range(3):
        optimizer.step([None, np.float64(1.0)])


@pytest.mark.parametrize("algorithm", ["average", "agn"])
def test_gradients_may_be_read_only(algorithm: str) -> None:
    """Only ρ > 0 is documented to write to gradients."""
    optimizer = two_parameters(algorithm)
    optimizer.step([np.broadcast_to(1.0, (2, 3)), None])


def test_an_integer_gradient_is_refused_or_works() -> None:
    """−1 + ρ (x − lc) = −.75 does not fit the dtype of an integer gradient; it must not be cut to 0 silently."""
    x = np.zeros(1)
    optimizer = ElasticAverageOptimizer(SGD(1.0), {"x": x}, 10, moving_rate=0.25, rho=0.25)
    try:
        for _ in range(2):
            optimizer.step([np.array([-1])])
    except (TypeError, ValueError):
        return
    assert x == [1.75]


def test_parameters_without_gradient_stay_and_take_part() -> None:
    optimizer = two_parameters("agn")
    optimizer.step({"scalar": np.array(1.0)})
    optimizer.step([None, np.array(1.0)])
    matrix, scalar = optimizer._replica.arrays
    np.testing.assert_array_equal(matrix, np.zeros((2, 3)))
    assert scalar == -1.0, "one center step on the mean of two gradients"


def test_require_int() -> None:
    assert require_int(np.int64(3), "`n`", minimum=3) == 3
    assert type(require_int(np.int64(3), "`n`", minimum=3)) is int
    with pytest.raises(ValueError, match=r"^`n` must be an int >= 4\. Received: 3$"):
        require_int(3, "`n`", minimum=4)


def test_require_real() -> None:
    require_real(0, "`r`", positive=False)
    require_real(np.float32(1e-30), "`r`", positive=True)
    with pytest.raises(ValueError, match=r"^`r` must be positive and finite\. Received: 0$"):
        require_real(0, "`r`", positive=True)
