"""Weights of a Keras model that are not trained: which policy each has, by name, pattern and function. One process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.covering import covering

pytest.importorskip("horovod.tensorflow")
keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402

pytestmark = pytest.mark.timeout(90)


class Queued(keras.Model):  # type: ignore[misc]
    """A queue of features with its place, statistics, a seed, a frozen network, and layers with variables of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        )
        self.copy = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, use_bias=False)], name="copy")
        self.copy.trainable = False
        self.queue = keras.Variable(np.ones((4, 2), "float32"), trainable=False, name="feature_queue")
        self.place = keras.Variable(0, trainable=False, name="place", dtype="int64")
        self.normed = keras.layers.SpectralNormalization(keras.layers.Dense(2))
        self.normed.build((None, 2))
        self.build((None, 3))

    def build(self, input_shape: Any) -> None:
        """Nothing is left to build."""
        self.built = True

    def call(self, inputs: Any) -> Any:
        """Return features."""
        return self.normed(self.encoder(inputs))


def wrap(model: Any, buffers: Any = None, **options: Any) -> Any:
    inner = keras.optimizers.SGD(0.1)
    return hvdp.ModelAverageOptimizer(inner, model, 2, buffers=buffers, process_set=LocalCommunicator(), **options)


def roles(optimizer: Any) -> dict[str, str]:
    """Return the role of every weight that is not trained, by the last part of its name."""
    named = optimizer.synchronizer.replica.named
    found = ("averaged", "counted", "followed", "constants")
    return {name.rpartition("/")[2]: role for role in found for name, _ in getattr(named, role)}


WEIGHTS = ("moving_mean", "moving_variance", "feature_queue", "place", "vector_u", "kernel")

A, M, B, C = "averaged", "counted", "followed", "constants"

CASES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "default": (None, (A, A, C, M, C, C)),
    "average": ("average", (A, A, A, M, A, C)),
    "maximum": ("maximum", (M, M, M, M, M, C)),
    "broadcast": ("broadcast", (B, B, B, B, B, C)),
    "local": ("local", (C, C, C, C, C, C)),
    "patterns": ({"*_queue": "broadcast", "place": "broadcast", "copy/*": "average"}, (A, A, B, B, C, A)),
    "the first pattern counts": ({"*moving_mean": "maximum", "*": "local"}, (M, C, C, C, C, C)),
    "function": (lambda path, variable: "average" if variable.dtype == "int64" else None, (A, A, C, M, C, C)),
}


@pytest.mark.parametrize("case", CASES)
def test_policies(case: str) -> None:
    buffers, expected = CASES[case]
    found = roles(wrap(Queued(), buffers))
    assert tuple(found[name] for name in WEIGHTS) == expected


@pytest.mark.parametrize("compiled", [False, True])
def test_the_center_holds_what_was_exchanged(compiled: bool) -> None:
    model = Queued()
    optimizer = wrap(model, {"feature_queue": "broadcast", "place": "broadcast"})
    model.queue.assign(np.full((4, 2), 0.5, "float32"))
    model.place.assign(3)

    def step() -> None:
        optimizer.apply([tf.zeros(v.shape) for v in model.trainable_variables], model.trainable_variables)

    run = tf.function(step) if compiled else step
    run()
    run()
    model.queue.assign(np.zeros((4, 2), "float32"))
    with optimizer.center():
        assert (model.queue.numpy() == 0.5).all()
        assert model.place.numpy() == 3
    assert not model.queue.numpy().any()


def test_a_queue_of_the_root_has_to_be_finite() -> None:
    model = Queued()
    optimizer = wrap(model, {"feature_queue": "broadcast", "place": "broadcast"})
    model.queue.assign(np.full((4, 2), np.nan, "float32"))
    gradients = [tf.zeros(v.shape) for v in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    with pytest.raises(RuntimeError, match="buffer 'feature_queue' of the root is not finite at step 2"):
        optimizer.apply(gradients, model.trainable_variables)


@keras.saving.register_keras_serializable("test_keras_buffers")
def all_local(path: str, variable: Any) -> str:
    return "local"


@pytest.mark.parametrize("buffers", [{"*queue": "broadcast"}, all_local], ids=["patterns", "function"])
def test_policies_are_part_of_the_configuration(buffers: Any) -> None:
    config = wrap(Queued(), buffers).get_config()
    loaded = hvdp.ModelAverageOptimizer.from_config(config)
    assert loaded._lifecycle.spec.options["buffers"] == buffers


@pytest.mark.parametrize(
    ("buffers", "error", "message"),
    [
        ({"queue": "local"}, ValueError, "matches no buffer: 'queue'. There are feature_queue, place, "),
        ({"*queue": "mean"}, ValueError, r"`buffers\['\*queue'\]` must be one of"),
        (lambda path, variable: 3, ValueError, r"must be one of .* Received: buffers\('feature_queue', ...\)=3"),
        (3, TypeError, "must be one of .* Received: int"),
    ],
)
def test_refused(buffers: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wrap(Queued(), buffers)


@pytest.mark.parametrize("buffers", ["average", {"*": "local"}])
def test_a_model_is_needed(buffers: Any) -> None:
    with pytest.raises(ValueError, match=r"`buffers=.*` needs the model, which knows its statistics"):
        wrap(None, buffers)


def trained(optimizer: Any, model: Any) -> None:
    for value in (1.0, 2.0, 3.0):
        model.encoder.layers[1].moving_mean.assign([value, -value])
        optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)


def test_a_state_in_which_all_variables_were_averaged() -> None:
    """Version 0.1 averaged all that layers made as not trainable, as ``"average"`` does; its states load."""
    keras.utils.set_random_seed(1)
    before, after = Queued(), Queued()
    old, new = wrap(before, "average"), wrap(after)
    trained(old, before)
    state = old.synchronizer.state_dict()
    names = [name for name, _ in new.synchronizer.replica.named.averaged]
    saved = state["vectors"]["buffers"]["center"]
    of_old = dict(zip((n for n, _ in old.synchronizer.replica.named.averaged), saved.values(), strict=True))
    kept = {name: value for name, value in of_old.items() if "moving" in name}
    new.synchronizer.load_state_dict(state | {"vectors": _renamed(state["vectors"], new)})
    found = new.synchronizer.state_dict()["vectors"]["buffers"]["center"]
    assert list(found) == names
    assert [value.tolist() for value in found.values()] == [value.tolist() for value in kept.values()]
    assert next(iter(found.values())).tolist() == [2.0, -2.0]


def _renamed(vectors: Any, optimizer: Any) -> Any:
    """Return vectors with the names that parameters have now: Keras numbers layers."""
    names = [name for name, _ in optimizer.synchronizer.replica.named.parameters]
    parameters = {key: dict(zip(names, v.values(), strict=True)) for key, v in vectors["parameters"].items()}
    return vectors | {"parameters": parameters}


def spectral() -> Any:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((2,))
    normed = keras.layers.SpectralNormalization(keras.layers.Dense(2))(inputs)
    return keras.Model(inputs, keras.layers.BatchNormalization()(normed))


def test_a_file_in_which_all_variables_were_averaged(tmp_path: Path) -> None:
    model = spectral()
    optimizer = wrap(model, "average")
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.arange(16.0).reshape(8, 2)
    model.fit(x, x, batch_size=2, verbose=0)
    optimizer._lifecycle.spec.options["buffers"] = None  # as in the file of version 0.1
    model.save(tmp_path / "model.keras")
    with optimizer.center():
        expected = [variable.numpy() for variable in model.non_trainable_variables if "moving" in variable.path]
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.optimizer.attach(loaded, process_set=LocalCommunicator())
    found = loaded.optimizer.synchronizer.tensor_groups.statistics[0].center.tensors()
    assert [variable.numpy().tolist() for variable in found] == [value.tolist() for value in expected]


POLICIES = [None, "average", "maximum", "broadcast", "local", {"*_queue": "average"}, {"*": "local"}]
CHANGED = [
    ("local", "average"),
    ("average", "local"),
    ("average", "maximum"),
    ("average", "average"),
    (None, "average"),
]
"""Exchanged only now, no longer, in another way, and as before."""


@pytest.mark.parametrize(("saved", "loaded"), covering(POLICIES, POLICIES, together=1, always=CHANGED), ids=str)
def test_a_state_is_loaded_under_another_policy(saved: Any, loaded: Any) -> None:
    """Weights that are exchanged only now start from what they are; those that were, and are, from what was saved."""
    model = Queued()
    state = wrap(model, saved).synchronizer.state_dict()
    mean = state["vectors"].get("buffers", {"center": {}})["center"]
    for name in mean:
        mean[name] = np.full_like(mean[name], 0.25)
    optimizer = wrap(model, loaded)
    optimizer.synchronizer.load_state_dict(state)
    group = next((each for each in optimizer.synchronizer.tensor_groups if each.name == "buffers"), None)
    for spec, center in zip(group.values.layout.specs, group.center.tensors(), strict=True) if group else []:
        assert (center.numpy() == 0.25).all() == (spec.name in mean), spec.name
