"""Shares of a center of Keras variables while ranks come and go: they go where a center on every rank goes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")

import keras  # noqa: E402

import hvd_periodic.tensorflow as hvdp  # noqa: E402
from hvd_periodic import Communicator  # noqa: E402
from hvd_periodic.tensorflow.replica import VariableReplica  # noqa: E402
from tests.conformance.test_front_ends import OnTensors  # noqa: E402
from tests.helpers import run_ranks  # noqa: E402

pytestmark = pytest.mark.timeout(120)

CONSTRUCTING = threading.Lock()
"""Keras counts names per process."""

NOW = threading.local()
"""The ranks of a thread, as Horovod would tell."""


class Elastic(OnTensors):
    """Ranks that may change."""

    elastic = True
    process_set = hvdp.elastic.hvd.global_process_set

    def changed(self) -> str | None:
        """Return that they have not."""
        return None


@pytest.fixture(autouse=True)
def _ranks_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 elements: some parameters are in several buckets."""
    monkeypatch.setattr(VariableReplica, "__init__", partialmethod(VariableReplica.__init__, bucket_bytes=48))
    for module in ("elastic", "graph"):
        monkeypatch.setattr(f"hvd_periodic.tensorflow.{module}.communicator_of", lambda _: NOW.ranks)
    monkeypatch.setattr(hvdp.elastic.State, "check_host_updates", lambda _: None)


def adam(rate: float = 0.1) -> Any:
    return keras.optimizers.Adam(rate)


def momentum() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.5)


OPTIMIZERS: dict[str, Any] = {
    "easgd": lambda **o: hvdp.PeriodicOptimizer(momentum(), None, hvdp.EASGD(), 2, **o),
    "easgd_rho": lambda **o: hvdp.PeriodicOptimizer(momentum(), None, hvdp.EASGD(rho=0.3), 2, **o),
    "averaging": lambda **o: hvdp.PeriodicOptimizer(momentum(), None, hvdp.Averaging(), 2, **o),
    "bmuf": lambda **o: hvdp.PeriodicOptimizer(momentum(), None, hvdp.BMUF(), 2, **o),
    "slowmo": lambda **o: hvdp.PeriodicOptimizer(momentum(), None, hvdp.SlowMo(), 2, **o),
    "diloco": lambda **o: hvdp.PeriodicOptimizer(momentum(), None, hvdp.DiLoCo(), 2, **o),
    "diloco_adam": lambda **o: hvdp.PeriodicOptimizer(momentum(), None, hvdp.DiLoCo(), 2, outer_optimizer=adam(), **o),
    "diloco_adam_in_fragments": lambda **o: hvdp.PeriodicOptimizer(
        momentum(), None, hvdp.DiLoCo(), 2, outer_optimizer=adam(), fragments=2, **o
    ),
    "agn": lambda **o: hvdp.AGNOptimizer(momentum(), None, 2, **o),
    "agn_nadam": lambda **o: hvdp.AGNOptimizer(momentum(), None, 2, center_optimizer=keras.optimizers.Nadam(0.1), **o),
    "agn_of_adam_in_fragments": lambda **o: hvdp.AGNOptimizer(adam(), None, 2, fragments=2, **o),
}

LOSSES: dict[str, list[tuple[int | None, ...]]] = {
    "one between others": [(None, None, None), (0, 2)],
    "the root": [(None, None, None), (1, 2)],
    "one joins, then the first goes, and the others change places": [(None, None), (0, 1, None), (2, 1)],
    "joins and replaces": [(None,), (0, None), (1, None), (0, None, 1)],
}
"""Who is there in each stretch: who has been which rank in the one before, or is new."""


CASES = [
    ("easgd", "the root", "root"),
    ("easgd_rho", "one between others", "sharded"),
    ("averaging", "joins and replaces", "root"),
    ("bmuf", "one joins, then the first goes, and the others change places", "sharded"),
    ("slowmo", "one joins, then the first goes, and the others change places", "root"),
    ("diloco", "joins and replaces", "sharded"),
    ("diloco_adam", "the root", "sharded"),
    ("agn", "joins and replaces", "root"),
    ("agn_nadam", "one joins, then the first goes, and the others change places", "sharded"),
    ("agn_of_adam_in_fragments", "one between others", "sharded"),
    ("diloco_adam_in_fragments", "the root", "root"),
]


@dataclass
class Process:
    """A worker, which may live longer than its rank."""

    variables: list[Any]
    optimizer: Any
    state: Any
    step: Any = None
    seen: list[Any] = field(default_factory=list)


def constructed(ranks: Communicator, make: Any, **options: Any) -> Process:
    with CONSTRUCTING:
        shapes = ((3, 2), (7,), ())
        variables = [
            keras.Variable(np.arange(float(np.prod(shape))).reshape(shape), dtype="float64", name=f"w{i}")
            for i, shape in enumerate(shapes)
        ]
        optimizer = make(process_set=ranks, **options)
        optimizer.build(variables)
        held = tf.Variable(0)
        state = hvdp.elastic.State(None, optimizer, commit="exchange", **dict(zip("abc", variables, strict=True)))
        return Process(variables, optimizer, state, held)


def trained(process: Process, ranks: Communicator, steps: int) -> None:
    for _ in range(steps):
        step = process.optimizer.synchronizer.local_steps
        process.optimizer.apply([v * 0.5 + np.sin(step + ranks.rank) for v in process.variables])


def center_of(process: Process) -> list[Any]:
    with process.optimizer.center():
        return [v.numpy() for v in process.variables]


def lived(make: Any, center: str, stretches: Sequence[Sequence[int | None]]) -> list[list[tuple[Any, ...]]]:
    """Return by stretch and rank where training has come: replicas, centers and counters."""
    processes: list[Process] = []
    found = []
    for stretch in stretches:
        before = list(processes)

        def live(arrays: Communicator, stretch: Any = stretch, before: Any = before) -> Process:
            NOW.ranks = ranks = Elastic(arrays)
            was = stretch[ranks.rank]
            process = constructed(ranks, make, center=center) if was is None else before[was]
            if was is not None:
                process.state.on_reset()
            process.state.sync()
            trained(process, ranks, 3)  # The last step is lost with whoever goes.
            replica = [v.numpy() for v in process.variables]
            process.seen = [replica, center_of(process), process.optimizer.synchronizer.counters]
            return process

        processes = run_ranks(len(stretch), live)
        found.append([process.seen for process in processes])
    return found


@pytest.mark.parametrize(("name", "losses", "center"), CASES)
def test_they_go_where_a_center_on_every_rank_goes(name: str, losses: str, center: str) -> None:
    here, there = (lived(OPTIMIZERS[name], place, LOSSES[losses]) for place in (center, "replicated"))
    for of_stretch, expected in zip(here, there, strict=True):
        for (replica, values, counters), (other, others, counted) in zip(of_stretch, expected, strict=True):
            for a, b in zip([*replica, *values], [*other, *others], strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
            assert (counters.local_steps, counters.rounds) == (counted.local_steps, counted.rounds)
