"""What files hold of PyTorch's tensors and objects; and what is refused."""

from __future__ import annotations

import enum
from collections import deque
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import Communicator, LocalCommunicator  # noqa: E402
from hvd_periodic.checkpoints import decode, encode  # noqa: E402
from hvd_periodic.checkpoints.files import read_content, write_content  # noqa: E402
from hvd_periodic.torch.checkpoints import Tensors  # noqa: E402
from tests.helpers import run_ranks  # noqa: E402


def made(model: Any = None, **options: Any) -> tuple[Any, Any]:
    model = torch.nn.Linear(2, 1) if model is None else model
    local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, hvdp.PeriodicOptimizer(local, model, hvdp.EASGD, 2, process_set=LocalCommunicator(), **options)


def train(model: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 2), float(step))).sum().backward()
        optimizer.step()


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_tensors_of_any_type_come_back(tmp_path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(6).reshape(2, 3) - 2).to(torch.float32)[: shape[0] if shape else 1].to(dtype)
    tensor = tensor.reshape(-1)[0] if shape == () else tensor
    write_content(tmp_path / "file.npz", encode({"x": tensor}, Tensors()))
    found = decode(read_content(tmp_path / "file.npz"), Tensors())["x"]
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert bytes(found.reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8))


def test_tensors_of_any_strides_come_back() -> None:
    tensors = [
        *(torch.arange(6.0).reshape(2, 3).T, torch.ones(1).expand(4), torch.tensor([1 + 2j]).conj()),
        torch.linalg.qr(torch.arange(12.0).reshape(4, 3))[0],
        torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last),
        *(torch.arange(12.0).reshape(3, 4)[:, :3], torch.arange(3.0)[:, None], torch.arange(3.0)[None].T),
    ]
    for tensor, found in zip(tensors, decode(encode(tensors, Tensors()), Tensors()), strict=True):
        assert torch.equal(found, tensor)
        assert found.stride() == tensor.stride()


class Rotated(torch.optim.SGD):
    """Multiplies gradients by a matrix that LAPACK makes, whose products depend on where its elements lie."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["recent"].append(len(group["recent"]))
            for parameter in group["params"]:
                state = self.state[parameter]
                if "basis" not in state:
                    torch.manual_seed(0)
                    state["basis"] = torch.linalg.qr(torch.randn(len(parameter), len(parameter)))[0]
                parameter.grad = state["basis"] @ parameter.grad
        return super().step(closure)


class Method(enum.Enum):
    POWER = "power"


def test_state_in_column_major_order_and_names_in_groups_come_back(tmp_path: Path) -> None:
    def rotated() -> tuple[Any, Any]:
        torch.manual_seed(1)
        model = torch.nn.Linear(37, 41, bias=False)
        local = Rotated(model.parameters(), lr=0.1)
        local.param_groups[0] |= {"recent": deque(maxlen=2), "method": Method.POWER, "dtype": torch.bfloat16}
        local.param_groups[0] |= {"place": torch.device("cpu"), "format": torch.channels_last}
        return model, hvdp.PeriodicOptimizer(local, model, hvdp.EASGD, 2, process_set=LocalCommunicator())

    def go_on(model: Any, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.linspace(0, 1 + step, 74).reshape(2, 37)).square().sum().backward()
            optimizer.step()

    model, optimizer = rotated()
    go_on(model, optimizer)
    hvdp.save(tmp_path, model, optimizer)
    other, resumed = rotated()
    hvdp.load(tmp_path, other, resumed)
    kept, found = optimizer.state[model.weight]["basis"], resumed.state[other.weight]["basis"]
    assert kept.stride() == found.stride() == (1, 41)
    for name in ("recent", "method", "dtype", "place", "format"):
        assert resumed.param_groups[0][name] == optimizer.param_groups[0][name]
    assert resumed.param_groups[0]["recent"].maxlen == 2
    go_on(model, optimizer)
    go_on(other, resumed)
    assert torch.equal(other.weight, model.weight)


def test_a_copy_shares_no_memory() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    kept, seen = (encode([parameter], Tensors(), copy=copy) for copy in (True, False))
    with torch.no_grad():
        parameter.fill_(1.0)
    assert [content.arrays["0"].tolist() for content in (kept, seen)] == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("value", [torch.eye(2).to_sparse(), torch.zeros(1, device="meta")], ids=["sparse", "meta"])
def test_tensors_without_memory_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"w\[0\] is of type Tensor"):
        encode({"w": [value]}, Tensors())


def test_objects_with_a_state_and_plain_values(tmp_path: Path) -> None:
    """Schedulers, scalers and random generators; a value that was not saved is as it was given."""
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 5], 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    train(model, optimizer, 3)
    scheduler.step()
    random = torch.get_rng_state()
    nested = {"seed": 2**100, "rates": (0.1, float("inf")), 3: [None, True]}
    saving = hvdp.save(tmp_path, model, optimizer, scheduler=scheduler, scaler=scaler, random=random, nested=nested)
    saving.wait()
    other, resumed = made()
    again = torch.optim.lr_scheduler.MultiStepLR(resumed, [1, 5], 0.5)
    fresh = torch.amp.GradScaler("cpu")
    found = hvdp.load(tmp_path, other, resumed, scheduler=again, scaler=fresh, epoch=7, nested=None)
    assert found.keys() == {"random", "nested", "epoch"}
    assert torch.equal(found["random"], random)
    assert (found["nested"], found["epoch"]) == (nested, 7)
    assert fresh.get_scale() == 8.0
    assert again.state_dict() == scheduler.state_dict()
    assert resumed.param_groups[0]["lr"] == 0.05
    for parameter, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected)
        assert torch.equal(resumed.state[parameter]["momentum_buffer"], optimizer.state[expected]["momentum_buffer"])
    with pytest.raises(
        ValueError, match=r"rank-0\.npz has no state of `sampler`\. It has states of: scheduler, scaler"
    ):
        hvdp.load(tmp_path, other, resumed, sampler=scheduler)
    with pytest.raises(RuntimeError, match=r"Training cannot start: loading the checkpoint failed on rank 0: "):
        train(other, resumed, 1)
    hvdp.load(tmp_path, other, resumed)
    train(other, resumed, 1)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    model, optimizer = made()
    with pytest.raises(TypeError, match=r"more\['transform'\]\[0\] is of type builtin_function_or_method"):
        hvdp.save(tmp_path, model, optimizer, transform=[len])
    with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module\. Received: dict"):
        hvdp.save(tmp_path, {}, optimizer)  # type: ignore[arg-type]
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"`optimizer` must be an optimizer or synchronizer .* Received: SGD"):
        hvdp.load(tmp_path, model, plain)  # type: ignore[arg-type]
    assert hvdp.load(tmp_path, model, optimizer, epoch=3) == {"epoch": 3}


def test_a_script_may_look_for_another_step_first(tmp_path: Path) -> None:
    model, optimizer = made()
    with pytest.raises(FileNotFoundError, match=r"has no checkpoint of step 3\. It has none"):
        hvdp.load(tmp_path, model, optimizer, at_step=3)
    with pytest.raises(RuntimeError, match=r"loading the checkpoint failed on rank 0: .* has no checkpoint of step 3"):
        train(model, optimizer, 1)
    assert hvdp.load(tmp_path, model, optimizer) == {}
    train(model, optimizer, 1)


def test_another_model_is_refused(tmp_path: Path) -> None:
    model, optimizer = made()
    hvdp.save(tmp_path, model, optimizer)
    other, others = made(torch.nn.Linear(3, 1))
    with pytest.raises(ValueError, match="belongs to another model: 'weight' is of shape"):
        hvdp.load(tmp_path, other, others)


class Versioned(torch.nn.Linear):
    """A module whose state has a version, which is told when it is loaded."""

    _version = 3
    seen: Any = None

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.seen = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_modules_are_told_their_versions_and_have_the_names_of_the_original(tmp_path: Path, compiled: bool) -> None:
    model, optimizer = made(torch.nn.Sequential(Versioned(2, 1)))
    saved = torch.compile(model) if compiled else model
    hvdp.save(tmp_path, saved, optimizer)
    other, resumed = made(torch.nn.Sequential(Versioned(2, 1)))
    hvdp.load(tmp_path, other if compiled else torch.compile(other), resumed)
    assert other[0].seen == 3
    assert torch.equal(other[0].weight, model[0].weight)


def test_a_save_of_a_single_process_in_the_background(tmp_path: Path) -> None:
    model, optimizer = made()
    saving = hvdp.save(tmp_path, model, optimizer, background=True, weight=model.weight)
    before = model.weight.detach().clone()
    train(model, optimizer, 2)
    saving.wait()
    other, resumed = made()
    assert torch.equal(hvdp.load(tmp_path, other, resumed)["weight"], before)
    assert torch.equal(other.weight, before)


@pytest.mark.parametrize(("saved", "now"), [(1, 2), (2, 1), (2, 3)])
def test_shares_of_another_number_of_fragments_are_refused(saved: int, now: int, tmp_path: Path) -> None:
    """Before they are cut for another number of ranks."""

    def run(communicator: Communicator, fragments: int, load: bool) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        local = torch.optim.Adam(model.parameters(), lr=0.1)
        options = {"process_set": communicator, "center": "sharded", "fragments": fragments}
        optimizer = hvdp.AGNOptimizer(local, model, 4, **options)
        if load:
            with pytest.raises(
                ValueError, match=f"saved with fragments={saved}, and this optimizer has fragments={now}"
            ):
                hvdp.load(tmp_path / "saved", model, optimizer)
            return
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        hvdp.save(tmp_path / "saved", model, optimizer)

    run_ranks(2, lambda communicator: run(communicator, saved, load=False))
    run_ranks(3, lambda communicator: run(communicator, now, load=True))


@pytest.mark.parametrize("background", [False, True])
def test_a_save_copies_what_a_thread_writes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Neither the center nor the state of its optimizer."""
    model = torch.nn.Linear(3, 2)
    local = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = hvdp.AGNOptimizer(local, model, 2, process_set=LocalCommunicator())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    center = optimizer.synchronizer.tensor_groups.parameters.center.tensors()[0]
    seen: list[Any] = []
    original = Tensors.to_array

    def to_array(leaves: Any, value: Any, copy: bool) -> Any:
        if isinstance(value, torch.Tensor):
            seen.append((value.data_ptr(), copy))
        return original(leaves, value, copy)

    monkeypatch.setattr(Tensors, "to_array", to_array)
    hvdp.save(tmp_path, model, optimizer, background=background).wait()
    moments = optimizer.synchronizer.exchanged.center_optimizer.optimizer.state.values()
    assert {center.data_ptr(), *(state["exp_avg"].data_ptr() for state in moments)} <= {where for where, _ in seen}
    assert {copy for _, copy in seen} == {background}
    assert optimizer.state_dict()["hvd_periodic"]["vectors"]["parameters"]["center"]["weight"] is not center
