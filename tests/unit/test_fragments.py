"""The parameters in fragments that are exchanged one after another, on threads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvd_periodic import AGN, EASGD, Averaging, Clock, Compression, Doubling, Every, Piecewise, PostLocal, Schedule
from hvd_periodic.comm.base import Communicator
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from hvd_periodic.schedules.conversion import as_schedule
from hvd_periodic.sync.fragment_plan import FragmentSchedule
from hvd_periodic.sync.planner import forecast
from hvd_periodic.vectors.fragments import cut_into_fragments
from hvd_periodic.vectors.layout import Layout, TensorSpec
from tests import oracle
from tests.covering import covering
from tests.helpers import errors, readable, run_ranks
from tests.overlap_oracle import expected
from tests.parallel.tiers import thorough
from tests.unit.test_overlap import ALGORITHMS, late

PERIOD = 5


def arrays() -> dict[str, Any]:
    return {f"x{k}": np.array([value]) for k, value in enumerate(oracle.START)}


def train(
    communicator: Communicator,
    name: str,
    schedule: Any = PERIOD,
    steps: int = oracle.STEPS,
    look: bool = False,
    elements: Sequence[int] = (0, 1, 2),
    **options: Any,
) -> list[Any]:
    """Return x after every step, and x and c at the end, of one array per element, all or these."""
    x = {key: value for key, value in arrays().items() if int(key[1:]) in elements}
    optimizer = PeriodicOptimizer(
        SGD(oracle.RATE, oracle.MOMENTUM),
        x,
        ALGORITHMS[name](),
        schedule,
        process_set=late(communicator) if options.get("overlap") else communicator,
        **options,
    )
    seen = []

    def note() -> None:
        seen.append([value.item() for value in x.values()])

    for _ in range(steps):
        now = [x[key].item() if key in x else start.item() for key, start in arrays().items()]
        optimizer.step([np.array([oracle.gradient(communicator.rank, now)[element]]) for element in elements])
        if look:
            with optimizer.center():
                pass
            optimizer.synchronizer.distance()
        note()
    optimizer.synchronizer.finalize()
    note()
    with optimizer.center():
        note()
    return seen


@functools.cache
def trained(size: int, name: str, **options: Any) -> list[list[Any]]:
    """Return what :func:`train` returns on so many ranks."""
    return run_ranks(size, lambda communicator: train(communicator, name, **options))


@dataclass(frozen=True)
class Phase:
    """Exchanges take place with a period, the first one earlier."""

    first: int

    def __call__(self, clock: Clock) -> int:
        return PERIOD if clock.round else self.first


@pytest.mark.parametrize(("name", "size"), covering(ALGORITHMS, (2, 3), together=1, always=[("average", 2)]))
def test_each_fragment_goes_where_all_go_that_begin_with_it(name: str, size: int) -> None:
    """Elements do not depend on each other here, so that a fragment has the trajectory of its own phase, to the bit."""
    compare_phases(name, size)


def test_of_one_rank_as_well() -> None:
    for name in ("easgd_rho", "diloco"):
        compare_phases(name, size=1)


def compare_phases(name: str, size: int) -> None:
    for fragments in (2, 3):
        found = trained(size, name, fragments=fragments)
        for element in range(3):
            alone = trained(size, name, schedule=Phase(steps_of(fragment_of(element, fragments), fragments)[0]))
            for rank in range(size):
                assert [x[element] for x in found[rank]] == [x[element] for x in alone[rank]], (fragments, element)


def fragment_of(element: int, fragments: int) -> int:
    """Three elements: the first is the first of two fragments."""
    return element if fragments == 3 else int(element > 0)


def steps_of(fragment: int, fragments: int) -> list[int]:
    """Return the steps at which a fragment is exchanged."""
    return list(range(-(-(fragment + 1) * PERIOD // fragments), oracle.STEPS + 1, PERIOD))


@pytest.mark.parametrize(("name", "overlap", "fragments"), covering(ALGORITHMS, (1, 2, "period"), (2, 3), together=1))
def test_fragments_that_travel_during_local_steps(name: str, overlap: int | str, fragments: int) -> None:
    """What is under way is taken when the next fragment is exchanged, at the latest; elastic averaging goes as ever."""
    landing = [step for fragment in range(fragments) for step in steps_of(fragment, fragments)]
    found = trained(2, name, fragments=fragments, overlap=overlap)
    assert found[0][-1] == found[1][-1]
    if name.startswith("easgd"):
        assert found == trained(2, name, fragments=fragments)
        return
    for element in range(3):
        own = steps_of(fragment_of(element, fragments), fragments)
        for step, of_workers in enumerate(expected(name, 2, overlap, own, landing)):
            for worker, x in enumerate(of_workers):
                assert found[worker][step][element] == pytest.approx(x[element], rel=1e-9, abs=1e-9), (element, step)


@pytest.mark.parametrize(
    ("overlap", "name", "last"),
    [
        *((0, "easgd_rho", 6), (1, "average", 6), (0, "agn", 6), (1, "diloco", 6), (0, "slowmo", 6), (1, "bmuf", 6)),
        *(thorough(1, name, 10) for name in ("easgd_rho", "agn", "slowmo")),
        *(thorough(0, name, 10) for name in ("average", "diloco", "bmuf")),
    ],
)
def test_resume_in_the_middle_of_a_period(name: str, overlap: int, last: int) -> None:
    """At every step of more than a period, in new objects: the same to the bit."""

    def run(communicator: Communicator) -> None:
        rank = communicator.rank

        def make(x: dict[str, Any]) -> PeriodicOptimizer:
            options: Any = {"fragments": 3, "overlap": overlap, "process_set": communicator}
            return PeriodicOptimizer(SGD(oracle.RATE), x, ALGORITHMS[name](), PERIOD, **options)

        def step(optimizer: PeriodicOptimizer, x: dict[str, Any]) -> None:
            optimizer.step([np.array([g]) for g in oracle.gradient(rank, [value.item() for value in x.values()])])

        def end(optimizer: PeriodicOptimizer, x: dict[str, Any]) -> list[dict[str, bytes]]:
            optimizer.synchronizer.finalize()
            ended = bits(x)
            with optimizer.center():
                return [ended, bits(x)]

        def bits(x: dict[str, Any]) -> dict[str, bytes]:
            return {key: value.tobytes() for key, value in x.items()}

        x, saved, trajectory = arrays(), {}, {}
        optimizer = make(x)
        for number in range(1, last + PERIOD + 3):
            step(optimizer, x)
            trajectory[number] = bits(x)
            if number <= last:
                saved[number] = optimizer.synchronizer.state_dict(), {key: value.copy() for key, value in x.items()}
        ended = end(optimizer, x)
        for saved_at, (state, kept) in saved.items():
            y = {key: np.zeros(1) for key in x}
            again = make(y)
            again.synchronizer.load_state_dict(state)
            for key, value in kept.items():
                y[key][...] = value
            for number in range(saved_at + 1, last + PERIOD + 3):
                step(again, y)
                assert bits(y) == trajectory[number], saved_at
            assert end(again, y) == ended, saved_at

    run_ranks(2, run)


@pytest.mark.parametrize(("name", "center"), covering(ALGORITHMS, ("root", "sharded"), together=1))
def test_places_of_the_center(name: str, center: str) -> None:
    replicated = trained(3, name, fragments=2)
    found = trained(3, name, fragments=2, center=center)
    for rank in range(3):
        assert np.ravel(found[rank]) == pytest.approx(np.ravel(replicated[rank]), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "wire", "overlap"),
    covering(
        ("easgd", "average", "agn", "diloco"),
        (Compression.int8, Compression.topk(0.5), Compression.bf16),
        (0, 1),
        together=1,
    ),
    ids=readable,
)
def test_compressed_fragments(name: str, wire: Any, overlap: int) -> None:
    """As messages of one element each, of a training whose phase is that of the fragment."""
    options: dict[str, Any] = {"compression": wire, "overlap": overlap}
    found = trained(2, name, fragments=3, **options)
    for element in range(3):
        alone = trained(2, name, schedule=Phase(steps_of(element, 3)[0]), elements=(element,), **options)
        for rank in range(2):
            assert [x[element] for x in found[rank]] == [x for (x,) in alone[rank]], element
    assert found[0][-1] == found[1][-1]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_with_other_numbers_of_steps(name: str) -> None:
    """Rank r has 4 + 3 r: all end together, with one center; elastic averaging conserves the sum of all."""

    def run(communicator: Communicator) -> tuple[list[float], list[float], int]:
        x = {"a": np.array([1.0]), "b": np.array([2.0])}
        options: Any = {"fragments": 2, "process_set": communicator}
        optimizer = PeriodicOptimizer(SGD(1.0), x, ALGORITHMS[name](), PERIOD, **options)
        for step in range(4 + 3 * communicator.rank):
            optimizer.step([np.full(1, -1.0 * communicator.rank * (step == 0))] * 2)
        optimizer.synchronizer.finalize()
        replica = [value.item() for value in x.values()]
        with optimizer.center():
            return replica, [value.item() for value in x.values()], optimizer.synchronizer.rounds

    found = run_ranks(3, run)
    assert all(report[1:] == found[0][1:] for report in found)
    assert found[0][2] == 5, "at 3, 5, 8 and 10, and the first fragment at the end"
    if name == "easgd":
        total = np.sum([replica for replica, _, _ in found], axis=0) + found[0][1]
        assert total == pytest.approx([4.0 + (0 + 1 + 2), 8.0 + (0 + 1 + 2)])


@pytest.mark.parametrize(("name", "overlap"), covering(ALGORITHMS, (0, 1), together=1))
def test_looking_changes_nothing(name: str, overlap: int) -> None:
    options: dict[str, Any] = {"overlap": overlap} if overlap else {}
    assert trained(2, name, fragments=3, look=True, **options) == trained(2, name, fragments=3, **options)


def test_traffic_is_spread() -> None:
    """A quarter of the bytes at every exchange, and the meeting's."""

    def run(communicator: Communicator, fragments: int) -> list[int]:
        x, seen = {f"x{i}": np.zeros(1000) for i in range(4)}, [0]
        options: Any = {"fragments": fragments, "process_set": communicator}
        optimizer = PeriodicOptimizer(SGD(0.1), x, Averaging(), 8, **options)
        for _ in range(8):
            optimizer.step([np.ones(1000)] * 4)
            seen.append(optimizer.synchronizer.counters.bytes_sent)
        return np.diff(seen).tolist()  # type: ignore[no-any-return]

    whole, parts = (run_ranks(2, lambda communicator, f=f: run(communicator, f))[0] for f in (1, 4))  # type: ignore[misc]
    assert [step for step, sent in enumerate(whole, 1) if sent] == [8]
    assert [step for step, sent in enumerate(parts, 1) if sent] == [2, 4, 6, 8]
    assert {sent - (whole[7] - 4 * 8000) for sent in parts if sent} == {8000}


@pytest.mark.parametrize(
    "schedule",
    [
        Every(7),
        Piecewise({0: 3, 9: 6}),
        Doubling(3, 2, 20),
        PostLocal(4, 5, quiet=True),
        as_schedule(lambda clock: 3 + clock.round, ""),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_the_last_fragment_is_exchanged_when_the_schedule_says(schedule: Schedule) -> None:
    whole, parts = forecast(schedule, 4), forecast(FragmentSchedule(schedule, 3), 12)
    assert parts[2::3] == whole
    starts = [schedule.synchronous_until or 0, *whole]
    for i, (begin, end) in enumerate(itertools.pairwise(starts)):
        assert parts[3 * i : 3 * i + 3] == [begin + -(-f * (end - begin) // 3) for f in (1, 2, 3)]


def test_schedules_of_the_learning_rate_and_the_loss_are_asked_once_in_a_period() -> None:
    asked = []

    @dataclass(frozen=True)
    class Asking(Schedule):
        remembers: ClassVar[tuple[str, ...]] = ("last",)

        def __call__(self, clock: Clock) -> int:
            asked.append((clock.step, clock.round, clock.period, clock.loss, dict(clock.memory)))
            return 4

        def remember(self, clock: Clock) -> dict[str, float]:
            return {"last": float(clock.step)}

    schedule, clock = FragmentSchedule(Asking(), 2), Clock()
    for _ in range(5):
        steps, memory = schedule(clock), schedule.remember(clock)
        assert set(memory) <= set(schedule.remembers)
        clock = Clock(clock.step + steps, clock.round + 1, loss=clock.step + 1.0, period=steps, memory=memory)
    assert list(dict.fromkeys(map(str, asked))) == [
        str(times) for times in [(0, 0, 0, None, {}), (4, 1, 4, 3.0, {"last": 0.0}), (8, 2, 4, 7.0, {"last": 4.0})]
    ]


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    kinds=st.lists(st.sampled_from(["float32", "float64"]), min_size=8, max_size=8),
    count=st.integers(1, 6),
    bucket_bytes=st.integers(8, 400),
)
def test_fragments_cut_the_layout(sizes: list[int], kinds: list[str], count: int, bucket_bytes: int) -> None:
    """Every bucket is in one of them, in order; and no fragment is much too large where tensors allow it."""
    kinds = sorted(kinds)
    specs = [TensorSpec(f"t{i}", (n,), kinds[i], int(kinds[i][-2:]) // 8) for i, n in enumerate(sizes)]
    assume(any(sizes))
    layout = Layout(specs, bucket_bytes)
    places = {(bucket.kind, bucket.start) for bucket in layout.buckets}
    places |= {layout.span(i)[:2] for i, size in enumerate(sizes) if size}
    if len(places) < count:
        with pytest.raises(ValueError, match=f"`fragments` must be at most {len(places)}, "):
            cut_into_fragments(layout, count)
        return
    cut, fragments = cut_into_fragments(layout, count)
    assert len(fragments) == count
    assert [fragment.index for fragment in fragments] == list(range(count))
    assert all(fragment.buckets for fragment in fragments)
    assert tuple(bucket for fragment in fragments for bucket in fragment.buckets) == cut.buckets
    assert cut.specs == layout.specs
    assert cut.arenas == layout.arenas
    for kind, size in layout.arenas.items():
        ends = [0, *(bucket.stop for bucket in cut.buckets if bucket.kind == kind)]
        assert [bucket.start for bucket in cut.buckets if bucket.kind == kind] == ends[:-1]
        assert ends[-1] == size
    assert all(bucket.nbytes <= max(bucket_bytes, bucket.itemsize) for bucket in cut.buckets)
    largest = max(sum(bucket.nbytes for bucket in fragment.buckets) for fragment in fragments)
    total = sum(bucket.nbytes for bucket in cut.buckets)
    step = max([bucket.nbytes for bucket in layout.buckets])
    assert largest <= 1.5 * (total / count + 2 * step)


def test_one_tensor_that_dominates_is_cut_between_buckets() -> None:
    layout = Layout([TensorSpec("embedding", (1000,), "f4", 4), TensorSpec("bias", (10,), "f4", 4)], 400)
    _, fragments = cut_into_fragments(layout, 5)
    assert [sum(bucket.size for bucket in fragment.buckets) for fragment in fragments] == [200, 200, 200, 200, 210]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"fragments": 0}, ValueError, "`fragments` must be an int >= 1. Received: 0"),
        ({"fragments": 1.5}, TypeError, "`fragments` must be an int"),
        ({"fragments": True}, TypeError, "`fragments` must be an int"),
        ({"fragments": 4}, ValueError, "`fragments` must be at most 3, the number of tensors and buckets"),
        ({"fragments": 3, "period": 2}, ValueError, "`fragments` must be at most the local steps of a period"),
        ({"fragments": 2, "asynchronous": True}, ValueError, "`fragments` is for synchronous exchange"),
    ],
    ids=readable,
)
def test_refusals(options: dict[str, Any], error: type[Exception], text: str) -> None:
    def make(communicator: Communicator) -> None:
        given: Any = {"period": PERIOD} | options
        PeriodicOptimizer(SGD(0.1), arrays(), EASGD(0.25), given.pop("period"), process_set=communicator, **given)

    for kind, found in errors(2, make):
        assert issubclass(kind, error)
        assert text in found


def test_ranks_have_to_agree() -> None:
    def make(communicator: Communicator) -> None:
        train(communicator, "average", fragments=2 + communicator.rank)

    for _, found in errors(2, make):
        assert "fragments=2) on rank 0; " in found


def test_a_state_has_its_number_of_fragments() -> None:
    def run(communicator: Communicator) -> list[str]:
        def make(fragments: int) -> PeriodicOptimizer:
            options: Any = {"fragments": fragments, "process_set": communicator}
            return PeriodicOptimizer(SGD(0.1), arrays(), AGN(), PERIOD, **options)

        optimizer, found = make(3), []
        for _ in range(2):
            optimizer.step([np.ones(1)] * 3)
        for other in (2, 1):
            with pytest.raises(ValueError, match="fragments") as caught:
                make(other).synchronizer.load_state_dict(optimizer.synchronizer.state_dict())
            found.append(str(caught.value))
        return found

    for first, second in run_ranks(2, run):
        assert "saved with fragments=3, and this optimizer has fragments=2: load it with the same number" in first
        assert "and this optimizer has fragments=1" in second


def test_an_exchange_that_was_not_planned_carries_all_fragments() -> None:
    """And a period begins with it: after sync() at step 4 of 6, and finalize() at 13; training goes on after it."""
    asked = []

    def growing(clock: Clock) -> int:
        asked.append((clock.step, clock.round))
        return 6 + clock.round

    def run(communicator: Communicator, overlap: int) -> list[Any]:
        x, seen = arrays(), []
        options: Any = {"fragments": 3, "process_set": communicator, "overlap": overlap}
        optimizer = PeriodicOptimizer(SGD(0.1), x, Averaging(), growing, **options)
        for step in range(1, 25):
            optimizer.step([value - communicator.rank for value in x.values()])
            if step == 4:
                optimizer.synchronizer.sync()
                if overlap == 0:
                    assert optimizer.synchronizer.distance() == 0.0
            if step == 13:
                optimizer.synchronizer.finalize()
                assert optimizer.synchronizer.distance() == 0.0
            if optimizer.synchronizer.counters.last_exchange == step:
                seen.append(step)
        optimizer.synchronizer.finalize()
        with optimizer.center():
            return [seen, [value.item() for value in x.values()]]

    for overlap in (0, 1):
        found = run_ranks(2, lambda communicator, d=overlap: run(communicator, d))  # type: ignore[misc]
        assert found[0] == found[1]
        assert found[0][0] == [2, 4, 7, 9, 11, 13, 16, 19, 22]
    assert {(0, 0), (4, 1), (11, 2), (13, 3), (22, 4)} <= set(asked)


def test_nothing_is_exchanged_before_a_synchronous_beginning_ends() -> None:
    """Whatever was called in it; the first fragment then has its whole part of the period."""

    def run(communicator: Communicator) -> list[int]:
        x, seen = arrays(), []
        options: Any = {"fragments": 2, "process_set": communicator}
        optimizer = PeriodicOptimizer(SGD(0.1), x, AGN(), PostLocal(10, 4, quiet=True), **options)
        for step in range(1, 19):
            optimizer.step([value - 1.0 for value in x.values()])
            if step == 3:
                optimizer.synchronizer.sync()
            if step == 9:
                optimizer.synchronizer.finalize()
            if optimizer.synchronizer.counters.last_exchange == step:
                seen.append(step)
        return seen

    assert run_ranks(2, run) == [[3, 9, 12, 14, 16, 18]] * 2


def test_a_tensor_that_is_cut_needs_an_elementwise_outer_optimizer() -> None:
    class Normalized(SGD):
        def step(self, parameters: Any, gradients: Any) -> None:
            super().step(parameters, [gradient / np.linalg.norm(gradient) for gradient in gradients])

    def make(communicator: Communicator, fragments: int) -> None:
        x = {"embedding": np.zeros(2**22), "a": np.zeros(2), "b": np.zeros(2)}
        given: Any = {"process_set": communicator, "outer_optimizer": Normalized(0.1), "fragments": fragments}
        PeriodicOptimizer(SGD(0.1), x, AGN(), 5, **given)

    for kind, found in errors(2, lambda communicator: make(communicator, 2)):
        assert issubclass(kind, ValueError)
        assert "`fragments` cuts tensors, but Normalized gives other results on parts than on the whole" in found
        assert "use fewer fragments, or another `outer_optimizer`" in found


def test_losses_of_a_period_are_reported_together() -> None:
    losses = []

    def noting(clock: Clock) -> int:
        losses.append(clock.loss)
        return 4

    def run(communicator: Communicator) -> None:
        x = arrays()
        optimizer = PeriodicOptimizer(SGD(0.1), x, Averaging(), noting, process_set=communicator, fragments=2)
        for step in range(8):
            optimizer.synchronizer.report(float(step))
            optimizer.step([np.ones(1)] * 3)

    run_ranks(1, run)
    assert {loss for loss in losses if loss is not None} == {1.5, 5.5}


def test_an_outer_optimizer_that_brings_a_state_is_cut_with_the_center() -> None:
    """One optimizer with velocities, whole and in fragments: the first step of the center is the same."""

    def run(communicator: Communicator, options: dict[str, Any]) -> list[float]:
        x, moving = arrays(), SGD(0.1, 0.5)
        moving.step([np.zeros(1) for _ in x], [np.array([1.0]), np.array([2.0]), np.array([3.0])])
        given: Any = options | {"process_set": communicator, "outer_optimizer": moving}
        optimizer = PeriodicOptimizer(SGD(0.0), x, AGN(), 30, **given)
        for _ in range(2):
            optimizer.step([np.ones(1)] * 3)
        optimizer.synchronizer.sync()
        with optimizer.center():
            return [value.item() for value in x.values()]

    expected = [start - 0.1 * (2.0 + 0.5 * velocity) for start, velocity in zip(oracle.START, (1, 2, 3), strict=True)]
    for options in ({}, {"fragments": 2}, {"fragments": 3}):
        for found in run_ranks(2, lambda communicator, o=options: run(communicator, o)):  # type: ignore[misc]
            assert found == pytest.approx(expected), options
