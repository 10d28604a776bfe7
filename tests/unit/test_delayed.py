"""Asynchronous averaging, DiLoCo, SlowMo and BMUF: the numbers of the reference, limits, invariants."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Communicator, Compression
from hvd_periodic.algorithms import BMUF, EASGD, Algorithm, Averaging, DiLoCo, Exchange, SlowMo
from hvd_periodic.algorithms.delayed import growth
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from hvd_periodic.vectors.space import VectorSpace
from tests.helpers import errors, run_ranks

CURVATURE, MINIMUM, RATE, PERIOD = (0.5, 1.0, 0.7), (3.0, -1.0, 2.0), 0.1, 3
"""Of workers with F_i = h_i (x − b_i)²/2."""


class Turns:
    """Workers that train in a given order, one period at a time."""

    def __init__(self, communicator: Communicator, algorithm: Algorithm | Callable[[], Algorithm], **options: Any):
        self.communicator, self.x, self.local = communicator, np.zeros(1), SGD(RATE)
        self.optimizer = PeriodicOptimizer(
            self.local, {"x": self.x}, algorithm, PERIOD, asynchronous=True, process_set=communicator, **options
        )
        self.optimizer.synchronizer.begin()

    def vector(self, key: str = "center") -> float:
        """Return a vector of the center."""
        return float(self.optimizer.synchronizer.state_dict()["vectors"]["parameters"][key]["x"][0])

    def take(self, order: Sequence[int], see: Callable[[], Any]) -> list[Any]:
        """Return what this worker sees after every turn; workers are counted from 1."""
        seen, rank = [], self.communicator.rank
        for turn in order:
            if turn == rank + 1:
                for _ in range(PERIOD):
                    self.optimizer.step([CURVATURE[rank] * (self.x - MINIMUM[rank])])
            self.communicator.allgather_object(None, "stepped")
            seen.append(see())
            self.communicator.allgather_object(None, "seen")
        return seen


IN_TURN, TWICE = (1, 2, 1, 2, 1, 2), (1, 1, 2, 1, 1, 2)
TABLE: dict[str, tuple[Algorithm, Sequence[int], float, Sequence[float]]] = {
    "diloco": (
        DiLoCo(),
        IN_TURN,
        0.0,
        [0.14975625, 0.104321875, 0.24660248, 0.220113721, 0.357559883, 0.331809188],
    ),
    "diloco, one worker twice as fast": (
        DiLoCo(),
        TWICE,
        0.0,
        [0.14975625, 0.554870025, 0.460020025, 0.843114758, 0.950783773, 1.01950159],
    ),
    "diloco, discounted": (
        DiLoCo(),
        TWICE,
        0.5,
        [0.14975625, 0.554870025, 0.487800947, 0.89589851, 1.000932626, 1.163306756],
    ),
    "averaging": (
        Averaging(),
        IN_TURN,
        0.0,
        [0.2139375, 0.0784375, 0.277118582, 0.130990301, 0.325165782, 0.171916596],
    ),
    "slowmo": (
        SlowMo(0.5, 1.0),
        IN_TURN,
        0.0,
        [0.2139375, 0.0784375, 0.277118582, 0.170209051, 0.364384532, 0.251706981],
    ),
}
"""Algorithm, order of pushes, power of the discount, and c after every push."""


@pytest.mark.parametrize("case", TABLE)
def test_numbers(case: str) -> None:
    algorithm, order, power, expected = TABLE[case]

    def work(communicator: Communicator) -> list[float]:
        turns = Turns(communicator, algorithm, staleness_power=power)
        return turns.take(order, turns.vector)

    for seen in run_ranks(2, work):
        assert seen == pytest.approx(expected, abs=5e-9)


def test_what_bmuf_hands_out() -> None:
    def work(communicator: Communicator) -> list[tuple[float, float]]:
        turns = Turns(communicator, BMUF(0.5, 1.0))
        return turns.take(IN_TURN, lambda: (float(turns.x[0]), turns.vector()))

    first, second = run_ranks(2, work)
    handed = [pair[turn - 1][0] for turn, pair in zip(IN_TURN, zip(first, second, strict=True), strict=True)]
    expected = [0.2139375, 0.11765625, 0.316337332, 0.208123615, 0.399502309, 0.271254884]
    assert handed == pytest.approx(expected, abs=5e-9)
    for number, (_, center) in enumerate(first):
        assert (center == pytest.approx(handed[number])) == (number == 0)


def test_the_momentum_of_diloco_after_every_window() -> None:
    def work(communicator: Communicator) -> list[float]:
        turns = Turns(communicator, DiLoCo())
        return turns.take(IN_TURN, lambda: turns.vector("momentum"))[1::2]

    for seen in run_ranks(2, work):
        assert seen == pytest.approx([-0.0784375, -0.124216143, -0.142820781], abs=5e-9)


ALGORITHMS: dict[str, Algorithm] = {
    "averaging": Averaging(),
    "diloco": DiLoCo(),
    "heavy ball": DiLoCo(0.3, 0.6, nesterov=False),
    "no momentum": DiLoCo(0.8, 0.0),
    "slowmo": SlowMo(0.5, 0.9),
    "bmuf": BMUF(0.3, 0.9),
    "bmuf, default": BMUF(),
    "bmuf, classic": BMUF(0.3, nesterov=False),
}


def trained(communicator: Communicator, algorithm: Algorithm, rounds: int, **options: Any) -> list[Any]:
    """Return x and c after every period of an optimizer on two arrays of awkward values."""
    x, y = np.linspace(-1, 1, 5), np.full((2, 3), np.float32(0.1))
    local = SGD(0.1)
    optimizer = PeriodicOptimizer(local, {"x": x, "y": y}, algorithm, PERIOD, process_set=communicator, **options)
    seen = []
    for number in range(rounds * PERIOD):
        local.learning_rate = 0.1 / (1 + number // 2)
        optimizer.step([np.sin(x + communicator.rank), np.cos(y * (number + 2))])
        if number % PERIOD == PERIOD - 1:
            seen += [x.copy(), y.copy()]
            with optimizer.center():
                seen += [x.copy(), y.copy()]
    return seen


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_worker_is_synchronous_to_the_bit(name: str) -> None:
    def work(communicator: Communicator, **options: Any) -> list[Any]:
        return trained(communicator, ALGORITHMS[name], 5, **options)

    (alone,), (waiting,) = run_ranks(1, lambda c: work(c, asynchronous=True)), run_ranks(1, work)
    for here, there in zip(alone, waiting, strict=True):
        np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_pushes_that_took_the_same_center_are_a_synchronous_round(name: str) -> None:
    """In any order, twice: all workers take the center again before they go on."""
    rounds = 3

    def take(turns: Turns, order: Sequence[int]) -> float:
        rank, synchronizer = turns.communicator.rank, turns.optimizer.synchronizer
        for _ in range(PERIOD - 1):
            turns.optimizer.step([CURVATURE[rank] * (turns.x - MINIMUM[rank])])
        for turn in order:
            if turn == rank:
                turns.optimizer.step([CURVATURE[rank] * (turns.x - MINIMUM[rank])])
            turns.communicator.allgather_object(None, "stepped")
        synchronizer.exchanger.worker.take(list(synchronizer.tensor_groups))
        center = turns.vector()
        turns.communicator.allgather_object(None, "taken")
        return center

    def work(communicator: Communicator, order: Sequence[int]) -> list[float]:
        turns = Turns(communicator, ALGORITHMS[name])
        return [take(turns, order[i:] + order[:i]) for i in range(rounds)]

    def wait(communicator: Communicator) -> list[float]:
        x, rank, seen = np.zeros(1), communicator.rank, []
        chosen = BMUF(0.4) if name == "bmuf, default" else ALGORITHMS[name]
        optimizer = PeriodicOptimizer(SGD(RATE), {"x": x}, chosen, PERIOD, process_set=communicator)
        for _ in range(rounds):
            for _ in range(PERIOD):
                optimizer.step([CURVATURE[rank] * (x - MINIMUM[rank])])
            with optimizer.center():
                seen.append(float(x[0]))
        return seen

    expected = run_ranks(3, wait)[0]
    for order in ((0, 1, 2), (2, 0, 1), (1, 0, 2)):
        for seen in run_ranks(3, lambda communicator, order=order: work(communicator, order)):
            assert seen == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["averaging", "diloco", "heavy ball", "no momentum", "slowmo", "bmuf"])
def test_every_push_moves_the_point_of_rest_by_its_share(name: str) -> None:
    """In whatever order, also in the middle of windows; n = 3."""
    algorithm, size = ALGORITHMS[name], 3

    def rest(vectors: dict[str, float]) -> float:
        c, d = vectors["center"], vectors.get("gathered", 0.0)
        if isinstance(algorithm, DiLoCo):
            rate, mu, m = algorithm.rate, algorithm.outer_momentum, vectors.get("momentum", 0.0)
            of_m = mu**2 if algorithm.nesterov else mu
            return c - rate * of_m / (1 - mu) * m - rate * mu / (1 - mu) * d
        if isinstance(algorithm, SlowMo):
            share = algorithm.slow_learning_rate * RATE * algorithm.slow_momentum / (1 - algorithm.slow_momentum)
            return c - share * (vectors["slow_momentum"] + d)
        if isinstance(algorithm, BMUF):
            eta = algorithm.block_momentum or 0.0
            return c + eta / (1 - eta) * (vectors["block_update"] + d)
        return c

    def scale() -> float:
        if isinstance(algorithm, DiLoCo):
            return algorithm.rate / (1 - algorithm.outer_momentum)
        if isinstance(algorithm, SlowMo):
            return algorithm.slow_learning_rate / (1 - algorithm.slow_momentum)
        return algorithm.block_learning_rate / (1 - 0.3) if isinstance(algorithm, BMUF) else 1.0

    order = (1, 1, 2, 3, 1, 3, 3, 2, 1, 2, 2)

    def work(communicator: Communicator) -> list[tuple[float, float]]:
        turns = Turns(communicator, algorithm)
        pushed: list[float] = []
        pull = turns.optimizer.synchronizer.exchanger.worker.exchange

        def exchange(groups: Any, known: Any) -> int:
            (group,) = groups
            pushed.append(float(turns.x[0] - group.worker["taken"].tensors()[0][0]))
            return pull(groups, known)

        turns.optimizer.synchronizer.exchanger.worker.exchange = exchange  # type: ignore[method-assign]

        def see() -> tuple[float, float]:
            saved = turns.optimizer.synchronizer.state_dict()["vectors"]["parameters"]
            return rest({key: float(values["x"][0]) for key, values in saved.items()}), sum(pushed)

        return turns.take(order, see)

    results = run_ranks(size, work)
    moved = [sum(pushed for _, pushed in each) for each in zip(*results, strict=True)]
    for total, (point, _) in zip(moved, results[0], strict=True):
        assert point == pytest.approx(scale() / size * total, rel=1e-12, abs=1e-14)


def test_a_rate_of_zero_pushes_the_displacement_and_leaves_the_momentum() -> None:
    """n = 2, α = .9, β = .5; displacements of 1, with γ = 0 in the second and third push."""
    delayed = SlowMo(0.5, 0.9).asynchronous_variant(2)
    space: VectorSpace[Any] = VectorSpace()
    center = delayed.init_center(space, np.zeros(1))
    seen = []
    for number, rate in enumerate((0.1, 0.0, 0.0, 0.1)):
        known = Exchange(2, PERIOD, learning_rate=rate, completes=number % 2 == 1)
        center |= delayed.move(space, center, np.ones(1), known)
        seen.append([float(center[key][0]) for key in ("center", "slow_momentum", "gathered")])
    expected = [[0.45, 0, -5], [0.95, 0, 0], [1.45, 0, 0], [1.9, -5, 0]]
    np.testing.assert_allclose(seen, expected, rtol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 16, 64])
def test_defaults_are_stable_in_turn(n: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for algorithm in (Averaging(), DiLoCo(), SlowMo(), BMUF()):
            assert growth(algorithm.asynchronous_variant(n), n) < 1


def test_defaults() -> None:
    variants = [DiLoCo().asynchronous_variant(n) for n in (1, 4, 5)]
    assert [made.outer_learning_rate for made in variants if isinstance(made, DiLoCo)] == [0.7, 0.7, 0.4]
    blocks = [BMUF().asynchronous_variant(n) for n in (1, 2, 3)]
    assert [made.block_momentum for made in blocks if isinstance(made, BMUF)] == [0.0, 0.5, 0.4]
    assert DiLoCo().in_force(Exchange(64, PERIOD)) == str(DiLoCo(0.7))
    assert DiLoCo().asynchronous_variant(5).in_force(Exchange(5, PERIOD)) == str(DiLoCo(0.4))


@pytest.mark.parametrize(
    ("make", "n", "stable"),
    [
        (lambda: DiLoCo(0.7), 4, True),
        (lambda: DiLoCo(0.7), 5, False),
        (lambda: SlowMo(0.509), 64, True),
        (lambda: SlowMo(0.511), 64, False),
        (lambda: BMUF(0.9), 8, False),
    ],
)
def test_values_of_ones_own_that_are_not_stable_are_warned_of(
    make: Callable[[], Algorithm], n: int, stable: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make().asynchronous_variant(n)
    assert [f"is not stable in asynchronous training of n={n} workers" in str(each.message) for each in caught] == (
        [] if stable else [True]
    )


@pytest.mark.parametrize(
    ("asynchronous", "momentum", "outer", "stable"),
    [(True, 0.9, 0.9, False), (True, 0.0, 0.9, True), (True, 0.9, 0.3, True), (False, 0.9, 0.9, True)],
)
def test_local_momentum_adds_to_that_of_the_center(
    asynchronous: bool, momentum: float, outer: float, stable: bool
) -> None:
    """As the guide says: of four workers in turn, who keep the state of their optimizers."""

    def work(communicator: Communicator) -> float:
        x = np.ones(1)
        optimizer = PeriodicOptimizer(
            *(SGD(0.03, momentum), {"x": x}, DiLoCo(0.7, outer), 10),
            asynchronous=asynchronous,
            process_set=communicator,
        )
        optimizer.synchronizer.begin()
        for turn in range(4 * 60):
            if turn % 4 == communicator.rank or not asynchronous:
                for _ in range(10 if asynchronous or turn % 4 == 0 else 0):
                    optimizer.step([x.copy()])
            communicator.allgather_object(None, "turn")
        with optimizer.center():
            return float(abs(x[0]))

    assert all((center < 0.1) == stable for center in run_ranks(4, work))


def test_the_eigenvalue_is_that_of_the_equations() -> None:
    """A turn written out from the paper, on random starts: its growth over many turns."""
    rate, mu, n = 0.7, 0.9, 8
    random = np.random.default_rng(0)
    c, m, d, h = *random.standard_normal(3), random.standard_normal(n)
    sizes = []
    for _ in range(400):
        for worker in range(n):
            g = h[worker]  # All the way to 0.
            d += g / n
            if worker < n - 1:
                c -= rate * g / n
            else:
                m = mu * m + d
                c, d = c - rate * (g / n + mu * m), 0.0
            h[worker] = c
        sizes.append(np.linalg.norm([c, m, *h]))
    long_run = (sizes[-1] / sizes[99]) ** (1 / 300)
    with pytest.warns(UserWarning, match="a turn multiplies deviations by 1.042"):
        variant = DiLoCo(rate, mu).asynchronous_variant(n)
    assert growth(variant, n) == pytest.approx(long_run, rel=5e-3)


def in_turn(communicator: Communicator, optimizer: PeriodicOptimizer, xs: dict[str, Any], order: Sequence[int]) -> Any:
    """Train one period at a time, in a given order; return replica and center after every turn."""
    optimizer.synchronizer.begin()
    rank, seen = communicator.rank, []
    for turn in order:
        if turn == rank:
            for _ in range(2):
                optimizer.step([np.sin(x + rank + place) for place, x in enumerate(xs.values())])
        communicator.allgather_object(None, "stepped")
        seen += [x.copy() for x in xs.values()]
        with optimizer.center():
            seen += [x.copy() for x in xs.values()]
        communicator.allgather_object(None, "seen")
    return seen


def arrays() -> dict[str, Any]:
    return {"w": np.linspace(-1, 1, 6).reshape(2, 3), "b": np.full(4, np.float32(0.3)), "none": np.zeros((0, 2))}


def made(communicator: Communicator, name: str, xs: dict[str, Any], **options: Any) -> PeriodicOptimizer:
    local = SGD(0.1)
    return PeriodicOptimizer(local, xs, ALGORITHMS[name], 2, asynchronous=True, process_set=communicator, **options)


FIRST, REST = (0, 1, 1, 2, 0), (2, 2, 1, 0, 0, 1, 2)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_set_that_was_saved_at_rest_resumes_exactly(name: str) -> None:
    """In the middle of a window, and with steps since the last push."""

    def step(communicator: Communicator, optimizer: PeriodicOptimizer, xs: dict[str, Any]) -> None:
        if communicator.rank == 1:
            optimizer.step([np.full_like(x, 0.5) for x in xs.values()])
        communicator.allgather_object(None, "at rest")

    def work(communicator: Communicator) -> None:
        xs = arrays()
        optimizer = made(communicator, name, xs, staleness_power=0.5)
        in_turn(communicator, optimizer, xs, FIRST)
        step(communicator, optimizer, xs)
        state, model = optimizer.synchronizer.state_dict(), {key: x.copy() for key, x in xs.items()}
        communicator.allgather_object(None, "saved")
        expected = in_turn(communicator, optimizer, xs, REST)
        optimizer.finalize()

        xs = arrays()
        resumed = made(communicator, name, xs, staleness_power=0.5)
        resumed.synchronizer.load_state_dict(state)
        for key, x in xs.items():
            x[...] = model[key]
        for here, there in zip(in_turn(communicator, resumed, xs, REST), expected, strict=True):
            np.testing.assert_array_equal(here, there)
        resumed.finalize()
        counts = [each.synchronizer.state_dict()["pushes"] for each in (resumed, optimizer)]
        assert all(np.all(np.array(each.pop("speeds")) > 0) for each in counts), "measured, in each training again"
        assert counts[0] == counts[1]

    run_ranks(3, work)


@pytest.mark.parametrize("name", ["averaging", "diloco", "bmuf"])
def test_all_leave_with_the_center(name: str) -> None:
    """After a last push of whoever has steps left; the open window stays open."""

    def work(communicator: Communicator) -> Any:
        xs = arrays()
        optimizer = made(communicator, name, xs)
        in_turn(communicator, optimizer, xs, FIRST)
        for _ in range(communicator.rank):
            optimizer.step([np.full_like(x, 0.5) for x in xs.values()])
        optimizer.finalize()
        state = optimizer.synchronizer.state_dict()
        with optimizer.center():
            center = [x.copy() for x in xs.values()]
        return [x.copy() for x in xs.values()], center, state

    results = run_ranks(3, work)
    for xs, center, state in results:
        for here, there in zip([*xs, *center], [*results[0][0], *results[0][1]], strict=True):
            np.testing.assert_array_equal(here, there)
        if name != "bmuf":
            for here, there in zip(xs, center, strict=True):
                np.testing.assert_array_equal(here, there)
        pushes = state["pushes"]["pushes"]
        assert pushes == [2, 3, 2]
        assert state["pushes"]["windows"] == [sum(pushes) % 3] * 2
        assert state["pushes"]["taken"] == [sum(pushes)] * 3
        taken = state["vectors"]["parameters"]["taken"]
        for here, there in zip(xs, taken.values(), strict=True):
            np.testing.assert_array_equal(here, there)


def resumed_on(size: int, states: Sequence[Any], caplog: Any) -> list[Any]:
    """Resume from states on a number of ranks; return replica, center, vectors, and counts, at the start."""

    def work(communicator: Communicator) -> Any:
        xs = arrays()
        optimizer = made(communicator, "diloco", xs)
        state, model = states[communicator.rank]
        optimizer.synchronizer.load_state_dict(state)
        for key, x in xs.items():
            x[...] = model[key]
        optimizer.synchronizer.begin()
        with optimizer.center():
            center = {key: x.copy() for key, x in xs.items()}
        found = {key: x.copy() for key, x in xs.items()}, center, optimizer.synchronizer.state_dict()
        communicator.allgather_object(None, "seen")
        optimizer.finalize()
        return found

    caplog.clear()
    return run_ranks(size, work)


def test_states_that_do_not_belong_together(caplog: Any) -> None:
    """A worker takes the center: one that pushed before the root saved; one with another's state; all of another job.

    What had entered the center does not enter it twice.
    """

    def save(communicator: Communicator) -> list[Any]:
        xs = arrays()
        optimizer = made(communicator, "diloco", xs)
        in_turn(communicator, optimizer, xs, FIRST)
        if communicator.rank == 2:
            optimizer.step([np.full_like(x, 0.5) for x in xs.values()])
        states = []
        for turn in (0, 1):
            states.append((optimizer.synchronizer.state_dict(), {key: x.copy() for key, x in xs.items()}))
            communicator.allgather_object(None, "saved")
            if turn == 0:
                in_turn(communicator, optimizer, xs, [1])
        optimizer.finalize()
        return states

    saved = run_ranks(3, save)
    (root, before, other), (_, after, _) = ([states[i] for states in saved] for i in (0, 1))
    c = root[0]["vectors"]["parameters"]["center"]

    for _, center, _ in resumed_on(3, [root, before, other], caplog):
        np.testing.assert_array_equal(center["w"], c["w"])
    assert "takes the center" not in caplog.text

    results = resumed_on(3, [root, after, root], caplog)
    replicas = [x["w"] for x, _, _ in results]
    np.testing.assert_array_equal(replicas, [root[1]["w"], c["w"], c["w"]])
    assert "Rank 1 takes the center, and what it had not pushed is lost: its state is one after 3 pushes" in caplog.text
    assert (
        "Rank 2 takes the center, and what it had not pushed is lost: it has loaded the state of rank 0" in caplog.text
    )
    assert "Rank 0 takes" not in caplog.text
    for _, _, state in results:
        assert state["pushes"]["pushes"] == root[0]["pushes"]["pushes"]
    total = sum(root[0]["pushes"]["pushes"])
    assert results[0][2]["pushes"]["taken"] == [root[0]["pushes"]["taken"][0], total, total]

    for size in (2, 4):
        results = resumed_on(size, [root, before, other, other][:size], caplog)
        assert f"the state is one of 3 workers, and there are {size}" in caplog.text
        for x, center, state in results:
            np.testing.assert_array_equal(x["w"], c["w"])
            np.testing.assert_array_equal(center["w"], c["w"])
            assert state["pushes"]["windows"] == root[0]["pushes"]["windows"]
            for key in ("momentum", "gathered"):
                here, there = (each["vectors"]["parameters"][key]["w"] for each in (state, root[0]))
                np.testing.assert_array_equal(here, there)


def test_a_state_loaded_on_the_root_alone() -> None:
    """All have its parameters; what it had not pushed, it alone pushes."""

    def work(communicator: Communicator) -> Any:
        xs = arrays()
        optimizer = made(communicator, "no momentum", xs)
        in_turn(communicator, optimizer, xs, FIRST)
        if communicator.rank == 0:
            optimizer.step([np.ones_like(x) for x in xs.values()])
        state, model = optimizer.synchronizer.state_dict(), {key: x.copy() for key, x in xs.items()}
        communicator.allgather_object(None, "saved")
        optimizer.finalize()

        ys = arrays()
        resumed = made(communicator, "no momentum", ys)
        if communicator.rank == 0:
            resumed.synchronizer.load_state_dict(state)
            for key, x in ys.items():
                x[...] = model[key]
        resumed.synchronizer.begin()
        at_start = ys["w"].copy()
        for turn in range(communicator.size):
            if turn == communicator.rank:
                resumed.synchronizer.sync()
            communicator.allgather_object(None, "pushed")
        with resumed.center():
            center = ys["w"].copy()
        resumed.finalize()
        return state["vectors"]["parameters"]["center"]["w"], model["w"], at_start, center

    results = run_ranks(3, work)
    before, model = results[0][:2]
    for _, _, x, center in results:
        np.testing.assert_array_equal(x, model)
        np.testing.assert_allclose(center, before - 0.8 * 0.1 / 3, rtol=1e-12)


def test_who_has_not_moved_pushes_nothing() -> None:
    """Also in 16 bits, where a replica is not the center: it rounds it."""

    def work(communicator: Communicator) -> Any:
        x, seen = np.full(3, 0.1, np.float16), []
        optimizer = PeriodicOptimizer(SGD(1.0), {"x": x}, Averaging(), 1, asynchronous=True, process_set=communicator)
        optimizer.synchronizer.begin()
        for number in range(4):
            if communicator.rank == 0 and number == 0:
                optimizer.step([np.full(3, 0.0123, np.float16)])
            elif number:
                optimizer.synchronizer.sync()
            communicator.allgather_object(None, "pushed")
            seen.append(optimizer.synchronizer.state_dict()["vectors"]["parameters"]["center"]["x"])
            communicator.allgather_object(None, "seen")
        return x, seen

    for x, seen in run_ranks(3, work):
        assert (seen[0] != seen[0].astype(np.float16)).all(), "a replica cannot hold it"
        for later in seen:
            np.testing.assert_array_equal(later, seen[0])
        np.testing.assert_array_equal(x, seen[0].astype(np.float16))


@pytest.mark.parametrize("name", ["diloco", "bmuf"])
def test_a_rank_that_is_not_finite_takes_the_center(name: str) -> None:
    """Or what is handed out in its place."""

    def work(communicator: Communicator) -> Any:
        xs = arrays()
        optimizer = made(communicator, name, xs, nonfinite="skip")
        in_turn(communicator, optimizer, xs, (0, 1))
        before = optimizer.synchronizer.state_dict()
        communicator.allgather_object(None, "seen")
        if communicator.rank == 1:
            for _ in range(2):
                optimizer.step([np.full_like(x, np.nan) for x in xs.values()])
            optimizer.synchronizer.sync()  # It has nothing to push.
        communicator.allgather_object(None, "skipped")
        after = optimizer.synchronizer.state_dict()
        with optimizer.center():
            center = xs["w"].copy()
        communicator.allgather_object(None, "read")
        counters = optimizer.synchronizer.counters
        return before, after, xs["w"].copy(), center, (counters.rounds, counters.left_out)

    first, second = run_ranks(2, work)
    for before, after, _, center, _ in (first, second):
        np.testing.assert_array_equal(before["vectors"]["parameters"]["center"]["w"], center)
        np.testing.assert_array_equal(
            after["vectors"]["parameters"]["gathered"]["w"], before["vectors"]["parameters"]["gathered"]["w"]
        )
    ahead = 0.3 * second[1]["vectors"]["parameters"]["block_update"]["w"] if name == "bmuf" else 0.0
    assert name == "diloco" or np.abs(ahead).min() > 0
    np.testing.assert_allclose(second[2], second[3] + ahead, rtol=1e-12)
    for before, after, *_ in (first, second):
        assert before["pushes"]["taken"] == [1, 2]
        assert after["pushes"]["taken"] == [1, 3]
    assert (first[4], second[4]) == ((1, 0), (2, 1))


def test_a_file_holds_the_center(tmp_path: Any) -> None:
    load_file = pytest.importorskip("safetensors.numpy").load_file
    path = tmp_path / "center.safetensors"

    def work(communicator: Communicator) -> Any:
        xs = arrays()
        optimizer = made(communicator, "diloco", xs, center_file=path)
        in_turn(communicator, optimizer, xs, FIRST)
        optimizer.finalize()
        return {key: x.copy() for key, x in xs.items()}

    expected, file = run_ranks(3, work)[0], load_file(path)
    for key, x in expected.items():
        np.testing.assert_array_equal(file[key], x)
    assert all(key in expected or key.startswith("hvd_periodic.unused.") for key in file)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "outer_optimizer": (
        {"algorithm": DiLoCo(), "outer_optimizer": SGD(1.0)},
        ValueError,
        "`outer_optimizer` is for synchronous exchange: with asynchronous=True the momentum of DiLoCo waits",
    ),
    "weight": ({"algorithm": Averaging(), "weight": 2.0}, ValueError, "`weight` is for synchronous exchange"),
    "overlap": ({"algorithm": DiLoCo(), "overlap": 1}, ValueError, "`overlap` is for synchronous exchange"),
    "compression": (
        {"algorithm": DiLoCo(), "compression": Compression.int8},
        ValueError,
        "`compression` is for synchronous exchange",
    ),
    "present": (
        {"algorithm": DiLoCo(), "parameters": {"x": "present"}},
        ValueError,
        "`parameters` can be 'present' in asynchronous exchange with elastic averaging only",
    ),
    "elastic averaging": (
        {"algorithm": EASGD(0.5), "staleness_power": 0.5},
        ValueError,
        "`staleness_power` is for averaging, DiLoCo, SlowMo and BMUF",
    ),
    "synchronously": (
        {"algorithm": DiLoCo(), "staleness_power": 0.5, "asynchronous": False},
        ValueError,
        "`staleness_power` is for asynchronous exchange",
    ),
    "below zero": (
        {"algorithm": DiLoCo(), "staleness_power": -0.5},
        ValueError,
        "`staleness_power` must be zero or positive and finite. Received: -0.5",
    ),
    "no number": (
        {"algorithm": DiLoCo(), "staleness_power": "half"},
        TypeError,
        "`staleness_power` must be a number. Received: 'half'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str) -> None:
    options, kind, text = BAD[case]

    def work(communicator: Communicator) -> None:
        given = {"asynchronous": True, **options}
        PeriodicOptimizer(SGD(0.1), {"x": np.zeros(1)}, period=2, process_set=communicator, **given)

    for raised, message in errors(2, work):
        assert raised is kind
        assert text in message


def test_a_replica_that_is_not_finite_is_an_error() -> None:
    def work(communicator: Communicator) -> None:
        x = np.zeros(1)
        optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, DiLoCo(), 1, asynchronous=True, process_set=communicator)
        optimizer.step([np.full(1, np.nan)])

    for raised, message in errors(2, work):
        assert raised is RuntimeError
        assert "parameter 'x' is not finite at step 1" in message


def test_ranks_that_differ_in_the_power_are_told() -> None:
    def work(communicator: Communicator) -> None:
        options: dict[str, Any] = {"staleness_power": 0.5 * communicator.rank}
        made(communicator, "diloco", arrays(), **options)

    for raised, message in errors(2, work):
        assert raised is ValueError
        assert "They differ in staleness_power" in message
