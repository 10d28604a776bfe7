"""What of a Keras job is kept while ranks come and go, and what cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.comm import selection  # noqa: E402
from hvd_periodic.comm.collective_tracker import CollectiveTracker  # noqa: E402
from hvd_periodic.tensorflow.communicator import as_elastic_jobs_heed  # noqa: E402
from hvd_periodic.tensorflow.host_values import HostValues  # noqa: E402
from hvd_periodic.tensorflow.hosted import hosted  # noqa: E402


def network() -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.BatchNormalization()])


def optimizer(model: Any, inner: Any = None, **options: Any) -> Any:
    inner = inner or keras.optimizers.SGD(0.1)
    return hvdp.PeriodicOptimizer(inner, model, hvdp.EASGD, 2, process_set=LocalCommunicator(), **options)


class Changing(LocalCommunicator):
    """One rank of a job whose ranks may change."""

    elastic = True
    process_set = hvd.global_process_set
    now: str | None = None

    def changed(self) -> str | None:
        return self.now


@pytest.mark.parametrize("nested", [False, True])
def test_optimizers_whose_ranks_cannot_change(nested: bool) -> None:
    message = "exchanges over one process, whose ranks cannot change"
    model = network()
    made = optimizer(model)
    made = optimizer(model, made) if nested else made
    with pytest.raises(ValueError, match=f"`optimizer` .*{message}"):
        hvdp.elastic.State(model, made)
    with pytest.raises(ValueError, match=f"`other` .*{message}"):
        hvdp.elastic.State(model, keras.optimizers.SGD(0.1), other=made)


def test_when_to_commit() -> None:
    model, plain = network(), keras.optimizers.SGD(0.1)
    with pytest.raises(ValueError, match=r"`commit` must be 'call' or 'exchange'\. Received: 'sometimes'"):
        hvdp.elastic.State(model, plain, commit="sometimes")
    with pytest.raises(ValueError, match=r"commit='exchange' needs an optimizer of hvd_periodic\.tensorflow"):
        hvdp.elastic.State(model, plain, commit="exchange")


def test_a_model_without_variables() -> None:
    with pytest.raises(ValueError, match="The model is not built"):
        hvdp.elastic.State(keras.Sequential([keras.layers.Dense(1)]))


def test_everything_with_a_state_is_kept() -> None:
    model, plain = network(), keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(plain)
    counter = tf.Variable(1)
    state = hvdp.elastic.State(model, counter=counter, epoch=3)
    assert state.optimizer is plain
    gradients = [tf.ones(variable.shape) for variable in model.trainable_variables]
    plain.apply(gradients)
    state.save()
    kept = [np.array(variable) for variable in [*model.weights, *plain.variables]]
    plain.apply(gradients)
    plain.learning_rate = 0.05
    model.layers[-1].moving_mean.assign([7.0])
    counter.assign(2)
    state.epoch = 4
    state.reset()
    found = [np.array(variable) for variable in [*model.weights, *plain.variables]]
    assert all(np.array_equal(a, b) for a, b in zip(found, kept, strict=True))
    assert (int(counter), state.epoch) == (1, 3)


@pytest.mark.parametrize("compiled", [False, True])
def test_every_exchange_is_a_commit(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    inner = keras.optimizers.SGD(0.1)
    made = hvdp.PeriodicOptimizer(inner, model, hvdp.EASGD, 2, process_set=Changing())
    state = hvdp.elastic.State(model, made, commit="exchange", batch=0)
    monkeypatch.setattr(state, "check_host_updates", lambda: None)
    ones = [tf.ones(variable.shape) for variable in model.trainable_variables]
    seen = []

    def descend() -> None:
        made.apply(ones)

    step = tf.function(descend) if compiled else descend
    for state.batch in range(5):
        step()
        newest = state.commits.held.get(max(state.commits.held, default=-1))
        seen.append(None if newest is None else newest.objects["batch"])
        if state.batch in (1, 3):
            assert all(map(np.array_equal, newest.states["model"], [np.array(v) for v in model.weights]))
    assert seen == [None, 1, 1, 3, 3]
    assert sorted(state.commits.held) == [0, 1]


def test_callbacks_of_horovod_commit_in_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Horovod's examples: the optimizer is there before its model is built, and scales the loss."""
    from horovod.tensorflow.keras import elastic

    model = keras.Sequential([keras.layers.Dense(1)])
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1))
    made = hvdp.PeriodicOptimizer(inner, model, hvdp.EASGD, 3, process_set=Changing())
    model.compile(made, loss="mse", jit_compile=False, auto_scale_loss=False)
    model.build((None, 2))
    state = hvdp.elastic.State(model, batch=0, epoch=0)
    monkeypatch.setattr(state, "check_host_updates", lambda: None)
    commit = elastic.CommitStateCallback(state, batches_per_commit=2)
    callbacks = [elastic.UpdateEpochStateCallback(state), elastic.UpdateBatchStateCallback(state), commit]
    data = np.ones((5, 2)), np.ones((5, 1))
    model.fit(*data, batch_size=1, epochs=2, callbacks=callbacks, verbose=0)
    held = {number: (kept.objects["epoch"], kept.objects["batch"]) for number, kept in state.commits.held.items()}
    assert held == {5: (1, 4), 6: (2, 0)}
    model.fit(*data, batch_size=1, callbacks=callbacks[:2], verbose=0)
    made.learning_rate.assign(0.3)
    monkeypatch.setattr("hvd_periodic.tensorflow.graph.communicator_of", lambda _: Changing())
    state.reset()
    assert (made.synchronizer.local_steps, int(made.iterations), state.epoch, state.batch) == (10, 10, 2, 0)
    assert float(inner.inner_optimizer.learning_rate) == pytest.approx(0.1)


@pytest.mark.parametrize("loop", ["eager", "compiled", "fit"])
def test_ranks_that_change_without_a_state(loop: str) -> None:
    ranks, model = Changing(), network()
    made = hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), model, 2, process_set=ranks)
    model.compile(made, loss="mse", jit_compile=False)
    ones = [tf.ones(variable.shape) for variable in model.trainable_variables]

    def descend() -> None:
        made.apply(ones)

    step = {"eager": descend, "compiled": tf.function(descend)}.get(loop)
    if step is None:
        data = np.ones((1, 2)), np.ones((1, 1))

        def step() -> None:
            model.fit(*data, verbose=0)

    for _ in range(2):
        step()
    ranks.now = "Other ranks"
    with pytest.raises((RuntimeError, tf.errors.InvalidArgumentError), match="Other ranks"):
        for _ in range(2):
            step()


@pytest.mark.parametrize("ranks", [Changing(), LocalCommunicator()])
def test_an_optimizer_that_was_loaded(ranks: LocalCommunicator, tmp_path: Any) -> None:
    model = network()
    model.compile(optimizer(model), jit_compile=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.optimizer.attach(loaded, process_set=ranks)
    if ranks.elastic:
        assert hvdp.elastic.State(loaded).optimizer is loaded.optimizer
        return
    with pytest.raises(ValueError, match="`optimizer` exchanges over one process, whose ranks cannot change"):
        hvdp.elastic.State(loaded)


def test_errors_of_python_in_a_compiled_step() -> None:
    """hvd.elastic.run heeds an UnknownError only if it names a collective, and else ends as if all was done."""
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

    def raising(error: Exception) -> Any:
        def run() -> None:
            raise error

        return tf.function(hosted(as_elastic_jobs_heed(run), HostValues(), []))

    for error in (HostsUpdatedInterrupt(skip_sync=True), HorovodInternalError("lost")):
        with pytest.raises(tf.errors.UnknownError, match="HorovodAllreduce"):
            raising(error)()
    for error in (RuntimeError("No way"), ValueError("No way"), KeyError("No way")):
        with pytest.raises(tf.errors.InvalidArgumentError, match="No way"):
            raising(error)()


def test_a_rank_alone_meets_nobody_until_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def meets(*_: Any) -> None:
        raise AssertionError("It met")

    ranks, model = Changing(), network()
    monkeypatch.setattr(Changing, "allgather_object", meets)
    monkeypatch.setattr(Changing, "gather_integers", meets)
    made = hvdp.PeriodicOptimizer(keras.optimizers.SGD(0.1), model, hvdp.EASGD, 2, process_set=ranks)
    hvdp.Synchronizer(model, hvdp.EASGD, 2, process_set=ranks)
    with pytest.raises(AssertionError, match="It met"):
        made.apply([tf.ones(variable.shape) for variable in model.trainable_variables])


@pytest.fixture
def at_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendezvous that is not there."""
    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "here:29400")
    monkeypatch.delenv("HVD_PERIODIC_RANKS", raising=False)


@pytest.mark.usefixtures("at_rendezvous")
def test_training_outside_of_run() -> None:
    pytest.importorskip("torch")
    model = network()
    made = hvdp.PeriodicOptimizer(keras.optimizers.SGD(0.1), model, hvdp.EASGD, 2, root_rank=1)
    state = hvdp.elastic.State(model, made, commit="exchange", min_ranks=2)
    assert str(state.fingerprint["`optimizer`: algorithm"]).startswith("EASGD(")
    message = "this process has not joined the other ranks: put model and optimizer into"
    with pytest.raises(RuntimeError, match=message):
        made.apply([tf.ones(variable.shape) for variable in model.trainable_variables])
    with pytest.raises(RuntimeError, match=message):
        hvdp.Synchronizer(network(), hvdp.EASGD, 2).step()


@pytest.mark.usefixtures("at_rendezvous")
def test_a_set_of_ranks_at_a_rendezvous() -> None:
    with pytest.raises(ValueError, match="so that all ranks exchange with each other, and the ranks change: leave out"):
        hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), network(), 2, process_set=hvdp.node_ranks)


@pytest.mark.usefixtures("at_rendezvous")
def test_a_rendezvous_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="but PyTorch is not installed: pip install torch"):
        hvdp.elastic.State(network())


def test_numbers_without_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVD_PERIODIC_RENDEZVOUS", raising=False)
    with pytest.raises(ValueError, match="are for jobs at a rendezvous, and HVD_PERIODIC_RENDEZVOUS is not set"):
        hvdp.elastic.State(network(), max_ranks=2)


@pytest.mark.usefixtures("at_rendezvous")
def test_the_longest_wait_holds_for_all_ranks_that_come() -> None:
    """Also for those that replace the first ones."""
    pytest.importorskip("torch")
    model = network()
    made = hvdp.PeriodicOptimizer(keras.optimizers.SGD(0.1), model, hvdp.EASGD, 2, timeout_seconds=7.0)
    hvdp.elastic.State(model, made)
    for name in ("first", "second"):
        ranks = Changing()
        ranks.tracker = CollectiveTracker(name, 0, [0])
        made.synchronizer.join(ranks, 0, name)
        assert ranks.tracker.timeout == 7.0


@pytest.mark.parametrize("center", ["replicated", "root"])
def test_an_optimizer_that_was_loaded_at_a_rendezvous(
    center: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    pytest.importorskip("torch")
    model = network()
    model.compile(optimizer(model, center=center), jit_compile=False)
    model.save(tmp_path / "model.keras")
    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "here:29400")
    if center == "replicated":
        loaded = keras.models.load_model(tmp_path / "model.keras")
        loaded.optimizer.attach(loaded)
        assert hvdp.elastic.State(loaded).optimizer is loaded.optimizer
        return
    with pytest.raises(RuntimeError, match="the ranks of an elastic job are not known before it has begun"):
        loaded = keras.models.load_model(tmp_path / "model.keras")
        loaded.optimizer.attach(loaded)
