"""Awkward tensors: dtypes, shapes, strides, aliases, missing gradients, buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator, run  # noqa: E402
from hvd_periodic.torch.model import NamedTensors  # noqa: E402
from hvd_periodic.torch.outer import TorchOuterOptimizer  # noqa: E402
from hvd_periodic.torch.replica import TorchReplica  # noqa: E402

ALGORITHMS: dict[str, Callable[..., Any]] = {
    "easgd": lambda o, m, c: hvdp.ElasticAverageOptimizer(o, m, 2, moving_rate=0.25, process_set=c),
    "easgd_rho": lambda o, m, c: hvdp.ElasticAverageOptimizer(o, m, 2, moving_rate=0.25, rho=0.5, process_set=c),
    "average": lambda o, m, c: hvdp.ModelAverageOptimizer(o, m, 2, process_set=c),
    "agn": lambda o, m, c: hvdp.AGNOptimizer(o, m, 2, process_set=c),
}


class Awkward(torch.nn.Module):
    """Every shape and dtype that a model may have, and weights that are tied, frozen or without gradient."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)

        def parameter(*shape: int, dtype: Any = torch.float32) -> Any:
            return torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

        self.scalar = parameter()
        self.empty = parameter(0, 3)
        self.f64 = parameter(5, dtype=torch.float64)
        self.bf16 = parameter(7, dtype=torch.bfloat16)
        self.f16 = parameter(2, 3, dtype=torch.float16)
        self.transposed = torch.nn.Parameter(torch.randn(3, 5, generator=generator).t())
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        for p in self.conv.parameters():
            torch.nn.init.normal_(p, generator=generator)
        self.tied = self.scalar
        self.frozen = parameter(3)
        self.frozen.requires_grad_(False)
        self.only_on_rank_0 = parameter(3)


def as_lists(model: torch.nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().double().tolist() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_awkward_tensors_agree_with_float64(name: str) -> None:
    """Replicas and center of every tensor follow the same arithmetic in float64, to the precision of their dtype."""

    def work(communicator: ThreadCommunicator, exact: bool) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
        model = Awkward(communicator.rank)
        if exact:
            model = model.double()
        before = [(p.stride(), p.data_ptr()) for p in model.parameters()]
        frozen = model.frozen.tolist()
        optimizer = ALGORITHMS[name](torch.optim.SGD(model.parameters(), lr=0.25), model, communicator)
        for step in range(6):
            for p in model.parameters():
                if p.requires_grad:
                    p.grad = torch.full_like(p, 0.5 * (communicator.rank + 1) * (-1) ** step)
            if communicator.rank:
                model.only_on_rank_0.grad = None
            optimizer.step()
        assert [(p.stride(), p.data_ptr()) for p in model.parameters()] == before, "tensors stay where they are"
        assert (model.frozen.tolist() == frozen) == (communicator.rank == 0), "frozen: the root's, then constant"
        local = as_lists(model)
        with optimizer.center():
            return local, as_lists(model), [p.dtype for p in model.parameters()]

    results = run(2, lambda c: work(c, exact=False))
    expected = run(2, lambda c: work(c, exact=True))
    tolerance = {"bf16": 0.05, "f16": 5e-3}
    for (local, center, dtypes), (exact_local, exact_center, _) in zip(results, expected, strict=True):
        assert dtypes == [p.dtype for p in Awkward(0).parameters()]
        for key in local:
            torch.testing.assert_close(
                (torch.tensor(local[key]), torch.tensor(center[key])),
                (torch.tensor(exact_local[key]), torch.tensor(exact_center[key])),
                rtol=0,
                atol=tolerance.get(key, 1e-5),
            )
    assert results[0][1] == results[1][1], "centers are equal to the bit"


def test_center_of_16_bit_parameters_moves_under_a_small_rate() -> None:
    """1 + 0.001 is not a bfloat16: a bfloat16 center would stay at 1 for ever."""
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = hvdp.ElasticAverageOptimizer(
        torch.optim.SGD([parameter], lr=0.0), [("w", parameter)], 1, moving_rate=0.001, process_set=LocalCommunicator()
    )
    optimizer.synchronizer.begin()
    with torch.no_grad():
        parameter.fill_(2.0)
    for _ in range(500):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    center = optimizer.synchronizer.center_tensors()[0]
    assert center.dtype == torch.float32
    assert 1.3 < center.item() < 1.5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_buckets_change_nothing(name: str) -> None:
    """Tensors larger than a bucket, several in one bucket, several buckets: equal to the bit, for any strides."""

    def work(communicator: ThreadCommunicator, bucket_bytes: int) -> list[Any]:
        model = Awkward(communicator.rank)
        inner = torch.optim.SGD(model.parameters(), lr=0.25)
        optimizer = ALGORITHMS[name](inner, model, communicator)
        synchronizer = optimizer.synchronizer
        replica = TorchReplica(NamedTensors.of(model, None), inner, bucket_bytes)
        moving = inner if synchronizer.algorithm.needs_outer_optimizer else None
        outer = None if moving is None else TorchOuterOptimizer(moving, inner, replica.tensors)
        super(hvdp.Synchronizer, synchronizer).__init__(
            replica, synchronizer.algorithm, synchronizer.planner.schedule, communicator, outer=outer
        )
        assert (len(replica.parameters.layout.buckets) > 20) == (bucket_bytes == 16)
        synchronizer.start()
        for _ in range(4):
            for p in model.parameters():
                if p.requires_grad:
                    p.grad = (p * (communicator.rank + 1)).detach()
            optimizer.step()
        return [as_lists(model), synchronizer.distance()]

    whole, pieces = run(2, lambda c: work(c, 2**20)), run(2, lambda c: work(c, 16))
    assert [result[0] for result in whole] == [result[0] for result in pieces]
    assert [result[1] for result in whole] == pytest.approx([result[1] for result in pieces])


def test_sparse_gradients() -> None:
    """They are accumulated as they are; only the elastic term needs dense ones, and says so."""
    for name in ALGORITHMS:
        embedding = torch.nn.Embedding(4, 2, sparse=True)
        optimizer = ALGORITHMS[name](torch.optim.SGD(embedding.parameters(), lr=0.1), embedding, LocalCommunicator())
        start = embedding.weight.detach().clone()
        embedding(torch.tensor([1, 3, 1])).sum().backward()
        if name == "easgd_rho":
            with pytest.raises(TypeError, match="sparse"):
                optimizer.step()
            continue
        optimizer.step()
        assert embedding.weight.grad.is_sparse
        moved = (embedding.weight - start).detach()
        torch.testing.assert_close(moved, torch.tensor([[0.0] * 2, [-0.2] * 2, [0.0] * 2, [-0.1] * 2]))
        optimizer.step()
        assert optimizer.synchronizer.rounds == 1


class Statistics(torch.nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.full((3,), float(rank)))
        self.register_buffer("count", torch.tensor(10 * rank))
        self.register_buffer("seen", torch.tensor([rank == 1, False]))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("rotation", torch.full((2,), complex(rank, -rank)))


@pytest.mark.parametrize("policy", ["average", "local"])
def test_buffers(policy: str) -> None:
    def work(communicator: ThreadCommunicator) -> tuple[Any, ...]:
        rank, model = communicator.rank, Statistics(communicator.rank + 1)
        optimizer = hvdp.ElasticAverageOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model, 1, buffers=policy, process_set=communicator
        )
        assert (model.mean[0].item(), model.count.item()) == (1.0, 10), "the root's"
        model.mean += rank
        model.count += rank
        model.seen.logical_or_(torch.tensor([False, rank == 2]))
        optimizer.step()
        exchanged = model.mean[0].item(), model.count.item(), model.seen.tolist()
        model.mean += 100
        with optimizer.center():
            center = model.mean[0].item(), model.count.item()
        export = hvdp.center_state_dict(model, optimizer)
        assert export["mean"][0].item() == center[0]
        assert export["count"].dtype == torch.int64
        assert model.mean[0].item() == exchanged[0] + 100
        assert model.mask.tolist() == [0.0, float("-inf")]
        assert model.rotation.tolist() == [1 - 1j] * 2
        return exchanged, center

    results = run(3, work)
    if policy == "average":
        assert results == [((2.0, 12, [True, True]), (2.0, 12))] * 3
    else:
        assert results == [((1.0 + rank, 10 + rank, [True, rank == 2]), (101.0 + rank, 10 + rank)) for rank in range(3)]


@pytest.mark.parametrize("how", ["module", "named_parameters", "list", "prefixed"])
def test_buffers_follow_the_model_and_its_named_parameters(how: str) -> None:
    """As scripts pass them to hvd.DistributedOptimizer; a list, or names of one's own, carry no buffers."""

    def work(communicator: ThreadCommunicator) -> tuple[float, list[str]]:
        model = Statistics(0)
        given = {
            "module": lambda: model,
            "named_parameters": model.named_parameters,
            "list": lambda: list(model.named_parameters()),
            "prefixed": lambda: model.named_parameters("part"),
        }[how]()
        optimizer = hvdp.ModelAverageOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), given, 1, process_set=communicator
        )
        model.mean += communicator.rank
        optimizer.step()
        return model.mean[0].item(), optimizer.synchronizer.replica.names

    expected = {"module": [1.0, 1.0, 1.0], "named_parameters": [1.0, 1.0, 1.0]}.get(how, [0.0, 1.0, 2.0])
    names = ["part.weight"] if how == "prefixed" else ["weight"]
    assert run(3, work) == [(value, names) for value in expected]


def test_center_state_dict_has_original_names_and_dtypes() -> None:
    model = Awkward(0)
    optimizer = ALGORITHMS["easgd"](torch.optim.SGD(model.parameters(), lr=0.5), model, LocalCommunicator())
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        optimizer.step()
    local = {name: value.clone() for name, value in model.state_dict().items()}
    exported = hvdp.center_state_dict(model, optimizer)
    assert {n: (t.dtype, t.shape) for n, t in exported.items()} == {n: (t.dtype, t.shape) for n, t in local.items()}
    with optimizer.center():
        assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, local[name]) for name, value in model.state_dict().items())
    assert torch.equal(exported["tied"], exported["scalar"])
    assert not torch.equal(exported["scalar"], local["scalar"])
    Awkward(1).load_state_dict(exported)
    kept = exported["scalar"].clone()
    with torch.no_grad():
        model.scalar.fill_(99.0)
    optimizer.synchronizer.sync()
    assert torch.equal(exported["scalar"], kept), "an export is a copy"


def test_export_goes_through_the_state_dict_of_the_model() -> None:
    """A module may save another tensor than the one it holds."""
    model = torch.nn.Linear(2, 2, bias=False)
    model._register_state_dict_hook(lambda module, state, prefix, meta: state.update(doubled=2 * module.weight))
    optimizer = ALGORITHMS["easgd"](torch.optim.SGD(model.parameters(), lr=0.5), model, LocalCommunicator())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    exported = hvdp.center_state_dict(model, optimizer)
    assert not torch.equal(exported["weight"], model.weight)
    torch.testing.assert_close(exported["doubled"], 2 * exported["weight"])
    with optimizer.center():
        inside = hvdp.center_state_dict(model, optimizer)
    assert torch.equal(inside["weight"], exported["weight"])


def test_center_restores_after_an_exception_and_refuses_steps_inside() -> None:
    model = Awkward(0)
    optimizer = ALGORITHMS["easgd"](torch.optim.SGD(model.parameters(), lr=0.5), model, LocalCommunicator())
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    local = as_lists(model)
    with pytest.raises(KeyError), optimizer.center():
        assert as_lists(model) != local
        raise KeyError
    assert as_lists(model) == local
    with pytest.raises(RuntimeError, match="inside the center"), optimizer.center():
        optimizer.step()
    assert as_lists(model) == local
    assert optimizer.synchronizer.local_steps == 1


def test_two_optimizers_share_one_model() -> None:
    """Each exchanges the parameters it holds, and nothing else."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizers = [
        hvdp.ModelAverageOptimizer(
            torch.optim.SGD(layer.parameters(), lr=0.1), model.named_parameters(), 2, process_set=LocalCommunicator()
        )
        for layer in model
    ]
    assert [optimizer.synchronizer.replica.names for optimizer in optimizers] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
    ]


def test_constants_of_types_that_have_no_common_one() -> None:
    """They lie in one arena, and are packed one by one."""

    class Quantized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trained = torch.nn.Parameter(torch.zeros(3))
            self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
            self.of_8_bits = torch.nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)

    def work(communicator: ThreadCommunicator) -> list[float]:
        model = Quantized()
        if communicator.rank == 0:
            model.of_8_bits.data.copy_(torch.tensor([0.5, 1.5, 2.0]))
        optimizer = hvdp.PeriodicOptimizer(
            torch.optim.SGD([model.trained], lr=0.1), model, hvdp.Averaging(), 2, process_set=communicator
        )
        assert optimizer.synchronizer.replica.constants is not None
        return model.of_8_bits.float().tolist()  # type: ignore[no-any-return]

    assert run(2, work) == [[0.5, 1.5, 2.0]] * 2


@pytest.mark.parametrize("mode", ["meta", "inference"])
def test_the_elastic_term_of_a_large_tensor_in_any_mode(mode: str) -> None:
    """Blocks are computed in host memory that any later step may use."""
    x = torch.nn.Parameter(torch.ones(300_000))
    x.grad = torch.zeros_like(x)
    optimizer = hvdp.ElasticAverageOptimizer(
        torch.optim.SGD([x], lr=0.5), [("x", x)], 100, 0.1, rho=0.5, process_set=LocalCommunicator()
    )
    optimizer.synchronizer.begin()
    with torch.no_grad():
        x += 1
    with torch.device("meta") if mode == "meta" else torch.inference_mode():
        optimizer.synchronizer.prepare_gradients()
    assert x.grad.unique().tolist() == [0.5], "rho (2 - 1)"
    optimizer.synchronizer.prepare_gradients()
    assert x.grad.unique().tolist() == [1.0]
