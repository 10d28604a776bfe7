"""DiLoCo, SlowMo and BMUF: the numbers of the reference, a slow oracle, limits, state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvd_periodic import Communicator
from hvd_periodic.algorithms import AGN, BMUF, EASGD, Algorithm, Averaging, DiLoCo, SlowMo
from hvd_periodic.centers import PLACEMENTS
from hvd_periodic.comm import LocalCommunicator
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.covering import covering
from tests.helpers import errors, run_ranks

CURVATURE, MINIMUM, RATE, PERIOD = (0.5, 1.0), (3.0, -1.0), 0.1, 3
"""Of two workers with F_i = h_i (x − b_i)²/2."""

Centers = list[float]


def centers(
    algorithm: Algorithm,
    rounds: int = 4,
    size: int = 2,
    center: str = "replicated",
    rates: Any = lambda number: RATE,
    outer: Any = None,
) -> tuple[Centers, Centers]:
    """Return the center after every round, and what was handed out; ``rates(round)`` from round 1."""

    def work(communicator: Communicator) -> tuple[Centers, Centers]:
        x, local = np.zeros(1), SGD(RATE)
        optimizer = PeriodicOptimizer(
            local, {"x": x}, algorithm, PERIOD, center=center, process_set=communicator, outer_optimizer=outer
        )
        seen: Centers = []
        handed: Centers = []
        h, b = CURVATURE[communicator.rank], MINIMUM[communicator.rank]
        for number in range(1, rounds + 1):
            local.learning_rate = rates(number)
            for _ in range(PERIOD):
                optimizer.step([h * (x - b)])
            handed.append(float(x[0]))
            with optimizer.center():
                seen.append(float(x[0]))
        return seen, handed

    results = run_ranks(size, work)
    assert all(result == results[0] for result in results)
    return results[0]


TABLE: dict[str, tuple[Algorithm, Centers]] = {
    "averaging": (Averaging(), [0.0784375, 0.140653145, 0.190001816, 0.229144565]),
    "slowmo": (SlowMo(0.5, 1.0), [0.0784375, 0.179871895, 0.271826836, 0.340024619]),
    "slowmo, slow rate": (SlowMo(0.5, 0.9), [0.07059375, 0.163344672, 0.249910335, 0.317270794]),
    "bmuf": (BMUF(0.5, 1.0), [0.0784375, 0.171760967, 0.251687656, 0.309771427]),
    "bmuf, default momentum": (BMUF(), [0.0784375, 0.171760967, 0.251687656, 0.309771427]),
    "diloco": (DiLoCo(), [0.104321875, 0.224422972, 0.33928258, 0.433479688]),
}


@pytest.mark.parametrize(("case", "center"), covering(TABLE, PLACEMENTS, together=1))
def test_numbers(case: str, center: str) -> None:
    algorithm, expected = TABLE[case]
    assert centers(algorithm, center=center)[0] == pytest.approx(expected, abs=5e-9)


@pytest.mark.parametrize("center", PLACEMENTS)
def test_the_slow_momentum_survives_a_change_of_the_rate(center: str) -> None:
    found, _ = centers(SlowMo(0.5, 1.0), center=center, rates=lambda number: RATE if number < 3 else RATE / 10)
    assert found == pytest.approx([0.0784375, 0.179871895, 0.188467309, 0.196096921], abs=5e-9)


@pytest.mark.parametrize("center", PLACEMENTS)
def test_what_bmuf_hands_out(center: str) -> None:
    _, handed = centers(BMUF(0.5), center=center)
    assert handed == pytest.approx([0.11765625, 0.2184227, 0.291651, 0.338813313], abs=5e-9)
    classic = centers(BMUF(0.5, nesterov=False), center=center)
    assert classic[0] == classic[1]


def oracle(kind: str, rounds: int, rate: float, momentum: float, rates: Any) -> Centers:
    """The equations of the papers in plain floats, two workers in a loop."""
    c = outer = handed = 0.0
    seen = []
    for number in range(1, rounds + 1):
        step, ends = rates(number), []
        for h, b in zip(CURVATURE, MINIMUM, strict=True):
            x = handed
            for _ in range(PERIOD):
                x -= step * h * (x - b)
            ends.append(x)
        g = handed - sum(ends) / 2
        if kind == "diloco":
            outer = momentum * outer + g
            c = handed = c - rate * (g + momentum * outer)
        elif kind == "heavy ball":
            outer = momentum * outer + g
            c = handed = c - rate * outer
        elif kind == "slowmo":
            outer = momentum * outer + g / step
            c = handed = c - rate * step * outer
        elif kind == "bmuf":
            outer = momentum * outer - rate * g
            c += outer
            handed = c + momentum * outer
        seen.append(c)
    return seen


@pytest.mark.parametrize(("rate", "momentum"), covering((0.5, 1.0, 1.3), (0.9, 0.3, 0.0), together=1))
def test_oracle(rate: float, momentum: float) -> None:
    kinds: dict[str, Algorithm] = {
        "diloco": DiLoCo(rate, momentum),
        "heavy ball": DiLoCo(rate, momentum, nesterov=False),
        "slowmo": SlowMo(momentum, rate),
        "bmuf": BMUF(momentum, rate),
    }

    def rates(number: int) -> float:
        return RATE / (1 + 0.2 * number)

    for kind, algorithm in kinds.items():
        expected = oracle(kind, 6, rate, momentum, rates)
        assert centers(algorithm, 6, rates=rates)[0] == pytest.approx(expected, rel=1e-12), kind


@pytest.mark.parametrize("algorithm", [DiLoCo(1, 0), SlowMo(0, 1), BMUF(0, 1), BMUF(0, 1, nesterov=False)], ids=str)
def test_without_momentum_it_is_model_averaging(algorithm: Algorithm) -> None:
    assert centers(algorithm)[0] == pytest.approx(centers(Averaging())[0], rel=1e-14)


def test_momentum_by_any_name() -> None:
    """At a constant rate classic BMUF, SlowMo and heavy-ball DiLoCo are one; so is what both of Nesterov's hand out."""
    heavy = centers(DiLoCo(1, 0.5, nesterov=False), 6)[0]
    assert centers(SlowMo(0.5, 1), 6)[0] == pytest.approx(heavy, rel=1e-13)
    assert centers(BMUF(0.5, 1, nesterov=False), 6)[0] == pytest.approx(heavy, rel=1e-13)
    assert centers(BMUF(0.5, 1), 6)[1] == pytest.approx(centers(DiLoCo(1, 0.5), 6)[0], rel=1e-13)


def test_one_worker_is_lookahead() -> None:
    slow, alpha = 0.0, 0.6
    expected = []
    for _ in range(5):
        fast = slow
        for _ in range(PERIOD):
            fast -= RATE * CURVATURE[0] * (fast - MINIMUM[0])
        slow += alpha * (fast - slow)
        expected.append(slow)
    assert centers(SlowMo(0, alpha), 5, size=1)[0] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("center", PLACEMENTS)
def test_a_rate_of_zero_leaves_the_mean_and_the_momentum(center: str) -> None:
    found, _ = centers(SlowMo(0.5, 1), 5, center=center, rates=lambda number: 0.0 if number == 3 else RATE)
    assert found[2] == found[1], "without local steps the mean is the center"
    without, _ = centers(SlowMo(0.5, 1), 4, center=center)
    assert found[3:] == pytest.approx(without[2:], rel=1e-14), "the momentum goes on where it was"


@pytest.mark.parametrize("center", PLACEMENTS)
def test_an_optimizer_in_place_of_its_own(center: str) -> None:
    """Without looking ahead, DiLoCo's own is the heavy-ball descent that there is of arrays."""
    own, _ = centers(DiLoCo(0.7, 0.9, nesterov=False), 5, center=center)
    given, _ = centers(DiLoCo(), 5, center=center, outer=SGD(0.7, 0.9))
    assert given == pytest.approx(own, rel=1e-13)


@pytest.mark.parametrize("center", PLACEMENTS)
@pytest.mark.parametrize("algorithm", [DiLoCo(), SlowMo(), BMUF()], ids=lambda made: type(made).__name__)
def test_resuming_without_the_outer_state_is_an_error(algorithm: Algorithm, center: str) -> None:
    def work(communicator: Communicator) -> None:
        x = np.ones(3)
        optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, algorithm, 2, center=center, process_set=communicator)
        for _ in range(3):
            optimizer.step([x - communicator.rank])
        state = optimizer.synchronizer.state_dict()
        lost = next(key for key in state["vectors"]["parameters"] if key != "center")
        del state["vectors"]["parameters"][lost]
        optimizer.synchronizer.load_state_dict(state)

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert "momentum' of the parameters: it was saved by" in message or "block_update' of the param" in message


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "λ": (
        lambda: DiLoCo(0),
        ValueError,
        r"`DiLoCo\(outer_learning_rate=...\)` must be positive and finite. Received: 0",
    ),
    "μ": (lambda: DiLoCo(0.7, 1.0), ValueError, r"`DiLoCo\(outer_momentum=...\)` must be in \[0, 1\). Received: 1.0"),
    "negative μ": (lambda: DiLoCo(0.7, -0.1), ValueError, r"outer_momentum=...\)` must be zero or positive .*: -0.1"),
    "α": (lambda: SlowMo(slow_learning_rate=-1), ValueError, r"`SlowMo\(slow_learning_rate=...\)` must be .*: -1"),
    "β": (lambda: SlowMo(slow_momentum=float("nan")), ValueError, r"`SlowMo\(slow_momentum=...\)` must be .*: nan"),
    "ζ": (lambda: BMUF(block_learning_rate=0.0), ValueError, r"`BMUF\(block_learning_rate=...\)` must be .*: 0.0"),
    "η": (lambda: BMUF(block_momentum=2), ValueError, r"`BMUF\(block_momentum=...\)` must be in \[0, 1\). Received: 2"),
    "a text": (lambda: DiLoCo("fast"), TypeError, r"must be a number. Received: 'fast'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    make, error, message = BAD[case]
    with pytest.raises(error, match=message):
        make()
    raised = errors(2, lambda c: PeriodicOptimizer(SGD(0.1), {"x": np.zeros(1)}, make, 2, process_set=c))
    assert [kind for kind, _ in raised] == [error, error]


class Mine(BMUF):
    """May compute something else than its base."""


def test_an_algorithm_without_an_asynchronous_variant_says_so() -> None:
    def work(communicator: Communicator) -> None:
        PeriodicOptimizer(SGD(0.1), {"x": np.zeros(1)}, Mine(), 2, asynchronous=True, process_set=communicator)

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert "Mine is for synchronous exchange, in which all workers take part" in message


@pytest.mark.parametrize("algorithm", [EASGD(), Averaging(), SlowMo(), BMUF()], ids=lambda made: type(made).__name__)
def test_an_outer_optimizer_that_nobody_would_use(algorithm: Algorithm) -> None:
    with pytest.raises(ValueError, match=r"takes no outer optimizer. Received: SGD"):
        PeriodicOptimizer(SGD(0.1), {"x": np.zeros(1)}, algorithm, 2, outer_optimizer=SGD(1.0))


def test_a_local_optimizer_without_a_rate() -> None:
    class Unknown:
        def step(self, parameters: Any, gradients: Any) -> None:
            """Do nothing."""

    with pytest.raises(TypeError, match="Unknown has no attribute `learning_rate`"):
        PeriodicOptimizer(Unknown(), {"x": np.zeros(1)}, SlowMo(), 2)
    PeriodicOptimizer(Unknown(), {"x": np.zeros(1)}, DiLoCo(), 2, process_set=LocalCommunicator())
    PeriodicOptimizer(Unknown(), {"x": np.zeros(1)}, AGN(), 2, process_set=LocalCommunicator())


def test_resuming_with_another_outer_optimizer_is_an_error() -> None:
    def make(**options: Any) -> PeriodicOptimizer:
        return PeriodicOptimizer(SGD(0.1), {"x": np.ones(2)}, DiLoCo(), 2, **options)

    for saved, loaded in (({}, {"outer_optimizer": SGD(0.7, 0.9)}), ({"outer_optimizer": SGD(0.7, 0.9)}, {})):
        state = make(**saved).synchronizer.state_dict()
        with pytest.raises(ValueError, match=r"saved with the outer optimizer (none|SGD), and this one has (SGD|none)"):
            make(**loaded).synchronizer.load_state_dict(state)
