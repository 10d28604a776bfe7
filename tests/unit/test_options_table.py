"""The table *What goes with what* of the limits: constructors accept what its cells say, and refuse the rest."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_periodic import AGN, BMUF, EASGD, Compression, DiLoCo, LocalCommunicator, PostLocal, SlowMo
from hvd_periodic.comm.subset import Subset
from tests.messages import explained

PAGE = (Path(__file__).parents[2] / "docs/concepts/limits.md").read_text()
FRONT_ENDS = {
    "PyTorch": "hvd_periodic.torch",
    "Keras": "hvd_periodic.tensorflow",
    "`contrib_opt`": "hvd_periodic.tensorflow.contrib_opt",
    "numpy": "hvd_periodic.numpy",
}
NEEDS = {"PyTorch": "horovod.torch", "Keras": "horovod.tensorflow", "`contrib_opt`": "horovod.tensorflow"}
MODES = ["synchronous", "asynchronous", "groups", "elastic"]
MODE_ROWS = {
    "asynchronous": "`asynchronous=True`",
    "groups": "a function as `process_set`",
    "elastic": "elastic Horovod with a `State`",
}
"""Rows that say which front ends have a mode; all have the synchronous one."""


def table() -> dict[str, dict[str, bool | None]]:
    """Return the cells by row and column; None where a cell is empty."""
    section = PAGE.partition("## What goes with what")[2]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\|.*\|$", section, re.MULTILINE)]
    assert rows[0] == ["", *FRONT_ENDS, *MODES]
    meaning: dict[str, bool | None] = {"yes": True, "no": False, "–": None}
    return {
        row[0]: {name: meaning[cell.partition(",")[0]] for name, cell in zip(rows[0][1:], row[1:], strict=True)}
        for row in rows[2:]
    }


TABLE = table()

OPTIONS: dict[str, dict[str, Any]] = {
    "a schedule as the period": {"period": PostLocal(2, 3)},
    '`center="root"`': {"center": "root"},
    '`center="sharded"`': {"center": "sharded"},
    "`center_device`": {"center_device": "cpu"},
    "`center_file`": {"center_file": "center.safetensors"},
    "`staleness_power`": {"staleness_power": 0.5, "algorithm": DiLoCo()},
    "`quorum`": {"quorum": 1},
    "`grace_seconds` with `quorum`": {"grace_seconds": 1.0, "quorum": 1},
    "`grace_seconds` without `quorum`": {"grace_seconds": 1.0, "algorithm": DiLoCo()},
    "`overlap`": {"overlap": 1},
    "`compression`": {"compression": Compression.int8},
    "`error_decay`": {"error_decay": 0.9, "compression": Compression.int8, "algorithm": AGN()},
    "`fragments`": {"fragments": 2},
    "`weight`": {"weight": 2.0, "algorithm": AGN(op="average")},
    '`weight="steps"`, `weight="examples"`': {"weight": "examples", "algorithm": AGN(op="average")},
    "`audit_every`": {"audit_every": 3},
    "`max_message_norm`": {"max_message_norm": 1.0},
    '`max_message_norm="median"`': {"max_message_norm": "median"},
    "`max_mean_norm`": {"max_mean_norm": 1.0, "algorithm": AGN(op="average")},
    "`timeout_seconds`": {"timeout_seconds": 60.0},
    '`nonfinite="skip"`': {"nonfinite": "skip"},
    '`optimizer_state` other than `"local"`': {"optimizer_state": "reset"},
    "`buffers`": {"buffers": "average"},
    '`buffers="broadcast"`': {"buffers": "broadcast"},
    '`parameters` with `"local"`': {"parameters": lambda name, _: "local" if "b" in name else None},
    '`parameters` with `"broadcast"`': {"parameters": lambda name, _: "broadcast" if "b" in name else None},
    '`parameters` with `"present"`': {"parameters": lambda name, _: "present" if "b" in name else None},
    '`parameters` with `"rows"`': {
        "parameters": lambda name, x: "rows" if len(x.shape) > 1 else None,
        "algorithm": AGN(op="average"),
    },
    "`run_log`": {"run_log": "log"},
    "`root_rank`": {"root_rank": 0},
}
"""Options by row; the algorithm is elastic averaging, which has every mode, unless the row says otherwise."""


class Elastic(LocalCommunicator):
    """The only rank of an elastic job."""

    elastic = True
    process_set = SimpleNamespace(process_set_id=0)


class OfProcessSet(Elastic):
    """The only rank of a process set of a job."""

    process_set = SimpleNamespace(process_set_id=1)


def ranks(mode: str) -> Any:
    """Return the only rank of a job, in a mode."""
    if mode == "groups":
        return Subset(LocalCommunicator(), lambda: [0])
    return Elastic() if mode == "elastic" else LocalCommunicator()


class Maker:
    """Constructs optimizers of one front end in one mode, as far as that goes without a step.

    Args:
        front_end: name of its column.
        mode: name of its column.
    """

    def __init__(self, front_end: str, mode: str) -> None:
        self.front_end, self.mode = front_end, mode
        self.module: Any = importlib.import_module(FRONT_ENDS[front_end])

    def make(self, cls: str = "PeriodicOptimizer", **options: Any) -> Any:
        """Construct an optimizer, and begin what begins at construction or when variables are known."""
        if self.mode == "asynchronous":
            options["asynchronous"] = True
        if self.front_end == "`contrib_opt`":
            return self._in_a_graph(cls, options)
        options.setdefault("process_set", ranks(self.mode))
        if cls == "PeriodicOptimizer":
            options = {"algorithm": EASGD(), "period": 4} | options
        model, local = self._model()
        self.model = model
        wrap = options.pop("wrap", lambda maker, local, model: local)
        optimizer = getattr(self.module, cls)(wrap(self, local, model), model, **options)
        if self.front_end == "Keras":
            optimizer.build(model.trainable_variables)
        if self.mode == "elastic":
            self.module.elastic.State(model, optimizer)
        return optimizer

    def outer(self) -> Any:
        """Return an optimizer for the center."""
        if self.front_end == "PyTorch":
            import torch

            return lambda groups: torch.optim.SGD(groups, lr=1.0)
        if self.front_end == "`contrib_opt`":
            import tensorflow as tf

            return tf.compat.v1.train.GradientDescentOptimizer(1.0)
        return self._model()[1]

    def _model(self) -> tuple[Any, Any]:
        if self.front_end == "PyTorch":
            import torch

            model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
            return model, torch.optim.SGD(model.parameters(), lr=0.1)
        if self.front_end == "Keras":
            import keras

            layers = [keras.Input((2,)), keras.layers.Dense(2), keras.layers.BatchNormalization()]
            return keras.Sequential(layers), keras.optimizers.SGD(0.1)
        return {"w": np.zeros((2, 2)), "b": np.zeros(2)}, self.module.SGD(0.1)

    def _in_a_graph(self, cls: str, options: dict[str, Any]) -> Any:
        import tensorflow as tf

        v1, algorithm = tf.compat.v1, options.pop("algorithm", EASGD())
        asked, shapes = cls, [("w", (2, 2)), ("b", (2,))]
        if cls == "PeriodicOptimizer" and isinstance(algorithm, EASGD | AGN):
            cls = "ElasticAverageOptimizer" if isinstance(algorithm, EASGD) else "AGNOptimizer"
        period = options.pop("period", 4)
        with tf.Graph().as_default():
            made = getattr(self.module, cls)
            getter = getattr(self.module, cls.replace("Optimizer", "CustomGetter"))("")
            with v1.variable_scope("", custom_getter=getter):
                loss = tf.add_n([tf.reduce_sum(v1.get_variable(name, shape) ** 2) for name, shape in shapes])
            wrap = options.pop("wrap", lambda maker, local, model: local)
            local = wrap(self, v1.train.GradientDescentOptimizer(0.1), None)
            if cls == "ModelAverageOptimizer":
                optimizer = made(local, 1, True, getter, period, **options)
            elif cls == "PeriodicOptimizer":
                optimizer = made(local, 1, getter, algorithm, period, **options)
            else:
                own = {"rho": 0.0} if cls == "ElasticAverageOptimizer" else vars(algorithm) if cls != asked else {}
                optimizer = made(local, 1, getter, period, **own, **options)
            optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())
            return optimizer


def named(*classes: str) -> Callable[[Maker], None]:
    """Return a function that constructs optimizers by their names."""

    def attempt(maker: Maker) -> None:
        for cls in classes:
            maker.make(cls)

    return attempt


def with_algorithms(*algorithms: Any) -> Callable[[Maker], None]:
    """Return a function that constructs optimizers with algorithms."""

    def attempt(maker: Maker) -> None:
        for algorithm in algorithms:
            maker.make(algorithm=algorithm)

    return attempt


def averaging_without_waiting(maker: Maker) -> None:
    maker.make("ModelAverageOptimizer", asynchronous=True)


def momentum_without_waiting(maker: Maker) -> None:
    for algorithm in (DiLoCo(), SlowMo(), BMUF()):
        maker.make(algorithm=algorithm, asynchronous=True)


def with_outer_optimizer(maker: Maker) -> None:
    maker.make(algorithm=AGN(), outer_optimizer=maker.outer())


def in_mode(mode: str) -> Callable[[Maker], None]:
    """Return a function that constructs an optimizer in a mode besides the maker's own."""

    def attempt(maker: Maker) -> None:
        inner = Maker(maker.front_end, mode)
        if maker.mode == "asynchronous":
            inner.make(asynchronous=True)
        elif maker.mode in (mode, "synchronous"):
            inner.make()
        elif mode == "asynchronous":
            maker.make(asynchronous=True)
        else:
            maker.make(process_set=ranks(mode) if maker.mode != "elastic" else Subset(Elastic(), lambda: [0]))

    return attempt


def as_a_group(maker: Maker) -> None:
    """Pass a function as ``process_set``; where that is possible, it makes a group of the ranks that there are."""
    if maker.front_end in ("`contrib_opt`", "numpy"):
        maker.make(process_set=lambda: [0])
    in_mode("groups")(maker)


def as_elastic(maker: Maker) -> None:
    _ = maker.module.elastic.State
    in_mode("elastic")(maker)


def within_a_process_set(maker: Maker) -> None:
    maker.make(process_set=OfProcessSet() if maker.mode == "elastic" else LocalCommunicator())


def on_two_levels(maker: Maker) -> None:
    def inner(maker: Maker, local: Any, model: Any) -> Any:
        if model is None:
            return maker.module.ModelAverageOptimizer(local, 1, True, None)
        return maker.module.PeriodicOptimizer(local, model, EASGD(), 2, process_set=ranks(maker.mode))

    optimizer = maker.make(wrap=inner)
    if maker.front_end == "numpy":  # Only its step fails.
        optimizer.step([np.zeros((2, 2)), np.zeros(2)])


def saved(maker: Maker) -> None:
    save, load, optimizer = maker.module.save, maker.module.load, maker.make()
    save("checkpoints", maker.model, optimizer)
    optimizer = maker.make()
    load("checkpoints", maker.model, optimizer)


SPECIAL: dict[str, Callable[[Maker], None]] = {
    "`ElasticAverageOptimizer`, `AGNOptimizer`": named("ElasticAverageOptimizer", "AGNOptimizer"),
    "`ModelAverageOptimizer`": named("ModelAverageOptimizer"),
    "`PeriodicOptimizer` with DiLoCo, SlowMo, BMUF": with_algorithms(DiLoCo(), SlowMo(), BMUF()),
    "`ModelAverageOptimizer` with `asynchronous=True`": averaging_without_waiting,
    "DiLoCo, SlowMo, BMUF with `asynchronous=True`": momentum_without_waiting,
    "`outer_optimizer`": with_outer_optimizer,
    MODE_ROWS["asynchronous"]: in_mode("asynchronous"),
    MODE_ROWS["groups"]: as_a_group,
    MODE_ROWS["elastic"]: as_elastic,
    "a Horovod process set as `process_set`": within_a_process_set,
    "several levels": on_two_levels,
    "`hvdp.save`, `hvdp.load`": saved,
}
"""Rows that are more than a value of an option."""

ATTEMPTS = SPECIAL | {row: lambda maker, options=options: maker.make(**options) for row, options in OPTIONS.items()}


UNKNOWN = r".*\(\) (got an unexpected keyword argument|takes \d+ positional arguments but) .*"
"""The text of Python about an argument that is not in a signature."""

DOCUMENTED = [re.compile(".*".join(map(re.escape, line.split("…"))), re.DOTALL) for line in explained()]
DOCUMENTED.append(re.compile(UNKNOWN))
"""Texts of errors that *Troubleshooting* explains."""


def refusal(row: str, front_end: str, mode: str) -> str | None:
    """Construct what a row is about; return the text of the error with which that is refused, or None."""
    try:
        ATTEMPTS[row](Maker(front_end, mode))
    except (TypeError, ValueError, AttributeError) as error:
        return str(error)
    return None


def is_explained(text: str, row: str) -> bool:
    """Say whether *Troubleshooting* explains the text of an error, and the error is about the option of a row."""
    keys = set(OPTIONS.get(row, {})) - {"algorithm"}
    return any(line.fullmatch(text) for line in DOCUMENTED) and (not keys or any(key in text for key in keys))


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_row_is_tried() -> None:
    assert set(TABLE) == set(ATTEMPTS)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("row", TABLE)
def test_cells_are_what_constructors_do(row: str, front_end: str) -> None:
    if front_end in NEEDS:
        pytest.importorskip(NEEDS[front_end])
    modes = [mode for mode in MODES if mode not in MODE_ROWS or TABLE[MODE_ROWS[mode]][front_end]]
    refused = {mode: refusal(row, front_end, mode) for mode in modes}
    assert [text for text in refused.values() if text is not None and not is_explained(text, row)] == []
    assert TABLE[row][front_end] == (None in refused.values()), refused
    if TABLE[row][front_end]:
        told = {mode: TABLE[row][mode] for mode in modes if TABLE[row][mode] is not None}
        assert told == {mode: refused[mode] is None for mode in told}, refused
