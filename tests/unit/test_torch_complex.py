"""Complex parameters in PyTorch: pairs of reals are exchanged, to the bit, as on numpy (``test_complex.py``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.comm.threads import run  # noqa: E402
from tests.covering import covering  # noqa: E402
from tests.helpers import errors  # noqa: E402

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "easgd": lambda: hvdp.EASGD(0.25, rho=0.5),
    "average": hvdp.Averaging,
    "agn": hvdp.AGN,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": hvdp.BMUF,
}
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "host": {"center_device": "cpu"},
    "overlap": {"overlap": 1},
    "int8": {"compression": hvdp.Compression.int8},
    "top k": {"compression": hvdp.Compression.topk(0.2)},
    "chunks": {"compression": hvdp.Compression.topk(chunk=4, keep=1)},
    **{wire: {"compression": getattr(hvdp.Compression, wire)} for wire in ("fp16", "bf16", "int4", "e3m0", "int2")},
    "fragments": {"fragments": 2},
    "average": {"optimizer_state": "average"},
    "reset": {"optimizer_state": "reset"},
    "skip": {"nonfinite": "skip"},
    "from the root": {"parameters": {"w": "broadcast"}},
}
STEPS, PERIOD = 7, 2


def model_of(of_complex: bool, dtype: Any = torch.float32) -> Any:
    """Return a model of one real parameter, and three of complex numbers or of pairs; one is not contiguous."""
    made = torch.nn.Module()
    w, v = torch.tensor([[1.0, -2.0], [0.5, 4.0], [3.0, 0.25]]), torch.tensor([-1.0, 0.75])
    wide = torch.arange(12.0).reshape(2, 3, 2).transpose(0, 1)
    for name, pairs in {"w": w, "wide": wide, "v": v}.items():
        pairs = pairs.to(dtype)
        setattr(made, name, torch.nn.Parameter(torch.view_as_complex(pairs) if of_complex else pairs))
    made.x = torch.nn.Parameter(torch.tensor([1.0, -1.0, 2.0], dtype=dtype))
    return made


def real(tensor: Any) -> Any:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.125)


def wrapped(model: Any, communicator: Any, algorithm: str, local: Callable[[Any], Any] = adam, **options: Any) -> Any:
    return hvdp.PeriodicOptimizer(
        local(model), model, ALGORITHMS[algorithm](), PERIOD, process_set=communicator, **options
    )


def descend(model: Any, optimizer: Any, rank: int, steps: int = STEPS) -> list[Any]:
    """Descend on ½ h ‖x − b‖², with curvature and minimum of the rank's own; return all values, as pairs."""
    seen = []
    for _ in range(steps):
        for x in model.parameters():
            pairs = (0.5 + 0.25 * rank) * (real(x) - (1.5 - rank))
            x.grad = torch.view_as_complex(pairs) if x.is_complex() else pairs
        optimizer.step()
        seen.append([real(x).tolist() for x in model.parameters()])
    return seen


@pytest.mark.parametrize(("algorithm", "way"), covering(ALGORITHMS, WAYS, together=1))
def test_pairs_are_exchanged(algorithm: str, way: str) -> None:
    def work(communicator: Any, of_complex: bool) -> Any:
        model = model_of(of_complex)
        optimizer = wrapped(model, communicator, algorithm, **WAYS[way])
        seen = descend(model, optimizer, communicator.rank)
        with optimizer.center():
            seen.append([real(x).tolist() for x in model.parameters()])
        return seen, optimizer.synchronizer.distance()

    found, expected = (run(3, lambda c, kind=kind: work(c, kind), 60) for kind in (True, False))  # type: ignore[misc]
    assert found == expected


def test_numbers_worked_out_by_hand() -> None:
    def work(communicator: Any) -> list[complex]:
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.zeros(1, dtype=torch.complex128))
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvdp.ElasticAverageOptimizer(sgd, model, 1, moving_rate=0.25, process_set=communicator)
        centers = []
        for _ in range(3):
            model.w.grad = torch.tensor([-1 - 2j if communicator.rank == 0 else 3 - 1j], dtype=torch.complex128)
            optimizer.step()
            center = hvdp.center_state_dict(model, optimizer)["w"]
            assert center.dtype == torch.complex128
            centers.append(center.item())
        return centers

    assert run(2, work, 60) == [[-0.5 + 0.75j, -1.125 + 1.6875j, -1.78125 + 2.671875j]] * 2


@pytest.mark.parametrize("center", ["replicated", "sharded"])
@pytest.mark.parametrize("algorithm", ["easgd", "agn", "slowmo"])
def test_checkpoints_resume_to_the_bit(algorithm: str, center: str, tmp_path: Path) -> None:
    """In the middle of a period, in another object, from files; errors of the wire are in them as well."""
    options: dict[str, Any] = {"center": center}
    if center == "replicated":
        options["compression"] = hvdp.Compression.int8

    def work(communicator: Any) -> Any:
        model = model_of(True, torch.float64)
        optimizer = wrapped(model, communicator, algorithm, **options)
        descend(model, optimizer, communicator.rank, 3)
        hvdp.save(tmp_path, model, optimizer)
        expected = descend(model, optimizer, communicator.rank, 5)
        again = model_of(True, torch.float64)
        restored = wrapped(again, communicator, algorithm, **options)
        hvdp.load(tmp_path, again, restored)
        return expected, descend(again, restored, communicator.rank, 5)

    for expected, found in run(2, work, 60):
        assert found == expected


def test_a_complex_state_loads_only_into_complex_parameters() -> None:
    made = {kind: model_of(kind) for kind in (True, False)}
    optimizers = {kind: wrapped(model, LocalCommunicator(), "average") for kind, model in made.items()}
    for here, there in ((True, False), (False, True)):
        kinds = {True: "complex", False: "real"}
        message = rf"saved with 'v' as a {kinds[there]} parameter, and it is a {kinds[here]} one here"
        with pytest.raises(ValueError, match=message):
            optimizers[here].synchronizer.load_state_dict(optimizers[there].synchronizer.state_dict())


def test_ranks_that_disagree() -> None:
    def work(communicator: Any) -> None:
        wrapped(model_of(communicator.rank == 1), communicator, "average")

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert "w float32[3, 2]" in message
        assert "w complex64[3]" in message


@pytest.mark.parametrize("algorithm", ["easgd", "agn"])
def test_lazy_conjugates_as_gradients(algorithm: str) -> None:
    """Autograd leaves them; the local rule changes or sums what they stand for."""

    def trained(resolve: bool) -> list[Any]:
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        sgd = torch.optim.SGD(model.parameters(), lr=0.25)
        optimizer = wrapped(model, LocalCommunicator(), algorithm, lambda model: sgd)
        for _ in range(5):
            optimizer.zero_grad()
            model.w.conj().abs().sum().backward()
            assert model.w.grad.is_conj()
            if resolve:
                model.w.grad = model.w.grad.resolve_conj()
            optimizer.step()
        return [complex(value) for value in model.w.detach()]

    assert trained(False) == trained(True)


def test_a_parameter_whose_memory_was_replaced() -> None:
    model = model_of(True)
    optimizer = wrapped(model, LocalCommunicator(), "average", lambda m: torch.optim.SGD(m.parameters(), lr=1.0))
    model.w.data = torch.full((3,), 5j)
    descend(model, optimizer, 0, 2)
    assert hvdp.center_state_dict(model, optimizer)["w"].tolist() == model.w.tolist()
    assert model.w.imag.tolist() != [0.0] * 3


def test_the_state_of_optimizers_starts_as_they_start_it() -> None:
    """Adagrad fills the accumulator of both parts."""
    model = model_of(True)
    options: dict[str, Any] = {"lr": 0.1, "initial_accumulator_value": 0.5}
    optimizer = wrapped(
        model,
        LocalCommunicator(),
        "average",
        lambda model: torch.optim.Adagrad(model.parameters(), **options),
        optimizer_state="reset",
    )
    descend(model, optimizer, 0, 2)
    assert optimizer.state[model.v]["sum"].item() == 0.5 + 0.5j


def test_a_new_optimizer_of_the_same_parameters_warns(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(True)
    model.x.requires_grad = False
    former = wrapped(model, LocalCommunicator(), "average")
    descend(model, former, 0, 1)
    with caplog.at_level(logging.WARNING):
        wrapped(model, LocalCommunicator(), "average")
    assert "takes over parameters of one that has taken 1 local steps" in caplog.text


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_refused_by_name() -> None:
    def of(tensor: Any) -> None:
        parameter = torch.nn.Parameter(tensor)
        sgd = torch.optim.SGD([parameter], lr=1.0)
        hvdp.ModelAverageOptimizer(sgd, [("w", parameter)], process_set=LocalCommunicator())

    with pytest.raises(TypeError, match=r"'w' must be float64.*complex64 or complex128\. Received: torch\.complex32"):
        of(torch.zeros(2, dtype=torch.complex32))
    with pytest.raises(ValueError, match=r"'w' is a lazy conjugate, with the conj bit set: \.resolve_conj\(\) it"):
        of(torch.zeros(2, dtype=torch.complex64).conj())


def test_a_parameter_that_has_become_a_lazy_conjugate() -> None:
    def work(communicator: Any) -> None:
        model = model_of(True)
        optimizer = wrapped(model, communicator, "average")
        descend(model, optimizer, communicator.rank, 1)
        if communicator.rank == 1:
            model.w.data = model.w.data.conj()
        optimizer.synchronizer.sync()

    for kind, message in errors(2, work):
        assert kind is RuntimeError
        assert "'w' was complex64[3] on cpu at construction and is complex64[3] on cpu with the conj bit set" in message
