"""Copies of Keras optimizers, and what is of another Keras. One process."""

from __future__ import annotations

import copy
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow")
keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.tensorflow import rank_binding  # noqa: E402
from hvd_periodic.tensorflow.rank_binding import RankBinding  # noqa: E402
from tests.unit.test_keras_optimizer import descend, parameter, wrap  # noqa: E402

pytestmark = pytest.mark.timeout(90)

COPIES: dict[str, Any] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "config": lambda optimizer: type(optimizer).from_config(optimizer.get_config()),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", ["easgd_rho", "agn"])
def test_a_copy_trains_like_a_new_optimizer_and_leaves_the_original_alone(way: str, name: str) -> None:
    def make() -> Any:
        return wrap(name, keras.optimizers.SGD(0.1, momentum=0.5), period=3)

    expected = descend(make(), parameter(), 7)
    original, trained = make(), parameter()
    descend(original, trained, 5)
    before = [trained.numpy().tolist(), original.synchronizer.counters, original.inner.iterations.numpy()]
    made = COPIES[way](original)
    if way in ("pickle", "config"):
        made.attach(process_set=LocalCommunicator())
    assert descend(made, parameter(), 7) == expected
    assert made.synchronizer.rounds == 2
    assert before == [
        trained.numpy().tolist(),
        original.synchronizer.counters,
        original.inner.iterations.numpy(),
    ]


def test_a_copy_of_optimizers_in_one_another() -> None:
    made = copy.deepcopy(wrap("average", wrap("average", keras.optimizers.SGD(1.0), period=1), period=2))
    descend(made, parameter(), 4)
    assert (made.inner.synchronizer.rounds, made.synchronizer.rounds) == (4, 2)


def of_tf_keras(kind: str) -> Any:
    """Return something that tells where it comes from as a class of tf_keras does."""
    return type(kind, (), {"__module__": "tf_keras.src.somewhere"})()


@pytest.mark.parametrize("inherited", [False, True])
def test_what_is_of_keras_2_is_named(inherited: bool) -> None:
    sgd, model = of_tf_keras("SGD"), of_tf_keras("Sequential")
    if inherited:
        sgd, model = type("Own", (type(sgd),), {})(), type("Own", (type(model),), {})()
    said = r" of tf_keras, which is Keras 2\..*unset the environment variable TF_USE_LEGACY_KERAS"
    plain = keras.optimizers.SGD(0.1)
    for use in (
        lambda: wrap("average", sgd),
        lambda: wrap("average", plain, model),
        lambda: hvdp.AGNOptimizer(plain, None, 2, sgd, process_set=LocalCommunicator()),
        lambda: hvdp.Synchronizer(model, hvdp.Averaging(), 2, process_set=LocalCommunicator()),
        lambda: hvdp.save("nowhere", model, wrap("average", plain)),
    ):
        with pytest.raises(TypeError, match=said):
            use()


def test_a_file_of_another_number_of_fragments(tmp_path: Any) -> None:
    def make(fragments: int) -> Any:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(2)])
        model.compile(wrap("easgd", keras.optimizers.SGD(0.1), model, fragments=fragments), loss="mse")
        return model

    model = make(2)
    model.fit(np.ones((8, 3)), np.ones((8, 2)), 1, verbose=0)
    model.save_weights(tmp_path / "two.weights.h5")
    make(2).load_weights(tmp_path / "two.weights.h5")
    for fragments in (1, 3):
        said = rf"another number of fragments: 2 in the file, {fragments} here\. Pass fragments=2"
        with pytest.raises(ValueError, match=said):
            make(fragments).load_weights(tmp_path / "two.weights.h5")


@pytest.mark.parametrize("options", [{"compression": hvdp.Compression.int8}, {"center": "root"}])
def test_a_file_that_needs_to_know_the_ranks(
    options: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Horovod is not initialized in one of several processes, whatever other tests of this process have done."""
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setattr("horovod.tensorflow.is_initialized", lambda: False)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(wrap("easgd", keras.optimizers.SGD(0.1), model, **options), loss="mse")
    model.save(tmp_path / "model.keras")
    with pytest.raises(RuntimeError, match=r"call hvd\.init\(\) before the file is loaded, or load it with compile=F"):
        loaded = keras.models.load_model(tmp_path / "model.keras")
        loaded.optimizer.attach(loaded)
    assert keras.models.load_model(tmp_path / "model.keras", compile=False).built


def test_ranks_that_a_function_returned_are_known_after_horovod_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved names them; nobody can be asked any more."""
    initialized = [True]
    horovod = SimpleNamespace(is_initialized=lambda: initialized[0])
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", horovod)
    monkeypatch.setattr(rank_binding, "communicator_of", lambda _: LocalCommunicator())
    binding = RankBinding(lambda: [0] if horovod.is_initialized() else pytest.fail("asked"))
    assert binding.config()["process_set"] == [0]
    initialized[:] = [False]
    assert binding.config()["process_set"] == [0]


def test_a_file_that_does_not_fit_is_refused_at_every_use(tmp_path: Any) -> None:
    """Training would go on from nothing after the first error, were that forgotten."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    optimizer = hvdp.ElasticAverageOptimizer(keras.optimizers.SGD(0.1), model, 2, process_set=LocalCommunicator())
    model.compile(optimizer, loss="mse", jit_compile=False)
    x = np.ones((8, 4))
    model.fit(x, x[:, :3], batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    misfit = r"The saved state is of another optimizer or model; .* call optimizer\.attach"
    with pytest.raises(ValueError, match=misfit):  # Without the model, whose statistics are exchanged.
        loaded.optimizer.attach(process_set=LocalCommunicator())
    for _ in range(2):
        with pytest.raises(ValueError, match=misfit):
            loaded.fit(x, x[:, :3], batch_size=4, verbose=0)
