"""The state of torch optimizers at an exchange."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator, run  # noqa: E402
from hvd_periodic.torch.copies import in_train_mode  # noqa: E402

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.25),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
}


def parameters() -> list[Any]:
    """Return tensors of awkward kinds: without dimensions, transposed, of 16 bits."""
    torch.manual_seed(3)
    made = [torch.randn(3, 4).t(), torch.randn(()), torch.randn(5).to(torch.bfloat16)]
    return [torch.nn.Parameter(tensor) for tensor in made]


def train(communicator: Any, kind: str, policy: Any, steps: int) -> list[dict[str, list[float]]]:
    """Return the state after every step; exchanges are at even ones."""
    model = parameters()
    inner = OPTIMIZERS[kind](model)
    named = [(f"p{i}", parameter) for i, parameter in enumerate(model)]
    optimizer = hvdp.ModelAverageOptimizer(inner, named, 2, process_set=communicator, optimizer_state=policy)
    seen = []
    for step in range(steps):
        for i, parameter in enumerate(model):
            parameter.grad = torch.full_like(parameter, 0.5 * (communicator.rank + 1) + 0.25 * step + i)
        optimizer.step()
        state = inner.state
        seen.append(
            {
                f"{key} of {i}": value.detach().float().reshape(-1).tolist()
                for i, parameter in enumerate(model)
                for key, value in state[parameter].items()
                if isinstance(value, torch.Tensor)
            }
        )
    return seen


def entries(state: dict[str, list[float]]) -> set[str]:
    return {key.partition(" ")[0] for key in state}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_average(kind: str) -> None:
    """At an exchange every entry becomes the mean of what ranks would have had; the counters go on."""
    ranks = run(2, lambda communicator: train(communicator, kind, "average", 4))
    alone = run(2, lambda communicator: train(communicator, kind, "local", 2))
    for key in alone[0][1]:
        first, second = (torch.tensor(rank[1][key]) for rank in alone)
        found = [torch.tensor(rank[1][key]) for rank in ranks]
        assert torch.equal(found[0], found[1]), key
        if key.startswith(("step", "mu_product")):
            assert torch.equal(found[0], first), "a counter"
        else:
            assert torch.allclose(found[0], (first + second) / 2, rtol=1e-2 if key.endswith("2") else 1e-6), key
    assert ranks[0][2] != ranks[1][2], "between exchanges the states differ"
    assert ranks[0][3] == ranks[1][3]


def test_every_entry_has_its_own_period() -> None:
    ranks = run(2, lambda communicator: train(communicator, "Adam", {"exp_avg": 1, "exp_avg_sq": 2}, 8))
    for step in range(8):
        equal = {key.partition(" ")[0] for key in ranks[0][step] if ranks[0][step][key] == ranks[1][step][key]}
        exchange = (step + 1) // 2 if step % 2 else 0
        assert ("exp_avg" in equal) == (exchange > 0)
        assert ("exp_avg_sq" in equal) == (exchange > 0 and exchange % 2 == 0)
        assert "max_exp_avg_sq" not in equal


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_reset(kind: str) -> None:
    (state,) = train(LocalCommunicator(), kind, "reset", 2)[1:]
    for key, values in state.items():
        if key.startswith("sum"):
            assert set(values) == {0.25}, "as the constructor makes it"
        elif not key.startswith(("step", "mu_product")):
            assert set(values) == {0.0}, key
        else:
            assert set(values) != {0.0}, key


@pytest.mark.parametrize("policy", ["average", {"momentum_buffer": 1}])
def test_state_of_some_ranks_only(policy: Any) -> None:
    """One rank has no gradient for a parameter, and so no momentum."""

    def work(communicator: ThreadCommunicator) -> str:
        model = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        inner = torch.optim.SGD(model, lr=0.1, momentum=0.9)
        named = [(f"p{i}", parameter) for i, parameter in enumerate(model)]
        optimizer = hvdp.ModelAverageOptimizer(inner, named, 1, process_set=communicator, optimizer_state=policy)
        for parameter in model[communicator.rank :]:
            parameter.grad = torch.ones(2)
        with pytest.raises(ValueError, match=r"differ in momentum_buffer of p0 in the optimizer's state") as caught:
            optimizer.step()
        return str(caught.value)

    messages = run(2, work)
    assert messages[0] == messages[1]


def test_an_entry_that_the_optimizer_does_not_keep() -> None:
    model = [torch.nn.Parameter(torch.ones(2))]
    inner = torch.optim.SGD(model, lr=0.1, momentum=0.9)
    optimizer = hvdp.ModelAverageOptimizer(
        inner, [("p", model[0])], 1, process_set=LocalCommunicator(), optimizer_state={"exp_avg": 3}
    )
    model[0].grad = torch.ones(2)
    with pytest.raises(
        RuntimeError, match=r"names 'exp_avg', which is not in the state of the local optimizer. That has mom"
    ):
        optimizer.step()


def test_a_synchronizer_needs_the_optimizer() -> None:
    with pytest.raises(ValueError, match=r"`optimizer_state` needs the local optimizer: pass `optimizer`"):
        hvdp.Synchronizer(
            torch.nn.Linear(1, 1), hvdp.Averaging(), 2, process_set=LocalCommunicator(), optimizer_state="average"
        )


class Averaged(torch.optim.SGD):
    """Keeps a copy of the parameters, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("z", parameter.detach().clone())
        return super().step(closure)


class WithModes(Averaged):
    """Steps in train mode only, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("train_mode", False)

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("Optimizer was not in train mode when step is called")
        return super().step(closure)


START_OF: dict[str, tuple[Any, str, Any]] = {
    "Rprop": (lambda p: torch.optim.Rprop(p, lr=0.1), "step_size", 0.1),
    "a copy of the parameters": (lambda p: Averaged(p, lr=0.1), "z", None),
    "only in train mode": (lambda p: in_train_mode(WithModes(p, lr=0.1)), "z", None),
    "weight decay": (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5), "exp_avg", 0.0),
}


@pytest.mark.parametrize("kind", START_OF)
def test_reset_knows_what_state_starts_from(kind: str) -> None:
    make, key, value = START_OF[kind]
    parameter = torch.nn.Parameter(torch.tensor([2.0, -3.0]))
    inner = make([parameter])
    optimizer = hvdp.ModelAverageOptimizer(
        inner, [("w", parameter)], 2, process_set=LocalCommunicator(), optimizer_state="reset"
    )
    for _ in range(2):
        parameter.grad = torch.ones(2)
        optimizer.step()
    expected = parameter.detach() if value is None else torch.full((2,), value)
    assert torch.equal(inner.state[parameter][key], expected)


def test_reset_of_what_cannot_be_copied_is_refused_at_construction() -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, params: Any, total_steps: int) -> None:
            super().__init__(params, lr=1 / total_steps, momentum=0.9)

    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match=r"`optimizer_state='reset'` .* need the initial state of Odd"):
        hvdp.ModelAverageOptimizer(
            Odd([parameter], 10), [("w", parameter)], 2, process_set=LocalCommunicator(), optimizer_state="reset"
        )


@pytest.mark.parametrize("policy", ["reset", "average", {"exp_avg": 1}], ids=str)
def test_a_rank_that_has_not_stepped_yet(policy: Any) -> None:
    """Its first updates were skipped; what the others keep waits for the first exchange to which all bring theirs."""

    def work(communicator: ThreadCommunicator) -> list[list[float]]:
        parameter = torch.nn.Parameter(torch.ones(2))
        inner = torch.optim.Adam([parameter], lr=0.1)
        optimizer = hvdp.ModelAverageOptimizer(
            inner, [("w", parameter)], 2, process_set=communicator, optimizer_state=policy
        )
        seen = []
        for step in range(4):
            parameter.grad = torch.full((2,), 1.0 + communicator.rank)
            if communicator.rank == 0 and step < 2:
                optimizer.skip()
            else:
                optimizer.step()
            seen.append(inner.state[parameter]["exp_avg"].tolist() if inner.state else [])
        optimizer.finalize()
        return seen

    first, second = run(2, work)
    assert first[1] == []
    assert second[1] != []
    assert first[3] == second[3], "at the second exchange all have one"


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_keep_the_policy(way: str) -> None:
    import copy
    import pickle

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = hvdp.ModelAverageOptimizer(
        torch.optim.Adam([parameter], lr=0.1),
        [("w", parameter)],
        2,
        process_set=LocalCommunicator(),
        optimizer_state={"exp_avg": 3},
    )
    made = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    assert made.synchronizer.policy == optimizer.synchronizer.policy
    assert made.synchronizer.handshake._optimizer_state is not None


def test_counters_in_the_shape_of_parameters_are_left_alone() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    seen = self.state[parameter].setdefault("seen", torch.zeros_like(parameter, dtype=torch.int64))
                    seen += 1
            return super().step(closure)

    for policy in ("average", "reset"):
        parameter = torch.nn.Parameter(torch.ones(2))
        inner = Counting([parameter], lr=0.1, momentum=0.9)
        optimizer = hvdp.ModelAverageOptimizer(
            inner, [("w", parameter)], 2, process_set=LocalCommunicator(), optimizer_state=policy
        )
        for _ in range(4):
            parameter.grad = torch.ones(2)
            optimizer.step()
        assert inner.state[parameter]["seen"].tolist() == [4, 4]
