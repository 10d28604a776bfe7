"""Steps of the wrapped optimizer: compiled, taken by its own methods, or taken past the optimizer around it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: E402

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import LocalCommunicator  # noqa: E402
from hvd_periodic.comm.threads import ThreadCommunicator, run  # noqa: E402

LOCAL: dict[str, Any] = {"process_set": LocalCommunicator()}

WRAPPERS: dict[str, Callable[..., Any]] = {
    "average": lambda o, m, **k: hvdp.ModelAverageOptimizer(o, m, 3, **{**LOCAL, **k}),
    "easgd_rho": lambda o, m, **k: hvdp.ElasticAverageOptimizer(o, m, 3, moving_rate=0.4, rho=0.5, **{**LOCAL, **k}),
    "agn": lambda o, m, **k: hvdp.AGNOptimizer(o, m, 3, torch.optim.SGD(m.parameters(), 0.1), **{**LOCAL, **k}),
    "nested": lambda o, m, **k: WRAPPERS["agn"](WRAPPERS["average"](o, m, **k), m, **k),
}

TORCH_WARNS = pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""When torch.compile looks at its own optimizers."""


@pytest.fixture(params=WRAPPERS)
def wrap(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return WRAPPERS[request.param]


class Ascent:
    """SAM's first step, and a second that undoes it and lets an optimizer step."""

    param_groups: list[dict[str, Any]]

    @torch.no_grad()
    def first_step(self) -> None:
        """Move by the gradients."""
        self.moves = [(p, 0.05 * p.grad) for group in self.param_groups for p in group["params"]]
        for parameter, move in self.moves:
            parameter.add_(move)

    @torch.no_grad()
    def second_step(self) -> str:
        """Move back, and step."""
        for parameter, move in self.moves:
            parameter.sub_(move)
        self.descend()
        return "stepped"

    def descend(self) -> None:
        """Step, by whatever does."""
        raise NotImplementedError


class Sam(Ascent, torch.optim.Optimizer):
    """Around an optimizer of its own, as the implementation that most people copy."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    def descend(self) -> None:
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.first_step()
        loss = torch.enable_grad()(closure)()
        self.second_step()
        return loss


class DerivedSam(Ascent, torch.optim.SGD):
    """An SGD itself."""

    def descend(self) -> None:
        self.step()


def make_model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def losses(model: Any, count: int, seed: int = 1) -> list[Callable[[], Any]]:
    """Return functions that evaluate the model on a batch each, and leave its gradients."""
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(8, 3, generator=generator) for _ in range(count)]

    def closure(batch: Any) -> Callable[[], Any]:
        def evaluate() -> Any:
            model.zero_grad()
            loss = (model(batch) - batch[:, :2]).square().mean()
            loss.backward()
            return loss

        return evaluate

    return [closure(batch) for batch in batches]


def values(model: Any) -> Any:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def train(model: Any, step: Callable[[], object], count: int) -> None:
    for evaluate in losses(model, count):
        evaluate()
        step()


@pytest.mark.timeout(120)
@TORCH_WARNS
def test_compiled_steps_are_steps(wrap: Callable[..., Any]) -> None:
    """The update is compiled; beginning, counting and exchanging are not."""
    found, counters = [], []
    for compiled in (False, True):
        model = make_model()
        optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.01), model)

        def step(optimizer: Any = optimizer) -> None:
            optimizer.step()

        torch.compiler.reset()
        train(model, torch.compile(step, backend="eager") if compiled else step, 14)
        optimizer.finalize()
        found.append(values(model))
        counters.append((optimizer.synchronizer.local_steps, optimizer.synchronizer.rounds))
    assert torch.allclose(*found, atol=1e-5)
    assert counters[0] == counters[1]


@pytest.mark.timeout(120)
@TORCH_WARNS
@pytest.mark.parametrize("algorithm", [hvdp.Averaging, hvdp.AGN])
def test_compiled_loops_around_a_synchronizer(algorithm: Any) -> None:
    found = []
    for compiled in (False, True):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        synchronizer = hvdp.Synchronizer(model, algorithm, 3, optimizer=optimizer, **LOCAL)

        def step(optimizer: Any = optimizer, synchronizer: Any = synchronizer) -> None:
            synchronizer.prepare_gradients()
            optimizer.step()
            synchronizer.step()

        torch.compiler.reset()
        train(model, torch.compile(step, backend="eager") if compiled else step, 14)
        assert (synchronizer.local_steps, synchronizer.rounds) == (14, 4)
        found.append(values(model))
    assert torch.allclose(*found, atol=1e-5)


@pytest.mark.timeout(120)
@TORCH_WARNS
def test_compiled_steps_compile_the_update() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = make_model()
    optimizer = WRAPPERS["average"](torch.optim.Adam(model.parameters(), lr=0.01), model)

    def step() -> None:
        optimizer.step()

    torch.compiler.reset()
    train(model, torch.compile(step, backend=backend), 9)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["average", "agn", "nested"])
def test_two_steps_of_sam_are_one_iteration(name: str) -> None:
    """They are what ``step(closure)`` of the same optimizer is, to the bit."""
    found = []
    for two_steps in (False, True):
        model = make_model()
        optimizer = WRAPPERS[name](Sam(model.parameters(), 0.1), model)
        for evaluate in losses(model, 7):
            evaluate()
            if two_steps:
                optimizer.first_step()
                evaluate()
                assert optimizer.second_step() == "stepped"
            else:
                optimizer.step(evaluate)
        assert (optimizer.synchronizer.local_steps, optimizer.synchronizer.rounds) == (7, 2)
        optimizer.finalize()
        found.append(values(model))
    assert torch.equal(*found)


@pytest.mark.parametrize("sam", [Sam, DerivedSam])
def test_two_steps_of_sam_begin_with_the_first(sam: Any) -> None:
    """Ranks start from the same parameters, not from what the first step made of them; and exchange every other one."""

    def rank(communicator: ThreadCommunicator) -> Any:
        model = make_model()
        optimizer = hvdp.ModelAverageOptimizer(sam(model.parameters(), 0.1), model, 2, process_set=communicator)
        exchanged = []
        for evaluate in losses(model, 4, seed=communicator.rank):
            evaluate()
            optimizer.first_step()
            evaluate()
            optimizer.second_step()
            exchanged.append(optimizer.synchronizer.distance() == 0)
        return exchanged, values(model)

    (first, model), (second, other) = run(2, rank, 30.0)
    assert first == second == [False, True, False, True]
    assert torch.equal(model, other)


def test_methods_that_do_not_step_count_nothing() -> None:
    model = make_model()
    optimizer = WRAPPERS["average"](Sam(model.parameters(), 0.1), model)
    losses(model, 1)[0]()
    optimizer.first_step()
    assert optimizer.synchronizer.local_steps == 0
    assert optimizer.first_step.__name__ == "first_step"
    assert optimizer.moves is optimizer.inner.moves


def test_a_step_inside_of_center_is_refused_before_it_moves_anything() -> None:
    model = make_model()
    optimizer = WRAPPERS["average"](Sam(model.parameters(), 0.1), model)
    losses(model, 1)[0]()
    before = values(model)
    with optimizer.center(), pytest.raises(RuntimeError, match=r"first_step\(\) inside the center\(\) block"):
        optimizer.first_step()
    assert torch.equal(values(model), before)


READING: dict[str, Callable[[Any, Any], object]] = {
    "center": lambda m, o: o.center().__enter__(),
    "center_state_dict": hvdp.center_state_dict,
    "state_dict": lambda m, o: o.state_dict(),
    "distance": lambda m, o: o.synchronizer.distance(),
    "sync": lambda m, o: o.synchronizer.sync(),
    "finalize": lambda m, o: o.finalize(),
    "step": lambda m, o: [o.step() for _ in range(3)],
}


@pytest.mark.parametrize("read", READING)
@pytest.mark.parametrize("counted", [0, 1])
def test_steps_of_the_wrapped_optimizer_are_noticed(wrap: Callable[..., Any], counted: int, read: str) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(inner, model)
    train(model, optimizer.step, counted)
    train(model, inner.step, 1)
    with pytest.raises(RuntimeError, match=rf"SGD\.step\(\) ran after local step {counted} without the "):
        READING[read](model, optimizer)


@pytest.mark.parametrize("options", [{"asynchronous": True}, {"center": "root"}, {"overlap": 1}, {"fragments": 2}])
def test_steps_of_the_wrapped_optimizer_are_noticed_at_the_end(options: dict[str, Any]) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvdp.ElasticAverageOptimizer(inner, model, 2, **LOCAL, **options)
    train(model, inner.step, 2)
    with pytest.raises(RuntimeError, match="without the ElasticAverageOptimizer around the SGD"):
        optimizer.finalize()


def test_all_ranks_are_told_of_a_step_that_one_did_not_count() -> None:
    def rank(communicator: ThreadCommunicator) -> str:
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvdp.ModelAverageOptimizer(inner, model, 2, process_set=communicator)
        train(model, inner.step if communicator.rank else optimizer.step, 1)
        with pytest.raises(RuntimeError) as caught:
            optimizer.finalize()
        return str(caught.value)

    for message in run(2, rank, 30.0):
        assert "SGD.step() ran after local step 0" in message


@pytest.mark.parametrize("sam", [Sam, DerivedSam])
def test_methods_that_step_past_the_wrapper_are_named(sam: Any) -> None:
    model = make_model()
    inner = sam(model.parameters(), 0.1)
    optimizer = WRAPPERS["average"](inner, model)
    losses(model, 1)[0]()
    inner.first_step()
    inner.second_step()
    with pytest.raises(RuntimeError, match=rf"{sam.__name__}\.second_step\(\) ran .* pass a closure"):
        optimizer.finalize()


def test_levels_notice_steps_further_inside() -> None:
    for inside in (lambda o: o.inner, lambda o: o.inner.inner):
        model = make_model()
        optimizer = WRAPPERS["nested"](torch.optim.SGD(model.parameters(), lr=0.1), model)
        with pytest.raises(RuntimeError, match="without the AGNOptimizer around the ModelAverageOptimizer"):
            train(model, inside(optimizer).step, 1)
            optimizer.synchronizer.finalize()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_watch_their_own_optimizer(wrap: Callable[..., Any], copied: Callable[[Any], Any]) -> None:
    model = make_model()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    train(model, optimizer.step, 2)
    other, twin = copied((model, optimizer))
    train(other, twin.step, 2)
    twin.finalize()
    train(other, twin.inner.step, 1)
    with pytest.raises(RuntimeError, match=r"\.step\(\) ran after local step 4"):
        twin.finalize()
    train(model, optimizer.step, 2)
    optimizer.finalize()


def test_a_wrapped_optimizer_can_be_copied_and_pickled() -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = WRAPPERS["average"](inner, model)
    for copied in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        copied.step()
    inert = copy.deepcopy(vars(inner)["_optimizer_step_pre_hooks"])
    for hook in inert.values():
        hook(inner, (), {})
    optimizer.finalize()


def test_hooks_of_optimizers_that_are_no_more_go() -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer = WRAPPERS["average"](inner, model)
        train(model, optimizer.step, 3)
        del optimizer
    assert len(vars(inner)["_optimizer_step_pre_hooks"]) <= 2


def test_a_former_wrapper_is_not_told_of_the_steps_of_the_next(wrap: Callable[..., Any]) -> None:
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizers = []
    for _ in range(2):
        optimizers.append(wrap(inner, model))
        optimizers[-1].zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizers[-1].step()
        optimizers[-1].finalize()
    for optimizer in optimizers:
        with optimizer.center():
            pass
    inner.step()
    with pytest.raises(RuntimeError, match=r"SGD\.step\(\) ran after local step 1 without"), optimizers[1].center():
        pass


def test_a_scaler_steps_the_wrapper_or_is_noticed() -> None:
    model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=2.0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = WRAPPERS["average"](inner, model)
    torch.optim.lr_scheduler.StepLR(inner, 1)
    for stepping in (optimizer, inner):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        scaler.step(stepping)
        scaler.update()
        if stepping is optimizer:
            optimizer.finalize()
    with pytest.raises(RuntimeError, match=r"SGD\.step\(\) ran"):
        optimizer.finalize()


def test_steps_that_make_state_are_no_steps() -> None:
    model = make_model()
    optimizer = WRAPPERS["average"](torch.optim.Adam(model.parameters(), lr=0.1), model)
    get_optimizer_state_dict(model, optimizer.inner)
    train(model, optimizer.step, 3)
    optimizer.finalize()


def test_a_state_that_is_loaded_replaces_what_was_not_counted() -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = WRAPPERS["average"](inner, model)
    train(model, optimizer.step, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, inner.step, 1)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer.step, 2)
    assert optimizer.synchronizer.rounds == 2


def test_a_new_optimizer_warns_of_steps_that_were_not_exchanged(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    former = WRAPPERS["average"](inner, model)
    train(model, former.step, 5)
    other = make_model()
    WRAPPERS["average"](torch.optim.SGD(other.parameters(), lr=0.1), other)
    assert "lost" not in caplog.text
    WRAPPERS["average"](inner, model)
    assert "has taken 2 local steps since its last exchange, at step 3" in caplog.text
    caplog.clear()
    former.finalize()
    WRAPPERS["average"](inner, model)
    assert "lost" not in caplog.text
