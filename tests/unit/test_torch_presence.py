"""Parameters of PyTorch models to which only ranks with gradients contribute: as on numpy, see ``test_presence.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
import hvd_periodic.torch.replica as replica  # noqa: E402
import tests.unit.test_torch_blocks as blocks  # noqa: E402
from hvd_periodic.comm.subset import Subset  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator, run  # noqa: E402
from tests.covering import covering  # noqa: E402
from tests.oracle import MOMENTUM, RATE, Present, has_gradient, present  # noqa: E402

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "average": hvdp.Averaging,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": hvdp.BMUF,
    "easgd": lambda: hvdp.EASGD(0.25, rho=0.5),
    "agn": hvdp.AGN,
    "agn average": lambda: hvdp.AGN(op="average"),
}
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "overlap": {"overlap": 1},
}
RANKS, STEPS, PERIOD = 3, 13, 2
START = {"body": [1.0, 0.25], "experts.0": [1.0, -2.0, 0.5], "experts.1": [-1.0]}
POLICIES = {"experts.*": "present"}


class Experts(torch.nn.Module):
    """A body and two experts, of which a forward pass uses some."""

    def __init__(self, dtype: Any = torch.float64) -> None:
        super().__init__()
        self.body = torch.nn.Parameter(torch.tensor(START["body"], dtype=dtype))
        self.experts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.tensor(START[f"experts.{i}"], dtype=dtype)) for i in range(2)
        )

    def forward(self, rank: int, used: list[int]) -> Any:
        """Return the loss, whose gradients are those of the oracle."""
        parts = [self.body, *(self.experts[i] for i in used)]
        return sum((0.5 * (0.5 + 0.25 * rank) * (x - (1.5 - rank)) ** 2).sum() for x in parts)


def made(model: Any, communicator: Any, algorithm: str, **options: Any) -> Any:
    local = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
    if algorithm.startswith("agn"):
        options["outer_optimizer"] = lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9)
    options = {"parameters": POLICIES, "period": PERIOD} | options
    return hvdp.PeriodicOptimizer(local, model, ALGORITHMS[algorithm](), process_set=communicator, **options)


def stepped(model: Any, optimizer: Any, rank: int, step: int) -> dict[str, Any]:
    """Take a step, and return the values after it."""
    optimizer.zero_grad(set_to_none=True)
    model(rank, [i for i in range(2) if has_gradient(rank, step, i)]).backward()
    optimizer.step()
    return {name: x.tolist() for name, x in model.named_parameters()}


def expected(algorithm: str, delay: int = 0) -> list[list[dict[str, list[float]]]]:
    """Return the values on each rank after each step, and the center, by the oracle."""
    found = [[{name: list[float]() for name in START} for _ in range(STEPS + 1)] for _ in range(RANKS)]
    for name, values in START.items():
        which = None if name == "body" else int(name[-1])
        for value in values:
            element = Present(value, RANKS, algorithm, takes_part=which is None)
            replicas = present(
                element,
                STEPS,
                range(PERIOD, STEPS + 1, PERIOD),
                lambda i, t, which=which: which is None or has_gradient(i, t, which),
                delay,
            )
            for rank in range(RANKS):
                for step, of_ranks in enumerate([*replicas, [element.center] * RANKS]):
                    found[rank][step][name].append(of_ranks[rank])
    return found


@pytest.mark.parametrize(("algorithm", "way"), covering(ALGORITHMS, WAYS, together=1))
def test_oracle(algorithm: str, way: str) -> None:
    def work(communicator: ThreadCommunicator) -> Any:
        model, rank = Experts(), communicator.rank
        optimizer = made(model, communicator, algorithm, **WAYS[way])
        seen = [stepped(model, optimizer, rank, step) for step in range(1, STEPS + 1)]
        with optimizer.center():
            return [*seen, {name: x.tolist() for name, x in model.named_parameters()}]

    for found, right in zip(run(RANKS, work), expected(algorithm, WAYS[way].get("overlap", 0)), strict=True):
        for step, (values, of_oracle) in enumerate(zip(found, right, strict=True)):
            for name in START:
                assert values[name] == pytest.approx(of_oracle[name], rel=1e-9), (name, step)


@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
def test_a_checkpoint_in_the_middle_of_a_period(tmp_path: Path, center: str) -> None:
    """On the same ranks it resumes to the bit; on others all start from the center, and nobody is present yet."""
    begun = 3

    def save(communicator: ThreadCommunicator) -> Any:
        rank, model = communicator.rank, Experts()
        optimizer = made(model, communicator, "diloco", center=center)
        for step in range(1, begun + 1):
            stepped(model, optimizer, rank, step)
        hvdp.save(tmp_path, model, optimizer)
        return [stepped(model, optimizer, rank, step) for step in range(begun + 1, STEPS + 1)]

    def resume(communicator: ThreadCommunicator) -> Any:
        rank, model = communicator.rank, Experts()
        optimizer = made(model, communicator, "diloco", center=center)
        hvdp.load(tmp_path, model, optimizer)
        optimizer.synchronizer.begin()
        seen = optimizer.synchronizer.progress.notes.seen
        return seen, [stepped(model, optimizer, rank, step) for step in range(begun + 1, STEPS + 1)]

    saved, resumed = run(RANKS, save), run(RANKS, resume)
    assert [values for _, values in resumed] == saved
    assert [list(seen) for seen, _ in resumed] == [[["experts.0"]], [], []]
    if center != "sharded":
        assert [list(seen) for seen, _ in run(2, resume)] == [[], []]


class Tensors(ThreadCommunicator):
    """Threads that scatter tensors, as Horovod does."""

    def scatter(self, buffer: Any, counts: Any, name: str) -> Callable[[], Any]:
        """Return a new tensor."""
        received, given = super().scatter(buffer, counts, name)()
        return lambda: (torch.from_numpy(received), given)

    def tile(self, buffer: Any, times: int) -> Any:
        """Return a new tensor."""
        return buffer.repeat(times)


def test_several_levels() -> None:
    """Both know who is present: at each step within a pair, every other one among all."""

    def work(communicator: ThreadCommunicator) -> Any:
        model, rank = Experts(), communicator.rank
        local = torch.optim.SGD(model.parameters(), 0.1)
        communicator = Tensors(rank, communicator._group)
        pair = Subset(communicator, lambda: [rank // 2 * 2, rank // 2 * 2 + 1])
        inner = hvdp.PeriodicOptimizer(local, model, hvdp.Averaging(), 1, process_set=pair, parameters=POLICIES)
        outer = hvdp.PeriodicOptimizer(inner, model, hvdp.Averaging(), 2, process_set=communicator, parameters=POLICIES)
        found = []
        for used in ([[0], [0], [0, 1], []], [[], [0], [], []]):
            outer.zero_grad()
            sum((x * (rank + 1)).sum() for x in [model.body, *(model.experts[i] for i in used[rank])]).backward()
            outer.step()
            found.append([round(x[0].item(), 9) for x in model.experts])
        return found

    one, two, three, four = run(4, work)
    assert one == two
    assert three == four
    # Step 1: the first pair moves expert 0 by −(.1 + .2)/2, the second by −.3, and expert 1 by −.3.
    assert (one[0], three[0]) == ([0.85, -1.0], [0.7, -1.3])
    # Step 2: rank 1 moves expert 0 by another −.2. Then ranks 0, 1 and 2 have had gradients of it, rank 2 of expert 1.
    assert one[1] == three[1] == pytest.approx([(0.65 + 0.65 + 0.7) / 3, -1.3])


def test_mixed_precision_that_skips_an_update() -> None:
    """A gradient whose update did not run because it was not finite does not count."""

    def work(communicator: ThreadCommunicator) -> list[float]:
        model, rank = Experts(torch.float32), communicator.rank
        optimizer = made(model, communicator, "average", period=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        used = [model.body, model.experts[1]]
        loss = sum((x * (float("inf") if rank else 1.0)).sum() for x in used)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return model.experts[1].tolist()

    assert run(2, work) == [[pytest.approx(-1 - RATE)]] * 2


@pytest.mark.parametrize("policy", ["average", "reset"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_optimizer_state(kind: Any, policy: str) -> None:
    """The mean of those present, on all ranks whose optimizer has any; it stays if nobody is present."""

    def work(communicator: ThreadCommunicator) -> Any:
        model, rank, found = Experts(), communicator.rank, []
        more = {"momentum": 0.5} if kind is torch.optim.SGD else {"betas": (0.5, 0.75)}
        local = kind([{"params": [model.body]}, {"params": list(model.experts)}], 0.0, **more)
        key = "momentum_buffer" if kind is torch.optim.SGD else "exp_avg"
        optimizer = hvdp.PeriodicOptimizer(
            local, model, hvdp.Averaging(), 1, process_set=communicator, parameters=POLICIES, optimizer_state=policy
        )
        for used in ([0, 1], [1], [], [2]):
            optimizer.zero_grad()
            model.body.grad = torch.ones_like(model.body)
            if rank in used:
                model.experts[1].grad = torch.full((1,), 1.0 + rank).double()
            optimizer.step()
            buffer = local.state.get(model.experts[1], {}).get(key)
            found.append(None if buffer is None else buffer.item())
        return found

    scale = 1.0 if kind is torch.optim.SGD else 0.5  # Of what a gradient adds to the buffer.
    if policy == "average":  # (1 + 2)/2; .5 · 1.5 + 2; stays; the third rank's first.
        both = [1.5 * scale, (0.75 + 2) * scale, (0.75 + 2) * scale, 3.0 * scale]
        assert run(3, work) == [both, both, [None, None, None, 3.0 * scale]]
    else:
        empty = None if kind is torch.optim.SGD else 0.0
        assert run(3, work) == [[empty] * 4] * 2 + [[None, None, None, empty]]


def test_closures() -> None:
    """A gradient of any evaluation counts."""

    def work(communicator: ThreadCommunicator) -> list[float]:
        model, rank = Experts(), communicator.rank
        optimizer = made(model, communicator, "average", period=1)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = sum((x * (rank + 1)).sum() for x in [model.body, *([model.experts[1]] if rank else [])])
            loss.backward()
            return loss

        optimizer.step(closure)
        return model.experts[1].tolist()

    assert run(3, work) == [[pytest.approx(-1 - RATE * (2 + 3) / 2)]] * 3


def test_an_explicit_synchronizer() -> None:
    def work(communicator: ThreadCommunicator) -> list[float]:
        model, rank = Experts(), communicator.rank
        local = torch.optim.SGD(model.parameters(), RATE)
        synchronizer = hvdp.Synchronizer(
            model, hvdp.Averaging(), 1, optimizer=local, process_set=communicator, parameters=POLICIES
        )
        model(rank, [1] if rank else []).backward()
        synchronizer.prepare_gradients()
        local.step()
        synchronizer.step()
        return model.experts[1].tolist()

    slopes = [0.75 * (-1.0 - 0.5), 1.0 * (-1.0 + 0.5)]
    assert run(3, work) == [[pytest.approx(-1.0 - RATE * sum(slopes) / 2)]] * 3


@pytest.mark.parametrize(
    ("algorithm", "options"), covering(["averaging", "easgd_rho", "agn", "slowmo"], blocks.OPTIONS, together=1)
)
def test_blocks_change_nothing(algorithm: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, on two ranks: tensors of several blocks, computed in place where that is possible; 16-bit ones."""
    of_some = {"small": 0, "large": 1, "of_16_bits": 2, "larger": 3}

    def work(communicator: ThreadCommunicator) -> Any:
        model, rank = blocks.Model(communicator.rank), communicator.rank
        groups = [{"params": list(model.parameters())[:2], "lr": 0.2}, {"params": list(model.parameters())[2:]}]
        optimizer = hvdp.PeriodicOptimizer(
            torch.optim.SGD(groups, lr=0.1, momentum=0.5),
            model,
            blocks.ALGORITHMS[algorithm](),
            4,
            process_set=communicator,
            parameters=dict.fromkeys(of_some, "present"),
            **blocks.OPTIONS[options],
        )
        for step in range(11):
            for i, (name, x) in enumerate(model.named_parameters()):
                x.grad = (x.detach() - i * (rank + 1)) * (0.5 + step % 3)
                if name in of_some and (step // 4 + of_some[name]) % 4 in ([0, 1], [0, 2])[rank]:
                    x.grad = None  # Of one round both have none, of one both have one, and of two one of them has.
            optimizer.step()
        optimizer.finalize()
        with optimizer.center():
            return [x.tolist() for x in model.parameters()]

    results = []
    for size in (2**40, 64):
        monkeypatch.setattr(replica, "_BLOCK_BYTES", size)
        results.append(run(2, work))
    assert results[0] == results[1]
    assert results[0][0] == results[0][1]
