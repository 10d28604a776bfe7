"""Options that all constructors share, and what errors call them and everything else that a user has typed."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Annotated, Any, TypedDict, Unpack

import numpy as np
import pytest

from hvd_periodic import AGN, EASGD, Averaging, Compression, Every, LocalCommunicator
from hvd_periodic.arguments import as_typed, spelled
from hvd_periodic.numpy import SGD, AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer, PeriodicOptimizer
from hvd_periodic.options import Options, of_exchange, takes
from tests.one_rank import one_rank

X = {"x": np.zeros(1)}
SHARED = ["center", "optimizer_state", "overlap", "compression", "error_decay", "fragments"]
SHARED += [
    "nonfinite",
    "weight",
    "audit_every",
    "max_message_norm",
    "max_mean_norm",
    "timeout_seconds",
    "center_file",
    "staleness_power",
    "quorum",
    "grace_seconds",
    "run_log",
    "parameters",
    "root_rank",
    "process_set",
]
DEFAULTS = {
    "center": "replicated",
    "optimizer_state": "local",
    "overlap": 0,
    "compression": Compression.none,
    "error_decay": 1.0,
    "fragments": 1,
    "nonfinite": "raise",
    "weight": None,
    "audit_every": 0,
    "max_message_norm": None,
    "max_mean_norm": None,
    "timeout_seconds": None,
    "center_file": None,
    "staleness_power": 0.0,
    "quorum": None,
    "grace_seconds": None,
    "run_log": None,
}
OWN = {
    "PeriodicOptimizer": ["algorithm", "period", "outer_optimizer", "asynchronous"],
    "ElasticAverageOptimizer": ["communication_period", "moving_rate", "beta", "rho", "asynchronous", "period"],
    "ModelAverageOptimizer": ["interval_steps", "asynchronous", "period"],
    "AGNOptimizer": ["communication_period", "outer_optimizer", "op", "asynchronous", "period"],
}


def front_end(name: str) -> tuple[Any, list[str], list[str]]:
    """Return a module, the first arguments of its constructors, and the options that only it has."""
    if name == "numpy":
        import hvd_periodic.numpy

        return hvd_periodic.numpy, ["optimizer", "model"], []
    if name == "torch":
        pytest.importorskip("torch")
        import hvd_periodic.torch

        return hvd_periodic.torch, ["optimizer", "model"], ["buffers", "center_device"]
    pytest.importorskip("tensorflow")
    import hvd_periodic.tensorflow

    return hvd_periodic.tensorflow, ["optimizer", "model"], ["buffers", "name"]


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
@pytest.mark.parametrize("name", OWN)
def test_signatures_list_every_option(framework: str, name: str) -> None:
    """In the order in which they may be passed, and after those by keyword only."""
    module, first, more = front_end(framework)
    parameters = inspect.signature(getattr(module, name)).parameters
    assert list(parameters) == [*first, *OWN[name], *SHARED, *more]
    for option in (*SHARED, *more):
        assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[option].default == DEFAULTS.get(option)


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_synchronizers_take_the_same(framework: str) -> None:
    module, *_ = front_end(framework)
    parameters = list(inspect.signature(module.Synchronizer).parameters)
    assert parameters[:3] == ["model", "algorithm", "period"]
    assert {*SHARED, "buffers"} <= {*parameters}
    assert "name" not in parameters


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        ("ElasticAverageOptimizer", "centre"),
        ("ElasticAverageOptimizer", "outer_optimizer"),
        ("ModelAverageOptimizer", "rho"),
        ("AGNOptimizer", "rho"),
        ("PeriodicOptimizer", "argument"),
    ],
)
def test_an_unknown_keyword_is_refused_by_name(framework: str, name: str, keyword: str) -> None:
    """Also one that only the general constructor behind it has."""
    module, first, more = front_end(framework)
    known = ", ".join([*first, *OWN[name], *SHARED, *more])
    with pytest.raises(TypeError) as caught:
        getattr(module, name)(None, None, **{keyword: None})
    assert str(caught.value) == f"{name}() got an unexpected keyword argument {keyword!r}. It takes {known}"


def test_a_new_option_is_declared_once() -> None:
    class Wider(Options, total=False):
        color: Annotated[str, "none"]

    class Inner:
        @takes(Wider)
        def __init__(self, size: int, **options: Unpack[Wider]) -> None:
            self.size, self.options = size, options

    class Outer(Inner):
        @takes(Wider)
        def __init__(self, **options: Unpack[Wider]) -> None:
            super().__init__(3, **options)

    made = Outer(color="red")
    assert made.options == {**DEFAULTS, "parameters": None, "root_rank": None, "process_set": None, "color": "red"}
    assert of_exchange(made.options) == DEFAULTS
    assert list(inspect.signature(Outer).parameters) == [*SHARED, "color"]


def test_options_have_defaults() -> None:
    class Undefined(TypedDict, total=False):
        size: int

    with pytest.raises(
        TypeError, match=r"`Undefined.size` must be annotated with its default: Annotated\[..., default\]"
    ):
        takes(Undefined)


def test_numpy_exchanges_through_a_communicator() -> None:
    communicator = LocalCommunicator()
    optimizer = ModelAverageOptimizer(SGD(1.0), X, process_set=communicator)
    assert optimizer.synchronizer.membership.communicator is communicator
    with pytest.raises(TypeError, match=r"`process_set` must be a Horovod process set, .* Received: 3"):
        ModelAverageOptimizer(SGD(1.0), X, process_set=3)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (lambda: EASGD(moving_rate=-1), r"^`EASGD\(moving_rate=\.\.\.\)` must be"),
        (lambda: EASGD(0.1, 0.1), r"^`EASGD` takes `moving_rate` or `beta`"),
        (lambda: EASGD(moving_rate=1.5), r"^`EASGD\(moving_rate=\.\.\.\)` must be in \(0, 2/\(n\+1\)\]"),
        (lambda: AGN("max"), r"^`AGN\(op=\.\.\.\)` must be"),
    ],
)
def test_who_names_an_algorithm_sees_its_name(algorithm: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PeriodicOptimizer(SGD(1.0), X, algorithm, 2)


def test_named_constructors_are_named_in_warnings() -> None:
    with pytest.warns(UserWarning, match=r"^`ElasticAverageOptimizer\(moving_rate=0\.9\)` makes the center overshoot"):
        ElasticAverageOptimizer(SGD(1.0), X, moving_rate=0.9)
    with pytest.warns(UserWarning, match=r"^`EASGD\(moving_rate=0\.9\)` makes"):
        PeriodicOptimizer(SGD(1.0), X, EASGD(0.9), 2)


def test_a_spelling_ends_with_the_constructor_that_has_it() -> None:
    with pytest.raises(ValueError, match=r"`AGNOptimizer\(op=\.\.\.\)`"):
        AGNOptimizer(SGD(1.0), X, op="max")
    with pytest.raises(ValueError, match=r"`AGN\(op=\.\.\.\)`"):
        AGN("max")
    with spelled({"AGN": "Outer"}):
        with spelled({"period": "interval_steps"}), warnings.catch_warnings():
            assert (as_typed("AGN"), as_typed("period")) == ("Outer", "interval_steps")
        assert as_typed("period") == "period"


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("ElasticAverageOptimizer", "communication_period"),
        ("ModelAverageOptimizer", "interval_steps"),
        ("AGNOptimizer", "communication_period"),
    ],
)
def test_a_period_has_two_names(framework: str, name: str, other: str) -> None:
    module, local, model = one_rank(framework)
    construct = partial(getattr(module, name), process_set=LocalCommunicator())
    for given in ({"period": 7}, {other: 7}, {other: 7, "period": None}):
        assert construct(local(), model, **given).synchronizer.planner.schedule == Every(7)
    for typed in ("period", other):
        with pytest.raises(ValueError, match=rf"^`{typed}`, unless it is a schedule, must be"):
            construct(local(), model, **{typed: 0})
    for positional, named in (([], {other: 7, "period": 7}), ([7], {"period": 7})):
        with pytest.raises(TypeError, match=rf"^`{other}` and `period` are two names of one argument: pass one of"):
            construct(local(), model, *positional, **named)


def test_a_period_is_called_what_the_constructor_calls_it() -> None:
    with pytest.raises(ValueError, match=r"^`period`, unless it is a schedule, must be an int >= 1\. Received: 0$"):
        PeriodicOptimizer(SGD(1.0), X, Averaging(), 0)
    with pytest.raises(ValueError, match=r"^`interval_steps`, unless"):
        ModelAverageOptimizer(SGD(1.0), X, 0)
