"""State that optimizers keep in parameter groups: a copy for the center has its own, and follows the settings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator, run  # noqa: E402
from hvd_periodic.torch.outer import TorchOuterOptimizer  # noqa: E402
from hvd_periodic.vectors.layout import Layout, TensorSpec  # noqa: E402
from hvd_periodic.vectors.store import FlatStore  # noqa: E402
from tests.counting import CountsInGroup  # noqa: E402
from tests.covering import covering  # noqa: E402

PERIOD = 2


class Weighs(CountsInGroup):
    """Has what schedule-free optimizers have among its defaults: a counter, a sum of weights, the largest rate."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        for name, value in (("k", 0), ("weight_sum", 0.0), ("lr_max", -1.0)):
            self.defaults[name] = value
            for group in self.param_groups:
                group.setdefault(name, value)

    def counted(self, group: dict[str, Any]) -> float:
        group["k"] += 1
        group["lr_max"] = max(group["lr_max"], group["lr"])
        group["weight_sum"] += group["lr_max"] ** 2
        return float(group["weight_sum"] / group["lr_max"] ** 2)


class CountsForAll(CountsInGroup):
    """Counts under a key of its state that is no parameter, from its construction on."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.state["count"] = 0

    def counted(self, group: dict[str, Any]) -> float:
        self.state["count"] += group is self.param_groups[0]
        return float(self.state["count"])


class CountsInAttribute(CountsInGroup):
    """Counts in an attribute."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.count = 0

    def counted(self, group: dict[str, Any]) -> float:
        self.count += group is self.param_groups[0]
        return float(self.count)


class Learns(CountsInGroup):
    """Learns the size of its steps from all gradients, as Prodigy and D-Adaptation do."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("d", 1.0)

    def counted(self, group: dict[str, Any]) -> float:
        total = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
        group["d"] = max(group["d"], total)
        return 1.0 + float(group["d"])


class LearnsLate(Learns):
    """Learns, but long after it was tried out."""

    def counted(self, group: dict[str, Any]) -> float:
        group["quiet"] = group.get("quiet", 0) + 1
        return super().counted(group) if group["quiet"] > 30 else 1.0


COUNTING = [CountsInGroup, Weighs, CountsForAll, CountsInAttribute]

EVERYWHERE: dict[str, dict[str, Any]] = {
    "replicated": {},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "fragments": {"fragments": 2},
    "overlap": {"overlap": 1},
    "fragments that overlap": {"fragments": 2, "overlap": 1},
    "sharded fragments": {"fragments": 2, "center": "sharded"},
}


def model() -> Any:
    """Return a small one, whose parameters have one and two dimensions."""
    of = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in of.parameters():
            parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).reshape(parameter.shape))
    return of


def train(optimizer: Any, of: Any, steps: int, rank: int, scheduler: Any = None) -> list[list[float]]:
    """Descend, each rank to another place; return the center after every exchange."""
    seen = []
    for step in range(1, steps + 1):
        for i, parameter in enumerate(of.parameters()):
            parameter.grad = parameter.detach() - torch.full_like(parameter, float(rank + 1) * (i + 1))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if hasattr(optimizer, "center") and step % PERIOD == 0:
            with optimizer.center():
                seen.append([x for parameter in of.parameters() for x in parameter.flatten().tolist()])
    return seen


def centers(kind: Any, communicator: Any, own: bool, before: int = 0, **options: Any) -> list[list[float]]:
    """Return the centers of AGN by a copy of the local optimizer, or by one that is given."""
    of = model()
    local = kind(of.parameters())
    train(local, of, before, 0)
    given = {} if own else {"outer_optimizer": lambda groups: kind([{"params": group["params"]} for group in groups])}
    optimizer = hvdp.AGNOptimizer(local, of, PERIOD, process_set=communicator, **given, **options)
    return train(optimizer, of, 6, communicator.rank)


@pytest.mark.parametrize(("kind", "where"), covering(COUNTING, EVERYWHERE, together=1))
def test_a_copy_counts_its_own_steps_wherever_the_center_is(kind: Any, where: str) -> None:
    def work(communicator: ThreadCommunicator, own: bool, before: int) -> list[list[float]]:
        return centers(kind, communicator, own, before, **EVERYWHERE[where])

    for before in (0, 3):  # As the optimizer is made, and after it has trained alone.
        assert run(2, lambda c: work(c, True, before)) == run(2, lambda c: work(c, False, before))  # noqa: B023


@pytest.mark.parametrize("kind", [CountsInGroup, Weighs, CountsForAll])
def test_a_copy_counts_its_own_steps_asynchronously(kind: Any) -> None:
    one = LocalCommunicator()
    copied = centers(kind, one, True, 3, asynchronous=True)
    assert copied == centers(kind, one, False, 3, asynchronous=True) == centers(kind, one, True, 3)


def test_what_is_counted_in_an_attribute_cannot_be_shared() -> None:
    message = r"CountsInAttribute changes its attribute 'count' when it steps.*Pass another `outer_optimizer`"
    with pytest.raises(ValueError, match=message):
        centers(CountsInAttribute, LocalCommunicator(), True, asynchronous=True)


@pytest.mark.parametrize("kind", [CountsInGroup, Weighs, CountsForAll])
def test_processes_that_step_in_turn_share_the_counter(kind: Any) -> None:
    """Two of them move one center as one process would that took all steps."""

    layout = Layout([TensorSpec("w", (3,), "float32", 4)])

    def made() -> TorchOuterOptimizer:
        parameter = torch.nn.Parameter(torch.zeros(3))
        return TorchOuterOptimizer(kind([parameter]), None, [parameter])

    workers, alone = [made() for _ in range(2)], made()
    shapes = [worker.shapes(layout) for worker in workers]
    assert shapes[0] == shapes[1]
    x, g, alone_x, alone_g = (np.zeros(3, "float32") for _ in range(4))
    for worker, of_center, of_gradient in [(workers[0], x, g), (workers[1], x, g), (alone, alone_x, alone_g)]:
        stores = [FlatStore(layout, lambda kind, size, array=array: array) for array in (of_center, of_gradient)]
        worker.bind_host(*stores, layout)
    arrays = [np.zeros(shape, dtype) for shape, dtype in shapes[0]]
    for turn, worker in enumerate([workers[0], workers[1], workers[1], workers[0]]):
        for gradient in (g, alone_g):
            gradient[:] = np.array([1.0, -2.0, 3.0]) * (turn + 1)
        if turn == 0:
            worker.reset()
        else:
            worker.pull(arrays)
        worker.step()
        worker.push(arrays)
        alone.step()
        assert x.tolist() == alone_x.tolist()
    assert workers[0].state()["param_groups"] == alone.state()["param_groups"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", [CountsInGroup, Weighs])
def test_a_copy_follows_what_schedulers_and_users_set(kind: Any, asynchronous: bool) -> None:
    of = model()
    local = kind(of.parameters(), lr=0.1)
    optimizer = hvdp.AGNOptimizer(local, of, PERIOD, process_set=LocalCommunicator(), asynchronous=asynchronous)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.param_groups[0]["note"] = "set by the user"
    train(optimizer, of, 3 * PERIOD, 0, scheduler)
    group = optimizer.state_dict()["hvd_periodic"]["center_optimizer"]["param_groups"][0]
    assert group["lr"] == local.param_groups[0]["lr"] == 0.1 / 2**6
    assert group["note"] == "set by the user"
    assert {group.get("step", 3), group.get("k", 3)} == {3}
    assert {local.param_groups[0].get("step", 6), local.param_groups[0].get("k", 6)} == {6}


@pytest.mark.parametrize("kind", COUNTING)
def test_a_template_that_never_steps_leaves_the_counter_alone(kind: Any) -> None:
    def work(given: Callable[[Any], Any]) -> list[list[float]]:
        of = model()
        local = torch.optim.SGD(of.parameters(), lr=0.1)
        outer = given(of.parameters())
        options: dict[str, Any] = {"outer_optimizer": outer, "process_set": LocalCommunicator()}
        return train(hvdp.PeriodicOptimizer(local, of, hvdp.DiLoCo(), PERIOD, **options), of, 6, 0)

    assert work(kind) == work(lambda _: lambda groups: kind([{"params": group["params"]} for group in groups]))


def test_the_counter_is_saved_with_the_center() -> None:
    def made() -> tuple[Any, Any]:
        of = model()
        return of, hvdp.AGNOptimizer(Weighs(of.parameters()), of, PERIOD, process_set=LocalCommunicator())

    of, optimizer = made()
    train(optimizer, of, 2 * PERIOD, 0)
    weights, state = copy.deepcopy(of.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = train(optimizer, of, 2 * PERIOD, 0)
    of, optimizer = made()
    of.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert train(optimizer, of, 2 * PERIOD, 0) == expected


def test_a_learned_step_size_is_the_centers_own() -> None:
    """Ranks learn different ones from their gradients, and all move the center by the one that it has learned."""
    found = run(2, lambda c: centers(Learns, c, True))
    assert found[0] == found[1] == run(2, lambda c: centers(Learns, c, False))[0]


@pytest.mark.parametrize("where", ["sharded", "fragments"])
def test_a_learned_step_size_needs_the_whole_center(where: str) -> None:
    by = r"center='sharded'" if where == "sharded" else "fragments"
    message = rf"Learns learns 'd' .*divided here \(by {by}\). Pass another `outer_optimizer`"
    with pytest.raises(ValueError, match=message):
        run(2, lambda c: centers(Learns, c, True, **EVERYWHERE[where]))


def test_the_core_calls_it_the_outer_optimizer() -> None:
    of = model()
    with pytest.raises(ValueError, match=r"learns 'd'.*Pass another `outer_optimizer`"):
        hvdp.PeriodicOptimizer(
            Learns(of.parameters()), of, hvdp.AGN(), PERIOD, fragments=2, process_set=LocalCommunicator()
        )


def test_what_ranks_learn_late_is_told_with_the_way_out() -> None:
    def work(communicator: ThreadCommunicator) -> None:
        of = model()
        optimizer = hvdp.AGNOptimizer(LearnsLate(of.parameters()), of, PERIOD, process_set=communicator)
        train(optimizer, of, 40, communicator.rank)

    with pytest.raises(ValueError, match=r"They differ in d of group 0 of the center optimizer.*`outer_optimizer`"):
        run(2, work)


def test_trying_an_optimizer_out_draws_no_random_numbers() -> None:
    class Noisy(CountsInGroup):
        def step(self, closure: Any = None) -> None:
            torch.rand(3)
            super().step(closure)

    of = model()
    before = torch.random.get_rng_state()
    hvdp.AGNOptimizer(Noisy(of.parameters()), of, PERIOD, process_set=LocalCommunicator())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_optimizer_of_other_parameters_is_refused_before_it_steps() -> None:
    of = model()
    before = [parameter.tolist() for parameter in of.parameters()]
    made = torch.optim.SGD(of.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="must hold the parameters of the model"):
        hvdp.AGNOptimizer(made, of, PERIOD, outer_optimizer=lambda groups: made, process_set=LocalCommunicator())
    assert [parameter.tolist() for parameter in of.parameters()] == before


def test_ranks_that_are_threads_leave_the_random_generator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch waits for ever where two threads ask for its state at once."""
    asked, state = [], torch.get_rng_state

    def noted() -> Any:
        asked.append(None)
        return state()

    def work(communicator: ThreadCommunicator) -> None:
        model = torch.nn.Linear(2, 1)
        hvdp.AGNOptimizer(torch.optim.Adam(model.parameters()), model, 2, process_set=communicator)

    monkeypatch.setattr(torch, "get_rng_state", noted)
    run(2, work, 30.0)
    assert asked == []
    work(LocalCommunicator())
    assert asked
