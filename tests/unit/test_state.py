"""State: saving and restoring in mid-period, restoring from the root, and what the center block holds."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from hvd_periodic import AGN, EASGD, Algorithm, Averaging, Communicator, Every, LocalCommunicator, PostLocal, Schedule
from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.covering import covering
from tests.helpers import Array, NumpyTrainer, errors, random_arrays, run_ranks

ALGORITHMS = [EASGD(), EASGD(0.2), EASGD(0.2, rho=0.3), EASGD(beta=0.5), Averaging(), AGN(), AGN("average")]

N = 3


def gradients(trainer: NumpyTrainer, rank: int, step: int) -> list[Array]:
    """Return gradients that depend on the rank, on the step and on x."""
    return [np.asarray(0.3 * (x - rank - 0.1 * step)) for x in trainer.arrays]


def new_trainer(communicator: Communicator, algorithm: Algorithm, schedule: Schedule, seed: int = 0) -> NumpyTrainer:
    """Return a trainer with momentum, locally and on the center."""
    return NumpyTrainer(
        communicator,
        random_arrays(seed) + random_arrays(seed + 1, "float32"),
        algorithm,
        schedule,
        optimizer=SGD(0.5, 0.5),
        outer_optimizer=SGD(0.25, 0.5),
    )


def result(trainer: NumpyTrainer) -> list[bytes]:
    """Return replica and center to the bit."""
    return [array.tobytes() for array in (*trainer.arrays, *trainer.center())]


@pytest.mark.parametrize(
    ("algorithm", "schedule"), covering(ALGORITHMS, (Every(3), PostLocal(2, 3)), together=1), ids=str
)
def test_a_restored_state_continues_bit_for_bit(algorithm: Algorithm, schedule: Schedule) -> None:
    """Save in mid-period, restore into trainers that have been elsewhere, and continue over two more exchanges."""
    saved_at, until = 4, 10

    def uninterrupted(communicator: Communicator) -> tuple[list[list[bytes]], bytes]:
        trainer, trajectory, checkpoint = new_trainer(communicator, algorithm, schedule), [], b""
        for step in range(1, until + 1):
            trainer.step(gradients(trainer, communicator.rank, step))
            if step == saved_at:
                local = (trainer.arrays, vars(trainer.optimizer), trainer.synchronizer.state_dict())
                checkpoint = pickle.dumps(local)
            if step > saved_at:
                trajectory.append(result(trainer))
        return trajectory, checkpoint

    expected = run_ranks(N, uninterrupted)

    def resumed(communicator: Communicator) -> list[list[bytes]]:
        trainer = new_trainer(communicator, algorithm, schedule, seed=7)
        for step in range(5):
            trainer.step(gradients(trainer, communicator.rank, step))
        arrays, local_optimizer, state = pickle.loads(expected[communicator.rank][1])
        for array, saved in zip(trainer.arrays, arrays, strict=True):
            array[...] = saved
        vars(trainer.optimizer).update(local_optimizer)
        trainer.synchronizer.load_state_dict(state)
        assert trainer.synchronizer.local_steps == saved_at
        trajectory = []
        for step in range(saved_at + 1, until + 1):
            trainer.step(gradients(trainer, communicator.rank, step))
            trajectory.append(result(trainer))
        return trajectory

    assert run_ranks(N, resumed) == [trajectory for trajectory, _ in expected]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_a_state_holds_copies_of_plain_things(algorithm: Algorithm) -> None:
    def work(communicator: Communicator) -> None:
        trainer = new_trainer(communicator, algorithm, Every(2))
        for step in range(3):
            trainer.step(gradients(trainer, communicator.rank, step))
        state = trainer.synchronizer.state_dict()
        assert_plain(state)
        before = pickle.dumps(state)
        for step in range(3):
            trainer.step(gradients(trainer, communicator.rank, step))
        assert pickle.dumps(state) == before, "training changes a saved state"
        trainer.synchronizer.load_state_dict(state)
        for step in range(3):
            trainer.step(gradients(trainer, communicator.rank, step))
        assert pickle.dumps(state) == before, "training changes the state that was loaded"

    run_ranks(2, work)


def assert_plain(value: Any) -> None:
    """Fail unless ``value`` is made of arrays, dicts, lists, strings and numbers."""
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        for item in value.values():
            assert_plain(item)
    elif isinstance(value, list):
        for item in value:
            assert_plain(item)
    else:
        assert value is None or isinstance(value, (np.ndarray, str, int, float)), type(value)


def test_counters_are_part_of_the_state() -> None:
    trainer = local_trainer(Averaging(), (2,))
    trainer.step([np.zeros(2)])
    trainer.synchronizer.step(updated=False)
    trainer.step([np.zeros(2)])
    counters = copy.copy(trainer.synchronizer.counters)
    other = local_trainer(Averaging(), (2,))
    other.synchronizer.load_state_dict(trainer.synchronizer.state_dict())
    assert other.synchronizer.counters == counters
    assert (counters.local_steps, counters.rounds, counters.skipped_updates) == (3, 1, 1)
    assert counters.bytes_sent == 2 * 8 + 17 * 8, "two float64 and the seventeen integers of the meeting"
    assert counters.exchange_seconds > 0


def local_trainer(algorithm: Algorithm, *shapes: tuple[int, ...]) -> NumpyTrainer:
    """Return a trainer of one rank with parameters p0, p1, ... of the given shapes, which exchanges every 2 steps."""
    return NumpyTrainer(LocalCommunicator(), [np.zeros(shape) for shape in shapes], algorithm, Every(2))


@pytest.mark.parametrize("saved", ALGORITHMS, ids=str)
@pytest.mark.parametrize("loaded", [EASGD(0.2), Averaging(), AGN()], ids=str)
def test_a_state_of_another_algorithm_is_refused(saved: Algorithm, loaded: Algorithm) -> None:
    state = local_trainer(saved, (2,)).synchronizer.state_dict()
    target = local_trainer(loaded, (2,)).synchronizer
    if type(saved) is type(loaded):
        target.load_state_dict(state)
        return
    with pytest.raises(
        ValueError, match=f"saved by {type(saved).__name__}, this optimizer runs {type(loaded).__name__}"
    ):
        target.load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"version": 0}, {"version": 99}, {"version": None}, None, [1], "state"], ids=str)
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match=r"Not a synchronizer state of version 1\. Received: "):
        local_trainer(Averaging(), (2,)).synchronizer.load_state_dict(state)


def test_a_state_of_another_model_is_refused() -> None:
    state = local_trainer(Averaging(), (2,), (3,)).synchronizer.state_dict()
    with pytest.raises(
        ValueError, match=r"'center' of the parameters .*'p1' is of shape \(3,\) there and of shape \(3, 1\) here"
    ):
        local_trainer(Averaging(), (2,), (3, 1)).synchronizer.load_state_dict(state)
    renamed = copy.deepcopy(state)
    vectors = renamed["vectors"]["parameters"]["center"]
    vectors["q1"] = vectors.pop("p1")
    with pytest.raises(ValueError, match=r"'p1' is missing there and of shape \(3,\) here"):
        local_trainer(Averaging(), (2,), (3,)).synchronizer.load_state_dict(renamed)
    vectors["p1"] = vectors["q1"]
    with pytest.raises(ValueError, match=r"'q1' is of shape \(3,\) there and missing here"):
        local_trainer(Averaging(), (2,), (3,)).synchronizer.load_state_dict(renamed)


def test_a_state_without_the_vector_that_rho_needs_is_refused() -> None:
    state = local_trainer(EASGD(0.2), (2,), (3,)).synchronizer.state_dict()
    with pytest.raises(ValueError, match=r"'local_center' of the parameters"):
        local_trainer(EASGD(0.2, rho=0.1), (2,), (3,)).synchronizer.load_state_dict(state)


def test_a_refused_state_changes_nothing() -> None:
    target = local_trainer(AGN(), (2,), (3,))
    for _ in range(3):
        target.step([np.ones(2), np.ones(3)])
    before = pickle.dumps(target.synchronizer.state_dict())
    state = local_trainer(AGN(), (2,), (3,)).synchronizer.state_dict()
    del state["vectors"]["parameters"]["gradient"]["p1"]
    with pytest.raises(ValueError, match="'gradient' of the parameters"):
        target.synchronizer.load_state_dict(state)
    assert pickle.dumps(target.synchronizer.state_dict()) == before


@pytest.mark.parametrize(("algorithm", "root"), covering(ALGORITHMS, (2, 0), together=1), ids=str)
def test_broadcast_restores_the_others_from_the_root(algorithm: Algorithm, root: int) -> None:
    """A checkpoint was loaded on the root only: after broadcast() all ranks are where the root is."""

    def work(communicator: Communicator) -> tuple[list[bytes], bytes]:
        trainer = new_trainer(communicator, algorithm, PostLocal(2, 3))
        trainer.synchronizer.membership.root = root
        other = new_trainer(communicator, algorithm, PostLocal(2, 3), seed=5)
        for step in range(1, 5):
            other.step(gradients(other, communicator.rank, step))
        if communicator.rank == root:
            for array, saved in zip(trainer.arrays, other.arrays, strict=True):
                array[...] = saved
            trainer.synchronizer.load_state_dict(other.synchronizer.state_dict())
        trainer.synchronizer.broadcast()
        assert trainer.synchronizer.local_steps == 4
        assert trainer.synchronizer.rounds == 2
        at_root = communicator.allgather_object(result(other), "expected")[root]
        state = trainer.synchronizer.state_dict()
        exchanged = []
        for step in range(5, 9):
            exchanged.append(trainer.step(gradients(trainer, communicator.rank, step)))
            trainer.synchronizer.audit()
        assert exchanged == [True, False, False, True], "the schedule's position is that of the root"
        assert at_root == communicator.allgather_object(at_root, "own")[communicator.rank]
        return state_bytes(state), pickle.dumps(at_root)

    def state_bytes(state: dict[str, Any]) -> list[bytes]:
        state["counters"].pop("exchange_seconds")
        return [pickle.dumps(state[key]) for key in ("counters", "center_optimizer", "vectors")]

    results = run_ranks(N, work)
    assert all(found == results[0] for found in results)


def test_broadcast_gives_the_values_of_the_root() -> None:
    def work(communicator: Communicator) -> list[list[float]]:
        x = np.zeros(2)
        trainer = NumpyTrainer(communicator, [x], EASGD(0.25), Every(2), optimizer=SGD(1.0), bucket_bytes=8)
        for _ in range(3):
            trainer.step([np.array([-1.0, -2.0]) * (1 + 2 * communicator.rank)])
        trainer.synchronizer.broadcast()
        return [x.tolist(), trainer.center()[0].tolist()]

    # τ = 2, α = .25: as in the table of two workers; rank 0 is at (2.5, 5) and the center at (2, 4).
    assert run_ranks(2, work) == [[[2.5, 5.0], [2.0, 4.0]]] * 2


def forgotten(outer: dict[str, Any]) -> None:
    del outer["velocities"]


def one_short(outer: dict[str, Any]) -> None:
    outer["velocities"].pop()


def reshaped(outer: dict[str, Any]) -> None:
    outer["velocities"][0] = np.zeros(17)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (forgotten, "does not fit SGD: it has no 'velocities'"),
        (one_short, "does not fit SGD: 'velocities' has arrays of shapes"),
        (reshaped, r"does not fit SGD: 'velocities' has arrays of shapes \[\(17,\)"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"center": "sharded"}, {"center": "root"}, {"fragments": 2}], ids=str)
def test_a_damaged_state_of_an_outer_optimizer_is_refused(damage: Any, message: str, options: dict[str, Any]) -> None:
    """Before anything is loaded; the undamaged state is accepted, from before an exchange and from after it."""

    def work(communicator: Communicator) -> None:
        arrays = {"a": np.zeros(6), "b": np.zeros(6)}
        optimizer = PeriodicOptimizer(
            SGD(0.5), arrays, AGN(), 2, outer_optimizer=SGD(0.25, 0.5), process_set=communicator, **options
        )
        synchronizer = optimizer.synchronizer
        for _ in range(3):
            synchronizer.load_state_dict(synchronizer.state_dict())
            optimizer.step([np.full(6, communicator.rank + 1.0) for _ in arrays])
        state = synchronizer.state_dict()
        damaged = copy.deepcopy(state)
        outer = damaged["center_optimizer"]
        for key in ("sharded", "fragments"):
            if key in outer:
                outer = outer[key][communicator.rank]
        damage(outer)
        if options.get("center") == "root" and communicator.rank > 0:
            synchronizer.load_state_dict(damaged)  # The root alone has the optimizer.
        else:
            before = pickle.dumps(synchronizer.exchanged.center_optimizer.state())
            with pytest.raises(ValueError, match=message):
                synchronizer.load_state_dict(damaged)
            assert pickle.dumps(synchronizer.exchanged.center_optimizer.state()) == before

    run_ranks(2, work)


@pytest.mark.parametrize("damage", [forgotten, one_short, reshaped])
@pytest.mark.parametrize("center", ["replicated", "sharded"])
@pytest.mark.parametrize("transport", ["window", "service"])
def test_it_is_refused_asynchronously(
    damage: Any, center: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the optimizer of the center is: with a window on every rank, with a service on the holders."""
    monkeypatch.setenv("HVD_PERIODIC_TRANSPORT", transport)

    def work(communicator: Communicator) -> None:
        arrays = {"a": np.zeros(6), "b": np.zeros(6)}
        options: dict[str, Any] = {"outer_optimizer": SGD(0.25, 0.5), "asynchronous": True, "center": center}
        optimizer = PeriodicOptimizer(SGD(0.5), arrays, AGN(), 2, process_set=communicator, **options)
        synchronizer = optimizer.synchronizer
        synchronizer.load_state_dict(synchronizer.state_dict())
        for _ in range(3):
            optimizer.step([np.full(6, communicator.rank + 1.0) for _ in arrays])
        optimizer.finalize()
        state = synchronizer.state_dict()
        damaged, rank = copy.deepcopy(state), communicator.rank
        outer = damaged["center_optimizer"]
        damage(outer["sharded"][rank] if "sharded" in outer else outer)
        if transport == "service" and center == "replicated" and rank > 0:
            synchronizer.load_state_dict(damaged)
        else:
            with pytest.raises(ValueError, match="does not fit SGD: "):
                synchronizer.load_state_dict(damaged)
        synchronizer.load_state_dict(state)

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ({"velocities": [np.zeros(17)]}, "does not fit SGD: 'velocities' has arrays of shapes [(17,)]"),
        (None, "Training cannot start: loading the checkpoint failed on rank 0: KeyError('center_optimizer')"),
    ],
)
@pytest.mark.parametrize("transport", ["window", "service"])
def test_an_asynchronous_center_does_not_begin_from_it(
    transport: str, damaged: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a model is read before ranks meet: those of which one does not fit are an error on all of them."""
    monkeypatch.setenv("HVD_PERIODIC_TRANSPORT", transport)

    def work(communicator: Communicator) -> None:
        def made() -> Any:
            options: dict[str, Any] = {"outer_optimizer": SGD(0.25, 0.5), "asynchronous": True}
            return PeriodicOptimizer(SGD(0.5), {"a": np.zeros(6)}, AGN(), 2, process_set=communicator, **options)

        optimizer = made()
        for _ in range(2):
            optimizer.step([np.ones(6)])
        optimizer.finalize()
        state = optimizer.synchronizer.state_dict()
        if communicator.rank == 0:
            outer = state.pop("center_optimizer")
            state |= {} if damaged is None else {"center_optimizer": outer | damaged}
        again = made()
        again.synchronizer.load_checked(state)
        again.step([np.ones(6)])

    found = errors(2, work)
    assert all(message in str(each) for each in found), found


def test_the_state_of_another_model_is_refused_by_the_name_of_a_parameter() -> None:
    """The state of the outer optimizer does not fit either, but has no names."""

    def trained(size: int) -> PeriodicOptimizer:
        arrays = {"a": np.zeros(6), "b": np.zeros(size)}
        options = {"outer_optimizer": SGD(0.25, 0.5), "process_set": LocalCommunicator()}
        optimizer = PeriodicOptimizer(SGD(0.5), arrays, AGN(), 2, **options)
        for _ in range(2):
            optimizer.step([np.ones(6), np.ones(size)])
        return optimizer

    with pytest.raises(ValueError, match=r"belongs to another model: 'b' is of shape \(5,\) there and of shape \(6,\)"):
        trained(6).synchronizer.load_state_dict(trained(5).synchronizer.state_dict())


class InterruptError(Exception):
    """Raised inside a center block."""


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_center_block_holds_the_center_and_restores_come_what_may(dtype: str) -> None:
    def work(communicator: Communicator) -> None:
        trainer = NumpyTrainer(communicator, random_arrays(3, dtype), EASGD(0.2), Every(2))
        for step in range(3):
            trainer.step([g.astype(dtype) for g in gradients(trainer, communicator.rank, step)])
        addresses = [array.ctypes.data for array in trainer.arrays]
        before = result(trainer)
        local, center = [array.copy() for array in trainer.arrays], trainer.center()
        assert not all(np.array_equal(x, c) for x, c in zip(local, center, strict=True))

        def interrupted() -> None:
            with trainer.synchronizer.center():
                for array, values in zip(trainer.arrays, center, strict=True):
                    np.testing.assert_array_equal(array, values.astype(dtype))
                    array[...] = 7  # Whatever happens to the arrays inside the block is lost.
                raise InterruptError

        with pytest.raises(InterruptError):
            interrupted()
        assert result(trainer) == before
        assert [array.ctypes.data for array in trainer.arrays] == addresses
        with trainer.synchronizer.center():
            pass
        assert result(trainer) == before

    run_ranks(2, work)


@pytest.mark.parametrize("method", ["step", "sync", "finalize"])
def test_no_exchange_inside_the_center_block(method: str) -> None:
    synchronizer = local_trainer(Averaging(), (2,), (3,)).synchronizer
    with synchronizer.center(), pytest.raises(RuntimeError, match=rf"{method}\(\) inside the center\(\) block"):
        getattr(synchronizer, method)()
    assert (synchronizer.local_steps, synchronizer.rounds) == (0, 0)
    synchronizer.step()


def test_center_blocks_do_not_nest() -> None:
    trainer = local_trainer(Averaging(), (2,), (3,))
    trainer.step([np.ones(2), np.ones(3)])
    before = [array.copy() for array in trainer.arrays]
    with trainer.synchronizer.center():
        with (
            pytest.raises(RuntimeError, match=r"center\(\) inside the center\(\) block"),
            trainer.synchronizer.center(),
        ):
            pass
        assert not trainer.arrays[0].any(), "the refused block has ended the outer one"
    for array, values in zip(trainer.arrays, before, strict=True):
        np.testing.assert_array_equal(array, values)


@pytest.mark.parametrize("algorithm", [EASGD(0.2, rho=0.3), Averaging(), AGN()], ids=str)
def test_a_step_that_was_refused_inside_the_block_leaves_no_trace(algorithm: Algorithm) -> None:
    """The optimizer's step() is refused before it touches accumulators, counters or the local optimizer."""

    def train(stray: bool) -> list[float]:
        x = np.zeros(1)
        optimizer = PeriodicOptimizer(SGD(0.5, 0.5), {"x": x}, algorithm, 3)
        trajectory = []
        for step in range(1, 7):
            optimizer.step([np.array([-1.0])])
            trajectory.append(float(x[0]))
            if stray and step == 2:
                with optimizer.center(), pytest.raises(RuntimeError, match="inside the center"):
                    optimizer.step([np.array([-100.0])])
        return trajectory

    assert train(stray=True) == train(stray=False)


def test_broadcast_inside_the_center_block_is_refused() -> None:
    """It would send the center as if it were the root's replica, and the end of the block would undo it."""

    def work(communicator: Communicator) -> None:
        trainer = NumpyTrainer(communicator, [np.zeros(2)], Averaging(), Every(2))
        with trainer.synchronizer.center():
            trainer.synchronizer.broadcast()

    for kind, text in errors(2, work):
        assert kind is RuntimeError
        assert "inside the center() block" in text


def test_distance_to_the_center() -> None:
    trainer = local_trainer(Averaging(), (2,), (3,))
    assert trainer.synchronizer.distance() == 0.0
    trainer.arrays[0][...] = [3.0, 0.0]
    trainer.arrays[1][...] = [0.0, -4.0, 0.0]
    assert trainer.synchronizer.distance() == 5.0


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_16_bit_parameter_has_a_32_bit_center(dtype: str) -> None:
    """1 + 0.001 is 1 in float16: a center of that dtype would stand still for ever."""
    x = np.ones(1, dtype)
    trainer = NumpyTrainer(LocalCommunicator(), [x], EASGD(0.0001), Every(1), optimizer=SGD(1.0))
    x += np.asarray(1, dtype)
    for _ in range(10):
        trainer.synchronizer.sync()
    center = trainer.center()[0]
    assert center.dtype == ("float64" if dtype == "float64" else "float32")
    assert center == pytest.approx(1 + 0.001, rel=1e-4)
    assert x.dtype == dtype
