"""Changes of the trained set in the middle of training, on numpy."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from hvd_periodic import AGN, BMUF, EASGD, Algorithm, Averaging, Communicator, Compression, DiLoCo, SlowMo
from hvd_periodic.asynchronous.leaving import leave
from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.comm.subset import Subset
from hvd_periodic.numpy import SGD, NumpyReplica, PeriodicOptimizer
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer
from tests.covering import covering
from tests.helpers import Array, errors, run_ranks
from tests.unit.test_quorum import ADOPTED

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "average": Averaging,
    "diloco": DiLoCo,
    "slowmo": SlowMo,
    "bmuf": BMUF,
    "easgd": lambda: EASGD(0.25, rho=0.5),
    "agn": AGN,
}
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "int8": {"compression": Compression.int8},
    "topk": {"compression": Compression.topk(0.5)},
    "fragments": {"fragments": 2},
    "overlap": {"overlap": 1},
    "average": {"optimizer_state": "average"},
    "skip": {"nonfinite": "skip"},
    "present": {"parameters": {"v": "present"}},
}
PERIOD = 3


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the parameters into buckets of two elements."""
    monkeypatch.setattr("hvd_periodic.numpy.optimizer.NumpyReplica", partial(NumpyReplica, bucket_bytes=16))


def made(comm: Communicator, model: dict[str, Array], algorithm: str, **options: Any) -> PeriodicOptimizer:
    outer = SGD(0.1, 0.9) if algorithm == "agn" else None
    return PeriodicOptimizer(
        SGD(0.125, 0.5), model, ALGORITHMS[algorithm](), PERIOD, outer_optimizer=outer, process_set=comm, **options
    )


def started() -> dict[str, Array]:
    return {"w": np.array([1.0, -2.0, 0.5]), "v": np.array([[2.0, 1.0], [0.0, -1.0]])}


def train(optimizer: PeriodicOptimizer, model: dict[str, Array], rank: int, steps: int) -> list[Any]:
    """Take steps on another objective on each rank, and return the values after each."""
    seen = []
    for _ in range(steps):
        optimizer.step({name: (0.5 + 0.25 * rank) * (x - (1.5 - rank)) for name, x in model.items()})
        seen.append({name: x.tolist() for name, x in model.items()})
    return seen


def in_turn(comm: Communicator, work: Callable[[], Any]) -> None:
    """Let ranks work one after another, so that they push in the same order in every run."""
    for rank in range(comm.size):
        if rank == comm.rank:
            work()
        comm.allgather_object(None, "in turn")


def call_elsewhere(optimizer: PeriodicOptimizer, model: dict[str, Array], call: str) -> None:
    """Make a call, of those that all ranks make together."""
    if call == "save":
        optimizer.synchronizer.handshake.meet(Purpose.SAVE)
    elif call == "center":
        of_center(optimizer, model)
    elif call != "step":
        getattr(optimizer.synchronizer, call)()


def of_center(optimizer: PeriodicOptimizer, model: dict[str, Array]) -> Any:
    with optimizer.center():
        return {name: x.tolist() for name, x in model.items()}


def test_numbers_of_diloco() -> None:
    """Two workers with F_i = h_i (x - b_i)²/2; v is frozen after round 2 and thawed after round 3."""

    def job(comm: Communicator) -> tuple[list[float], list[float]]:
        w, v, rank = np.zeros(1), np.zeros(1), comm.rank
        optimizer = PeriodicOptimizer(SGD(0.1), {"w": w, "v": v}, DiLoCo(), PERIOD, process_set=comm)
        seen: tuple[list[float], list[float]] = ([], [])
        for done in range(1, 6):
            for _ in range(PERIOD):
                gradients = {"w": (0.5, 1.0)[rank] * (w - (3.0, -1.0)[rank])}
                if done != 3:
                    gradients["v"] = (1.0, 2.0)[rank] * (v - (0.5, 2.0)[rank])
                optimizer.step(gradients)
            seen[0].append(w.item())
            seen[1].append(v.item())
            if done == 2:
                optimizer.adopt({"w": w})
            elif done == 3:
                optimizer.adopt({"w": w, "v": v})
        assert optimizer.synchronizer.rounds == 5
        return seen

    for w, v in run_ranks(2, job):
        assert w[:4] == pytest.approx([0.104321875, 0.224422972, 0.33928258, 0.433479688], abs=1e-8)
        assert v == pytest.approx([0.7391475, 1.420331637, 1.420331637, 1.442588048, 1.463099129], abs=1e-8)


@pytest.mark.parametrize(("algorithm", "way"), covering(ALGORITHMS, WAYS, together=1))
def test_the_same_set_right_after_an_exchange_changes_nothing(algorithm: str, way: str) -> None:
    def job(comm: Communicator, adopts: bool) -> list[Any]:
        model = started()
        optimizer = made(comm, model, algorithm, **WAYS[way])
        seen = train(optimizer, model, comm.rank, 2 * PERIOD)
        optimizer.synchronizer.sync()
        optimizer.synchronizer.land()
        before = optimizer.synchronizer.rounds
        if adopts:
            optimizer.adopt(model)
        assert optimizer.synchronizer.rounds == before
        seen += train(optimizer, model, comm.rank, 3 * PERIOD)
        optimizer.finalize()
        return [*seen, of_center(optimizer, model), optimizer.synchronizer.rounds]

    assert run_ranks(3, partial(job, adopts=True)) == run_ranks(3, partial(job, adopts=False))


@pytest.mark.parametrize(
    ("algorithm", "way"),
    covering(ALGORITHMS, ("replicated", "root", "sharded", "overlap", "average", "skip"), together=1),
)
def test_parameters_leave_come_and_stay(algorithm: str, way: str) -> None:
    """What stays trains as if it were alone."""

    def job(comm: Communicator, alone: bool) -> dict[str, Any]:
        model, rank = started(), comm.rank
        w, v = model["w"], model["v"]
        u = np.full(3, 1.0 + rank)
        optimizer = made(comm, {"w": w} if alone else {"v": v, "w": w}, algorithm, **WAYS[way])
        whole = {"w": w} if alone else {"w": w, "v": v}
        seen = train(optimizer, whole, rank, PERIOD + 1)
        optimizer.adopt({"w": w})
        found: dict[str, Any] = {"left": v.tolist()}
        seen += train(optimizer, {"w": w}, rank, PERIOD + 2)
        found["frozen"] = v.tolist()
        now = {"w": w} if alone else {"u": u, "w": w, "v": v}
        optimizer.adopt(now)
        found |= {"came": u.tolist(), "center": of_center(optimizer, now)}
        seen += train(optimizer, now, rank, 2 * PERIOD)
        optimizer.finalize()
        found["end"] = of_center(optimizer, now)
        return found | {"w": [each["w"] for each in seen], "counters": optimizer.synchronizer.local_steps}

    together, alone = (run_ranks(3, partial(job, alone=each)) for each in (False, True))
    for rank in range(3):
        found = together[rank]
        np.testing.assert_allclose(found["w"], alone[rank]["w"], rtol=1e-12, atol=0)
        assert found["left"] == found["frozen"] == together[0]["left"] == found["center"]["v"]
        assert found["came"] == found["center"]["u"] == [1.0, 1.0, 1.0]
        assert found["end"] == together[0]["end"]
        assert found["counters"] == 4 * PERIOD + 3


def test_an_exchange_comes_first_and_the_next_is_a_period_later() -> None:
    def job(comm: Communicator) -> list[int]:
        model = started()
        optimizer = made(comm, model, "average", fragments=2)
        train(optimizer, model, comm.rank, 2)
        optimizer.adopt(model)
        counters = optimizer.synchronizer.counters
        return [counters.rounds, counters.last_exchange, counters.next_exchange]

    assert run_ranks(2, job) == [[2, 2, 4]] * 2


def test_bmuf_leaves_the_center_not_what_it_publishes() -> None:
    def job(comm: Communicator) -> tuple[list[float], Any]:
        model = started()
        optimizer = made(comm, model, "bmuf")
        train(optimizer, model, comm.rank, 2 * PERIOD)
        center = of_center(optimizer, model)["w"]
        published = model["w"].tolist()
        optimizer.adopt({"v": model["v"]})
        assert model["w"].tolist() == center != published
        return center, published

    run_ranks(2, job)


def test_other_arrays_of_the_same_names_take_the_values() -> None:
    def job(comm: Communicator) -> Any:
        model = started()
        optimizer = made(comm, model, "easgd")
        train(optimizer, model, comm.rank, 4)
        others = {name: np.zeros_like(x) for name, x in model.items()}
        optimizer.adopt(others)
        assert {n: x.tolist() for n, x in others.items()} == {n: x.tolist() for n, x in model.items()}

    run_ranks(2, job)


def test_another_shape_comes_from_the_root_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def job(comm: Communicator) -> Any:
        model = started()
        optimizer = made(comm, model, "diloco")
        train(optimizer, model, comm.rank, PERIOD)
        model["w"] = np.full(5, float(comm.rank))
        optimizer.adopt(model)
        return train(optimizer, model, comm.rank, PERIOD)[-1]

    found = run_ranks(2, job)
    assert found[0] == found[1]
    assert [r.getMessage() for r in caplog.records if "adopt()" in r.getMessage()] == [
        "Parameter 'w' has another shape, dtype or policy than before adopt(): it starts from the root's value, and "
        "its outer state from zero"
    ]


def test_parameters_with_policies_leave_and_come() -> None:
    """What is each rank's own stays so; under other policies, it starts from the root's. The rest goes on."""
    policies = {"own*": "local", "led": "broadcast", "v": "rows", "seldom": "present"}

    def job(comm: Communicator, alone: bool) -> Any:
        rank, w = comm.rank, started()["w"]
        model = {"w": w, "v": np.ones((4, 2)), "led": np.ones(2), "seldom": np.ones(1), "own": np.ones(2)}
        optimizer = made(comm, {"w": w} if alone else model, "diloco", parameters=None if alone else policies)
        optimizer.inner.momentum = 0.0
        now = {"w": w} if alone else model
        seen = train(optimizer, now, rank, 4)
        own = model["own"].copy()
        optimizer.adopt({"w": w})
        left = {name: x.tolist() for name, x in model.items() if name not in ("w", "own")}
        seen += train(optimizer, {"w": w}, rank, 4)
        np.testing.assert_array_equal(model["own"], own)
        for x in () if alone else model.values():
            x += 0 if x is w else rank + 1
        optimizer.adopt(now)
        came = {name: x.tolist() for name, x in model.items() if name not in ("w", "own")}
        np.testing.assert_array_equal(model["own"], own if alone else own + rank + 1)
        seen += train(optimizer, now, rank, 4)
        return [each["w"] for each in seen], left, came, optimizer.synchronizer.replica.by_policy

    together, alone = (run_ranks(3, partial(job, alone=each)) for each in (False, True))
    for (w, left, came, by_policy), (w_alone, *_) in zip(together, alone, strict=True):
        assert w == w_alone
        assert left == together[0][1] != {name: np.ones_like(x).tolist() for name, x in left.items()}
        assert came == together[0][2] == {name: (np.array(x) + 1).tolist() for name, x in left.items()}
        assert by_policy == {"broadcast": ["led"], "local": ["own"], "present": ["seldom"], "rows": ["v"]}


@pytest.mark.parametrize("center", ["replicated", "sharded"])
def test_sets_that_differ_are_an_error_everywhere_and_training_goes_on(center: str) -> None:
    def job(comm: Communicator, tries: bool) -> Any:
        model = started()
        optimizer = made(comm, model, "agn", center=center)
        seen, message = train(optimizer, model, comm.rank, PERIOD), ""
        if tries:
            with pytest.raises(ValueError, match="All ranks must run the same optimizer") as error:
                optimizer.adopt({"w": model["w"]} if comm.rank else model)
            message = str(error.value)
        seen += train(optimizer, model, comm.rank, 2 * PERIOD)
        return message, seen

    tried, plain = (run_ranks(2, partial(job, tries=each)) for each in (True, False))
    assert tried[0][0] == tried[1][0] != ""
    assert [seen for _, seen in tried] == [seen for _, seen in plain]


def test_a_set_that_is_refused_on_one_rank_is_an_error_everywhere() -> None:
    def job(comm: Communicator) -> Any:
        model = started()
        optimizer = made(comm, model, "average")
        train(optimizer, model, comm.rank, 1)
        with pytest.raises((TypeError, RuntimeError), match="must be a numpy array of floating point"):
            optimizer.adopt({"w": np.zeros(2, int)} if comm.rank else model)
        train(optimizer, model, comm.rank, PERIOD)

    run_ranks(2, job)


@pytest.mark.parametrize(
    ("elsewhere", "center"),
    [
        *((elsewhere, "replicated") for elsewhere in ("step", "finalize", "save", "audit", "broadcast", "center")),
        *((elsewhere, "sharded") for elsewhere in ("center", "state_dict")),
    ],
)
@pytest.mark.parametrize("adopting", [{0}, {1, 2}], ids=str)
def test_a_rank_that_is_elsewhere_is_an_error_everywhere(elsewhere: str, center: str, adopting: set[int]) -> None:
    """Who reads a center that is on every rank waits for nobody, and is elsewhere at its next step."""

    def job(comm: Communicator) -> None:
        model = started()
        optimizer = made(comm, model, "average", center=center)
        train(optimizer, model, comm.rank, 1)
        if comm.rank in adopting:
            optimizer.adopt({"w": model["w"]})
        call_elsewhere(optimizer, model, elsewhere)
        train(optimizer, model, comm.rank, PERIOD)

    for _, text in errors(3, job):
        assert text.startswith("Ranks wait for each other in different places: ")
        assert "adopt() of optimizer 1 at local step 1" in text


@pytest.mark.parametrize("way", ["replicated", "sharded", "int8"])
def test_a_state_saved_afterwards_loads_into_the_same_set_only(way: str) -> None:
    def job(comm: Communicator) -> None:
        model = started()
        optimizer = made(comm, model, "diloco", **WAYS[way])
        train(optimizer, model, comm.rank, 2)
        optimizer.adopt({"w": model["w"]})
        train(optimizer, {"w": model["w"]}, comm.rank, PERIOD + 1)
        state = optimizer.synchronizer.state_dict()
        kept, inner = {"w": model["w"].copy()}, copy.deepcopy(optimizer.inner)
        other = made(comm, kept, "diloco", **WAYS[way])
        other.inner.__dict__.update(vars(inner))
        kept["w"][...] = model["w"]
        other.synchronizer.load_state_dict(copy.deepcopy(state))
        after = train(optimizer, {"w": model["w"]}, comm.rank, 2 * PERIOD)
        assert train(other, kept, comm.rank, 2 * PERIOD) == after
        with pytest.raises(ValueError, match="belongs to another model"):
            made(comm, started(), "diloco", **WAYS[way]).synchronizer.load_state_dict(state)

    run_ranks(2, job)


def test_before_the_first_step() -> None:
    def job(comm: Communicator) -> Any:
        model = {name: x + comm.rank for name, x in started().items()}
        optimizer = made(comm, {"w": model["w"]}, "easgd")
        optimizer.adopt(model)
        return train(optimizer, model, comm.rank, 2 * PERIOD)

    plain = run_ranks(2, lambda comm: (lambda m: train(made(comm, m, "easgd"), m, comm.rank, 2 * PERIOD))(started()))
    assert run_ranks(2, job) == plain


def test_refused_inside_center_and_without_arrays() -> None:
    model = started()
    optimizer = made(None, model, "average")  # type: ignore[arg-type]
    with optimizer.center(), pytest.raises(RuntimeError, match=r"adopt\(\) inside the center\(\) block"):
        optimizer.adopt(model)
    with pytest.raises(ValueError, match="must hold at least one element"):
        optimizer.adopt({})
    train(optimizer, model, 0, PERIOD)


@pytest.mark.parametrize(("algorithm", "place"), covering(ALGORITHMS, ("window", "service", "sharded"), together=1))
def test_after_finalize_of_asynchronous_training(algorithm: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays trains as if it were alone, what leaves takes the center, and what comes starts from the root's."""
    monkeypatch.setenv("HVD_PERIODIC_TRANSPORT", "window" if place == "window" else "service")
    options = {"asynchronous": True, "center": "sharded" if place == "sharded" else "replicated"}

    def job(comm: Communicator, alone: bool) -> dict[str, Any]:
        model, rank = started(), comm.rank
        w, v, u = model["w"], model["v"], np.full(3, 1.0 + rank)
        first = {"w": w} if alone else {"v": v, "w": w}
        optimizer = made(comm, first, algorithm, **options)
        optimizer.synchronizer.begin()
        in_turn(comm, lambda: train(optimizer, first, rank, (3 if rank == 1 else 2) * PERIOD))
        optimizer.finalize()
        found: dict[str, Any] = {"before": [w.tolist(), of_center(optimizer, first)["w"]]}
        if not alone:
            optimizer.adopt({"w": w})
        found["adopted"] = [w.tolist(), of_center(optimizer, {"w": w})["w"]]
        found["left"] = v.tolist()
        in_turn(comm, lambda: train(optimizer, {"w": w}, rank, PERIOD))
        optimizer.finalize()
        now = {"w": w} if alone else {"u": u, "w": w}
        if not alone:
            optimizer.adopt(now)
        found |= {"came": u.tolist(), "center": of_center(optimizer, now)}
        in_turn(comm, lambda: train(optimizer, now, rank, 2 * PERIOD))
        pushes = optimizer.synchronizer.state_dict()["pushes"]["pushes"]
        optimizer.finalize()
        return found | {"end": of_center(optimizer, now), "w": w.tolist(), "pushes": pushes}

    together, alone = (run_ranks(3, partial(job, alone=each)) for each in (False, True))
    for found, by_itself in zip(together, alone, strict=True):
        assert found["before"] == found["adopted"]
        assert by_itself["pushes"] == [5, 6, 5]
        for key in ("before", "w", "pushes"):
            np.testing.assert_allclose(found[key], by_itself[key], rtol=1e-12, atol=0)
        np.testing.assert_allclose(found["end"]["w"], by_itself["end"]["w"], rtol=1e-12, atol=0)
        assert found["left"] == together[0]["left"]
        assert found["came"] == found["center"]["u"] == [1.0, 1.0, 1.0]
        assert found["end"] == together[0]["end"]


QUORUM: dict[str, tuple[str, dict[str, Any]]] = {
    "average": ("average", {"weight": "steps"}),
    "diloco": ("diloco", {"staleness_power": 0.5}),
    "slowmo": ("slowmo", {"max_message_norm": 1.0, "max_mean_norm": 0.5}),
    "bmuf": ("bmuf", {"compression": Compression.topk(0.5)}),
    "easgd": ("easgd", {}),
    "easgd, topk": ("easgd", {"compression": Compression.topk(0.5)}),
    "agn": ("agn", {"nonfinite": "skip"}),
}


@pytest.mark.parametrize("case", QUORUM)
def test_after_finalize_with_a_quorum(case: str) -> None:
    """What stays trains as if it were alone, in the same rounds, some of which are replayed after adopt()."""
    algorithm, options = QUORUM[case]

    def job(comm: Communicator, alone: bool) -> dict[str, Any]:
        model, rank = started(), comm.rank
        w, v, u = model["w"], model["v"], np.full(3, 1.0 + rank)
        first = {"w": w} if alone else {"v": v, "w": w}
        optimizer = made(comm, first, algorithm, quorum=2, **options)
        optimizer.synchronizer.begin()
        optimizer.synchronizer.exchanger.replay(ADOPTED)  # type: ignore[attr-defined]
        comm.allgather_object(None, "replayed")

        def rounds(numbers: range, trained: dict[str, Array]) -> None:
            for members in (ADOPTED[number] for number in numbers):
                train(optimizer, trained, rank, PERIOD if rank in members else 0)
            optimizer.finalize()

        rounds(range(2), first)  # Rank 1 has no steps of the second round; finalize() is the third.
        found: dict[str, Any] = {"before": [w.tolist(), of_center(optimizer, first)["w"]]}
        if not alone:
            optimizer.adopt({"w": w})
        found |= {"adopted": [w.tolist(), of_center(optimizer, {"w": w})["w"]], "left": v.tolist()}
        now = {"w": w} if alone else {"u": u, "w": w}
        if not alone:
            optimizer.adopt(now)
        found |= {"came": u.tolist(), "center": of_center(optimizer, now)}
        train(optimizer, now, rank, PERIOD)  # Rank 0 comes too, and is in the fifth round.
        optimizer.finalize()
        pushes = optimizer.synchronizer.state_dict()["pushes"]
        return found | {"end": of_center(optimizer, now), "w": w.tolist(), "pushes": pushes}

    together, alone = (run_ranks(3, partial(job, alone=each)) for each in (False, True))
    for found, by_itself in zip(together, alone, strict=True):
        assert found["before"] == found["adopted"]
        assert found["pushes"] | {"windows": [], "speeds": []} == by_itself["pushes"] | {"windows": [], "speeds": []}
        if not options.keys() & {"compression", "max_mean_norm"}:  # These choose and bound over all parameters.
            np.testing.assert_allclose(found["before"], by_itself["before"], rtol=1e-12, atol=0)
            np.testing.assert_allclose(found["end"]["w"], by_itself["end"]["w"], rtol=1e-12, atol=0)
            np.testing.assert_allclose(found["w"], by_itself["w"], rtol=1e-12, atol=0)
        assert found["left"] == together[0]["left"]
        assert found["came"] == found["center"]["u"] == [1.0, 1.0, 1.0]
        assert found["end"] == together[0]["end"]


@pytest.mark.parametrize("kind", [{"asynchronous": True}, {"quorum": 1}])
def test_it_is_refused_before_finalize(kind: dict[str, Any]) -> None:
    def job(comm: Communicator) -> None:
        model = started()
        optimizer = made(comm, model, "easgd", **kind)
        text = (
            r"adopt\(\) is not available before finalize\(\) in asynchronous training or with a quorum: call finalize"
        )
        for steps in (1, 0):
            train(optimizer, model, comm.rank, steps)
            with pytest.raises(RuntimeError, match=text):
                optimizer.adopt(model)
        optimizer.finalize()
        train(optimizer, model, comm.rank, 1 - comm.rank)
        with pytest.raises(RuntimeError, match=text):
            optimizer.adopt(model)
        optimizer.finalize()
        optimizer.adopt({"w": model["w"]})
        optimizer.adopt(model)

    run_ranks(2, job)


@pytest.mark.parametrize("knowing", [{0, 1, 2}, {1}])
@pytest.mark.parametrize("kind", [{"asynchronous": True}, {"quorum": 2}])
def test_it_is_refused_once_a_rank_has_died(knowing: set[int], kind: dict[str, Any]) -> None:
    """On all ranks, also those that do not know of it yet."""

    def job(comm: Communicator) -> None:
        model = started()
        optimizer = made(comm, model, "easgd", **kind)
        train(optimizer, model, comm.rank, 1)
        optimizer.finalize()
        with (
            patch.object(comm, "dead_ranks", lambda: [3] if comm.rank in knowing else []),
            pytest.raises(RuntimeError, match=r"adopt\(\) is not available after ranks have died"),
        ):
            optimizer.adopt(model)
        comm.allgather_object(None, "after")
        if "quorum" in kind and comm.rank == 0:
            meeting = optimizer.synchronizer.exchanger._meeting
            assert not meeting._agreed().rounds["_out"], "Rounds wait for all ranks again"
        comm.allgather_object(None, "seen")
        optimizer.adopt(model)

    run_ranks(3, job)


@pytest.mark.parametrize("elsewhere", ["finalize", "step", "center", "audit", "save", "broadcast"])
@pytest.mark.parametrize("alone", [{2}, {0}, {0, 1}], ids=str)
@pytest.mark.parametrize("kind", [{"asynchronous": True}, {"quorum": 2, "grace_seconds": 0.0}], ids=str)
def test_ranks_in_another_call_are_an_error_everywhere(kind: dict[str, Any], alone: set[int], elsewhere: str) -> None:
    """They finalize again, or first train on, and wait for nobody in this; then all make the same calls again."""
    called = f"{elsewhere}()" if elsewhere in ("audit", "save", "broadcast") else "finalize()"

    def job(comm: Communicator) -> str:
        model = started()
        optimizer = made(comm, model, "easgd", **kind)
        train(optimizer, model, comm.rank, 1)
        optimizer.finalize()
        with pytest.raises(RuntimeError) as caught:
            if comm.rank not in alone:
                optimizer.adopt({"w": model["w"]})
            call_elsewhere(optimizer, model, elsewhere)
            if elsewhere == "step":
                train(optimizer, model, comm.rank, PERIOD)
            optimizer.finalize()
        optimizer.finalize()
        optimizer.synchronizer.handshake.meet(Purpose.SAVE)
        optimizer.adopt({"w": model["w"]})
        train(optimizer, {"w": model["w"]}, comm.rank, PERIOD)
        optimizer.finalize()
        return str(caught.value)

    calls = [f"{called} of optimizer 1", "adopt() of optimizer 1"]
    calls = "; ".join(calls if called in ("audit()", "finalize()") else calls[::-1])
    text = f"Ranks are in different calls: {calls}. All ranks must make the same calls in the same order"
    assert run_ranks(3, job) == [text] * 3


@pytest.mark.parametrize("kind", [{"asynchronous": True}, {"quorum": 2, "grace_seconds": 0.0}], ids=str)
def test_a_rank_that_constructs_another_optimizer_is_an_error_everywhere(kind: dict[str, Any]) -> None:
    """As in synchronous training; with finalize() on others, too."""

    def job(comm: Communicator) -> tuple[str, str]:
        model, found = started(), []
        optimizer = made(comm, model, "easgd", **kind)
        train(optimizer, model, comm.rank, PERIOD)
        for call in ("broadcast", "finalize"):
            with pytest.raises(RuntimeError) as caught:
                if comm.rank == 1:
                    made(comm, started(), "easgd")
                else:
                    call_elsewhere(optimizer, model, call)
            found.append(str(caught.value))
        return found[0], found[1]

    one = "Ranks wait for each other in different places: broadcast() of optimizer 1 at local step 3 on ranks 0 and 2; "
    other = "Ranks are in different calls: finalize() of optimizer 1; construction of an optimizer. All ranks must make"
    for found in run_ranks(3, job):
        assert found[0].startswith(one), found
        assert found[1].startswith(other), found


@pytest.mark.parametrize("saving", [{2}, {0}, {0, 1}], ids=str)
@pytest.mark.parametrize("kind", [{"asynchronous": True}, {"quorum": 2, "grace_seconds": 0.0}], ids=str)
def test_saves_and_the_end_of_training_are_an_error_everywhere(kind: dict[str, Any], saving: set[int]) -> None:
    """Rank 1 trains on for a while, and is kept waiting by nobody."""

    def job(comm: Communicator) -> str:
        model = started()
        optimizer = made(comm, model, "easgd", **kind)
        train(optimizer, model, comm.rank, PERIOD)
        with pytest.raises(RuntimeError) as caught:
            train(optimizer, model, comm.rank, 2 * PERIOD if comm.rank == 1 else 0)
            call_elsewhere(optimizer, model, "save" if comm.rank in saving else "finalize")
        return str(caught.value)

    calls = "finalize() of optimizer 1; save() of optimizer 1"
    text = f"Ranks are in different calls: {calls}. All ranks must make the same calls in the same order"
    assert run_ranks(3, job) == [text] * 3


@pytest.mark.parametrize("kind", [{"asynchronous": True}, {"quorum": 2}], ids=str)
def test_calls_of_optimizers_of_high_numbers(kind: dict[str, Any]) -> None:
    def job(comm: Communicator) -> str:
        comm.constructed = 2**16 - 1
        model = started()
        optimizer = made(comm, model, "easgd", **kind)
        train(optimizer, model, comm.rank, 1)
        optimizer.finalize()
        with pytest.raises(RuntimeError) as caught:
            optimizer.finalize() if comm.rank else optimizer.adopt({"w": model["w"]})
        optimizer.finalize()
        optimizer.adopt({"w": model["w"]})
        return str(caught.value)

    for text in run_ranks(3, job):
        assert text.startswith(
            "Ranks are in different calls: finalize() of optimizer 65536; adopt() of optimizer 65536"
        )


def test_a_rank_at_its_end_hears_of_ranks_in_different_calls() -> None:
    """It goes on to wait for their ends."""

    def job(comm: Communicator) -> None:
        model = started()
        optimizer = made(comm, model, "easgd", asynchronous=True)
        train(optimizer, model, comm.rank, 1)
        optimizer.finalize()
        if comm.rank < 2:
            with pytest.raises(RuntimeError, match=r"Ranks are in different calls: finalize.* adopt"):
                optimizer.adopt(model) if comm.rank else optimizer.finalize()
        worker = optimizer.synchronizer.exchanger.worker
        for _ in leave(worker.communicator, [worker]):
            time.sleep(1e-3)

    run_ranks(3, job)


def test_groups_in_lockstep_are_refused() -> None:
    def job(comm: Communicator) -> None:
        model = started()
        optimizer = made(Subset(comm, lambda: [comm.rank]), model, "average")
        train(optimizer, model, comm.rank, PERIOD)
        with pytest.raises(
            RuntimeError, match=r"adopt\(\) is not available where ranks exchange in groups of their own"
        ):
            optimizer.adopt(model)

    run_ranks(2, job)


def test_no_option_is_forgotten() -> None:
    """A synchronizer is constructed again with all options, but for those of the replica and those refused."""
    options = inspect.signature(ReplicaSynchronizer).parameters.keys()
    optimizer = made(None, started(), "average")  # type: ignore[arg-type]
    of_replica = {"replica", "outer", "rates", "local_optimizer"}
    assert optimizer.synchronizer.arguments().keys() | of_replica | {"journal"} == options
