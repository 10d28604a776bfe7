"""Changes of the trained set in the middle of training, in Keras: as on numpy, see ``test_adoption.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import hvd_periodic.tensorflow as hvdp
from hvd_periodic import Communicator, Compression, LocalCommunicator
from tests.covering import covering
from tests.helpers import errors, run_ranks
from tests.unit.test_tensorflow_edges import Delegate

pytestmark = pytest.mark.timeout(120)

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "average": hvdp.Averaging,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": hvdp.BMUF,
    "easgd": lambda: hvdp.EASGD(0.25, rho=0.5),
    "agn": hvdp.AGN,
}
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "int8": {"compression": Compression.int8},
    "topk": {"compression": Compression.topk(0.5)},
    "fragments": {"fragments": 2},
    "overlap": {"overlap": 1},
    "average": {"optimizer_state": "average"},
    "present": {"parameters": {"v": "present"}},
}
PERIOD = 3
START = {"w": [1.0, -2.0, 0.5], "v": [[2.0, 1.0], [0.0, -1.0]]}


def variable(name: str, values: Any) -> Any:
    return keras.Variable(np.array(values), name=name, dtype="float64")


def started() -> dict[str, Any]:
    return {name: variable(name, values) for name, values in START.items()}


class WithPeers(Delegate):
    """Hands on also what ranks need that exchange at steps of their own."""

    processes = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("shares_memory", "shared_memory", "messages"):
            return getattr(self._other, name)
        return super().__getattribute__(name)


def made(comm: Communicator, trained: dict[str, Any], algorithm: str, local: Any = None, **options: Any) -> Any:
    if algorithm == "agn":
        options["outer_optimizer"] = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvdp.PeriodicOptimizer(
        local or keras.optimizers.SGD(0.125, momentum=0.5),
        None,
        ALGORITHMS[algorithm](),
        PERIOD,
        process_set=WithPeers(comm),
        **options,
    )
    optimizer.build(list(trained.values()))
    return optimizer


def values_of(trained: dict[str, Any]) -> dict[str, Any]:
    return {name: x.numpy().tolist() for name, x in trained.items()}


def train(optimizer: Any, trained: dict[str, Any], rank: int, steps: int, compiled: bool = False) -> list[Any]:
    """Take steps on another objective on each rank, and return the values after each."""

    def step() -> None:
        gradients = [(0.5 + 0.25 * rank) * (x.value - (1.5 - rank)) for x in trained.values()]
        optimizer.apply(gradients, list(trained.values()))

    run, seen = tf.function(step) if compiled else step, []
    for _ in range(steps):
        run()
        seen.append(values_of(trained))
    return seen


def of_center(optimizer: Any, trained: dict[str, Any]) -> Any:
    with optimizer.center():
        return values_of(trained)


def test_numbers_of_diloco() -> None:
    """Two workers with F_i = h_i (x - b_i)²/2; v is frozen after round 2 and thawed after round 3."""

    def job(comm: Communicator) -> tuple[list[float], list[float]]:
        w, v, rank = variable("w", [0.0]), variable("v", [0.0]), comm.rank
        local = keras.optimizers.SGD(0.1)
        optimizer = made(comm, {"w": w, "v": v}, "diloco", local)
        seen: tuple[list[float], list[float]] = ([], [])
        for done in range(1, 6):
            trained = [w] if done == 3 else [w, v]
            for _ in range(PERIOD):
                of_w, of_v = (
                    h[rank] * (x.value - b[rank])
                    for x, h, b in ((w, (0.5, 1.0), (3.0, -1.0)), (v, (1.0, 2.0), (0.5, 2.0)))
                )
                optimizer.apply([of_w, of_v][: len(trained)], trained)
            seen[0].append(w.numpy().item())
            seen[1].append(v.numpy().item())
            if done == 2:
                optimizer.adopt([w])
            elif done == 3:
                optimizer.adopt([w, v])
        assert optimizer.synchronizer.rounds == 5
        return seen

    for w, v in run_ranks(2, job):
        assert w[:4] == pytest.approx([0.104321875, 0.224422972, 0.33928258, 0.433479688], abs=1e-7)
        assert v == pytest.approx([0.7391475, 1.420331637, 1.420331637, 1.442588048, 1.463099129], abs=1e-7)


@pytest.mark.parametrize(("algorithm", "way", "compiled"), covering(ALGORITHMS, WAYS, (False, True), together=1))
def test_the_same_set_right_after_an_exchange_changes_nothing(algorithm: str, way: str, compiled: bool) -> None:
    ranks = 1 if compiled else 2  # Threads of compiled steps would wait for each other.

    def job(comm: Communicator, adopts: bool) -> list[Any]:
        trained = started()
        optimizer = made(comm, trained, algorithm, **WAYS[way])
        seen = train(optimizer, trained, comm.rank, PERIOD, compiled)
        optimizer.synchronizer.sync()
        optimizer.synchronizer.land()
        before = optimizer.synchronizer.rounds
        if adopts:
            listed = [(x.name, x.shape) for x in optimizer.variables]
            optimizer.adopt(list(trained.values()))
            assert [(x.name, x.shape) for x in optimizer.variables] == listed
        assert optimizer.synchronizer.rounds == before
        seen += train(optimizer, trained, comm.rank, 2 * PERIOD, compiled)
        optimizer.finalize()
        return [*seen, of_center(optimizer, trained), optimizer.synchronizer.rounds]

    assert run_ranks(ranks, partial(job, adopts=True)) == run_ranks(ranks, partial(job, adopts=False))


@pytest.mark.parametrize(("algorithm", "way"), covering(ALGORITHMS, ["replicated", "sharded", "average"], together=1))
def test_variables_leave_come_and_stay(algorithm: str, way: str) -> None:
    """What stays trains as if it were alone, and a new optimizer would have the same variables."""

    def job(comm: Communicator, alone: bool) -> dict[str, Any]:
        trained, rank = started(), comm.rank
        w, v, u = trained["w"], trained["v"], variable("u", np.full(3, 1.0 + rank))
        optimizer = made(comm, {"w": w} if alone else {"v": v, "w": w}, algorithm, **WAYS[way])
        seen = train(optimizer, {"w": w} if alone else trained, rank, PERIOD + 1)
        optimizer.adopt([w])
        found: dict[str, Any] = {"left": v.numpy().tolist()}
        seen += train(optimizer, {"w": w}, rank, PERIOD + 2)
        found["frozen"] = v.numpy().tolist()
        now = {"w": w} if alone else {"u": u, "w": w, "v": v}
        optimizer.adopt(list(now.values()))
        found |= {"came": u.numpy().tolist(), "center": of_center(optimizer, now)}
        seen += train(optimizer, now, rank, 2 * PERIOD)
        optimizer.finalize()
        found["end"] = of_center(optimizer, now)
        new = made(LocalCommunicator(), now, algorithm)
        found["shapes"] = [[tuple(x.shape) for x in each.inner.variables] for each in (optimizer, new)]
        return found | {"w": [each["w"] for each in seen], "counters": optimizer.synchronizer.local_steps}

    together, alone = (run_ranks(2, partial(job, alone=each)) for each in (False, True))
    for rank in range(2):
        found = together[rank]
        np.testing.assert_allclose(found["w"], alone[rank]["w"], rtol=1e-12, atol=0)
        assert found["left"] == found["frozen"] == together[0]["left"] == found["center"]["v"]
        assert found["came"] == found["center"]["u"] == [1.0, 1.0, 1.0]
        assert found["end"] == together[0]["end"]
        assert found["counters"] == 4 * PERIOD + 3
        assert found["shapes"][0] == found["shapes"][1]


def in_turn(comm: Communicator, work: Callable[[], Any]) -> None:
    """Let ranks work one after another, so that they push in the same order in every run."""
    for rank in range(comm.size):
        if rank == comm.rank:
            work()
        comm.allgather_object(None, "in turn")


APART: dict[str, dict[str, Any]] = {
    "window": {"asynchronous": True},
    "service": {"asynchronous": True},
    "sharded": {"asynchronous": True, "center": "sharded"},
    "compiled": {"asynchronous": True},
    "quorum": {"quorum": 2, "grace_seconds": 1e3},
}


@pytest.mark.parametrize(("algorithm", "way"), covering(ALGORITHMS, APART, together=1))
def test_after_finalize_where_ranks_are_at_steps_of_their_own(
    algorithm: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays trains as if it were alone, what leaves takes the center, and what comes starts from the root's."""
    monkeypatch.setenv("HVD_PERIODIC_TRANSPORT", "window" if way in ("window", "compiled") else "service")
    compiled = way == "compiled"

    def job(comm: Communicator, alone: bool) -> dict[str, Any]:
        trained, rank = started(), comm.rank
        w, v, u = trained["w"], trained["v"], variable("u", np.full(3, 1.0 + rank))
        first = {"w": w} if alone else {"v": v, "w": w}
        optimizer = made(comm, first, algorithm, **APART[way])
        optimizer._lifecycle.open()

        def take(trained: dict[str, Any], steps: int) -> None:
            if way == "quorum":
                train(optimizer, trained, rank, steps)
            else:
                in_turn(comm, lambda: train(optimizer, trained, rank, steps, compiled))
            optimizer.finalize()

        take(first, 2 * PERIOD)
        found: dict[str, Any] = {"before": [w.numpy().tolist(), of_center(optimizer, first)["w"]]}
        if not alone:
            optimizer.adopt([w])
        found["adopted"] = [w.numpy().tolist(), of_center(optimizer, {"w": w})["w"]]
        found["left"] = v.numpy().tolist()
        take({"w": w}, PERIOD)
        now = {"w": w} if alone else {"u": u, "w": w}
        if not alone:
            optimizer.adopt(list(now.values()))
        found |= {"came": u.numpy().tolist(), "center": of_center(optimizer, now)}
        take(now, 2 * PERIOD)
        pushes = optimizer.synchronizer.state_dict()["pushes"]["pushes"]
        return found | {"end": of_center(optimizer, now), "w": w.numpy().tolist(), "pushes": pushes}

    ranks = 1 if compiled else 3  # Threads of compiled steps would wait for each other.
    together, alone = (run_ranks(ranks, partial(job, alone=each)) for each in (False, True))
    for found, by_itself in zip(together, alone, strict=True):
        assert found["before"] == found["adopted"]
        for key in ("before", "w", "pushes"):
            np.testing.assert_allclose(found[key], by_itself[key], rtol=1e-12, atol=0)
        np.testing.assert_allclose(found["end"]["w"], by_itself["end"]["w"], rtol=1e-12, atol=0)
        assert found["left"] == together[0]["left"]
        assert found["came"] == found["center"]["u"] == [1.0, 1.0, 1.0]
        assert found["end"] == together[0]["end"]


@pytest.mark.parametrize("center", ["replicated", "sharded"])
def test_sets_that_differ_are_an_error_everywhere_and_training_goes_on(center: str) -> None:
    def job(comm: Communicator, tries: bool) -> Any:
        trained = started()
        optimizer = made(comm, trained, "agn", center=center)
        seen, message = train(optimizer, trained, comm.rank, PERIOD), ""
        if tries:
            listed = list(map(id, optimizer.variables))
            with pytest.raises(ValueError, match="All ranks must run the same optimizer") as error:
                optimizer.adopt([trained["w"]] if comm.rank else list(trained.values()))
            message = str(error.value)
            assert list(map(id, optimizer.variables)) == listed
        seen += train(optimizer, trained, comm.rank, 2 * PERIOD)
        return message, seen

    tried, plain = (run_ranks(2, partial(job, tries=each)) for each in (True, False))
    assert tried[0][0] == tried[1][0] != ""
    assert [seen for _, seen in tried] == [seen for _, seen in plain]


def test_a_set_that_is_refused_on_one_rank_is_an_error_everywhere() -> None:
    def job(comm: Communicator) -> None:
        trained = started()
        optimizer = made(comm, trained, "average")
        train(optimizer, trained, comm.rank, PERIOD)
        optimizer.adopt([trained["w"], trained["w"]] if comm.rank else list(trained.values()))

    assert all("A variable must be given once" in message for _, message in errors(2, job))


def network(seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, name="backbone"), keras.layers.Dense(1, name="head")]
    )


def fit(model: Any, epochs: int = 1) -> None:
    x = np.random.default_rng(0).normal(size=(8, 3))
    model.fit(x, x.sum(axis=1), batch_size=2, epochs=epochs, verbose=0, shuffle=False)


LOCAL: dict[str, Callable[[], Any]] = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.01), initial_scale=8.0),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "averages": lambda: keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True, ema_momentum=0.5),
}


@pytest.mark.parametrize(("algorithm", "local", "eager"), covering(["diloco", "agn"], LOCAL, [True, False], together=1))
def test_layers_are_thawed_in_mid_run(algorithm: str, local: str, eager: bool, tmp_path: Path) -> None:
    """The optimizer's state of the head is kept; a model saved afterwards goes on."""
    model = network()
    model.layers[0].trainable = False
    options = {"outer_optimizer": keras.optimizers.Adam(0.01)} if algorithm == "agn" else {}
    optimizer = hvdp.PeriodicOptimizer(
        LOCAL[local](), model, ALGORITHMS[algorithm](), 2, process_set=LocalCommunicator(), **options
    )
    compiled: dict[str, Any] = {"run_eagerly": eager, "jit_compile": False, "auto_scale_loss": False}
    model.compile(optimizer, loss="mse", **compiled)
    fit(model)
    head = [x.numpy().tolist() for x in model.layers[1].weights]
    before = {x.path: x.numpy().tolist() for x in optimizer.variables if "head" in x.path}
    model.layers[0].trainable = True
    with pytest.raises(ValueError, match=r"Unknown variable '.*backbone/kernel'.*call adopt\(\) on all ranks"):
        model.compile(optimizer, loss="mse", **compiled)
        fit(model)
    iterations = int(optimizer.iterations.numpy())
    optimizer.adopt()
    assert [x.numpy().tolist() for x in model.layers[1].weights] == head
    after = {x.path: x.numpy().tolist() for x in optimizer.variables}
    assert before.items() <= after.items()
    assert int(optimizer.iterations.numpy()) == iterations
    frozen = model.layers[0].kernel.numpy().tolist()
    fit(model)
    assert model.layers[0].kernel.numpy().tolist() != frozen
    if not isinstance(optimizer.inner, keras.optimizers.LossScaleOptimizer):
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        loaded.optimizer.attach(loaded, process_set=LocalCommunicator())
        for each in (model, loaded):
            fit(each)
        assert [x.numpy().tolist() for x in loaded.weights] == [x.numpy().tolist() for x in model.weights]


@pytest.mark.parametrize("policy", ["local", "broadcast", "present", "rows"])
def test_a_pattern_may_match_what_is_frozen(policy: str) -> None:
    """When the optimizer is made, or when it adopts, also by one for variables that are not trained."""
    model = network()
    head = model.layers[1]
    head.trainable = False
    optimizer = hvdp.PeriodicOptimizer(
        *(keras.optimizers.SGD(0.01), model, ALGORITHMS["diloco"](), 2),
        process_set=LocalCommunicator(),
        parameters={"*/head/kernel": policy},
        buffers={"*/head/bias": "average"},
    )
    for frozen in (True, False, True, False):
        head.trainable = not frozen
        optimizer.build(model.trainable_variables) if not optimizer.built else optimizer.adopt()
        named = {key: len(names) for key, names in optimizer.synchronizer.replica.by_policy.items()}
        assert named == ({} if frozen else {policy: 1})


def test_a_layer_is_frozen_and_the_step_that_was_compiled_before_is_refused() -> None:
    model = network()
    optimizer = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.01), model, 2, process_set=LocalCommunicator())
    model.compile(optimizer, loss="mse", jit_compile=False)
    fit(model)
    model.layers[0].trainable = False
    optimizer.adopt()
    assert len(optimizer.synchronizer.replica.named.parameters) == 2
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"compiled before adopt\(\).*call model.compile\(\) again"
    ):
        fit(model)
    kernel = model.layers[0].kernel.numpy().tolist()
    model.compile(optimizer, loss="mse", jit_compile=False)
    fit(model)
    assert model.layers[0].kernel.numpy().tolist() == kernel


def test_variables_whose_names_are_alike_keep_theirs() -> None:
    first, second = variable("x", [1.0]), variable("x", [2.0])
    optimizer = made(LocalCommunicator(), {"a": first, "b": second}, "diloco")
    train(optimizer, {"a": first, "b": second}, 0, PERIOD)
    optimizer.adopt([second])
    optimizer.adopt([second, first])
    assert [name for name, _ in optimizer.synchronizer.replica.named.parameters] == ["x_2", "x"]


def test_as_many_variables_as_the_optimizer_has_of_its_own() -> None:
    """Plain SGD has two, its iterations and its rate, and two are trained before and after."""
    a, b, c = (variable(name, [1.0]) for name in "abc")
    inner = keras.optimizers.SGD(0.125)
    optimizer = hvdp.PeriodicOptimizer(inner, None, hvdp.Averaging(), 2, process_set=LocalCommunicator())
    optimizer.build([a, b])
    for before, trained in (([a, b], [c, a]), ([c, a], [b, c])):
        optimizer.apply([tf.ones_like(x.value) for x in before], before)
        done = int(inner.iterations)
        optimizer.adopt(trained)
        assert (float(inner.learning_rate), int(inner.iterations)) == (0.125, done)


def test_a_rate_that_is_set_on_the_outer_optimizer_counts() -> None:
    outer, w = keras.optimizers.SGD(0.5), variable("w", [0.0])
    optimizer = hvdp.AGNOptimizer(
        keras.optimizers.SGD(0.1), None, 1, outer_optimizer=outer, process_set=LocalCommunicator()
    )
    optimizer.build([w])
    optimizer.apply([tf.constant([1.0], tf.float64)], [w])
    assert w.numpy().item() == -0.5
    optimizer.adopt([w])
    outer.learning_rate = 0.25
    optimizer.apply([tf.constant([1.0], tf.float64)], [w])
    assert w.numpy().item() == -0.75


def test_where_it_is_not_available() -> None:
    w, here = variable("w", [0.0]), {"process_set": LocalCommunicator()}
    unbuilt = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), None, 2, **here)
    with pytest.raises(RuntimeError, match="is not built yet"):
        unbuilt.adopt([w])
    unbuilt.build([w])
    with pytest.raises(ValueError, match=r"adopt\(\) needs the variables"):
        unbuilt.adopt()
    with unbuilt.center(), pytest.raises(RuntimeError, match=r"adopt\(\) inside the center\(\) block"):
        unbuilt.adopt([w])
    inside = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), None, 2, **here)
    nested = hvdp.ModelAverageOptimizer(inside, None, 4, **here)
    nested.build([w])
    with pytest.raises(RuntimeError, match=r"adopt\(\) is not available for several levels"):
        nested.adopt([w])
    alone = hvdp.ElasticAverageOptimizer(keras.optimizers.SGD(0.1), None, 2, asynchronous=True, **here)
    alone.build([w])
    with pytest.raises(
        RuntimeError, match=r"adopt\(\) is not available before finalize\(\) in asynchronous training or with"
    ):
        alone.adopt([w])
