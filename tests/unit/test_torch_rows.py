"""Embedding tables of which only touched rows travel, in PyTorch: the dense exchange to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.covering import covering
from tests.helpers import errors, run_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic.torch.replica import TorchReplica  # noqa: E402
from hvd_periodic.torch.sharded_parameters import check_sharded  # noqa: E402

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "average": hvdp.Averaging,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": hvdp.BMUF,
    "agn": hvdp.AGN,
}
ROWS, WIDTH, STEPS, PERIOD = 20, 4, 11, 3
POLICIES = {"embedding.weight": "rows"}


class Words(torch.nn.Module):
    """The mean of some embeddings, and a layer on it."""

    def __init__(self, sparse: bool = False, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, 2, dtype=dtype)
        self.embedding = torch.nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=dtype)
        with torch.no_grad():  # Without the random generator, which the threads of the ranks share.
            for p in self.parameters():
                p.copy_(torch.arange(p.numel()).add(1).sin().reshape(p.shape))

    def forward(self, words: Any) -> Any:
        return self.layer(self.embedding(words).mean(0)).square().sum()


def local_of(kind: str, model: Words) -> Any:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), 0.1)
    if kind == "momentum":  # The table goes on in rows without gradients.
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    if kind == "adagrad":
        return torch.optim.Adagrad(model.parameters(), 0.1)
    return torch.optim.SparseAdam([model.embedding.weight], 0.05)


def made(model: Words, local: Any, communicator: Any, algorithm: Any, **options: Any) -> Any:
    named = [
        (n, p) for n, p in model.named_parameters() if any(p is q for g in local.param_groups for q in g["params"])
    ]
    if algorithm == "agn":
        options["outer_optimizer"] = lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9)
    options = {"parameters": POLICIES, "period": PERIOD} | options
    return hvdp.PeriodicOptimizer(
        local, named, ALGORITHMS.get(algorithm, lambda: algorithm)(), process_set=communicator, **options
    )


def words_of(rank: int, step: int) -> Any:
    return torch.tensor([(3 * rank + step) % (ROWS // 2), (5 * rank + 7) % ROWS])


def trained(model: Words, optimizer: Any, rank: int, steps: range = range(STEPS)) -> list[Any]:
    """Return the values after each step, and those of the center."""
    seen = []
    for step in steps:
        optimizer.zero_grad()
        model(words_of(rank, step)).backward()
        optimizer.step()
        seen.append([p.tolist() for p in model.parameters()])
    with optimizer.center():
        seen.append([p.tolist() for p in model.parameters()])
    return seen


def both_ways(work: Callable[[Any, Any], Any], ranks: int = 2) -> Any:
    """Return the results of the ranks for tables of which rows travel, and for whole ones."""
    return zip(run_ranks(ranks, lambda c: work(c, POLICIES)), run_ranks(ranks, lambda c: work(c, None)), strict=True)


LOCAL = [("sgd", True), ("sgd", False), ("momentum", True), ("momentum", False), ("sparse adam", True)]
"""Local optimizers, and whether gradients are sparse."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": 1},
    "fp16": {"overlap": 1, "compression": hvdp.Compression.fp16},
}


@pytest.mark.parametrize(
    ("algorithm", "local", "way"),
    covering(ALGORITHMS, LOCAL, WAYS, together=1, always=[("diloco", ("sgd", True), "plain")]),
    ids=str,
)
def test_the_dense_exchange_to_the_bit(algorithm: str, local: tuple[str, bool], way: str) -> None:
    (kind, sparse), options = local, WAYS[way]

    def work(communicator: Any, parameters: Any) -> Any:
        model = Words(sparse)
        optimizer = made(model, local_of(kind, model), communicator, algorithm, parameters=parameters, **options)
        return trained(model, optimizer, communicator.rank), optimizer.synchronizer.counters.bytes_sent

    for (rows, fewer), (dense, more) in both_ways(work):
        assert rows == dense
        if kind == "sgd" and not options:
            assert fewer < more


@pytest.mark.parametrize(
    ("rate", "local", "options"),
    covering(
        (None, 0.2),
        (("sgd", True), ("sgd", False), ("adagrad", False), ("sparse adam", True)),
        ({}, {"overlap": 1}, {"fragments": 2}),
        together=1,
    ),
    ids=str,
)
def test_elastic_averaging(rate: float | None, local: tuple[str, bool], options: dict[str, Any]) -> None:
    """The dense exchange within rounding."""
    kind, sparse = local

    def work(communicator: Any, parameters: Any) -> Any:
        model = Words(sparse, torch.float64)
        algorithm = hvdp.EASGD(rate)
        given = {} if kind == "sparse adam" and "fragments" in options else options  # It has one parameter.
        optimizer = made(model, local_of(kind, model), communicator, algorithm, parameters=parameters, **given)
        return trained(model, optimizer, communicator.rank), optimizer.synchronizer.counters.bytes_sent

    for (rows, fewer), (dense, more) in both_ways(work, 3):
        for one, other in zip(rows, dense, strict=True):
            for x, y in zip(one, other, strict=True):
                torch.testing.assert_close(torch.tensor(x), torch.tensor(y), rtol=0, atol=1e-13)
        assert fewer < more


def test_elastic_averaging_resumes_to_the_bit() -> None:
    """From a state dict and from a copy, in the middle of a period."""

    def work(communicator: Any) -> Any:
        rank, model = communicator.rank, Words()
        optimizer = made(model, local_of("sgd", model), communicator, hvdp.EASGD(0.2))
        trained(model, optimizer, rank, range(7))
        state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        assert f"untouched_sums.{rank}.2" in optimizer.synchronizer.state_dict()["vectors"]["parameters"]
        expected = trained(model, optimizer, rank, range(7, 14))
        again = Words()
        other = made(again, local_of("sgd", again), communicator, hvdp.EASGD(0.2))
        again.load_state_dict(weights)
        other.load_state_dict(state)
        return trained(again, other, rank, range(7, 14)) == expected

    assert run_ranks(2, work) == [True] * 2


@pytest.mark.parametrize(
    ("local", "text"),
    [
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "SGD with momentum=0.9"),
        (lambda p: torch.optim.Adagrad(p, weight_decay=0.1), "Adagrad with weight_decay=0.1"),
        (torch.optim.AdamW, "AdamW, which moves all rows, or is not known to leave them alone"),
    ],
)
def test_optimizers_that_move_all_rows_are_refused_in_elastic_averaging(local: Any, text: str) -> None:
    """They are not if they do so to other parameters alone."""

    def work(communicator: Any) -> None:
        model = Words()
        made(model, local(model.parameters()), communicator, hvdp.EASGD(0.2))

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert text in message

    def in_groups(communicator: Any) -> None:
        model = Words()
        groups = [
            {"params": model.layer.parameters(), "momentum": 0.9},
            {"params": model.embedding.parameters()},
        ]
        optimizer = made(model, torch.optim.SGD(groups, 0.1), communicator, hvdp.EASGD(0.2))
        trained(model, optimizer, communicator.rank, range(4))
        optimizer.param_groups[1]["weight_decay"] = 0.5
        trained(model, optimizer, communicator.rank, range(4, 8))

    for kind, message in errors(2, in_groups):
        assert kind is RuntimeError
        assert "SGD with weight_decay=0.5" in message


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_an_embedding_that_renormalizes_rows_is_refused_in_elastic_averaging(kind: str) -> None:
    """Its forward pass changes rows that have no gradient. It is not if the whole table travels."""

    def work(communicator: Any, parameters: Any) -> None:
        model = torch.nn.ModuleDict({"words": getattr(torch.nn, kind)(ROWS, WIDTH, max_norm=1.0)})
        local = torch.optim.SGD(model.parameters(), 0.1)
        hvdp.ElasticAverageOptimizer(local, model, PERIOD, parameters=parameters, process_set=communicator)

    run_ranks(2, lambda communicator: work(communicator, None))
    for error, message in errors(2, lambda communicator: work(communicator, "rows")):
        assert error is ValueError
        assert message.endswith(f"Received: 'words.weight' of {kind}(max_norm=1.0)")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_that_a_forward_pass_renormalizes_travel(algorithm: str) -> None:
    """One that has no gradient too, as that of ``padding_idx``: the dense exchange to the bit."""

    def work(communicator: Any, parameters: Any) -> list[Any]:
        model, rank, seen = Words(), communicator.rank, []
        model.embedding.max_norm, model.embedding.padding_idx = 1.0, 3
        optimizer = made(model, local_of("sgd", model), communicator, algorithm, parameters=parameters)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.tensor([3, 4 + rank, 6 + (2 * step + rank) % 5])).backward()
            optimizer.step()
            seen.append(model.embedding.weight.tolist())
        return seen

    for rows, dense in both_ways(work, 3):
        assert rows == dense


@pytest.mark.parametrize("algorithm", ["average", "diloco", "agn"])
def test_three_ranks_small_buckets_and_blocks(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket of seven rows, computed in blocks that end within rows."""
    monkeypatch.setattr("hvd_periodic.torch.replica._BLOCK_BYTES", 40)
    monkeypatch.setattr(TorchReplica.__init__, "__defaults__", (None, 7 * 4 * WIDTH + 4, None))

    def work(communicator: Any, parameters: Any) -> Any:
        model = Words()
        optimizer = made(model, local_of("sgd", model), communicator, algorithm, parameters=parameters)
        return trained(model, optimizer, communicator.rank)

    for rows, dense in both_ways(work, 3):
        assert rows == dense


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_dtypes(dtype: Any) -> None:
    """Of 16-bit parameters, whose center has 32 bits, what rounding cuts off travels as in the dense exchange."""

    def work(communicator: Any, parameters: Any) -> Any:
        table = torch.nn.Parameter(torch.ones(ROWS, WIDTH, dtype=dtype))
        optimizer = hvdp.PeriodicOptimizer(
            torch.optim.SGD([table], 0.1),
            [("embedding.weight", table)],
            hvdp.DiLoCo(),
            2,
            process_set=communicator,
            parameters=parameters,
        )
        seen = []
        for step in range(7):
            table.grad = torch.zeros_like(table)
            table.grad[words_of(communicator.rank, step)] = 1.0 + communicator.rank
            optimizer.step()
            seen.append(table.tolist())
        return seen

    for rows, dense in both_ways(work):
        assert rows == dense


def test_training_resumes_to_the_bit() -> None:
    def work(communicator: Any) -> bool:
        rank, model = communicator.rank, Words(sparse=True)
        optimizer = made(model, local_of("sgd", model), communicator, "diloco")
        trained(model, optimizer, rank, range(5))
        state, values = optimizer.synchronizer.state_dict(), copy.deepcopy(model.state_dict())
        expected = trained(model, optimizer, rank, range(5, 11))
        again = Words(sparse=True)
        optimizer = made(again, local_of("sgd", again), communicator, "diloco")
        again.load_state_dict(values)
        optimizer.synchronizer.load_state_dict(state)
        return trained(again, optimizer, rank, range(5, 11)) == expected

    assert run_ranks(2, work) == [True] * 2


def test_a_center_optimizer_of_torch() -> None:
    def work(communicator: Any, parameters: Any) -> Any:
        model = Words()
        options = {"parameters": parameters, "outer_optimizer": lambda groups: torch.optim.Adam(groups, 0.1)}
        optimizer = made(model, local_of("sgd", model), communicator, "diloco", **options)
        return trained(model, optimizer, communicator.rank)

    for rows, dense in both_ways(work):
        assert rows == dense


def test_a_bias_has_no_rows() -> None:
    def work(communicator: Any) -> None:
        model = Words()
        made(model, local_of("sgd", model), communicator, "average", parameters={"layer.bias": "rows"})

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert message.endswith("Received: 'layer.bias' of shape (2,)")


def test_a_sharded_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leave them out of fully_shard\(\). Received: sharded table"):
        check_sharded({"table": None}, [], ["table", "other"])
