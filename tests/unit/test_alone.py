"""Without a launcher, every front end has one rank; a launcher that has told nothing is an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from hvd_periodic.comm import LocalCommunicator, local, selection
from hvd_periodic.comm.local import started_alone, started_several

LINE = "No launcher has started other processes: this one trains alone, as the only rank"


@pytest.fixture(autouse=True)
def nothing_has_started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher, and nothing initialized, whatever other tests of this process have done."""
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "PMI_RANK", "WORLD_SIZE", "RANK", "HOROVOD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("HVD_PERIODIC_COMM", raising=False)
    local._only_rank.cache_clear()
    yield
    local._only_rank.cache_clear()


SEVERAL = [
    {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"},
    {"WORLD_SIZE": "4", "RANK": "0"},
    {"SLURM_STEP_NUM_TASKS": "2"},
    {"HOROVOD_SIZE": "2"},
    {"HOROVOD_SIZE": "1", "HOROVOD_ELASTIC": "1"},
    {"PMIX_RANK": "0"},
    {"RANK": "0"},
]
"""Of several processes, of a number that may change, and of a number that was not told."""

ONE: list[dict[str, str]] = [
    {},
    {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
    {"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "none"},
    {"HOROVOD_SIZE": "1"},
    {"SLURM_NTASKS": "8"},
]


def told(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)


@pytest.mark.parametrize(("variables", "alone"), [*((few, True) for few in ONE), *((many, False) for many in SEVERAL)])
def test_what_launchers_tell(variables: dict[str, str], alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, variables)
    assert started_alone() == alone


def test_what_horovod_reads_itself_tells_it_of_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an elastic job of which one rank is left, the number is that of the beginning."""
    told(monkeypatch, {"HOROVOD_SIZE": "4", "HOROVOD_ELASTIC": "1"})
    assert started_several() == ("horovodrun", 4, "HOROVOD_SIZE")
    assert started_several(horovodrun=False) is None
    told(monkeypatch, {"PMI_SIZE": "3"})
    assert started_several(horovodrun=False) == ("mpiexec of an MPICH", 3, "PMI_SIZE")


def without_horovod(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a framework's Horovod not be initialized, where there is one."""
    if find_spec("horovod") is not None:
        monkeypatch.setattr(f"horovod.{framework}.is_initialized", lambda: False)


def of_torch(monkeypatch: pytest.MonkeyPatch, process_set: Any = None) -> Any:
    """Return values after seven steps, of which every third exchanges; and the optimizer."""
    torch = pytest.importorskip("torch")
    hvdp = pytest.importorskip("hvd_periodic.torch")
    without_horovod("torch", monkeypatch)
    monkeypatch.setattr("hvd_periodic.comm.selection.has_torch_distributed", lambda: False)
    x = torch.nn.Parameter(torch.ones(3))
    optimizer = hvdp.ElasticAverageOptimizer(torch.optim.SGD([x], 0.1), [("x", x)], 3, process_set=process_set)
    for _ in range(7):
        optimizer.zero_grad()
        (x - 3).square().sum().backward()
        optimizer.step()
    optimizer.finalize()
    return x.tolist(), optimizer


def of_keras(monkeypatch: pytest.MonkeyPatch, process_set: Any = None) -> Any:
    keras, np = pytest.importorskip("keras"), pytest.importorskip("numpy")
    hvdp = pytest.importorskip("hvd_periodic.tensorflow")
    without_horovod("tensorflow", monkeypatch)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = hvdp.ElasticAverageOptimizer(keras.optimizers.SGD(0.1), model, 3, process_set=process_set)
    model.compile(optimizer, "mse", run_eagerly=True)
    model.fit(np.ones((7, 2)), np.ones(7), 1, verbose=0)
    model.optimizer.finalize()
    return [weight.tolist() for weight in model.get_weights()], model.optimizer


def of_contrib(monkeypatch: pytest.MonkeyPatch, process_set: Any = None) -> Any:
    tf = pytest.importorskip("tensorflow").compat.v1
    contrib_opt = pytest.importorskip("hvd_periodic.tensorflow.contrib_opt")
    without_horovod("tensorflow", monkeypatch)
    with tf.Graph().as_default():
        x = tf.get_variable("x", [3], initializer=tf.ones_initializer())
        optimizer = contrib_opt.ElasticAverageOptimizer(tf.train.GradientDescentOptimizer(0.1), 1, None, 3)
        train = optimizer.minimize(tf.reduce_sum(tf.square(x - 3)), tf.train.get_or_create_global_step())
        with tf.train.MonitoredTrainingSession(hooks=[optimizer.make_session_run_hook(True, 0)]) as session:
            for _ in range(7):
                session.run(train)
            return session.run(x).tolist(), optimizer


FRONT_ENDS = [of_torch, of_keras, of_contrib]


@pytest.mark.parametrize("train", FRONT_ENDS)
def test_a_process_without_a_launcher_is_one_rank(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hvd_periodic"):
        found, _ = train(monkeypatch)
        again, _ = train(monkeypatch)
    assert found == again
    assert [record.getMessage() for record in caplog.records].count(LINE) == 1
    if train is not of_contrib:
        assert found == train(monkeypatch, LocalCommunicator())[0]


@pytest.mark.parametrize("variables", SEVERAL)
@pytest.mark.parametrize("train", FRONT_ENDS)
def test_a_launcher_that_has_told_nothing_is_an_error(
    train: Callable[..., Any], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over MPI, its launcher tells mpi4py, unless that is built for another MPI."""
    told(monkeypatch, variables)
    monkeypatch.setattr(selection, "world_numbering", lambda: (0, 1))
    with pytest.raises(RuntimeError, match=r"is initialized: call hvd\.init\(\)|mpi4py, built for another MPI, sees"):
        train(monkeypatch)


@pytest.mark.parametrize("comm", ["torch", "horovod"])
def test_what_ranks_would_exchange_by_does_not_matter(comm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_PERIODIC_COMM", comm)
    _, optimizer = of_torch(monkeypatch)
    assert optimizer.synchronizer.membership.communicator.size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"is not initialized: call|Horovod is not installed"):
        of_torch(monkeypatch)


def test_what_is_misspelled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_PERIODIC_COMM", "nccl")
    with pytest.raises(ValueError, match=r"HVD_PERIODIC_COMM must be .* Received: 'nccl'"):
        of_torch(monkeypatch)


@pytest.mark.parametrize("train", FRONT_ENDS)
def test_mpi_without_its_launcher_is_an_error(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_PERIODIC_COMM", "mpi")
    with pytest.raises(
        RuntimeError, match=r"no launcher of MPI has started this process: start the script with mpirun"
    ):
        train(monkeypatch)


@pytest.mark.parametrize(("train", "room"), [(of_torch, "torch"), (of_keras, "tensorflow")])
def test_the_group_of_the_only_rank(train: Callable[..., Any], room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function in place of a process set; optimizers are numbered by one communicator."""
    groups = pytest.importorskip(f"hvd_periodic.{room}")
    alone, _ = train(monkeypatch)
    found, optimizer = train(monkeypatch, groups.node_ranks)
    assert found == alone
    assert optimizer.synchronizer.membership.name != train(monkeypatch)[1].synchronizer.membership.name
