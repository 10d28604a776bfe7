"""The torch optimizers as torch optimizers: what any other optimizer can do, they can."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator, PostLocal  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator, run  # noqa: E402

Wrap = Callable[..., Any]

WRAPPERS: dict[str, Wrap] = {
    "easgd": lambda o, m, **k: hvdp.ElasticAverageOptimizer(o, m, 4, moving_rate=0.4, **k),
    "easgd_rho": lambda o, m, **k: hvdp.ElasticAverageOptimizer(o, m, 4, moving_rate=0.4, rho=0.5, **k),
    "average": lambda o, m, **k: hvdp.ModelAverageOptimizer(o, m, 4, **k),
    "agn": lambda o, m, **k: hvdp.AGNOptimizer(o, m, 4, **k),
}


@pytest.fixture(params=WRAPPERS)
def wrap(request: pytest.FixtureRequest) -> Wrap:
    def make(optimizer: Any, model: Any, **common: Any) -> Any:
        return WRAPPERS[request.param](optimizer, model, **{"process_set": LocalCommunicator(), **common})

    return make


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def batches(seed: int = 1) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 3, generator=generator)


def loss_of(model: Any, batch: Any) -> Any:
    return (model(batch) - batch[:, :2]).square().mean()


def train(model: Any, optimizer: Any, data: Iterator[Any], steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, next(data)).backward()
        optimizer.step()


def values(model: Any) -> list[Any]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def same(left: list[Any], right: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_is_a_torch_optimizer(wrap: Wrap) -> None:
    model = make_model()
    inner = torch.optim.SGD([{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(model.parameters())], lr=1.0)
    optimizer = wrap(inner, model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert "Parameter Group 5" in repr(optimizer)


def test_without_exchange_it_is_the_wrapped_optimizer(wrap: Wrap) -> None:
    plain, wrapped = make_model(), make_model()
    train(plain, torch.optim.Adam(plain.parameters(), lr=0.1), batches(), 3)
    train(wrapped, wrap(torch.optim.Adam(wrapped.parameters(), lr=0.1), wrapped), batches(), 1)
    first = make_model()
    train(first, torch.optim.Adam(first.parameters(), lr=0.1), batches(), 1)
    assert same(values(first), values(wrapped))
    assert not same(values(plain), values(wrapped))


def test_learning_rate_scheduler_drives_local_and_center_optimizer() -> None:
    """One worker, gradient −1: the center moves by the rate that the scheduler has set by then."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([parameter], lr=1.0)
    optimizer = hvdp.AGNOptimizer(inner, [("w", parameter)], 2, process_set=LocalCommunicator())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    centers = []
    for _ in range(6):
        parameter.grad = torch.tensor([-1.0])
        optimizer.step()
        scheduler.step()
        centers.append(parameter.item())
    assert inner.param_groups[0]["lr"] == 0.125
    assert centers == [1.0, 1.0, 1.5, 1.5, 1.75, 1.75]


def test_one_cycle_scheduler_accepts_it(wrap: Wrap) -> None:
    model = make_model()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=20)
    for _ in range(10):
        train(model, optimizer, batches(), 1)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] != 0.1


def test_closure_equals_explicit_backward(wrap: Wrap) -> None:
    explicit, closed = make_model(), make_model()
    train(explicit, wrap(torch.optim.SGD(explicit.parameters(), lr=0.1), explicit), batches(), 9)
    optimizer, data = wrap(torch.optim.SGD(closed.parameters(), lr=0.1), closed), batches()
    for _ in range(9):
        batch = next(data)

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = loss_of(closed, batch)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
    assert same(values(explicit), values(closed))


def test_lbfgs_with_its_many_evaluations(wrap: Wrap) -> None:
    model = make_model()
    inner = torch.optim.LBFGS(model.parameters(), max_iter=3)
    try:
        optimizer = wrap(inner, model)
    except TypeError as error:  # AGN: the center has gradients, but no closure for LBFGS to call
        assert "LBFGS requires a closure, but the center has no loss" in str(error)  # noqa: PT017
        optimizer = wrap(inner, model, outer_optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    batch = next(batches())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(4)]
    assert losses[-1] < losses[0]
    assert optimizer.synchronizer.rounds == 1


def test_hooks_run_once_per_step_and_may_change_gradients(wrap: Wrap) -> None:
    model, calls = make_model(), []
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, batches(), 2)
    assert calls == ["before", "after"] * 2


def test_hooks_of_all_optimizers_run_once_per_step(wrap: Wrap) -> None:
    """For the optimizer inside, also where the outer one has hooks of its own."""
    model, calls = make_model(), []
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.register_step_post_hook(lambda *_: calls.append("own"))
    handle = register_optimizer_step_pre_hook(lambda o, *_: calls.append(type(o).__name__))
    try:
        train(model, optimizer, batches(), 2)
    finally:
        handle.remove()
    assert calls == ["SGD", "own"] * 2


def test_hooks_of_a_class_that_overrides_step() -> None:
    """They run once, around all that its step does."""
    calls: list[str] = []

    class Noisy(hvdp.PeriodicOptimizer):
        def step(self, closure: Any = None) -> Any:
            calls.append("begins")
            loss = super().step(closure)
            calls.append("ends")
            return loss

    model = make_model()
    optimizer = Noisy(
        torch.optim.SGD(model.parameters(), lr=0.1), model, hvdp.Averaging(), 2, process_set=LocalCommunicator()
    )
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, batches(), 2)
    assert calls == ["before", "begins", "ends", "after"] * 2


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(wrap: Wrap, to_none: bool) -> None:
    model = make_model()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    train(model, optimizer, batches(), 1)
    optimizer.zero_grad(set_to_none=to_none)
    assert all((p.grad is None) if to_none else not p.grad.any() for p in model.parameters())


def test_add_param_group_needs_adopt_and_names_in_the_model(wrap: Wrap) -> None:
    model = make_model()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="`model` must name every parameter of the optimizer"):
        optimizer.adopt()


def test_add_param_group_is_refused_around_another_level() -> None:
    model = make_model()
    inner = hvdp.ModelAverageOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, 2)
    optimizer = hvdp.ModelAverageOptimizer(inner, model, 4)
    with pytest.raises(RuntimeError, match="cannot be added"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(RuntimeError, match="not available for several levels"):
        optimizer.adopt()


COPIES = {
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda pair: torch_round_trip(pair),
}


def torch_round_trip(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", COPIES)
def test_copies_continue_exactly(wrap: Wrap, how: str) -> None:
    model, data = make_model(), batches()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    train(model, optimizer, data, 6)
    other_model, other_optimizer = COPIES[how]((model, optimizer))
    train(model, optimizer, batches(2), 7)
    train(other_model, other_optimizer, batches(2), 7)
    assert same(values(model), values(other_model))
    assert other_optimizer.synchronizer.rounds == optimizer.synchronizer.rounds == 3
    with optimizer.center(), other_optimizer.center():
        assert same(values(model), values(other_model))


@pytest.mark.parametrize("algorithm", [torch.optim.Adam, torch.optim.SGD])
def test_resume_in_mid_period_continues_bit_for_bit(wrap: Wrap, algorithm: Any) -> None:
    def make() -> tuple[Any, Any]:
        model = make_model(seed=3)
        options = {"momentum": 0.9} if algorithm is torch.optim.SGD else {}
        return model, wrap(algorithm(model.parameters(), lr=0.05, **options), model)

    model, optimizer = make()
    train(model, optimizer, batches(), 6)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, batches(2), 7)

    resumed_model, resumed = make()
    train(resumed_model, resumed, batches(5), 3)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.synchronizer.local_steps == 6
    train(resumed_model, resumed, batches(2), 7)
    assert same(values(model), values(resumed_model))
    with optimizer.center(), resumed.center():
        assert same(values(model), values(resumed_model))


@pytest.mark.parametrize("own", [False, True], ids=["copied", "center_optimizer"])
def test_resume_under_a_scheduler_follows_it(own: bool) -> None:
    """The center of AGN keeps reading the rate that the scheduler sets, after a state was loaded as before."""

    def make() -> tuple[Any, Any, Any]:
        parameter = torch.nn.Parameter(torch.zeros(1))
        inner = torch.optim.SGD([parameter], lr=1.0)
        center = torch.optim.SGD([parameter], lr=1.0) if own else None
        optimizer = hvdp.AGNOptimizer(
            inner, [("w", parameter)], 2, outer_optimizer=center, process_set=LocalCommunicator()
        )
        return parameter, optimizer, torch.optim.lr_scheduler.StepLR(center if own else optimizer, 2, gamma=0.5)

    def train(parameter: Any, optimizer: Any, scheduler: Any, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            parameter.grad = torch.tensor([-1.0])
            optimizer.step()
            if own:
                scheduler.optimizer._opt_called = True
            scheduler.step()
            seen.append(parameter.item())
        return seen

    parameter, optimizer, scheduler = make()
    train(parameter, optimizer, scheduler, 3)
    saved = copy.deepcopy((parameter.detach(), optimizer.state_dict(), scheduler.state_dict()))
    expected = train(parameter, optimizer, scheduler, 6)
    assert expected[-1] != expected[0]
    parameter, optimizer, scheduler = make()
    optimizer.load_state_dict(saved[1])
    scheduler.load_state_dict(saved[2])
    with torch.no_grad():
        parameter.copy_(saved[0])
    assert train(parameter, optimizer, scheduler, 6) == expected


def test_a_state_that_cannot_be_loaded_changes_nothing(wrap: Wrap) -> None:
    model = make_model()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    train(model, optimizer, batches(), 3)
    saved = optimizer.state_dict()
    train(model, optimizer, batches(), 2)
    del saved["param_groups"][0]["params"][-1]
    with pytest.raises(ValueError, match="size of optimizer's group"):
        optimizer.load_state_dict(saved)
    assert optimizer.synchronizer.local_steps == 5


def test_state_dict_hooks_run(wrap: Wrap) -> None:
    model, calls = make_model(), []
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", "saved", "load", "loaded"]


def test_plain_optimizer_state_is_refused(wrap: Wrap) -> None:
    model = make_model()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ValueError, match="without 'hvd_periodic'"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


def test_grad_scaler_counts_an_overflow_on_one_rank_on_all() -> None:
    """A scaler skips the update of rank 1 at step 2; ranks exchange at step 4 all the same."""

    def work(communicator: ThreadCommunicator) -> tuple[int, int, list[float]]:
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvdp.ModelAverageOptimizer(
            torch.optim.SGD([parameter], lr=1.0), [("w", parameter)], 4, process_set=communicator
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(1, 5):
            optimizer.zero_grad()
            overflow = communicator.rank == 1 and step == 2
            scaler.scale(-(parameter * (float("inf") if overflow else 1.0)).sum()).backward()
            if step == 3:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        counters = optimizer.synchronizer.counters
        return counters.local_steps, counters.skipped_updates, parameter.tolist()

    assert run(2, work) == [(4, 0, [3.5, 3.5]), (4, 1, [3.5, 3.5])]


def test_16_bit_gradients_are_not_unscaled() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    optimizer = hvdp.ModelAverageOptimizer(
        torch.optim.SGD([parameter], lr=0.5), [("w", parameter)], process_set=LocalCommunicator()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(-parameter.float().sum()).backward()
    with pytest.raises(ValueError, match="FP16 gradients"):
        scaler.step(optimizer)


def test_gradients_of_agn_are_unscaled() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvdp.AGNOptimizer(
        torch.optim.SGD([parameter], lr=0.5), [("w", parameter)], 2, process_set=LocalCommunicator()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(-parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert parameter.tolist() == [1.0]


def test_post_local_schedule() -> None:
    model = make_model()
    optimizer = hvdp.ModelAverageOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        PostLocal(start=2, period=3),
        process_set=LocalCommunicator(),
    )
    rounds = []
    for _ in range(8):
        train(model, optimizer, batches(), 1)
        rounds.append(optimizer.synchronizer.rounds)
    assert rounds == [1, 2, 2, 2, 3, 3, 3, 4]


def test_explicit_synchronizer_equals_the_wrapper() -> None:
    wrapped, explicit = make_model(), make_model()
    common = {"process_set": LocalCommunicator()}
    train(wrapped, hvdp.AGNOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1), wrapped, 3, **common), batches(), 7)
    optimizer, data = torch.optim.SGD(explicit.parameters(), lr=0.1), batches()
    synchronizer = hvdp.Synchronizer(explicit, hvdp.AGN(), 3, outer_optimizer=optimizer, **common)
    for _ in range(7):
        optimizer.zero_grad()
        loss_of(explicit, next(data)).backward()
        synchronizer.prepare_gradients()
        optimizer.step()
        synchronizer.step()
    assert same(values(wrapped), values(explicit))
    assert copy.deepcopy(synchronizer).rounds == 2


def test_gradients_that_are_not_shown_to_the_algorithm_are_missed() -> None:
    for algorithm in (hvdp.AGN(), hvdp.EASGD(rho=0.5)):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        synchronizer = hvdp.Synchronizer(model, algorithm, 3, optimizer=optimizer, process_set=LocalCommunicator())
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"call prepare_gradients\(\) before"):
            synchronizer.step()
        synchronizer.step(updated=False)


def test_repr_tells_how_it_exchanges(wrap: Wrap) -> None:
    model = make_model()
    text = repr(wrap(torch.optim.SGD(model.parameters(), lr=0.1), model))
    assert text.endswith("at Every(period=4)")
    assert "lr: 0.1" in text


def test_center_optimizer_has_the_groups_of_the_local_one() -> None:
    """Gradient −1 on both, rates 0.1 and 0.3, one of them frozen in between in its own group."""
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(1)) for name in ("slow", "frozen", "fast")})
    model["frozen"].requires_grad_(False)
    groups = [
        {"params": [model["slow"]], "lr": 0.1},
        {"params": [model["frozen"]], "lr": 9.0},
        {"params": [model["fast"]], "lr": 0.3},
    ]
    for outer_optimizer in (None, lambda given: torch.optim.SGD([{**g, "lr": 0.1} for g in given])):
        optimizer = hvdp.AGNOptimizer(
            torch.optim.SGD(groups), model, 2, outer_optimizer=outer_optimizer, process_set=LocalCommunicator()
        )
        with torch.no_grad():
            for parameter in model.values():
                parameter.zero_()
        optimizer.synchronizer.broadcast()
        optimizer.synchronizer.load_state_dict(_with_center_at_zero(optimizer.synchronizer.state_dict()))
        for _ in range(4):
            for parameter in (model["slow"], model["fast"]):
                parameter.grad = torch.tensor([-1.0])
            optimizer.step()
        fast = 0.6 if outer_optimizer is None else 0.2
        assert [model[name].item() for name in ("slow", "frozen", "fast")] == pytest.approx([0.2, 0.0, fast])


def _with_center_at_zero(state: dict[str, Any]) -> dict[str, Any]:
    for tensor in state["vectors"]["parameters"]["center"].values():
        tensor.zero_()
    return state


def test_center_optimizer_of_another_class_has_its_own_state() -> None:
    """Adam's first step is its learning rate, whatever the local optimizer did before."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([parameter], lr=0.5)
    optimizer = hvdp.AGNOptimizer(
        inner,
        [("w", parameter)],
        3,
        outer_optimizer=torch.optim.Adam([parameter], lr=0.1),
        process_set=LocalCommunicator(),
    )
    for _ in range(3):
        parameter.grad = torch.tensor([-7.0])
        optimizer.step()
    assert parameter.item() == pytest.approx(0.1, abs=1e-6)
    assert not inner.state[parameter].get("step")
