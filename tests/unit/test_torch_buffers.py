"""What becomes of buffers: by their names, by a pattern, by a function; and of infinities in them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.covering import covering

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator, run  # noqa: E402

INF = float("inf")


class Buffered(torch.nn.Module):
    """A queue of unit vectors with its pointer, a mask, the state of a random generator; and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("queue", torch.nn.functional.normalize(torch.ones(3, 2), dim=1))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(2))
        self.register_buffer("random_state", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("rotation", torch.zeros(2, dtype=torch.complex64))


def wrap(model: Any, communicator: Any, buffers: Any = None, period: int = 1, **common: Any) -> Any:
    local = torch.optim.SGD(model.parameters(), lr=0.0)
    return hvdp.ElasticAverageOptimizer(local, model, period, 0.25, buffers=buffers, process_set=communicator, **common)


def exchanged(buffers: Any, size: int = 3, root: int = 0) -> list[dict[str, Any]]:
    """Let all buffers change by the rank plus one, exchange once, and return them."""

    def work(communicator: ThreadCommunicator) -> dict[str, Any]:
        model = Buffered()
        optimizer = wrap(model, communicator, buffers, root_rank=root)
        for buffer in model.buffers():
            buffer.add_(communicator.rank + 1)
        optimizer.step()
        found = {name: buffer.reshape(-1)[0].item() for name, buffer in model.named_buffers()}
        with optimizer.center():
            center = {name: buffer.reshape(-1)[0].item() for name, buffer in model.named_buffers()}
        optimizer.finalize()
        return {"x": found, "c": center}

    return run(size, work)


NAMES = ("norm.running_mean", "norm.num_batches_tracked", "queue_ptr", "mask", "random_state")

CASES: dict[str, tuple[Any, list[list[float]]]] = {
    "default": (None, [[2.0, 3, 1 + r, 1.0 + r, 1 + r] for r in range(3)]),
    "average": ("average", [[2.0, 3, 3, 2.0, 3]] * 3),
    "maximum": ("maximum", [[3.0, 3, 3, 3.0, 3]] * 3),
    "broadcast": ("broadcast", [[2.0, 2, 2, 2.0, 2]] * 3),
    "local": ("local", [[1.0 + r, 1 + r, 1 + r, 1.0 + r, 1 + r] for r in range(3)]),
    "patterns": (
        {"norm.*": "local", "queue*": "broadcast", "*_state": "maximum"},
        [[1.0 + r, 1 + r, 2, 1.0 + r, 3] for r in range(3)],
    ),
    "function": (
        lambda name, tensor: "broadcast" if tensor.dtype in (torch.int64, torch.uint8) else None,
        [[2.0, 2, 2, 1.0 + r, 2] for r in range(3)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_policies(case: str) -> None:
    """Rank r of three adds r + 1; the root is rank 1."""
    buffers, expected = CASES[case]
    reports = exchanged(buffers, root=1)
    assert [[report["x"][name] for name in NAMES] for report in reports] == expected
    assert all(report["c"] == report["x"] for report in reports)
    rotations = [report["x"]["rotation"] for report in reports]
    assert rotations == ([2] * 3 if case == "broadcast" else [1, 2, 3])


def test_a_queue_stays_normalized_and_fits_its_pointer() -> None:
    def work(communicator: ThreadCommunicator) -> tuple[Any, Any]:
        model = Buffered()
        optimizer = wrap(model, communicator, {"queue*": "broadcast"})
        generator = torch.Generator().manual_seed(communicator.rank)
        for _ in range(3):
            place = int(model.queue_ptr)
            model.queue[place] = torch.nn.functional.normalize(torch.randn(2, generator=generator), dim=0)
            model.queue_ptr[0] = (place + 1 + communicator.rank) % 3
            optimizer.step()
        return model.queue.tolist(), model.queue_ptr.item()

    first, second = run(2, work)
    assert first == second
    torch.testing.assert_close(torch.tensor(first[0]).norm(dim=1), torch.ones(3))


@pytest.mark.filterwarnings("ignore:invalid value encountered in add")  # where ranks are threads, numpy sums
@pytest.mark.parametrize("center", ["replicated", "sharded"])
def test_infinities(center: str) -> None:
    """A mask that all ranks set; an infinity, a NaN and opposite infinities of one exchange."""

    def work(communicator: ThreadCommunicator) -> list[Any]:
        model = torch.nn.BatchNorm1d(4)
        optimizer = wrap(model, communicator, "average", center=center, nonfinite="ignore")
        mean, seen = model.running_mean, []
        sign = 1 - 2 * communicator.rank
        strange = INF if communicator.rank else 1.0
        for values in ([-INF, strange, strange - strange, sign * INF], [-INF, 1.0 + communicator.rank, 2.0, 3.0]):
            mean.copy_(torch.tensor(values))
            optimizer.step()
            optimizer.synchronizer.audit()
            seen.append(mean.tolist())
            with optimizer.center():
                seen.append(mean.tolist())
        return seen

    nan = pytest.approx(float("nan"), nan_ok=True)
    centers = [[-INF, INF, nan, nan], [-INF, 1.5, 2.0, 3.0]]
    own = [[-INF, 1.0, 0.0, INF], [-INF, INF, nan, -INF]]
    for rank, seen in enumerate(run(2, work)):
        assert seen == [own[rank], centers[0], centers[1], centers[1]]


SPOILT = {"queue": float("nan"), "mask": INF, "rotation": complex(0.0, float("nan"))}


@pytest.mark.parametrize(("name", "where", "policy"), covering(SPOILT, (0, 1), ("raise", "skip", "ignore")))
def test_buffers_of_the_root_are_looked_at(name: str, where: int, policy: str) -> None:
    """Rank 1 is the root; at the second exchange the buffer of one rank is not finite."""

    def work(communicator: ThreadCommunicator) -> tuple[str, list[bool], int]:
        model = Buffered()
        model.register_buffer("always", torch.tensor([-INF, 0.0]))
        optimizer = wrap(model, communicator, "broadcast", root_rank=1, nonfinite=policy)
        optimizer.step()
        if communicator.rank == where:
            model.get_buffer(name).reshape(-1)[1] = SPOILT[name]
        error = ""
        try:
            optimizer.step()
        except RuntimeError as raised:
            error = str(raised)
        with optimizer.center():
            finite = [bool(model.get_buffer(each).isfinite().all()) for each in SPOILT]
            assert model.always.tolist() == [-INF, 0.0]
        return error, finite, optimizer.synchronizer.counters.left_out

    spoilt = [each != name for each in SPOILT]
    for rank, (error, finite, left_out) in enumerate(run(2, work)):
        found = f"buffer {name!r} of the root is not finite at step 2, and would spoil the center"
        assert (found in error) == (policy == "raise" and where == 1)
        assert finite == (spoilt if policy == "ignore" and where == 1 else [True] * 3)
        assert left_out == (policy == "skip" and where == 1 == rank)


def test_infinities_of_asynchronous_workers() -> None:
    model = torch.nn.BatchNorm1d(2)
    optimizer = wrap(model, LocalCommunicator(), asynchronous=True)
    for values, center in (([-INF, INF], [-INF, INF]), ([-INF, 2.0], [-INF, 2.0]), ([1.0, 3.0], [1.0, 3.0])):
        model.running_mean.copy_(torch.tensor(values))
        optimizer.step()
        with optimizer.center():
            assert model.running_mean.tolist() == center
        assert model.running_mean.tolist() == values


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "policy": ("mean", ValueError, r"`buffers` must be one of \('average', .*Received: buffers='mean'"),
    "policy of a pattern": ({"mask": "sum"}, ValueError, r"`buffers\['mask'\]` must be .*='sum'"),
    "policy of a function": (lambda name, tensor: 3, ValueError, r"buffers\('queue', ...\)=3"),
    "pattern": ({"masks*": "local"}, ValueError, r"matches no buffer: 'masks\*'. There are queue, queue_ptr, "),
    "type": (["mask"], TypeError, "`buffers` must be .*Received: list"),
    "complex": ({"rotation": "average"}, ValueError, "'rotation' of torch.complex64 has no average"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_policies(case: str) -> None:
    buffers, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        wrap(Buffered(), LocalCommunicator(), buffers)


def test_broadcast_needs_the_root_to_be_there() -> None:
    with pytest.raises(ValueError, match="'broadcast' is for synchronous exchange"):
        wrap(Buffered(), LocalCommunicator(), "broadcast", asynchronous=True)


def test_policies_that_differ_are_an_error() -> None:
    def work(communicator: ThreadCommunicator) -> str:
        with pytest.raises(ValueError, match="differ in number of") as error:
            wrap(Buffered(), communicator, {"mask": "average" if communicator.rank else "maximum"})
        return str(error.value)

    assert len(set(run(2, work))) == 1


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "resized in place": (lambda model: model.norm.running_mean.resize_(3), r"'norm.running_mean' was float32\[2\]"),
    "replaced": (lambda model: setattr(model.norm, "running_var", torch.ones(2)), "'norm.running_var' was added"),
    "added": (lambda model: model.register_buffer("mean", torch.ones(2)), "'mean' was added"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changed_buffers_are_noticed(case: str) -> None:
    change, message = CHANGES[case]

    def work(communicator: ThreadCommunicator) -> None:
        model = Buffered()
        optimizer = wrap(model, communicator)
        if communicator.rank == 1:
            change(model)
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()

    run(2, work)


def test_local_buffers_may_change_as_they_like() -> None:
    def work(communicator: ThreadCommunicator) -> None:
        model = Buffered()
        optimizer = wrap(model, communicator)
        if communicator.rank == 1:
            model.mask = torch.ones(7)
            model.register_buffer("cache", torch.ones(3))
            model.queue.resize_(1, 2)
        optimizer.step()

    run(2, work)


def test_policies_are_kept_by_copies() -> None:
    model = Buffered()
    optimizer = wrap(model, LocalCommunicator(), {"queue*": "broadcast", "mask": "average"})
    model.mask.add_(1)
    optimizer.step()
    copied_model, copied = pickle.loads(pickle.dumps((model, optimizer)))
    assert copied.synchronizer.replica.facts() == optimizer.synchronizer.replica.facts()
    copied_model.mask.add_(1)
    copied.load_state_dict(optimizer.state_dict())
    copied.step()
    assert copied_model.mask.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("buffers", [{"peak": "maximum"}, lambda name, tensor: "average"])
def test_a_policy_for_an_empty_buffer_is_refused_until_it_has_its_shape(buffers: Any) -> None:
    model = torch.nn.Linear(2, 1)
    model.register_buffer("peak", torch.empty(0))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"process_set": LocalCommunicator(), "buffers": buffers}
    with pytest.raises(ValueError, match=r"Buffer 'peak' is empty, so .* run one forward pass"):
        hvdp.ModelAverageOptimizer(inner, model, 2, **options)
    model.peak.resize_(3).zero_()
    hvdp.ModelAverageOptimizer(inner, model, 2, **options).synchronizer.sync()
