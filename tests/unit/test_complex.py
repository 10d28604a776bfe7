"""Complex parameters on numpy: what is exchanged is what pairs of reals exchange, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_periodic import AGN, BMUF, EASGD, Algorithm, Averaging, Communicator, Compression, DiLoCo, SlowMo
from hvd_periodic.numpy import SGD, ModelAverageOptimizer, PeriodicOptimizer
from hvd_periodic.numpy.complex_numbers import as_complex, as_real
from tests.covering import covering
from tests.helpers import Array, errors, run_ranks

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "easgd": lambda: EASGD(0.25, rho=0.5),
    "average": Averaging,
    "agn": AGN,
    "agn, average": lambda: AGN("average"),
    "diloco": DiLoCo,
    "slowmo": SlowMo,
    "bmuf": BMUF,
}
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "overlap": {"overlap": 1},
    "int8": {"compression": Compression.int8},
    "top k": {"compression": Compression.topk(0.2)},
    "chunks": {"compression": Compression.topk(chunk=4, keep=1)},
    **{wire: {"compression": getattr(Compression, wire)} for wire in ("fp16", "bf16", "int4", "e3m0", "int2")},
    "fragments": {"fragments": 2},
    "state": {"optimizer_state": "average"},
    "skip": {"nonfinite": "skip"},
    "from the root": {"parameters": {"w": "broadcast"}},
}
STEPS, PERIOD = 7, 2

Model = dict[str, Array]


def pairs(dtype: str = "float32") -> Model:
    """Return a model of reals, of which all but ``x`` stand for complex numbers, one of them not contiguous."""
    w, v = np.array([[1.0, -2.0], [0.5, 4.0], [3.0, 0.25]], dtype), np.array([-1.0, 0.75], dtype)
    wide = np.arange(12, dtype=dtype).reshape(2, 3, 2)
    return {"w": w, "x": np.array([1.0, -1.0, 2.0], dtype), "wide": wide.transpose(1, 0, 2), "v": v}


def as_numbers(model: Model) -> Model:
    """Return the model with complex parameters in place of pairs."""
    numbers = {name: x if name == "x" else as_complex(x) for name, x in model.items()}
    assert np.iscomplexobj(numbers["wide"])
    assert not numbers["wide"].flags.c_contiguous
    return numbers


def trained(model: Model, communicator: Communicator, algorithm: str, steps: int = STEPS, **options: Any) -> Any:
    """Return the optimizer and, as pairs, the values after each step, and those of the center at the end."""
    local = SGD(0.125, momentum=0.5)
    optimizer = PeriodicOptimizer(local, model, ALGORITHMS[algorithm](), PERIOD, process_set=communicator, **options)
    seen = descend(model, optimizer, communicator.rank, steps)
    with optimizer.center():
        seen.append([as_real(x).tolist() for x in model.values()])
    return optimizer, seen


def descend(model: Model, optimizer: PeriodicOptimizer, rank: int, steps: int) -> list[Any]:
    """Descend on ½ h ‖x − b‖², with curvature and minimum of the rank's own."""
    seen = []
    for _ in range(steps):
        gradients = {name: (0.5 + 0.25 * rank) * (as_real(x) - (1.5 - rank)) for name, x in model.items()}
        optimizer.step({name: as_complex(g) if np.iscomplexobj(model[name]) else g for name, g in gradients.items()})
        seen.append([as_real(x).tolist() for x in model.values()])
    return seen


@pytest.mark.parametrize(("algorithm", "way"), covering(ALGORITHMS, WAYS, together=1))
def test_pairs_are_exchanged(algorithm: str, way: str) -> None:
    def work(communicator: Communicator, of_complex: bool) -> Any:
        model = as_numbers(pairs()) if of_complex else pairs()
        optimizer, seen = trained(model, communicator, algorithm, **WAYS[way])
        return seen, optimizer.synchronizer.distance()

    found, expected = (run_ranks(3, lambda c, kind=kind: work(c, kind)) for kind in (True, False))  # type: ignore[misc]
    assert found == expected


def test_numbers_worked_out_by_hand() -> None:
    def work(communicator: Communicator) -> list[complex]:
        w = np.zeros(1, np.complex64)
        optimizer = PeriodicOptimizer(SGD(1.0), {"w": w}, EASGD(0.25), 1, process_set=communicator)
        centers = []
        for _ in range(3):
            optimizer.step([np.array([-1 - 2j if communicator.rank == 0 else 3 - 1j], np.complex64)])
            with optimizer.center():
                assert w.dtype == np.complex64
                centers.append(complex(w[0]))
        return centers

    assert run_ranks(2, work) == [[-0.5 + 0.75j, -1.125 + 1.6875j, -1.78125 + 2.671875j]] * 2


@pytest.mark.parametrize("center", ["replicated", "sharded"])
@pytest.mark.parametrize("algorithm", ["easgd", "agn", "diloco"])
def test_training_resumes_to_the_bit(algorithm: str, center: str) -> None:
    def work(communicator: Communicator) -> Any:
        model = as_numbers(pairs("float64"))
        optimizer, _ = trained(model, communicator, algorithm, 3, center=center)
        state, local, values = copy.deepcopy((optimizer.synchronizer.state_dict(), optimizer.inner, model))
        expected = descend(model, optimizer, communicator.rank, 5)
        restored = PeriodicOptimizer(
            SGD(0.125, momentum=0.5), model, ALGORITHMS[algorithm](), PERIOD, process_set=communicator, center=center
        )
        restored.inner.velocities = local.velocities
        restored.synchronizer.load_state_dict(state)
        for name, x in model.items():
            x[...] = values[name]
        return expected, descend(model, restored, communicator.rank, 5)

    for expected, found in run_ranks(2, work):
        assert found == expected


def test_a_complex_state_loads_only_into_complex_parameters() -> None:
    kinds = {"complex": as_numbers(pairs()), "real": pairs()}
    made = {kind: ModelAverageOptimizer(SGD(1.0), model, 2).synchronizer for kind, model in kinds.items()}
    for here, there in (("real", "complex"), ("complex", "real")):
        message = rf"saved with 'v' as a {there} parameter, and it is a {here} one here"
        with pytest.raises(ValueError, match=message):
            made[here].load_state_dict(made[there].state_dict())


def test_ranks_that_disagree() -> None:
    def work(communicator: Communicator) -> None:
        trained(as_numbers(pairs()) if communicator.rank else pairs(), communicator, "average")

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert "w float32[3, 2]" in message
        assert "w complex64[3]" in message


def test_asynchronous_exchange() -> None:
    """One rank, whose exchanges are those of one worker with the center."""

    def work(communicator: Communicator, of_complex: bool) -> Any:
        model = as_numbers(pairs()) if of_complex else pairs()
        return trained(model, communicator, "easgd", asynchronous=True)[1]

    assert run_ranks(1, lambda c: work(c, True)) == run_ranks(1, lambda c: work(c, False))


def test_the_center_s_optimizer_takes_over_momentum() -> None:
    """A copy of an optimizer that has stepped has its velocities as pairs."""

    def work(communicator: Communicator, of_complex: bool) -> Any:
        model = as_numbers(pairs()) if of_complex else pairs()
        used = SGD(0.125, momentum=0.5)
        used.step(list(model.values()), list(model.values()))
        optimizer = PeriodicOptimizer(
            SGD(0.1), model, AGN(), PERIOD, outer_optimizer=used, process_set=communicator, fragments=2
        )
        return descend(model, optimizer, communicator.rank, STEPS)

    found, expected = (run_ranks(2, lambda c, kind=kind: work(c, kind)) for kind in (True, False))  # type: ignore[misc]
    assert found == expected


@pytest.mark.parametrize("gradient", [np.ones(2, np.float32), 1j])
def test_gradients_are_complex_where_parameters_are(gradient: Any) -> None:
    optimizer = ModelAverageOptimizer(SGD(1.0), {"w": np.zeros(2, np.complex64)}, 2)
    with pytest.raises(TypeError, match=r"The gradient of 'w' must be a numpy array of complex numbers"):
        optimizer.step([gradient])


def test_scalars() -> None:
    w = np.zeros((), np.complex128)
    optimizer = PeriodicOptimizer(SGD(1.0), {"w": w}, AGN(), 1)
    optimizer.step([np.complex128(-1 - 2j)])
    assert w == 1 + 2j
