"""Models that are wrapped: compiled, distributed; and what of an optimizer its wrapper lets through."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.elastic.shards import full_center, start_from_center  # noqa: E402
from hvd_periodic.torch.elastic import _KeptOptimizer  # noqa: E402

LOCAL: dict[str, Any] = {"process_set": LocalCommunicator()}


def network() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def compiled(model: Any, part: bool) -> Any:
    """Compile all of it, or a layer."""
    if not part:
        return torch.compile(model, backend="eager")
    model[0] = torch.compile(model[0], backend="eager")
    return model


def wrap(model: Any, given: Any = None, **options: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return hvdp.AGNOptimizer(inner, model if given is None else given, 2, **LOCAL, **options)


def train(model: Any, optimizer: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=generator)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("how", ["module", "named_parameters", "list"])
@pytest.mark.parametrize("part", [False, True], ids=["all", "a layer"])
def test_names_are_those_of_the_model_that_was_compiled(part: bool, how: str) -> None:
    plain = network()
    model = compiled(copy.deepcopy(plain), part)
    given = {
        "module": model,
        "named_parameters": model.named_parameters(),
        "list": list(model.named_parameters()),
    }[how]
    optimizer, expected = wrap(model, given), wrap(plain, list(plain.named_parameters()) if how == "list" else None)
    assert optimizer.synchronizer.replica.facts() == expected.synchronizer.replica.facts()
    train(model, optimizer, 3)
    train(plain, expected, 3)
    exported = hvdp.center_state_dict(model, optimizer)
    other = network()
    other.load_state_dict(exported)
    assert all(torch.equal(value, exported[name]) for name, value in hvdp.center_state_dict(plain, expected).items())
    expected.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(expected.state_dict())


def test_a_state_that_was_saved_under_the_prefix_is_loaded() -> None:
    model = compiled(network(), part=False)
    optimizer = wrap(model)
    train(model, optimizer, 3)
    saved = optimizer.state_dict()
    for part in saved["hvd_periodic"]["vectors"].values():
        for key, tensors in part.items():
            part[key] = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    expected = hvdp.center_state_dict(model, optimizer)
    train(model, optimizer, 3)
    optimizer.load_state_dict(saved)
    found = hvdp.center_state_dict(model, optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_state_saved_with_other_policies_of_buffers_is_loaded() -> None:
    """What was averaged then and is not now is left out; what only now is averaged starts from what it is."""
    model = network()
    optimizer = wrap(model, buffers={"*var": "local", "*mean": "average"})
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(model)
    resumed = wrap(other, buffers={"*var": "average", "*mean": "local"})
    other[1].running_var.fill_(3.0)
    resumed.load_state_dict(saved)
    center = resumed.synchronizer.state_dict()["vectors"]["buffers"]["center"]
    assert {name: tensor.tolist() for name, tensor in center.items()} == {"1.running_var": [3.0] * 4}


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch without torch.distributed")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def fsdp(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fully_shard(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


DIVIDED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "FSDP": (fsdp, r"FullyShardedDataParallel flattens many parameters into one: use fully_shard\(\) instead"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("case", DIVIDED)
@pytest.mark.usefixtures("process_group")
def test_divided_models_are_refused(case: str) -> None:
    divide, message = DIVIDED[case]
    model = divide(network())
    for given in (model, model.named_parameters(), torch.nn.Sequential(model)):
        with pytest.raises(TypeError, match=message):
            wrap(model, given)
    with pytest.raises(TypeError, match=message):
        wrap(model, list(model.named_parameters()))


@pytest.mark.usefixtures("process_group")
def test_a_model_that_is_divided_comes_as_itself() -> None:
    """Its modules may hold what they have gathered for a forward pass."""
    model = fully_shard(network())
    with pytest.raises(
        TypeError, match=r"'0\.weight' is a DTensor, which its module may have gathered.*pass the module"
    ):
        wrap(model, list(model.named_parameters()))
    optimizer = wrap(model, model.named_parameters())
    assert list(optimizer.synchronizer.replica.sharded) == [name for name, _ in model.named_parameters()]


@pytest.mark.usefixtures("process_group")
def test_files_of_one_rank_hold_no_part_of_a_model(tmp_path: Path) -> None:
    model = fully_shard(network())
    optimizer = wrap(model)
    for write in (hvdp.save, hvdp.load, hvdp.SaveBestCenter):
        with pytest.raises(ValueError, match=r"the whole model on every rank.*use torch\.distributed\.checkpoint"):
            write(tmp_path / "file", model, optimizer)


@pytest.mark.usefixtures("process_group")
def test_a_center_that_an_island_committed_before_training_is_what_joins_take() -> None:
    """Its state then has the center of each rank, as tensors that are sharded over the island."""
    model = fully_shard(network())
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    optimizer = wrap(model, center="sharded")
    kept = _KeptOptimizer(optimizer)
    center = full_center(optimizer.synchronizer, kept.exchanges_in(kept.copied()))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    start_from_center(optimizer.synchronizer, center)
    assert not any(parameter.full_tensor().any() for parameter in model.parameters())


@pytest.mark.usefixtures("process_group")
def test_sums_that_are_not_formed_are_no_parameters() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    model = torch.nn.Module()
    sums = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Partial()])
    model.weight = torch.nn.Parameter(sums)
    with pytest.raises(ValueError, match=r"'weight' is a sum that ranks have not formed yet.*Redistribute it"):
        wrap(model)


@pytest.mark.usefixtures("process_group")
def test_shards_are_contiguous() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    model = torch.nn.Module()
    shards = DTensor.from_local(torch.ones(2, 3).t(), init_device_mesh("cpu", (1,)), [Shard(0)])
    model.weight = torch.nn.Parameter(shards)
    with pytest.raises(ValueError, match=r"The shard of 'weight' must be contiguous. Received: strides \(1, 3\)"):
        wrap(model)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("divided", [False, True])
def test_who_cannot_be_left_out_is_not_told_of_it(divided: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    tensor = torch.full((4,), float("nan"))
    model = torch.nn.Module()
    shards = DTensor.from_local(tensor, init_device_mesh("cpu", (1,)), [Shard(0)]) if divided else tensor
    model.weight = torch.nn.Parameter(shards)
    with pytest.raises(RuntimeError, match=r"'weight' is not finite .* the data of this rank") as caught:
        wrap(model).synchronizer.sync()
    assert ("nonfinite='skip'" in str(caught.value)) is not divided


class ScheduleFree(torch.optim.SGD):
    """An optimizer with modes, as schedule-free ones have."""

    training = False

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False


def test_methods_and_attributes_of_the_wrapped_optimizer_are_reachable() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    inner = ScheduleFree([parameter], lr=0.1)
    optimizer = hvdp.ModelAverageOptimizer(inner, [("w", parameter)], **LOCAL)
    optimizer.train()
    assert optimizer.training is inner.training is True
    optimizer.eval()
    assert optimizer.training is inner.training is False
    twice = hvdp.ModelAverageOptimizer(optimizer, [("w", parameter)], **LOCAL)
    twice.train()
    assert inner.training
    assert not hasattr(optimizer, "set_backward_passes_per_step")
    assert not hasattr(optimizer, "nothing")
    message = (
        "'ModelAverageOptimizer' object has no attribute 'nothing', and neither has the ScheduleFree that it wraps"
    )
    with pytest.raises(AttributeError, match=re.escape(message)):
        _ = optimizer.nothing
    for again in (copy.copy(optimizer), copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert isinstance(again.inner, ScheduleFree)
        again.train()
    assert not hasattr(object.__new__(hvdp.ModelAverageOptimizer), "train"), "as while it is unpickled"
