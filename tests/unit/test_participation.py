"""Parameters that take part by pattern, on numpy: what is exchanged is what a model without the others exchanges."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_periodic import (
    AGN,
    BMUF,
    EASGD,
    Algorithm,
    Averaging,
    Communicator,
    Compression,
    DiLoCo,
    PostLocal,
    SlowMo,
)
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests import oracle
from tests.covering import covering
from tests.helpers import Array, errors, run_ranks

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "easgd": lambda: EASGD(0.25, rho=0.5),
    "average": Averaging,
    "agn": AGN,
    "diloco": DiLoCo,
    "slowmo": SlowMo,
    "bmuf": BMUF,
}
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "overlap": {"overlap": 1},
    "int8": {"compression": Compression.int8},
    "fragments": {"fragments": 2},
    "state": {"optimizer_state": "average"},
}
POLICIES = {"expert.*": "local", "router": "broadcast"}
PERIOD, ROOT = 2, 1

Model = dict[str, Array]


def everything(rank: int) -> Model:
    """Return a model with an expert in it whose name and shape are the rank's own."""
    start = np.array(oracle.START)
    return {"x": start.copy(), f"expert.{rank}": start[: rank + 1].copy(), "y": np.ones(2), "router": start}


def gradients_of(rank: int, model: Model) -> dict[str, Array]:
    return {name: np.array(oracle.gradient(rank, x.tolist())) for name, x in model.items()}


def made(
    model: Model, communicator: Communicator, algorithm: str, rates: tuple[float, float] = (0.1, 0.5), **options: Any
) -> PeriodicOptimizer:
    local = SGD(*rates)
    return PeriodicOptimizer(
        local, model, ALGORITHMS[algorithm](), PERIOD, process_set=communicator, root_rank=ROOT, **options
    )


def trained(model: Model, optimizer: PeriodicOptimizer, rank: int, steps: int = oracle.STEPS) -> list[list[Any]]:
    """Return the values after each step, in the order of names, and those of the center at the end."""
    seen = []
    for _ in range(steps):
        optimizer.step(gradients_of(rank, model))
        seen.append([x.tolist() for x in model.values()])
    with optimizer.center():
        seen.append([x.tolist() for x in model.values()])
    return seen


@pytest.mark.parametrize(("algorithm", "way"), covering(ALGORITHMS, WAYS, together=1))
def test_the_rest_is_exchanged_as_if_it_were_alone(algorithm: str, way: str) -> None:
    """To the bit; local parameters descend by themselves, and those of the root replace the others' every period."""

    def by_pattern(communicator: Communicator) -> Any:
        model = everything(communicator.rank)
        optimizer = made(model, communicator, algorithm, rates, parameters=POLICIES, **WAYS[way])
        return trained(model, optimizer, communicator.rank)

    def alone(communicator: Communicator) -> Any:
        model = {name: x for name, x in everything(0).items() if name in "xy"}
        return trained(model, made(model, communicator, algorithm, rates, **WAYS[way]), communicator.rank)

    rates, own = (oracle.RATE, oracle.MOMENTUM), oracle.local(3, oracle.MOMENTUM)
    led, center = oracle.broadcast(3, oracle.periodic(PERIOD), ROOT, oracle.MOMENTUM)
    for rank, (found, expected) in enumerate(zip(run_ranks(3, by_pattern), run_ranks(3, alone), strict=True)):
        assert [[x, y] for x, _, y, _ in found] == expected
        experts = [step[rank][: rank + 1] for step in [*own, own[-1]]]
        np.testing.assert_allclose([expert for _, expert, _, _ in found], experts, rtol=1e-12)
        following = [*(step[rank] for step in led), center]
        np.testing.assert_allclose([router for *_, router in found], following, rtol=1e-12)


def test_numbers_worked_out_by_hand() -> None:
    """Two local steps of the first worker, h = .5, b = 3, and SGD .1, in every round."""

    def work(communicator: Communicator) -> list[float]:
        h, b = [(0.5, 3.0), (1.0, -1.0), (2.0, 0.5)][communicator.rank]
        model = {"x": np.zeros(1), "router": np.zeros(1)}
        options: dict[str, Any] = {"parameters": {"router": "broadcast"}, "process_set": communicator}
        optimizer = PeriodicOptimizer(SGD(0.1), model, Averaging(), 2, **options)
        seen = []
        for _ in range(4):
            optimizer.step([h * (x - b) for x in model.values()])
            seen.append(float(model["router"][0]))
        return seen[1::2]

    assert run_ranks(3, work) == [pytest.approx([0.2925, 0.55648125], rel=1e-12)] * 3


def test_local_parameters_start_as_they_are_and_do_not_count_in_the_distance() -> None:
    def work(communicator: Communicator) -> tuple[Any, float]:
        model = {"x": np.full(2, 1.0 + communicator.rank), "own": np.full(2, 1.0 + communicator.rank)}
        optimizer = made(model, communicator, "average", parameters={"own": "local"})
        optimizer.synchronizer.begin()
        model["own"] += 5.0
        return [x.tolist() for x in model.values()], optimizer.synchronizer.distance()

    assert run_ranks(2, work) == [([[2.0, 2.0], [6.0, 6.0]], 0.0), ([[2.0, 2.0], [7.0, 7.0]], 0.0)]


def test_parameters_of_the_root_count_in_the_distance() -> None:
    def work(communicator: Communicator) -> float:
        model = {"x": np.zeros(2), "led": np.zeros(2)}
        optimizer = made(model, communicator, "average", parameters=lambda name, x: {"led": "broadcast"}.get(name))
        optimizer.step({"x": np.ones(2), "led": np.array([30.0, 40.0])})
        return optimizer.synchronizer.distance()

    assert run_ranks(2, work) == [pytest.approx((0.02 + 25.0) ** 0.5, rel=1e-12)] * 2


def test_audits_compare_parameters_of_the_root_and_not_local_ones() -> None:
    def work(communicator: Communicator) -> None:
        model = {"x": np.zeros(2), "led": np.zeros(2), "own": np.full(2, float(communicator.rank))}
        policies = {"led": "broadcast", "own": "local"}
        optimizer = made(model, communicator, "average", parameters=policies, audit_every=1)
        for _ in range(PERIOD):
            optimizer.step({name: np.ones(2) for name in model})
        optimizer.synchronizer.audit()
        if communicator.rank == 1:
            group = next(each for each in optimizer.synchronizer.tensor_groups if each.name == "parameters_from_root")
            group.center.tensors()[0][0] += 1.0
        optimizer.synchronizer.audit()

    for kind, message in errors(2, work):
        assert kind is RuntimeError
        assert "The center variables differ between ranks: rank 1 from rank 0, first in 'led'" in message


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
def test_training_resumes_to_the_bit(center: str, ranks: int) -> None:
    """In the middle of a period."""

    def work(communicator: Communicator) -> bool:
        rank = communicator.rank
        model = everything(rank)
        optimizer = made(model, communicator, "diloco", parameters=POLICIES, center=center)
        trained(model, optimizer, rank, steps=5)
        state, values, local = optimizer.synchronizer.state_dict(), copy.deepcopy(model), copy.deepcopy(optimizer.inner)
        expected = trained(model, optimizer, rank, steps=4)
        new = everything(rank)
        again = made(new, communicator, "diloco", parameters=POLICIES, center=center)
        for name, x in values.items():
            new[name][:] = x
        again.inner.__dict__.update(local.__dict__)
        again.synchronizer.load_state_dict(state)
        return trained(new, again, rank, steps=4) == expected

    assert run_ranks(ranks, work) == [True] * ranks


def test_a_state_that_the_root_alone_has_loaded_is_refused() -> None:
    """The other ranks would go on with new parameters of their own."""

    def work(communicator: Communicator) -> None:
        model = {"x": np.zeros(1), "own": np.zeros(1)}
        optimizer = made(model, communicator, "average", parameters={"own": "local"})
        optimizer.step({"x": np.ones(1)})
        again = made(model, communicator, "average", parameters={"own": "local"})
        if communicator.rank == ROOT:
            again.synchronizer.load_state_dict(optimizer.synchronizer.state_dict())
        again.step({"x": np.ones(1)})

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert message.startswith("A state was loaded on the root alone, which has no values for the `parameters`")


def test_parameters_without_elements() -> None:
    def work(communicator: Communicator) -> list[float]:
        model = {"x": np.zeros(1), "own": np.zeros((0, 2)), "led": np.zeros(0)}
        optimizer = made(model, communicator, "average", parameters={"own": "local", "led": "broadcast"})
        for _ in range(2):
            optimizer.step({"x": -np.ones(1)})
        return list(model["x"])

    assert run_ranks(2, work) == [[pytest.approx(0.25)]] * 2


def test_a_local_parameter_that_is_not_finite_is_the_rank_s_own_affair() -> None:
    def work(communicator: Communicator) -> list[float]:
        model = {"x": np.zeros(1), "own": np.full(1, np.nan)}
        optimizer = made(model, communicator, "average", parameters={"own": "local"})
        for _ in range(2):
            optimizer.step({"x": np.ones(1)})
        optimizer.finalize()
        return list(model["x"])

    assert run_ranks(2, work)[0][0] < 0


@pytest.mark.parametrize(
    ("parameters", "kind", "text"),
    [
        ({"heads.*": "local"}, ValueError, r"pattern that matches no parameter: 'heads\.\*'\. There are x, own"),
        (
            {"x": "maximum"},
            ValueError,
            "`parameters['x']` must be one of ('average', 'broadcast', 'local', 'present', 'rows')",
        ),
        ("sometimes", ValueError, "Received: parameters='sometimes'"),
        (3, TypeError, "Received: int"),
        ({0: "local"}, TypeError, "Patterns of `parameters` must be strings. Received: 0"),
        ("local", ValueError, "Received: 2 parameters, without those that `parameters` makes 'local' or 'broadcast'"),
    ],
)
def test_bad_arguments(parameters: Any, kind: type[Exception], text: str) -> None:
    def work(communicator: Communicator) -> None:
        made({"x": np.zeros(1), "own": np.zeros(1)}, communicator, "average", parameters=parameters)

    for found, message in errors(2, work):
        assert found is kind
        assert text.replace("\\", "") in message


def test_ranks_that_disagree() -> None:
    """A parameter that takes part on one rank only is an error on all, before anything travels."""

    def work(communicator: Communicator) -> None:
        policy = ["average", "local"][communicator.rank]
        made({"x": np.zeros(1), "own": np.zeros(1)}, communicator, "average", parameters={"own": policy})

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert "number of parameters: 2 on rank 0; 1 on rank 1" in message


def test_asynchronous_exchange_has_local_parameters_and_none_of_the_root() -> None:
    model = {"x": np.zeros(1), "own": np.zeros(1)}
    options: dict[str, Any] = {"asynchronous": True, "algorithm": EASGD(0.25), "period": 1}
    optimizer = PeriodicOptimizer(SGD(1.0), model, parameters={"own": "local"}, **options)
    for _ in range(2):
        optimizer.step([-np.ones(1)] * 2)
    assert (model["x"].tolist(), model["own"].tolist()) == ([1.375], [2.0])
    with pytest.raises(ValueError, match="parameters='broadcast' is for synchronous exchange"):
        PeriodicOptimizer(SGD(1.0), model, parameters={"own": "broadcast"}, **options)


def test_a_warmup_that_averages_all_gradients_is_refused() -> None:
    schedule = PostLocal(start=2, period=2).around_averaging()
    with pytest.raises(ValueError, match="`parameters` cannot be 'local', 'broadcast' or 'present' as long as"):
        PeriodicOptimizer(
            SGD(1.0), {"x": np.zeros(1), "own": np.zeros(1)}, Averaging(), schedule, parameters={"own": "local"}
        )
