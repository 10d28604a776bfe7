"""Disagreement between ranks is an error on every rank that says what differs and where; never a hang."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvd_periodic import Communicator, LocalCommunicator, PostLocal
from hvd_periodic.comm.agreement import agree, audit, build_on_all, raise_on_all
from hvd_periodic.numpy import SGD, AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer, PeriodicOptimizer
from tests.helpers import Array, errors, outcomes, read_center, run_ranks


def easgd(communicator: Communicator, named: Any = None, period: Any = 2, **arguments: Any) -> PeriodicOptimizer:
    """Return an optimizer of elastic averaging; other arguments than the defaults make a rank differ."""
    named = {"w": np.zeros((2, 3)), "b": np.zeros(3)} if named is None else named
    return ElasticAverageOptimizer(SGD(1.0), named, period, process_set=communicator, **arguments)


def average(communicator: Communicator) -> PeriodicOptimizer:
    """Return an optimizer of model averaging over the same parameters."""
    return ModelAverageOptimizer(SGD(1.0), {"w": np.zeros((2, 3)), "b": np.zeros(3)}, 2, process_set=communicator)


def agn(communicator: Communicator, op: str) -> PeriodicOptimizer:
    """Return an optimizer of accumulated gradient normalization over the same parameters."""
    named = {"w": np.zeros((2, 3)), "b": np.zeros(3)}
    return AGNOptimizer(SGD(1.0), named, 2, op=op, process_set=communicator)


DISAGREEMENTS: dict[str, tuple[Callable[[Communicator], object], Callable[[Communicator], object], str]] = {
    "names": (
        easgd,
        lambda c: easgd(c, {"weight": np.zeros((2, 3)), "b": np.zeros(3)}),
        "parameter 0: w float64[2, 3] on ranks 0 and 2; weight float64[2, 3] on rank 1",
    ),
    "order": (
        easgd,
        lambda c: easgd(c, {"b": np.zeros(3), "w": np.zeros((2, 3))}),
        "parameter 0: w float64[2, 3] on ranks 0 and 2; b float64[3] on rank 1",
    ),
    "shapes": (
        easgd,
        lambda c: easgd(c, {"w": np.zeros((2, 3)), "b": np.zeros((3, 1))}),
        "parameter 1: b float64[3] on ranks 0 and 2; b float64[3, 1] on rank 1",
    ),
    "dtype": (
        easgd,
        lambda c: easgd(c, {"w": np.zeros((2, 3)), "b": np.zeros(3, "float32")}),
        "parameter 1: b float64[3] on ranks 0 and 2; b float32[3] on rank 1",
    ),
    "number": (
        easgd,
        lambda c: easgd(c, {"w": np.zeros((2, 3))}),
        "number of parameters: 2 on ranks 0 and 2; 1 on rank 1",
    ),
    "algorithm": (average, easgd, "algorithm: Averaging() on ranks 0 and 2; EASGD("),
    "moving_rate": (
        lambda c: easgd(c, moving_rate=0.1),
        lambda c: easgd(c, moving_rate=0.2),
        "algorithm: EASGD(moving_rate=0.1, beta=None, rho=0.0) on ranks 0 and 2; EASGD(moving_rate=0.2,",
    ),
    "beta": (lambda c: easgd(c, beta=0.1), lambda c: easgd(c, beta=0.2), "algorithm: EASGD("),
    "rho": (easgd, lambda c: easgd(c, rho=0.2), "algorithm: EASGD("),
    "op": (
        lambda c: agn(c, "sum"),
        lambda c: agn(c, "average"),
        "algorithm: AGN(op='sum') on ranks 0 and 2; AGN(op='average') on rank 1",
    ),
    "period": (easgd, lambda c: easgd(c, period=3), "schedule: Every(period=2)"),
    "start of a schedule": (
        lambda c: easgd(c, period=PostLocal(5, 10)),
        lambda c: easgd(c, period=PostLocal(6, 10)),
        "schedule",
    ),
    "period after a long start": (
        lambda c: easgd(c, period=PostLocal(100, 10)),
        lambda c: easgd(c, period=PostLocal(100, 20)),
        "schedule",
    ),
    "root": (easgd, lambda c: easgd(c, root_rank=2), "root rank: 0 on ranks 0 and 2; 2 on rank 1"),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree(what: str) -> None:
    most, other, message = DISAGREEMENTS[what]
    found = errors(3, lambda communicator: (other if communicator.rank == 1 else most)(communicator))
    assert [kind for kind, _ in found] == [ValueError] * 3
    assert len({text for _, text in found}) == 1, "the ranks tell different stories"
    assert "They differ in " + message in found[0][1]
    assert re.search(r"on ranks 0 and 2; .*on rank 1", found[0][1])


BAD_ARGUMENTS: dict[str, tuple[Callable[[Communicator], object], str]] = {
    "rate": (lambda c: easgd(c, moving_rate=-1.0), "moving_rate"),
    "rate for the size": (lambda c: easgd(c, moving_rate=0.9), "moving_rate=0.9"),
    "both rates": (lambda c: easgd(c, moving_rate=0.1, beta=0.1), "beta=0.1"),
    "period": (lambda c: easgd(c, period=0), "`communication_period`"),
    "schedule": (lambda c: easgd(c, period=lambda step: 0), "step 0"),
    "schedule, later": (lambda c: easgd(c, period=lambda clock: 0 if clock.step else 2), "step 2"),
    "no parameters": (lambda c: easgd(c, {}), "`model`"),
    "dtype": (lambda c: easgd(c, {"w": np.zeros(3, int)}), "'w'"),
    "root": (lambda c: easgd(c, root_rank=7), "`root_rank`"),
    "op": (lambda c: agn(c, "max"), "op='max'"),
}


@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize("what", BAD_ARGUMENTS)
def test_a_bad_argument_on_one_rank_only(what: str, bad_rank: int) -> None:
    bad, message = BAD_ARGUMENTS[what]
    found = errors(3, lambda communicator: (bad if communicator.rank == bad_rank else easgd)(communicator))
    for rank, (kind, text) in enumerate(found):
        assert message in text, f"rank {rank} raised {kind.__name__}: {text}"
        if rank == bad_rank:
            assert kind in (ValueError, TypeError)
        else:
            assert kind is RuntimeError
            assert text.startswith(f"Rank {bad_rank} failed (1 of 3 ranks did): ")


def test_construction_succeeds_after_a_refused_one() -> None:
    """One rank corrects its argument and all construct again: names of collectives must agree still."""

    def work(communicator: Communicator) -> list[float]:
        with pytest.raises((ValueError, RuntimeError)):
            easgd(communicator, moving_rate=-1.0 if communicator.rank == 1 else 0.1)
        x = np.zeros(1)
        optimizer = easgd(communicator, {"x": x}, moving_rate=0.1)
        for _ in range(2):
            optimizer.step([-np.ones(1)])
        return x.tolist()

    assert run_ranks(3, work) == [[1.8]] * 3


def test_two_optimizers_of_one_communicator_do_not_meet() -> None:
    def work(communicator: Communicator) -> tuple[float, float]:
        x, y = np.zeros(1), np.zeros(1)
        one = easgd(communicator, {"x": x}, moving_rate=0.25)
        two = ModelAverageOptimizer(SGD(1.0), {"y": y}, 3, process_set=communicator)
        for _ in range(6):
            two.step([np.array([-1.0 - communicator.rank])])
            one.step([np.array([-1.0 - 2 * communicator.rank])])
        return float(x[0]), float(y[0])

    assert run_ranks(2, work) == [(4.96875, 9.0), (11.90625, 9.0)]


def test_sync_at_different_steps() -> None:
    def work(communicator: Communicator) -> None:
        optimizer = easgd(communicator, {"x": np.zeros(1)}, 10)
        for _ in range(3 + communicator.rank):
            optimizer.step([np.ones(1)])
        optimizer.synchronizer.sync()

    for rank, (kind, text) in enumerate(errors(3, work)):
        assert kind is RuntimeError
        assert f"different local steps, from 3 to 5; this rank is at {3 + rank}" in text


def test_sync_on_one_rank_only() -> None:
    """The others come for their own exchange, at step 4, and all learn of it."""

    def work(communicator: Communicator) -> None:
        optimizer = easgd(communicator, {"x": np.zeros(1)}, 4)
        for step in range(1, 9):
            optimizer.step([np.ones(1)])
            if step == 2 and communicator.rank == 1:
                optimizer.synchronizer.sync()

    for kind, text in errors(3, work):
        assert kind is RuntimeError
        assert "different local steps, from 2 to 4" in text
        assert "sync()" in text


def final_centers(
    make: Callable[[Communicator, Array], PeriodicOptimizer], steps: list[int]
) -> list[tuple[float, float, int]]:
    """Return center, replica and rounds of each rank; rank k takes ``steps[k]`` steps of gradient −1 − 2k."""

    def work(communicator: Communicator) -> tuple[float, float, int]:
        x = np.zeros(1)
        optimizer = make(communicator, x)
        for _ in range(steps[communicator.rank]):
            optimizer.step([np.array([-1.0 - 2 * communicator.rank])])
        optimizer.synchronizer.finalize()
        return float(read_center(optimizer, [x])[0][0]), float(x[0]), optimizer.synchronizer.rounds

    return run_ranks(len(steps), work)


def test_finalize_elastic_averaging_after_uneven_numbers_of_steps() -> None:
    """τ = 2, α = .25, η = 1; rank 0 stops after 2 steps, rank 1 after 5.

    Step 2: x = 2, 6, c = 0: x = 1.5, 4.5, c = 2. Rank 0 leaves.
    Step 4 of rank 1: x = 1.5, 10.5; d = −.5, 8.5; x = 1.625, 8.375, c = 4.
    End, one step later: x = 1.625, 11.375; d = −2.375, 7.375; x = 2.21875, 9.53125, c = 5.25.
    """
    found = final_centers(lambda communicator, x: easgd(communicator, {"x": x}, 2, moving_rate=0.25), [2, 5])
    assert found == [(5.25, 2.21875, 3), (5.25, 9.53125, 3)]


def test_finalize_averaging_after_uneven_numbers_of_steps() -> None:
    """τ = 2, η = 1. Step 2: 2, 6: c = 4. Step 4 of rank 1: 4, 10: c = 7. End: 7, 10: c = 8.5."""
    found = final_centers(
        lambda communicator, x: ModelAverageOptimizer(SGD(1.0), {"x": x}, 2, process_set=communicator), [2, 5]
    )
    assert found == [(8.5, 8.5, 3)] * 2


def test_finalize_agn_after_uneven_numbers_of_steps() -> None:
    """τ = 4, η = .1, sum. Rank 0 stops after 5 steps, rank 1 after 8.

    Step 4: a = 1 + 3, c = .4. Step 8 of rank 1: rank 0 has one gradient, its mean is 1; 1 + 3: c = .8. Nothing is left.
    """
    found = final_centers(lambda communicator, x: AGNOptimizer(SGD(0.1), {"x": x}, 4, process_set=communicator), [5, 8])
    for center, replica, rounds in found:
        assert (center, replica, rounds) == (pytest.approx(0.8, abs=1e-12), center, 2)


@pytest.mark.parametrize("steps", [[3, 1, 7], [0, 0, 5], [1, 0, 0], [4, 4, 3]])
@pytest.mark.parametrize("algorithm", ["easgd", "average", "agn"])
def test_all_ranks_leave_with_the_same_center(algorithm: str, steps: list[int]) -> None:
    def make(communicator: Communicator, x: Array) -> PeriodicOptimizer:
        if algorithm == "easgd":
            return ElasticAverageOptimizer(SGD(0.3, 0.5), {"x": x}, 2, rho=0.1, process_set=communicator)
        if algorithm == "average":
            return ModelAverageOptimizer(SGD(0.3, 0.5), {"x": x}, 2, process_set=communicator)
        return AGNOptimizer(SGD(0.3, 0.5), {"x": x}, 2, process_set=communicator)

    found = final_centers(make, steps)
    assert len({center for center, _, _ in found}) == 1
    assert found[0][0] != 0.0
    assert {rounds for _, _, rounds in found} == {-(-max(steps) // 2)}


def test_finalize_does_nothing_without_pending_steps() -> None:
    found = final_centers(lambda communicator, x: easgd(communicator, {"x": x}, 2, moving_rate=0.25), [6, 6])
    assert found == [(7.125, 4.96875, 3), (7.125, 11.90625, 3)]
    assert final_centers(lambda communicator, x: easgd(communicator, {"x": x}, 2), [0, 0]) == [(0, 0, 0)] * 2


def test_finalize_again_does_nothing() -> None:
    def work(communicator: Communicator) -> list[float]:
        x = np.zeros(1)
        optimizer = easgd(communicator, {"x": x}, 2, moving_rate=0.25)
        for _ in range(3):
            optimizer.step([np.array([-1.0 - 2 * communicator.rank])])
        found = []
        for _ in range(2):
            optimizer.synchronizer.finalize()
            found += [*read_center(optimizer, [x])[0], *x]
        return found

    for found in run_ranks(2, work):
        assert found[:2] == found[2:]


def test_training_continues_after_finalize() -> None:
    """Two rounds as one: finalize at step 3 is an exchange like any other, and the period starts anew there."""

    def work(communicator: Communicator) -> tuple[float, int]:
        x = np.zeros(1)
        optimizer = ModelAverageOptimizer(SGD(1.0), {"x": x}, 2, process_set=communicator)
        for step in range(1, 6):
            optimizer.step([np.array([-1.0 - 2 * communicator.rank])])
            if step == 3:
                optimizer.synchronizer.finalize()
        return float(x[0]), optimizer.synchronizer.rounds

    assert run_ranks(2, work) == [(10.0, 3)] * 2


@pytest.mark.parametrize("method", ["step", "sync", "finalize"])
def test_a_parameter_that_changed_on_one_rank_only(method: str) -> None:
    def work(communicator: Communicator) -> None:
        x = np.zeros((2, 3))
        optimizer = easgd(communicator, {"x": x}, 1)
        optimizer.step([np.ones((2, 3))])
        if communicator.rank == 1:
            x.resize((3, 2), refcheck=False)  # in place, like ``x.shape = (3, 2)``
        getattr(optimizer.synchronizer, method)()

    for rank, (kind, text) in enumerate(errors(3, work)):
        assert kind is RuntimeError, text
        assert "Parameter 'x' changed from" in text
        assert "(3, 2)" in text
        assert text.startswith("Rank 1 failed") == (rank != 1)


@pytest.mark.parametrize(("audit_every", "noticed"), [(1, 1), (2, 1), (3, 2), (0, 4)])
@pytest.mark.parametrize("overlap", [0, 1])
def test_centers_are_compared_now_and_then(overlap: int, audit_every: int, noticed: int) -> None:
    """One changes after the first exchange; without audits that is noticed at the end. What fails is not counted."""

    def work(communicator: Communicator) -> None:
        optimizer = easgd(communicator, period=2, overlap=overlap, audit_every=audit_every)
        for step in range(8):
            if step == 3 and communicator.rank == 1:
                optimizer.synchronizer.center_tensors()[1][1] += 1.0
            try:
                optimizer.step([np.ones((2, 3)), np.ones(3)])
            except RuntimeError as error:
                raise RuntimeError(f"{error} after {optimizer.synchronizer.rounds} exchanges") from None
        assert optimizer.synchronizer.rounds == 4
        try:
            optimizer.synchronizer.finalize()
        except RuntimeError as error:
            raise RuntimeError(f"{error} after {optimizer.synchronizer.rounds} exchanges") from None

    for kind, text in errors(3, work):
        assert kind is RuntimeError
        assert "center variables differ between ranks: rank 1 from rank 0, first in 'b'" in text
        assert text.endswith(f"after {noticed} exchanges")


def test_centers_that_are_alike_pass() -> None:
    def work(communicator: Communicator) -> int:
        optimizer = easgd(communicator, period=1, audit_every=2)
        for _ in range(5):
            optimizer.step([np.full((2, 3), float(communicator.rank)), np.ones(3)])
        optimizer.synchronizer.finalize()
        return optimizer.synchronizer.rounds

    assert run_ranks(3, work) == [5] * 3


def test_audits_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match=r"`audit_every` must be an int >= 0\. Received: -1"):
        easgd(LocalCommunicator(), audit_every=-1)
    with pytest.raises(TypeError, match=r"`audit_every` must be an int >= 0\. Received: 0\.5"):
        easgd(LocalCommunicator(), audit_every=0.5)
    with pytest.raises(ValueError, match=r"`audit_every` is for synchronous exchange.* Received: audit_every=2"):
        easgd(LocalCommunicator(), audit_every=2, asynchronous=True)


def test_audit_notices_a_center_that_differs() -> None:
    def work(communicator: Communicator) -> None:
        optimizer = easgd(communicator)
        optimizer.synchronizer.audit()
        center = optimizer.synchronizer.center_tensors()[1]
        if communicator.rank == 2:
            center[1] = np.nextafter(center[1], 1.0)
        optimizer.synchronizer.audit()

    for kind, text in errors(4, work):
        assert kind is RuntimeError
        assert "center variables differ between ranks: rank 2 from rank 0, first in" in text


def test_finalize_audits() -> None:
    """A center that differs on one rank does not go unnoticed."""

    def work(communicator: Communicator) -> None:
        x = np.zeros(1)
        optimizer = easgd(communicator, {"x": x})
        optimizer.step([np.ones(1)])
        if communicator.rank == 0:
            optimizer.synchronizer.center_tensors()[0][:] += 1.0
        optimizer.synchronizer.finalize()

    for kind, text in errors(3, work):
        assert kind is RuntimeError
        assert "ranks 1 and 2 from rank 0" in text


def test_build_on_all() -> None:
    def work(communicator: Communicator) -> int:
        return build_on_all(communicator, "name", lambda: 6 // communicator.rank)

    zero, *others = outcomes(3, work)
    assert isinstance(zero, ZeroDivisionError)
    for error in others:
        assert isinstance(error, RuntimeError)
        assert str(error).startswith("Rank 0 failed (1 of 3 ranks did): ZeroDivisionError: ")
    assert run_ranks(3, lambda c: build_on_all(c, "name", lambda: 6 // (c.rank + 1))) == [6, 3, 2]


def test_raise_on_all() -> None:
    failures = [ValueError("one"), None, TypeError("three")]
    found = errors(3, lambda communicator: raise_on_all(communicator, "name", failures[communicator.rank]))
    assert found[0] == (ValueError, "one")
    assert found[1] == (RuntimeError, "Rank 0 failed (2 of 3 ranks did): ValueError: one")
    assert found[2] == (TypeError, "three")
    assert run_ranks(2, lambda communicator: raise_on_all(communicator, "name", None)) == [None, None]


def test_an_error_without_text_is_an_error() -> None:
    found = errors(2, lambda c: raise_on_all(c, "name", ValueError() if c.rank == 1 else None))
    assert [kind for kind, _ in found] == [RuntimeError, ValueError]


def test_agree() -> None:
    assert run_ranks(3, lambda communicator: agree(communicator, "name", {"one": 1, "two": [2]})) == [None] * 3
    found = errors(3, lambda communicator: agree(communicator, "name", {"one": 1, "two": communicator.rank}))
    assert {text.partition("differ in ")[2] for _, text in found} == {"two: 0 on rank 0; 1 on rank 1; 2 on rank 2"}
    found = errors(2, lambda c: agree(c, "name", {"one": 1} if c.rank else {"one": 1, "more": "x"}))
    assert {text.partition("differ in ")[2] for _, text in found} == {"more: x on rank 0; nothing on rank 1"}
    found = errors(2, lambda c: agree(c, "name", {"a": 1, "b": 2} if c.rank else {"b": 2, "a": 1}))
    assert all(kind is ValueError and "a different order" in text for kind, text in found)


def test_audit() -> None:
    def check(communicator: Communicator, *vectors: bytes) -> None:
        audit(communicator, "name", lambda: zip(("a", "b"), vectors, strict=False))

    assert run_ranks(3, lambda communicator: check(communicator, b"one", b"two")) == [None] * 3
    found = errors(3, lambda communicator: check(communicator, b"one", bytes([communicator.rank // 2])))
    assert {kind for kind, _ in found} == {RuntimeError}
    assert all("rank 2 from rank 0, first in 'b'" in text for _, text in found)
    found = errors(2, lambda communicator: check(communicator, *[b"one", b"two"][communicator.rank :]))
    assert all("rank 1 from rank 0, first in 'a'" in text for _, text in found)
