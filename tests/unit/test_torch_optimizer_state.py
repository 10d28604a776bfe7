"""The state of torch optimizers at an exchange."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator, run  # noqa: E402

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
    with pytest.raises(RuntimeError, match=r"names 'exp_avg', which the local optimizer does not keep. It keeps mom"):
        optimizer.step()


def test_a_synchronizer_needs_the_optimizer() -> None:
    with pytest.raises(ValueError, match=r"`optimizer_state` needs the local optimizer: pass `optimizer`"):
        hvdp.Synchronizer(
            torch.nn.Linear(1, 1), hvdp.Averaging(), 2, process_set=LocalCommunicator(), optimizer_state="average"
        )
