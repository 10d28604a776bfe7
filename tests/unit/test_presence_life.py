"""Parameters to which only ranks with gradients contribute: in the life of a job, and next to other options."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from hvd_periodic import (
    AGN,
    EASGD,
    Averaging,
    Communicator,
    Compression,
    PostLocal,
)
from hvd_periodic.comm.subset import Subset
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.covering import covering
from tests.helpers import errors, read_center, readable, run_ranks
from tests.unit.test_presence import START, STEPS, Model, gradients_of, made, started


@pytest.mark.parametrize(
    ("at", "ranks", "algorithm", "options"),
    covering(
        (3, 4, 11),
        (2, 3),
        ("diloco", "easgd", "agn average"),
        (
            {},
            {"center": "root"},
            {"center": "sharded"},
            {"overlap": 1},
            {"fragments": 2},
            {"compression": Compression.int8},
        ),
        together=1,
        always=[(4, 3, "diloco", {"overlap": 1}), (11, 3, "easgd", {"fragments": 2})],
    ),
    ids=readable,
)
def test_training_resumes_to_the_bit(at: int, ranks: int, algorithm: str, options: dict[str, Any]) -> None:
    """Also in the middle of a period: who has had gradients since the last exchange is saved."""
    dtype = "f4" if "compression" in options else "f8"

    def work(communicator: Communicator) -> bool:
        rank, model = communicator.rank, started(dtype)
        optimizer = made(model, communicator, algorithm, **options)

        def train(model: Model, optimizer: PeriodicOptimizer, steps: range) -> list[Any]:
            seen = []
            for step in steps:
                optimizer.step({name: g.astype(dtype) for name, g in gradients_of(rank, step, model).items()})
                seen.append({name: x.tolist() for name, x in model.items()})
            return seen

        train(model, optimizer, range(1, at + 1))
        state, values = optimizer.synchronizer.state_dict(), copy.deepcopy(model)
        local = copy.deepcopy(optimizer.inner.__dict__)
        right = train(model, optimizer, range(at + 1, STEPS + 1))
        new = started(dtype)
        again = made(new, communicator, algorithm, **options)
        for name, x in values.items():
            new[name][:] = x
        again.inner.__dict__.update(local)
        again.synchronizer.load_state_dict(state)
        return train(new, again, range(at + 1, STEPS + 1)) == right

    assert run_ranks(ranks, work) == [True] * ranks


def test_who_takes_over_the_state_of_the_root_is_as_present_as_it_was() -> None:
    """Its replica is the root's, too."""

    def work(communicator: Communicator) -> Any:
        options: dict[str, Any] = {"process_set": communicator, "parameters": "present"}
        model = {"x": np.zeros(1)}
        optimizer = PeriodicOptimizer(SGD(1.0), model, Averaging(), 2, **options)
        optimizer.step([-np.ones(1)] if communicator.rank == 0 else [None])
        new = {"x": model["x"].copy()}
        again = PeriodicOptimizer(SGD(1.0), new, Averaging(), 2, **options)
        if communicator.rank == 0:
            new["x"][:] = model["x"]
            again.synchronizer.load_state_dict(optimizer.synchronizer.state_dict())
        again.step([None])
        return new["x"].tolist()

    assert run_ranks(2, work) == [[1.0], [1.0]]


def test_an_excluded_rank_is_absent() -> None:
    """nonfinite="skip": the mean is over the others, and what the excluded one had seen is forgotten."""

    def work(communicator: Communicator) -> Any:
        model, rank = {"x": np.zeros(1), "y": np.zeros(1)}, communicator.rank
        options: dict[str, Any] = {"process_set": communicator, "parameters": {"x": "present"}, "nonfinite": "skip"}
        optimizer = PeriodicOptimizer(SGD(1.0), model, Averaging(), 1, **options)
        nan = np.full(1, np.nan)
        optimizer.step([-np.ones(1) if rank == 0 else None if rank == 1 else nan, -np.ones(1)])
        first = [x.tolist() for x in model.values()]
        optimizer.step([-np.ones(1) if rank == 2 else None, None])
        return first, [x.tolist() for x in model.values()]

    assert run_ranks(3, work) == [([[1.0], [1.0]], [[2.0], [1.0]])] * 3


@pytest.mark.parametrize("algorithm", ["average", "slowmo", "easgd"])
def test_other_parameters_are_exchanged_as_ever(algorithm: str) -> None:
    """To the bit, also where the root weighs nothing: the others take its values all the same."""

    def work(communicator: Communicator, policy: str) -> Any:
        rank, seen = communicator.rank, []
        model = {name: np.full(2, 1.0 + rank) for name in ("x", "led", "expert")}
        options: dict[str, Any] = {"parameters": {"led": "broadcast", "expert": policy}}
        options |= {} if algorithm == "easgd" else {"weight": float(rank)}
        optimizer = made(model, communicator, algorithm, **options)
        for step in range(6):
            gradients = {name: x * (1 + rank) for name, x in model.items() if name != "expert" or step % 3}
            optimizer.step(gradients)
            seen.append([model["x"].tolist(), model["led"].tolist()])
        return seen

    present, local = (
        run_ranks(2, lambda communicator, p=policy: work(communicator, p))  # type: ignore[misc]
        for policy in ("present", "local")
    )
    assert present == local


def test_finalize() -> None:
    """A rank without a step since the last exchange is absent."""

    def work(communicator: Communicator) -> Any:
        model = {"x": np.zeros(1), "y": np.zeros(1)}
        options: dict[str, Any] = {"process_set": communicator, "parameters": {"x": "present"}}
        optimizer = PeriodicOptimizer(SGD(1.0), model, Averaging(), 2, **options)
        for _ in range(3 if communicator.rank else 2):
            optimizer.step([-np.ones(1)] * 2)
        optimizer.finalize()
        return [x.tolist() for x in model.values()]

    assert run_ranks(2, work) == [[[3.0], [2.5]]] * 2


def test_it_counts_in_the_distance_and_is_audited() -> None:
    def work(communicator: Communicator) -> float:
        model = {"x": np.zeros(2)}
        options: dict[str, Any] = {"process_set": communicator, "parameters": "present", "audit_every": 1}
        optimizer = PeriodicOptimizer(SGD(1.0), model, Averaging(), 2, **options)
        optimizer.step([-np.array([3.0, 4.0])])
        distance = optimizer.synchronizer.distance()
        optimizer.step([None])
        return distance

    assert run_ranks(2, work) == [5.0] * 2


def test_nothing_more_is_sent_without_such_parameters() -> None:
    """The handshake, and the bytes that are counted, are those of before; with them, one bit each travels more."""

    def work(communicator: Communicator, parameters: Any) -> list[int]:
        sent, handshake = [], communicator.handshake

        def watched(record: Any, failure: Any = None, piggyback: Any = None) -> Any:
            sent.append(0 if piggyback is None else int(piggyback.size))
            return handshake(record, failure, piggyback)

        communicator.handshake = watched  # type: ignore[method-assign]
        optimizer = made(started(), communicator, "average", parameters=parameters)
        for _ in range(2):
            optimizer.step([None] * len(START))
        return sent[-1:]

    assert run_ranks(2, lambda communicator: work(communicator, {"e.*": "present"})) == [[1]] * 2
    assert run_ranks(2, lambda communicator: work(communicator, {"e.*": "local"})) == [[0]] * 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"asynchronous": True, "algorithm": AGN()},
            "`parameters` can be 'present' in asynchronous exchange with elastic",
        ),
        ({"optimizer_state": "average", "fragments": 2}, "`fragments`, `optimizer_state` and `parameters` that are"),
        (
            {"period": PostLocal(start=2, period=2).around_averaging()},
            "`parameters` cannot be 'local', 'broadcast' or 'present' as long as gradients are averaged",
        ),
    ],
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    def work(communicator: Communicator) -> None:
        given = {"algorithm": Averaging(), "period": 2, "process_set": communicator, "parameters": "present"} | options
        PeriodicOptimizer(SGD(1.0), {"x": np.zeros(1), "y": np.zeros(1)}, **given)

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert message.startswith(text)


def test_policies_that_differ_between_ranks() -> None:
    def work(communicator: Communicator) -> None:
        made(started(), communicator, "average", parameters={"e.*": ["average", "present"][communicator.rank]})

    for kind, message in errors(2, work):
        assert kind is ValueError
        assert "parameters of those present" in message


def test_a_step_whose_gradients_nobody_has_seen() -> None:
    optimizer = PeriodicOptimizer(SGD(1.0), {"x": np.zeros(1)}, Averaging(), 2, parameters="present")
    with pytest.raises(RuntimeError, match="A parameter that is 'present' needs every local gradient"):
        optimizer.synchronizer.step()


def test_asynchronous_elastic_averaging_of_one_rank() -> None:
    """A rank that is absent is pulled, and does not move the center."""
    model = {"x": np.zeros(2), "y": np.zeros(1)}
    options: dict[str, Any] = {"asynchronous": True, "parameters": {"x": "present"}}
    optimizer = PeriodicOptimizer(SGD(1.0), model, EASGD(0.25), 2, **options)
    seen = []
    for step in range(6):
        optimizer.step([-np.ones(2) if step in (1, 4) else None, -np.ones(1)])
        center = read_center(optimizer, [model["x"]])[0]
        seen.append([model["x"].tolist(), center.tolist()])
    # x: 1 at step 2, pulled to .75, c .25; pulled to .625 at step 4, c stays; 1.625 at step 6: pulled to 1.28125.
    assert seen[1::2] == [[[v] * 2, [c] * 2] for v, c in ((0.75, 0.25), (0.625, 0.25), (1.28125, 0.59375))]
    assert model["y"].tolist() == elastic_alone(3)


def elastic_alone(rounds: int) -> list[float]:
    """Return what one worker has, whose every round of two steps moves it by 2."""
    x = c = 0.0
    for _ in range(rounds):
        d = x + 2 - c
        x, c = x + 2 - 0.25 * d, c + 0.25 * d
    return [x]


@pytest.mark.parametrize("policy", ["average", "reset"])
def test_optimizer_state(policy: str) -> None:
    """The mean of those present, for all; it stays if nobody is present."""

    def work(communicator: Communicator) -> list[list[float]]:
        model, rank, found = {"x": np.zeros(1), "y": np.zeros(1)}, communicator.rank, []
        options: dict[str, Any] = {"process_set": communicator, "parameters": {"x": "present"}}
        local = SGD(0.0, momentum=0.5)
        optimizer = PeriodicOptimizer(local, model, Averaging(), 1, optimizer_state=policy, **options)
        for ranks in ([0, 1, 2], [0, 2], [], [1]):
            optimizer.step([np.full(1, 1.0 + rank) if rank in ranks else None, np.full(1, 1.0 + rank)])
            found.append([float(v[0]) for v in local.velocities or []])
        return found

    # x: (1 + 2 + 3)/3; then (.5 · 2 + 1 + .5 · 2 + 3)/2; stays; then .5 · 3 + 2. y: .5 v + 2 each time.
    x, y = ([2.0, 3.0, 3.0, 3.5], [2.0, 3.0, 3.5, 3.75]) if policy == "average" else ([0.0] * 4, [0.0] * 4)
    assert run_ranks(3, work) == [[[a, b] for a, b in zip(x, y, strict=True)]] * 3


def test_a_reset_leaves_what_nobody_has_trained() -> None:
    def work(communicator: Communicator) -> float:
        model, local = {"x": np.zeros(1), "y": np.zeros(1)}, SGD(0.0, momentum=0.5)
        options: dict[str, Any] = {"process_set": communicator, "parameters": {"x": "present"}}
        optimizer = PeriodicOptimizer(local, model, Averaging(), 1, optimizer_state="reset", **options)
        optimizer.step([None, np.ones(1)])
        assert local.velocities is not None
        local.velocities[0][:] = 7.0
        optimizer.step([None, np.ones(1)])
        return float(local.velocities[0][0])

    assert run_ranks(2, work) == [7.0] * 2


def test_groups() -> None:
    """Each has its own ranks that are present."""

    def work(communicator: Communicator) -> list[float]:
        rank = communicator.rank
        group = Subset(communicator, lambda: [0, 1] if rank < 2 else [2, 3, 4])
        model = {"x": np.zeros(1)}
        options: dict[str, Any] = {"process_set": group, "parameters": "present"}
        optimizer = PeriodicOptimizer(SGD(1.0), model, Averaging(), 1, **options)
        optimizer.step([-np.full(1, 1.0 + rank) if rank in (1, 2, 4) else None])
        return model["x"].tolist()

    assert run_ranks(5, work) == [[2.0], [2.0], [4.0], [4.0], [4.0]]
