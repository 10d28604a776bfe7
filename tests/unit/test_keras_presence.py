"""Variables to which only ranks with gradients contribute, in Keras: as on numpy, see ``test_presence.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic import Communicator, LocalCommunicator
from tests.covering import covering
from tests.helpers import run_ranks
from tests.oracle import MOMENTUM, RATE, Present, has_gradient, present
from tests.parallel.tiers import thorough
from tests.unit.test_tensorflow_edges import Delegate

pytestmark = pytest.mark.timeout(120)

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "average": hvdp.Averaging,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": hvdp.BMUF,
    "easgd": lambda: hvdp.EASGD(0.25, rho=0.5),
    "agn": hvdp.AGN,
    "agn average": lambda: hvdp.AGN(op="average"),
}
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "overlap": {"overlap": 1},
}
RANKS, STEPS, PERIOD = 3, 13, 2
START = {"body": [1.0, 0.25], "expert_0": [1.0, -2.0, 0.5], "expert_1": [-1.0]}


def variables() -> list[Any]:
    return [keras.Variable(np.array(values), name=name, dtype="float64") for name, values in START.items()]


def made(trained: list[Any], communicator: Any, algorithm: str, **options: Any) -> Any:
    if algorithm.startswith("agn"):
        options["outer_optimizer"] = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvdp.PeriodicOptimizer(
        keras.optimizers.SGD(RATE, momentum=MOMENTUM),
        None,
        ALGORITHMS[algorithm](),
        PERIOD,
        process_set=Delegate(communicator),
        parameters={"expert_*": "present"},
        **options,
    )
    optimizer.build(trained)
    return optimizer


def stepped(trained: list[Any], optimizer: Any, rank: int, step: int) -> None:
    """Take a step with the gradients that the oracle has."""
    with_gradient = [True, *(has_gradient(rank, step, which) for which in range(2))]
    gradients = [
        (0.5 + 0.25 * rank) * (x.value - (1.5 - rank)) if here else None
        for x, here in zip(trained, with_gradient, strict=True)
    ]
    optimizer.apply(gradients, trained)


def expected(algorithm: str, ranks: int = RANKS, delay: int = 0) -> list[list[dict[str, list[float]]]]:
    """Return the values on each rank after each step, and the center, by the oracle."""
    found = [[{name: list[float]() for name in START} for _ in range(STEPS + 1)] for _ in range(ranks)]
    for name, values in START.items():
        which = None if name == "body" else int(name[-1])
        for value in values:
            element = Present(value, ranks, algorithm, takes_part=which is None)
            replicas = present(
                element,
                STEPS,
                range(PERIOD, STEPS + 1, PERIOD),
                lambda i, t, which=which: which is None or has_gradient(i, t, which),
                delay,
            )
            for rank in range(ranks):
                for step, of_ranks in enumerate([*replicas, [element.center] * ranks]):
                    found[rank][step][name].append(of_ranks[rank])
    return found


def check(found: list[list[Any]], right: list[dict[str, list[float]]]) -> None:
    for step, (values, of_oracle) in enumerate(zip(found, right, strict=True)):
        for value, name in zip(values, START, strict=True):
            assert value == pytest.approx(of_oracle[name], rel=1e-5, abs=1e-6), (name, step)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    ("algorithm", "way"),
    [
        *((algorithm, "replicated") for algorithm in ALGORITHMS),
        *(("diloco", way) for way in WAYS if way != "replicated"),
        *(("agn average", way) for way in WAYS if way != "replicated"),
    ],
)
def test_oracle(algorithm: str, way: str) -> None:
    def work(communicator: Communicator) -> Any:
        trained, rank, seen = variables(), communicator.rank, []
        optimizer = made(trained, communicator, algorithm, **WAYS[way])
        for step in range(1, STEPS + 1):
            stepped(trained, optimizer, rank, step)
            seen.append([x.numpy().tolist() for x in trained])
        with optimizer.center():
            return [*seen, [x.numpy().tolist() for x in trained]]

    oracle = expected(algorithm, delay=WAYS[way].get("overlap", 0))
    for found, right in zip(run_ranks(RANKS, work), oracle, strict=True):
        check(found, right)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "algorithm", [name if name in ("easgd", "diloco", "agn average") else thorough(name) for name in ALGORITHMS]
)
def test_compiled_steps_do_the_same(algorithm: str) -> None:
    """A step is compiled for each set of gradients. On one rank: those that are threads share TensorFlow's threads."""
    trained = variables()
    optimizer = made(trained, LocalCommunicator(), algorithm)

    @tf.function(autograph=False)
    def run(which: tuple[bool, ...]) -> None:
        gradients = [0.5 * (x.value - 1.5) if here else None for x, here in zip(trained, which, strict=True)]
        optimizer.apply(gradients, trained)

    seen = []
    for step in range(1, STEPS + 1):
        run((True, *(has_gradient(0, step, which) for which in range(2))))
        seen.append([x.numpy().tolist() for x in trained])
    with optimizer.center():
        seen.append([x.numpy().tolist() for x in trained])
    check(seen, expected(algorithm, ranks=1)[0])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(("center", "fragments"), covering(["replicated", "sharded"], [1, 2], together=1))
def test_a_state_in_the_middle_of_a_period(center: str, fragments: int) -> None:
    """Training resumes to the bit: who has had gradients since the last exchange is saved."""
    begun = 3

    def work(communicator: Communicator) -> bool:
        trained, rank = variables(), communicator.rank
        optimizer = made(trained, communicator, "diloco", center=center, fragments=fragments)
        for step in range(1, begun + 1):
            stepped(trained, optimizer, rank, step)
        state, values = optimizer.synchronizer.state_dict(), [x.numpy() for x in trained]
        local = [x.numpy() for x in optimizer.inner.variables]
        again = variables()
        other = made(again, communicator, "diloco", center=center, fragments=fragments)
        for mine, theirs in zip([*again, *other.inner.variables], [*values, *local], strict=True):
            mine.assign(theirs)
        other.synchronizer.load_state_dict(state)
        for step in range(begun + 1, STEPS + 1):
            stepped(trained, optimizer, rank, step)
            stepped(again, other, rank, step)
            if any((x.numpy() != y.numpy()).any() for x, y in zip(trained, again, strict=True)):
                return False
        return True

    assert run_ranks(RANKS, work) == [True] * RANKS


def test_a_model_that_is_saved_and_loaded(tmp_path: Path) -> None:
    """hvdp.save in the middle of a period; the variables of the optimizer hold what was seen."""

    def made_of(name: str, pattern: str | None = "*expert/*") -> tuple[Any, Any]:
        x = keras.Input((2,), name="x")
        y = keras.layers.Dense(1, name="body")(x) + keras.layers.Dense(1, name="expert")(x)
        model = keras.Model(x, y, name=name)
        for weight in model.weights:
            weight.assign(tf.ones_like(weight))
        parameters = None if pattern is None else {pattern: "present"}
        options: dict[str, Any] = {"process_set": LocalCommunicator(), "parameters": parameters}
        return model, hvdp.PeriodicOptimizer(keras.optimizers.SGD(1.0), model, hvdp.Averaging(), 4, **options)

    model, optimizer = made_of("net")
    optimizer.apply([tf.ones_like(v) for v in model.trainable_variables], model.trainable_variables)
    seen = optimizer.synchronizer.progress.notes.seen
    assert [name.rpartition("/")[0].split("/")[-1] for name in seen[0]] == ["expert", "expert"]
    hvdp.save(tmp_path, model, optimizer)
    again, other = made_of("net")
    hvdp.load(tmp_path, again, other)
    assert other.synchronizer.progress.notes.seen == seen
    for pattern in (None, "*body/kernel"):  # Policies may change.
        again, other = made_of("net", pattern)
        hvdp.load(tmp_path, again, other)
        assert other.synchronizer.progress.notes.seen == []


@pytest.mark.parametrize("compiled", [False, True])
def test_an_update_that_a_loss_scale_skips_does_not_count(compiled: bool) -> None:
    x, y = (keras.Variable([1.0], name=name) for name in "xy")
    options: dict[str, Any] = {"process_set": LocalCommunicator(), "parameters": {"x": "present"}}
    local = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
    optimizer = hvdp.PeriodicOptimizer(local, None, hvdp.Averaging(), 4, **options)
    optimizer.build([x, y])

    def step(g: Any) -> None:
        optimizer.apply([g, g], [x, y])

    run = tf.function(step, autograph=False) if compiled else step
    run(tf.constant([np.inf]))
    assert optimizer.synchronizer.progress.notes.seen == []
    run(tf.constant([1.0]))
    assert optimizer.synchronizer.progress.notes.seen == [["x"]]


def test_a_callback_refuses_it() -> None:
    from hvd_periodic.keras import PeriodicExchange

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(
        ValueError, match="`parameters` can be 'present' for PeriodicExchange with Keras on PyTorch only"
    ):
        PeriodicExchange(model, hvdp.Averaging(), 2, process_set=LocalCommunicator(), parameters="present")
