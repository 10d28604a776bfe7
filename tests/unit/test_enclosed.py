"""Messages that travel with what ranks tell each other: the same training in one collective per exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic.comm.handshake import Purpose, Record, integers, unpack_records  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator  # noqa: E402
from hvd_periodic.numpy import SGD, PeriodicOptimizer  # noqa: E402
from hvd_periodic.sync.piggyback import as_integers  # noqa: E402
from tests.covering import covering  # noqa: E402
from tests.helpers import errors, run_ranks  # noqa: E402

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "averaging": hvdp.Averaging,
    "easgd": lambda: hvdp.EASGD(moving_rate=0.2),
    "easgd_rho": lambda: hvdp.EASGD(moving_rate=0.2, rho=0.1),
    "agn": hvdp.AGN,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": hvdp.BMUF,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fragments": {"fragments": 2},
    "average_state": {"optimizer_state": "average"},
    "piecewise": {"period": hvdp.Piecewise({0: 1, 3: 4})},
}


class Spy:
    """Notes the names of the collectives of a communicator."""

    def __init__(self, communicator: Any) -> None:
        self.names: list[str] = []
        for method in ("allreduce", "broadcast", "allgather", "allgather_object"):
            setattr(communicator, method, self._noting(getattr(communicator, method)))

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(buffer: Any, name: str, *arguments: Any, **options: Any) -> Any:
            self.names.append(name)
            return method(buffer, name, *arguments, **options)

        return call


class Model(torch.nn.Module):
    """Parameters of several types, and statistics that are averaged, counted and taken from the root."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.first = torch.nn.Parameter(torch.randn(3, generator=generator))
        self.second = torch.nn.Parameter(torch.randn(5, 3, generator=generator).double())
        self.third = torch.nn.Parameter(torch.randn(7, generator=generator).half())
        self.register_buffer("mean", torch.randn(3, generator=generator))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(5, dtype=torch.bool))

    def move(self, rank: int, step: int) -> None:
        """Let statistics follow a step, and give all parameters gradients."""
        self.mean.add_(rank + step)
        self.count.add_(1 + rank)
        self.flag[step % 5] = rank == 0
        for i, parameter in enumerate(self.parameters()):
            parameter.grad = (parameter.detach() - i * (rank + 1)) * (0.5 + step % 3)


def trained(communicator: ThreadCommunicator, algorithm: str, options: dict[str, Any], limit_bytes: int) -> Any:
    """Return all values after some periods, the counters, and the names of collectives in one exchange."""
    communicator.piggyback_limit_bytes = limit_bytes
    rank, options = communicator.rank, dict(options)
    model = Model(rank)
    local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    period = options.pop("period", 4)
    buffers = {"mean": "average", "count": "maximum", "flag": "broadcast"}
    optimizer = hvdp.PeriodicOptimizer(
        local, model, ALGORITHMS[algorithm](), period, process_set=communicator, buffers=buffers, **options
    )
    spy = Spy(communicator)
    values = []
    for step in range(10 + rank):  # One rank has more data than the others.
        spy.names.clear()
        model.move(rank, step)
        optimizer.step()
        if step < 10:
            values.append([tensor.tolist() for tensor in (*model.parameters(), *model.buffers())])
        if step == 7:
            names = list(spy.names)
    optimizer.finalize()
    with optimizer.center():
        values.append([tensor.tolist() for tensor in (*model.parameters(), *model.buffers())])
    counters = optimizer.synchronizer.counters
    return values, (counters.rounds, counters.bytes_sent, counters.local_steps), names


@pytest.mark.parametrize(("algorithm", "options", "size"), covering(ALGORITHMS, OPTIONS, (2, 3), together=1))
def test_training_is_the_same_to_the_bit(algorithm: str, options: str, size: int) -> None:
    """Also where ranks end at different steps; and each exchange is one collective, but for the optimizer's state."""

    def train(limit_bytes: int) -> list[Any]:
        return run_ranks(size, lambda communicator: trained(communicator, algorithm, OPTIONS[options], limit_bytes))  # type: ignore[arg-type]

    apart, together = train(0), train(2**20)
    for (values, counters, names), (others, as_many, few) in zip(apart, together, strict=True):
        assert values == others
        assert counters == as_many
        if options != "piecewise":
            assert len(names) > 2
            rest = [name for name in few if "momentum_buffer" not in name]
            assert rest == ["hvd_periodic.meeting"]


def test_large_messages_travel_by_themselves() -> None:
    """Up to as many bytes of all ranks as the communicator says."""

    def exchange(communicator: Any, limit_bytes: int) -> list[str]:
        communicator.piggyback_limit_bytes = limit_bytes
        x = np.zeros(100)
        optimizer = PeriodicOptimizer(SGD(0.1), {"x": x}, hvdp.Averaging(), 2, process_set=communicator)
        optimizer.step({"x": x - communicator.rank})
        spy = Spy(communicator)
        optimizer.step({"x": x - communicator.rank})
        assert x[0] == pytest.approx(0.095)
        return spy.names

    for names in run_ranks(2, lambda communicator: exchange(communicator, 1600)):
        assert names == ["hvd_periodic.meeting"]
    for names in run_ranks(2, lambda communicator: exchange(communicator, 1599)):
        assert len(names) == 2


class Cumulative(hvdp.Averaging):
    """Averaging whose messages change a vector that the next message reads."""

    def init_worker(self, space: Any, x: Any) -> dict[str, Any]:
        """Return the number of messages."""
        return {"count": space.zeros_like(x)}

    def message(self, space: Any, x: Any, worker: Any, center: Any, exchange: Any, out: Any = None) -> Any:
        """Return the displacement, larger from message to message."""
        count = worker["count"]
        count += 1
        return (x - center) * count, {"count": count}


@pytest.mark.parametrize(
    ("made", "messages"),
    [(hvdp.Averaging, 1), (lambda: hvdp.EASGD(0.2), 1), (hvdp.AGN, 1), (hvdp.DiLoCo, 1), (Cumulative, 2)],
    ids=["averaging", "easgd", "agn", "diloco", "cumulative"],
)
def test_a_message_that_changes_nothing_is_formed_once(
    made: Callable[[], Any], messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that changes vectors of its worker once more, when all ranks are known to exchange."""
    formed: list[int] = []

    def train(communicator: Any, limit_bytes: int) -> list[float]:
        communicator.piggyback_limit_bytes = limit_bytes
        model = torch.nn.Linear(2, 2, bias=False)
        model.weight.data.fill_(1.0)
        local = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvdp.PeriodicOptimizer(local, model, made(), 2, process_set=communicator)
        for step in range(6):
            model.weight.grad = torch.full((2, 2), float(step + communicator.rank))
            optimizer.step()
        return list(model.weight.flatten().tolist())

    kind = type(made())
    message = kind.message
    noting = lambda self, *a, **k: formed.append(1) or message(self, *a, **k)  # noqa: E731
    apart = run_ranks(2, lambda communicator: train(communicator, 0))
    monkeypatch.setattr(kind, "message", noting)
    assert run_ranks(2, lambda communicator: train(communicator, 2**20)) == apart
    assert len(formed) == 2 * 3 * messages


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_error_of_one_rank_leaves_all_as_they_were(algorithm: str) -> None:
    """Its message is formed before the others hear of it: nothing has changed then."""
    kept: dict[int, list[Any]] = {}

    def fail(communicator: Any) -> None:
        communicator.piggyback_limit_bytes = 2**20
        model = Model(communicator.rank)
        local = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvdp.PeriodicOptimizer(local, model, ALGORITHMS[algorithm](), 4, process_set=communicator)
        for step in range(3):
            model.move(communicator.rank, step)
            optimizer.step()
        state = [tensor.tolist() for tensor in optimizer.synchronizer.center_tensors()]
        vectors = optimizer.synchronizer.tensor_groups.parameters.vectors

        def all_values() -> list[Any]:
            return [t.tolist() for vector in vectors.values() for t in vector.tensors()] + [
                tensor.tolist() for tensor in model.parameters()
            ]

        before = all_values()
        if communicator.rank == 1:
            optimizer.synchronizer.handshake.checks.append(lambda: "out of order")
        try:
            optimizer.synchronizer.sync()
        finally:
            assert all_values() == before
            assert [tensor.tolist() for tensor in optimizer.synchronizer.center_tensors()] == state
            kept[communicator.rank] = before

    for kind, text in errors(2, fail):
        assert kind is RuntimeError
        assert "out of order" in text
    assert len(kept) == 2


def test_records_with_enclosures() -> None:
    """Of any length, also of none; messages of any type begin at multiples of eight bytes."""
    messages = [np.arange(3, dtype=np.float32), np.array([True, False]), np.arange(2, dtype=np.int64)]
    words = as_integers(messages)
    assert words.size == 2 + 1 + 2
    assert words.view(np.uint8)[:12].tobytes() == messages[0].tobytes()
    assert words[3:].tolist() == [0, 1]
    full, empty = Record(Purpose.EXCHANGE, 1, piggyback_length=words.size), Record(Purpose.LEAVE, 1, loss=0.5)
    records, enclosures = unpack_records([*integers(empty), *integers(full), *words.tolist(), *integers(empty)])
    assert records == [empty, full, empty]
    assert [enclosure.tolist() for enclosure in enclosures] == [[], words.tolist(), []]
    assert as_integers([]).size == 0
