"""The path of one exchange through the library, as a reader follows it: how many files, functions and calls it takes.

Comprehensions, generator expressions and lambdas belong to the function in which they are written.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest

import hvd_periodic
from hvd_periodic import Communicator, LocalCommunicator
from hvd_periodic.numpy import SGD, ElasticAverageOptimizer
from hvd_periodic.sync.synchronous import Synchronous
from tests.helpers import run_ranks

PACKAGE = Path(hvd_periodic.__file__).parent


class Limits(NamedTuple):
    """The most that the path of an exchange may take."""

    files: int
    functions: int
    calls: int


class Trace(NamedTuple):
    """The functions of the library that an exchange has called, by file and qualified name, with their calls."""

    calls: Counter[tuple[str, str]]

    def check(self, limits: Limits) -> None:
        """Fail if the path takes more than the limits; name the files, those with most calls first."""
        files = Counter[str]()
        for (file, _), count in self.calls.items():
            files[file] += count
        found = Limits(len(files), len(self.calls), self.calls.total())
        assert found.files > 10, "The trace is empty"
        assert all(count <= limit for count, limit in zip(found, limits, strict=True)), (
            f"{found}, at most {limits}: {files}"
        )

    def of(self, name: str) -> int:
        """Return how often the functions of a name, the last part of the qualified one, were called."""
        return sum(count for (_, function), count in self.calls.items() if function.rpartition(".")[2] == name)


@contextmanager
def traced() -> Iterator[Trace]:
    """Trace the calls of this thread."""
    path = Trace(Counter())

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE) and not frame.f_code.co_name.startswith("<"):
            path.calls[str(file.relative_to(PACKAGE)), frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        yield path
    finally:
        sys.setprofile(None)


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[Trace]:
    """Trace all synchronous exchanges of the test, in whichever threads they run."""
    exchange, traces = Synchronous.exchange, list[Trace]()

    def within(self: Synchronous[Any], leaving: bool = False) -> bool:
        with traced() as trace:
            found = exchange(self, leaving)
        traces.append(trace)
        return found

    monkeypatch.setattr(Synchronous, "exchange", within)
    return traces


def check_asked_once(trace: Trace) -> None:
    """Fail unless an exchange asks the schedule, and this rank for its status, once, and counts and reports itself."""
    names = ("next_exchange", "remember", "snapshot", "advance", "report_exchange")
    found = {name: trace.of(name) for name in names}
    assert found == dict.fromkeys(names, 1)


def test_numpy() -> None:
    """From the step that finds an exchange due, on two ranks."""

    def train(communicator: Communicator) -> Trace:
        x = np.full(5, 1.0 + communicator.rank)
        optimizer = ElasticAverageOptimizer(SGD(0.1), {"x": x}, period=2, process_set=communicator)
        for _ in range(3):
            optimizer.step({"x": x})
        with traced() as trace:
            optimizer.synchronizer.step()
        assert optimizer.synchronizer.counters.last_exchange == 4
        return trace

    for trace in run_ranks(2, train):
        check_asked_once(trace)
        trace.check(Limits(35, 140, 178))


def test_torch(exchanges: list[Trace]) -> None:
    """The second exchange: at the first one, memory is allocated."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("horovod.torch")
    import hvd_periodic.torch as hvdp

    model = torch.nn.Linear(3, 2)
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvdp.ElasticAverageOptimizer(local, model, period=2, process_set=LocalCommunicator())
    for _ in range(4):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    assert len(exchanges) == 2
    check_asked_once(exchanges[1])
    exchanges[1].check(Limits(35, 132, 171))


@pytest.mark.parametrize("algorithm", ["averaging", "elastic averaging", "AGN"])
def test_torch_calls_do_not_grow_with_the_model(exchanges: list[Trace], algorithm: str) -> None:
    """No function of the library is called for each tensor: an exchange of small tensors would spend its time there."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("horovod.torch")
    import hvd_periodic.torch as hvdp

    made: Any = {"averaging": hvdp.Averaging, "elastic averaging": hvdp.EASGD, "AGN": hvdp.AGN}[algorithm]
    calls = []
    for count in (1, 20):
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(count)))
        local = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvdp.PeriodicOptimizer(local, model, made(), period=2, process_set=LocalCommunicator())
        for _ in range(4):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
        calls.append(exchanges[-1].calls)
    assert calls[0] == calls[1]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_keras(exchanges: list[Trace], eager: bool) -> None:
    """Python runs the same text, also where a compiled step waits for it."""
    keras = pytest.importorskip("keras")
    pytest.importorskip("horovod.tensorflow")
    import hvd_periodic.tensorflow as hvdp

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = hvdp.ElasticAverageOptimizer(
        keras.optimizers.SGD(0.1), model, period=2, process_set=LocalCommunicator()
    )
    model.compile(optimizer, loss="mse", run_eagerly=eager, jit_compile=False)
    model.fit(np.ones((16, 3)), np.ones((16, 2)), batch_size=4, verbose=0)
    assert len(exchanges) == 2
    check_asked_once(exchanges[1])
    exchanges[1].check(Limits(39, 141, 320))


def operations(optimizer: Any, count: int) -> int:
    """Return the operations of a compiled step of variables, with those of the functions that it calls."""
    import tensorflow as tf

    variables = [tf.Variable(tf.zeros(3), name=f"v{i}") for i in range(count)]
    optimizer.build(variables)
    step = tf.function(lambda: optimizer.apply([tf.ones(3)] * count), autograph=False)
    graph = step.get_concrete_function().graph.as_graph_def()
    return len(graph.node) + sum(len(function.node_def) for function in graph.library.function)


@pytest.mark.parametrize(
    ("name", "of_one", "per_variable"),
    [
        ("averaging", 40, 1),
        ("elastic averaging", 40, 1),
        ("elastic averaging, rho > 0", 48, 8),
        ("AGN", 45, 5),
        ("DiLoCo", 40, 2),
        ("overlap", 45, 1),
    ],
)
def test_operations_of_a_compiled_step(name: str, of_one: int, per_variable: int) -> None:
    """Each takes time to trace, at every compilation: a step holds nothing of an exchange, which is in Python."""
    keras = pytest.importorskip("keras")
    pytest.importorskip("horovod.tensorflow")
    import hvd_periodic.tensorflow as hvdp

    algorithms: dict[str, tuple[Any, dict[str, Any]]] = {
        "averaging": (hvdp.Averaging, {}),
        "elastic averaging": (lambda: hvdp.EASGD(0.3), {}),
        "elastic averaging, rho > 0": (lambda: hvdp.EASGD(0.3, rho=0.1), {}),
        "AGN": (hvdp.AGN, {}),
        "DiLoCo": (hvdp.DiLoCo, {}),
        "overlap": (hvdp.Averaging, {"overlap": 1}),
    }

    def added(count: int) -> int:
        """Return the operations of a step of so many variables that are not the plain optimizer's."""
        plain, local = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
        algorithm, options = algorithms[name]
        periodic = hvdp.PeriodicOptimizer(local, None, algorithm(), 4, process_set=LocalCommunicator(), **options)
        return operations(periodic, count) - operations(plain, count)

    one, six = added(1), added(6)
    assert one <= of_one
    assert six - one <= 5 * per_variable, (one, six)


def test_session(exchanges: list[Trace]) -> None:
    """Python runs the same text for a session of TensorFlow 1, which waits for it."""
    tf: Any = pytest.importorskip("tensorflow").compat.v1
    from hvd_periodic.tensorflow import contrib_opt

    with tf.Graph().as_default():
        getter = contrib_opt.ElasticAverageCustomGetter("")
        with tf.variable_scope("", custom_getter=getter):
            w = tf.get_variable("w", (3, 2))
        local = tf.train.GradientDescentOptimizer(0.1)
        optimizer = contrib_opt.ElasticAverageOptimizer(local, 1, getter, 2, process_set=LocalCommunicator())
        train = optimizer.minimize(tf.reduce_sum(tf.square(w)), tf.train.get_or_create_global_step())
        with tf.train.MonitoredTrainingSession(hooks=[optimizer.make_session_run_hook(True, 0)]) as session:
            for _ in range(4):
                session.run(train)
    assert len(exchanges) == 2
    check_asked_once(exchanges[1])
    exchanges[1].check(Limits(41, 143, 282))
