"""Elastic jobs whose set of parameters changes; ranks are threads, which are lost and join."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic.torch.trained_set import TrainedSet  # noqa: E402
from tests.parallel.tiers import thorough  # noqa: E402
from tests.unit.test_torch_elastic_ranks import (  # noqa: E402
    HERE,
    PERIOD,
    Worker,
    _ranks_are_threads,
    lost_anywhere,
    together,
)

__all__ = ["_ranks_are_threads"]

ALGORITHMS = {"diloco": hvdp.DiLoCo, "easgd": hvdp.EASGD, "agn": hvdp.AGN}


class Thawing(Worker):
    """Trains x, and from its third step on also y, which is in a parameter group of its own."""

    def train(self, steps: int) -> None:
        """Descend, each rank to another place."""
        for _ in range(steps):
            if self.state.batch == 3 and not self.state.thawed:
                self.thaw()
            for parameter in (self.model.x, self.model.y):
                if parameter.requires_grad:
                    parameter.grad = parameter.detach() - float(HERE.communicator.rank + 1)
            self.state.batch += 1
            self.optimizer.step()

    def thaw(self) -> None:
        """Let y train, in a group of its own."""
        self.model.y.requires_grad = self.state.thawed = True
        self.optimizer.add_param_group({"params": [self.model.y], "lr": 0.05})
        self.optimizer.adopt()

    def found(self) -> tuple[Any, ...]:
        """Return how far it has come, and where it and the center are."""
        replica = [parameter.tolist() for parameter in self.model.parameters()]
        with self.optimizer.center():
            center = [parameter.tolist() for parameter in self.model.parameters()]
        rates = [group["lr"] for group in self.optimizer.param_groups], self.model.y.requires_grad
        return self.state.batch, self.optimizer.synchronizer.local_steps, rates, replica, center


def new(algorithm: str = "diloco", commit: Any = "exchange", thawed: bool = False, **options: Any) -> Thawing:
    """Return a worker that trains x."""
    model = torch.nn.Module()
    model.x, model.y = (torch.nn.Parameter(torch.full((n,), 1.0, dtype=torch.float64)) for n in (5, 3))
    model.y.requires_grad = False
    local = torch.optim.SGD([model.x], lr=0.1, momentum=0.5)
    optimizer = hvdp.PeriodicOptimizer(local, model, ALGORITHMS[algorithm](), PERIOD, **options)
    state = hvdp.elastic.State(model, optimizer, commit=commit, batch=0, thawed=thawed)
    return Thawing(model, optimizer, local, state)


def begin(worker: Worker, steps: int) -> Worker:
    worker.state.sync()
    worker.train(steps)
    return worker


def again(worker: Worker) -> Any:
    """Go on after a loss; return what is there then, and in the end."""
    worker.begin_again()
    at_once = worker.found()
    worker.train(10 - worker.state.batch)
    worker.optimizer.finalize()
    return at_once, worker.found()


@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_losses_it_is_the_job_that_is_not_elastic(algorithm: str, center: str) -> None:
    """Commits change nothing."""

    def train(worker: Worker, commits: bool) -> Any:
        worker.state.sync()
        if not commits:
            worker.optimizer.after_exchange = worker.optimizer.after_adoption = None
        worker.train(10)
        return worker.found()

    make = partial(new, algorithm, center=center)
    found = [together([make] * 3, partial(train, commits=commits)) for commits in (True, False)]
    assert found[0] == found[1]
    assert len({str(center) for *_, center in found[0]}) == 1
    assert found[0][0][-1][1] != [1.0] * 3


@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rank_is_lost_after_it_and_another_joins(algorithm: str, center: str) -> None:
    """The others go back to the commit that adopt() took; who joins trains their set, from the center."""
    make = partial(new, algorithm, center=center)
    committed = {}

    def first(worker: Worker) -> Worker:
        begin(worker, 3)
        worker.thaw()
        committed[HERE.communicator.rank] = worker.found()
        worker.train(1)
        return worker

    zero, one, _ = together([make] * 3, first)
    (left, _), (joined, _), (other, _) = found = together([zero, make, one], again)
    assert [left, other] == [committed[0], committed[1]]
    batch, steps, rates, _, at_center = left
    assert joined == (batch, steps, rates, at_center, at_center)
    assert rates == ([0.1, 0.05], True)
    assert len({str(end[-1]) for _, end in found}) == 1


@pytest.mark.parametrize(
    ("center", "ahead", "places"),
    [
        *(("replicated", 0, (0, 4)), ("sharded", 1, (1, 5))),
        *(thorough("root", 0, (0, 1)), thorough("replicated", 1, (0, 1)), thorough("sharded", 0, (0, 1))),
    ],
)
def test_a_rank_is_lost_in_it(center: str, ahead: int, places: tuple[int, int]) -> None:
    """In any of its collectives: the others go on from its commit, or from the one before, and thaw y again."""
    make = partial(new, center=center)

    def prepare() -> list[Worker]:
        return together([make] * 3, partial(begin, steps=3))

    def work(worker: Worker) -> None:
        worker.begin_again()  # At step 2.
        worker.train(2)  # With adopt() between them.

    left = lost_anywhere(prepare, work, ahead, places)
    assert len(left) > 20 // places[1]
    for zero, one in left:
        ends = together([zero, make, one], again)
        assert {at_once[1] for at_once, _ in ends} in ({PERIOD}, {3})
        assert {(end[0], end[1], str(end[2]), str(end[-1])) for _, end in ends} == {
            (10, 10, "([0.1, 0.05], True)", str(ends[0][1][-1]))
        }


def test_commits_by_call() -> None:
    """adopt() commits as commit() does."""

    def first(worker: Worker) -> Worker:
        begin(worker, 1)
        worker.state.commit()
        worker.thaw()
        worker.train(3)
        return worker

    zero, _ = together([partial(new, commit="call")] * 2, first)
    ((at_once, _),) = together([zero], again)
    assert (at_once[0], at_once[1], at_once[2]) == (1, 1, ([0.1, 0.05], True))


def test_a_commit_before_it() -> None:
    """It is an error: ranks could not go on from it."""

    def refused(worker: Worker) -> None:
        begin(worker, 1)
        worker.optimizer.add_param_group({"params": [worker.model.y], "lr": 0.05})
        with pytest.raises(RuntimeError, match=r"added, removed or replaced .*: call adopt"):
            worker.state.commit()

    together([partial(new, commit="call")] * 2, refused)


def test_groups_that_divide_the_same_parameters_in_another_way() -> None:
    """There is nothing to adopt; commits hold the groups."""

    def first(worker: Worker) -> Worker:
        begin(worker, 1)
        worker.optimizer.add_param_group({"params": [worker.model.y], "lr": 0.05})
        worker.optimizer.adopt()
        worker.optimizer.param_groups[0]["params"], worker.optimizer.param_groups[1]["params"] = (
            worker.optimizer.param_groups[1]["params"],
            worker.optimizer.param_groups[0]["params"],
        )
        worker.state.commit()
        return worker

    def second(worker: Worker) -> list[bool]:
        worker.begin_again()
        return [group["params"][0] is worker.model.y for group in worker.optimizer.param_groups]

    make = partial(new, commit="call")
    zero, _ = together([make] * 2, first)
    assert together([zero, make], second) == [[True, False]] * 2


@pytest.mark.parametrize("complete", [True, False])
def test_one_of_two_optimizers_has_adopted(complete: bool) -> None:
    """The commit is taken when the other one has as well; a rank that is lost before takes all back to the start."""

    def two() -> Thawing:
        worker = new(commit="call")
        other = torch.nn.Module()
        other.x, other.y = (torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))
        second = hvdp.PeriodicOptimizer(torch.optim.SGD([other.x], lr=0.1), other, hvdp.DiLoCo(), PERIOD)
        worker.state = hvdp.elastic.State(
            worker.model, worker.optimizer, batch=0, thawed=False, other=other, second=second
        )
        return worker

    def first(worker: Worker) -> Worker:
        begin(worker, 1)
        worker.state.second.add_param_group({"params": [worker.state.other.y], "lr": 0.05})
        worker.thaw()
        if complete:
            worker.state.second.adopt()
        return worker

    def second(worker: Worker) -> Any:
        worker.begin_again()
        return worker.found()[:3], [len(group["params"]) for group in worker.state.second.param_groups]

    zero, _ = together([two] * 2, first)
    expected = ((1, 1, ([0.1, 0.05], True)), [1, 1]) if complete else ((0, 0, ([0.1], False)), [1])
    assert together([zero, two], second) == [expected] * 2


def test_what_a_set_changes() -> None:
    """Keys that are no parameters stay in the state; parameters outside of the optimizer are frozen and thawed too."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    theirs = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    theirs[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.state["steps"] = 1  # type: ignore[index]
    TrainedSet.of(theirs.named_parameters(), torch.optim.SGD(theirs[1].parameters(), lr=0.1)).put_into(
        optimizer, model.named_parameters()
    )
    assert set(optimizer.state) == {*model[1].parameters(), "steps"}
    assert [(each.requires_grad, each.grad is None) for each in model.parameters()] == [(False, True)] * 2 + [
        (True, False)
    ] * 2


def test_refused() -> None:
    """What would not be the same on a rank that joins; nothing has changed then."""

    def refused(worker: Worker) -> str:
        with pytest.raises(RuntimeError, match=r"adopt\(\) is not available in elastic jobs") as error:
            worker.optimizer.adopt()
        return str(error.value)

    def pairs() -> Worker:
        worker = new()
        local = torch.optim.SGD([worker.model.x], lr=0.1)
        named = list(worker.model.named_parameters())
        worker.optimizer = hvdp.PeriodicOptimizer(local, named, hvdp.DiLoCo(), PERIOD)
        worker.optimizer.synchronizer._alone = False
        return worker

    def moving() -> Worker:
        worker = new()
        local = torch.optim.SGD([worker.model.x], lr=0.1)
        outer = torch.optim.SGD([worker.model.x], lr=0.7)
        worker.optimizer = hvdp.PeriodicOptimizer(local, worker.model, hvdp.AGN(), PERIOD, outer_optimizer=outer)
        worker.optimizer.synchronizer._alone = False
        return worker

    assert "before training begins" in together([new], refused)[0]
    assert "were not made from a module" in together([pairs], refused)[0]
    assert "pass a function that makes one" in together([moving], refused)[0]


def test_a_model_that_lacks_parameters_cannot_join() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"the model of this worker lacks, .* \['adapter'\]\. A worker can join"):
        TrainedSet((("weight", "adapter"),)).put_into(optimizer, model.named_parameters())
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_who_lacks_an_adapter_ends_with_what_to_do_and_the_others_go_on() -> None:
    """The worker that cannot join is lost to them, as any other that ends; they then go on from the commit."""

    def first(worker: Worker) -> Worker:
        begin(worker, 1)
        worker.model.adapter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        worker.optimizer.add_param_group({"params": [worker.model.adapter], "lr": 0.05})
        worker.optimizer.adopt()
        return worker

    def refused(worker: Worker) -> str | Worker:
        lacks = not hasattr(worker.model, "adapter")
        try:
            worker.begin_again()
        except Exception as error:
            HERE.communicator._group.abort()  # This worker ends, and the others hear of it.
            return f"{type(error).__name__}: {error}" if lacks else worker
        return "joined"

    make = partial(new, commit="call")
    zero, one, _ = together([make] * 3, first)
    left, error, other = together([zero, make, one], refused)
    assert "ValueError: The other ranks train parameters that the model of this worker lacks" in error
    assert "['adapter']. A worker can join them only if its model has these from the start: construct it" in error
    assert together([left, other], lambda worker: (worker.begin_again(), worker.found()[1])[1]) == [1, 1]


def test_groups_with_names() -> None:
    """An optimizer that was made from named parameters keeps their names."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(list(model.named_parameters())[:1], lr=0.1)
    if "param_names" not in optimizer.param_groups[0]:
        pytest.skip("This version of PyTorch has no names in parameter groups")
    wanted = TrainedSet((("bias",), ("weight",)), {"weight": False, "bias": True})
    wanted.put_into(optimizer, model.named_parameters())
    assert [group["param_names"] for group in optimizer.param_groups] == [["bias"], ["weight"]]
    assert TrainedSet.of(model.named_parameters(), optimizer) == wanted
