"""What every rank does with the center on the root alone or sharded, next to the replicated one; see ``scenarios.py``.

mpirun -np 2 python -m tests.parallel.placement_scenarios FOLDER torch [SCENARIO ...]
"""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from hvd_periodic.algorithms import BMUF, DiLoCo, SlowMo
from tests.helpers import Array, random_arrays
from tests.parallel.program import Scenarios, attempt, crossed, repeated

BUCKET_BYTES = 40
"""Ten elements of float32 or five of float64: the last bucket of the latter has fewer elements than there are ranks."""

BUCKET_BYTES_OF_NETWORKS = 400
"""Also several."""

BUCKET_BYTES_IN_GRAPHS = 80
"""Fewer of them: tracing takes its time."""

PLACES: dict[str, dict[str, Any]] = {
    "replicated": {},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "replicated, root 1": {"root_rank": 1},
    "root, root 1": {"center": "root", "root_rank": 1},
    "sharded, root 1": {"center": "sharded", "root_rank": 1},
}

CASES = ("easgd", "easgd_rho", "average", "agn_sgd", "agn_momentum", "agn_adam", "diloco", "slowmo", "bmuf")
FROM_ROOT_1 = ("easgd_rho", "agn_momentum")
SOME_CASES = ("easgd_rho", "average", "agn_adam", "slowmo")
OUTER = {"diloco": DiLoCo(0.5, 0.5), "slowmo": SlowMo(), "bmuf": BMUF(0.5)}

Seen = list[list[Array]]
Comparison = tuple[bool, float]


def gradients(values: list[Array], rank: int, step: int) -> list[Array]:
    return [np.asarray(0.3 * (x - 1 - rank - 0.1 * step), dtype=x.dtype) for x in values]


def compare(found: Iterable[Any], expected: Iterable[Any]) -> Comparison:
    """Return whether arrays are equal to the bit, and by how much they differ, relatively to elements above one."""
    same, difference = True, 0.0
    for here, there in zip(map(np.asarray, found), map(np.asarray, expected), strict=True):
        if here.shape != there.shape or here.dtype != there.dtype:
            return False, float("inf")
        same = same and here.tobytes() == there.tobytes()
        if here.size:
            scale = np.maximum(np.abs(there.astype("f8")), 1.0)
            difference = max(difference, float((np.abs(here.astype("f8") - there.astype("f8")) / scale).max()))
    return same, difference


def flat(seen: Seen) -> list[Array]:
    return [array for arrays in seen for array in arrays]


class Trainer(ABC):
    """Tensors of one rank and the optimizer that trains them."""

    optimizer: Any

    @abstractmethod
    def values(self) -> list[Array]:
        """Return copies of the tensors."""

    @abstractmethod
    def assign(self, values: list[Array]) -> None:
        """Set the tensors."""

    @abstractmethod
    def step(self, shown: list[Array]) -> None:
        """Take a step by these gradients."""

    @abstractmethod
    def center_state_elements(self) -> int:
        """Return how many elements the center optimizer keeps on this rank, scalars aside."""

    @abstractmethod
    def save(self) -> bytes:
        """Return a checkpoint; all ranks together."""

    @abstractmethod
    def load(self, saved: bytes, exchange: bool) -> None:
        """Load tensors and local optimizer, and if asked for what belongs to exchanges."""

    @property
    def synchronizer(self) -> Any:
        return self.optimizer.synchronizer

    def center(self) -> list[Array]:
        with self.optimizer.center():
            return self.values()

    def train(self, rank: int, steps: Iterable[int]) -> None:
        for step in steps:
            self.step(gradients(self.values(), rank, step))

    def follow(self, rank: int, steps: Iterable[int]) -> Seen:
        """Train; return the replica after every step, center and distance at the start and after every exchange."""
        seen, rounds = [], -1
        for step in steps:
            self.train(rank, [step])
            seen.append(self.values())
            if self.synchronizer.rounds > rounds:
                rounds = self.synchronizer.rounds
                seen[-1] += [*self.center(), np.float64(self.synchronizer.distance())]
        return seen

    def held(self) -> dict[str, int]:
        """Return elements on this rank."""
        tensors = self.synchronizer.center_tensors()
        return {
            "center": int(sum(np.prod(tuple(tensor.shape), dtype=int) for tensor in tensors)),
            "state": self.center_state_elements(),
        }


OF_FRAMEWORKS = {
    "torch": ("tiny", "uneven_averages", "center_state_dict", "copies", "not_elementwise", "empty_shares"),
    "tensorflow": ("scheduled_rate", "files", "file_of_another_rank", "callbacks", "not_elementwise", "mixed_types"),
}
"""The scenarios of one framework alone."""


class Program(ABC):
    """The scenarios, in terms of what a framework provides.

    Attributes:
        hvd: its Horovod module.
        loops: ways to run a step; the last one is used where one will do.
        scenarios: the methods that all ranks call, in this order.
    """

    hvd: Any
    loops: tuple[str, ...] = ("eager",)
    scenarios: tuple[str, ...] = ("trajectories", "uneven_data", "resume", "other_placement", "statistics")

    @abstractmethod
    def trainer(self, case: str, place: str, loop: str = "eager", arrays: list[Array] | None = None) -> Trainer:
        """Return a trainer over small buckets."""

    @abstractmethod
    def network(self, case: str, place: str) -> dict[str, Seen]:
        """Train a network with batch normalization; return its state inside and outside of ``center()``."""

    @property
    def rank(self) -> int:
        return int(self.hvd.rank())

    def start(self) -> list[Array]:
        """Return what a rank starts with, until the root's is broadcast: 54 elements of float32."""
        return random_arrays(self.rank, "float32")

    def places(self, case: str, loop: str) -> list[tuple[str, str]]:
        """Return placements elsewhere, each with the replicated one that it is compared to."""
        named = [("root", "replicated"), ("sharded", "replicated")]
        if case not in SOME_CASES:  # One place each.
            named = [named[CASES.index(case) % 2]]
        more = [("root, root 1", "replicated, root 1"), ("sharded, root 1", "replicated, root 1")]
        return named + (more if case in FROM_ROOT_1 and loop == self.loops[-1] else [])

    def trajectories(self) -> Any:
        """Seven steps, three exchanges: replica and center after every step, and what this rank holds."""
        results: dict[str, Any] = {}
        for loop in self.loops:
            for case in CASES if loop == self.loops[-1] else SOME_CASES[::2]:
                references: dict[str, Seen] = {}
                for place, reference in self.places(case, loop):
                    if reference not in references:
                        trainer = self.trainer(case, reference, loop)
                        references[reference] = trainer.follow(self.rank, range(7))
                        results[f"{case}, {reference}, {loop}"] = {
                            "rounds": trainer.synchronizer.rounds,
                            "replica": [float(arrays[0].sum()) for arrays in references[reference]],
                            "distances": [float(arrays[-1]) for arrays in references[reference][1::2]],
                            "center": [float(arrays[-4].sum()) for arrays in references[reference][1::2]],
                            "buckets": [b.size for b in trainer.synchronizer.replica.parameters.layout.buckets],
                            "held": trainer.held(),
                        }
                    trainer = self.trainer(case, place, loop)
                    seen = trainer.follow(self.rank, range(7))
                    results[f"{case}, {place}, {loop}"] = {
                        "rounds": trainer.synchronizer.rounds,
                        "comparison": compare(flat(seen), flat(references[reference])),
                        "distances": [float(arrays[-1]) for arrays in seen[1::2]],
                        "held": trainer.held(),
                    }
        return results

    def uneven_data(self) -> Any:
        """Rank r has 5 + 3r steps, then finalizes; then another epoch."""
        cases = ("agn_adam", *repeated("easgd"))
        return {key: found for case in cases for key, found in self._uneven(case, 5).items()}

    def uneven_averages(self) -> Any:
        """Rank r has 3r steps."""
        return self._uneven("average", 0)

    def _uneven(self, case: str, fewest: int) -> dict[str, Any]:
        results: dict[str, Any] = {}
        expected: Any = None
        for place in ("replicated", "root", "sharded"):
            trainer = self.trainer(case, place, self.loops[-1])
            trainer.train(self.rank, range(fewest + 3 * self.rank))
            trainer.synchronizer.finalize()
            found = [*trainer.values(), *trainer.center()]
            trainer.train(self.rank, range(20, 23 + self.rank))
            trainer.synchronizer.finalize()
            found += [*trainer.values(), *trainer.center()]
            expected = found if expected is None else expected
            counters = trainer.synchronizer.counters
            results[f"{case}, {place}"] = {
                "comparison": compare(found, expected),
                "counters": [counters.local_steps, counters.rounds],
            }
        return results

    def resume(self) -> Any:
        """Load on all ranks in mid-period, or on the root alone at an exchange, and go on: the same to the bit."""
        results: dict[str, Any] = {}
        for case, other in crossed(SOME_CASES, ("root", "sharded", "on rank 1")):
            on_rank_1 = "sharded, root 1" if case == "average" else "root, root 1"
            place = on_rank_1 if other == "on rank 1" else other
            way, steps = [("all", 5), ("root", 4)][len(results) % 2]
            trainer, resumed = self.trainer(case, place), self.trainer(case, place)
            trainer.train(self.rank, range(steps))
            values, saved = trainer.values(), trainer.save()
            resumed.load(saved, exchange=way == "all" or self.rank == PLACES[place].get("root_rank", 0))
            if way == "root":
                resumed.synchronizer.broadcast()
                resumed.assign(values)
            expected = trainer.follow(self.rank, range(steps, steps + 3))
            found = resumed.follow(self.rank, range(steps, steps + 3))
            results[f"{case}, {place}, {way}"] = compare(flat(found), flat(expected))[0]
        return results

    def other_placement(self) -> Any:
        """A center saved in one place and loaded in another; with an optimizer of the center, an error."""
        results: dict[str, Any] = {}
        for saved, loaded in (("replicated", "sharded"), ("sharded", "root"), ("root", "replicated")):
            trainer, other = self.trainer("easgd_rho", saved), self.trainer("easgd_rho", loaded)
            trainer.train(self.rank, range(5))
            other.load(trainer.save(), exchange=True)
            results[f"{saved}, {loaded}"] = compare(other.center(), trainer.center())[0]
        trainer, other = self.trainer("agn_adam", "replicated"), self.trainer("agn_adam", "sharded")
        trainer.train(self.rank, range(2))
        state = trainer.save()
        results["refused"] = attempt(lambda: other.load(state, exchange=True))
        return results

    def tiny(self) -> Any:
        """One element: most ranks hold nothing."""
        results: dict[str, Any] = {}
        for case in ("easgd_rho", "average", "agn_momentum", "agn_adam"):
            expected: Any = None
            for place in ("replicated", "root", "sharded"):
                trainer = self.trainer(case, place, arrays=[np.asarray(float(self.rank), dtype="float32")])
                found = trainer.follow(self.rank, range(4))
                expected = found if expected is None else expected
                results[f"{case}, {place}"] = {
                    "comparison": compare(flat(found), flat(expected)),
                    "held": trainer.held()["center"],
                }
        return results

    def statistics(self) -> Any:
        """A network with batch normalization: parameters and statistics, local and in ``center()``."""
        results: dict[str, Any] = {}
        for case in ("easgd_rho", "average", "agn_momentum"):
            expected: Any = None
            for place in ("replicated", "root", "sharded"):
                found = self.network(case, place)
                expected = found if expected is None else expected
                results[f"{case}, {place}"] = {
                    "sums": [float(array.sum(dtype="f8")) for array in found["center"][-1]],
                    **{key: compare(flat(found[key]), flat(expected[key])) for key in found},
                }
        return results


def torch_program() -> Program:
    """Return the scenarios in PyTorch."""
    import torch

    import hvd_periodic.torch as hvdp
    from hvd_periodic.torch import synchronizer as module
    from tests.parallel.scenarios import network
    from tests.parallel.torch_job import hvd

    class SmallBuckets(module.TorchReplica):
        """A replica with small buckets where nothing is said."""

        def __init__(self, *arguments: Any, bucket_bytes: int = BUCKET_BYTES, **options: Any) -> None:
            super().__init__(*arguments[:2], bucket_bytes, **options)

    def wrap(case: str, place: str, parameters: list[Any], model: Any, replica: Any = SmallBuckets) -> Any:
        kind, _, moved = case.partition("_")
        middle = (len(parameters) + 1) // 2
        groups = [{"params": parameters[:middle]}, {"params": parameters[middle:], "lr": 0.05}][: len(parameters)]
        with patch.object(module, "TorchReplica", replica):
            if kind == "agn":
                momentum = 0.5 if moved == "momentum" else 0.0
                adam = (lambda groups: torch.optim.Adam(groups, lr=0.05)) if moved == "adam" else None
                inner = torch.optim.SGD(groups, lr=0.1, momentum=momentum)
                return hvdp.AGNOptimizer(inner, model, 2, outer_optimizer=adam, **PLACES[place])
            inner = torch.optim.SGD(groups, lr=0.1, momentum=0.5)
            if kind in OUTER:
                return hvdp.PeriodicOptimizer(inner, model, OUTER[kind], 2, **PLACES[place])
            if kind == "average":
                return hvdp.ModelAverageOptimizer(inner, model, 2, **PLACES[place])
            rho = 0.5 if moved == "rho" else 0.0
            return hvdp.ElasticAverageOptimizer(inner, model, 2, moving_rate=0.25, rho=rho, **PLACES[place])

    class TorchTrainer(Trainer):
        def __init__(self, case: str, place: str, arrays: list[Array]) -> None:
            self.parameters = [torch.nn.Parameter(torch.from_numpy(np.array(array))) for array in arrays]
            named = [(f"p{i}", parameter) for i, parameter in enumerate(self.parameters)]
            self.optimizer = wrap(case, place, self.parameters, named)

        def values(self) -> list[Array]:
            return [parameter.detach().numpy().copy() for parameter in self.parameters]

        def assign(self, values: list[Array]) -> None:
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.data.copy_(torch.from_numpy(value))

        def step(self, shown: list[Array]) -> None:
            for parameter, gradient in zip(self.parameters, shown, strict=True):
                parameter.grad = torch.from_numpy(gradient)
            self.optimizer.step()

        def center_state_elements(self) -> int:
            state = self.synchronizer.exchanged.center_optimizer.state() or {"state": {}}
            tensors = [(key, value) for of_one in state["state"].values() for key, value in of_one.items()]
            return sum(value.numel() for key, value in tensors if isinstance(value, torch.Tensor) and key != "step")

        def save(self) -> bytes:
            file = io.BytesIO()
            torch.save({"values": self.parameters, "optimizer": self.optimizer.state_dict()}, file)
            return file.getvalue()

        def load(self, saved: bytes, exchange: bool) -> None:
            state = torch.load(io.BytesIO(saved), weights_only=True)
            self.assign([value.detach().numpy() for value in state["values"]])
            (self.optimizer if exchange else self.optimizer.inner).load_state_dict(state["optimizer"])

    class TorchProgram(Program):
        def __init__(self) -> None:
            self.hvd = hvd
            self.scenarios = (*Program.scenarios, *OF_FRAMEWORKS["torch"])

        def trainer(self, case: str, place: str, loop: str = "eager", arrays: list[Array] | None = None) -> Trainer:
            return TorchTrainer(case, place, self.start() if arrays is None else arrays)

        def start(self) -> list[Array]:
            """Add 11 elements of float64."""
            return [*super().start(), np.random.default_rng(self.rank).standard_normal((11, 1))]

        def trained(self, case: str, place: str) -> Iterator[tuple[Any, Any]]:
            """Yield model and optimizer after every step."""
            torch.manual_seed(self.rank)
            model = network()
            replica = partial(SmallBuckets, bucket_bytes=BUCKET_BYTES_OF_NETWORKS)
            optimizer = wrap(case, place, list(model.parameters()), model, replica)
            generator = torch.Generator().manual_seed(self.rank)
            for _ in range(7):
                data = torch.randn(16, 6, generator=generator) + self.rank
                optimizer.zero_grad()
                (model(data) - data[:, :2]).square().mean().backward()
                optimizer.step()
                yield model, optimizer

        def network(self, case: str, place: str) -> dict[str, Seen]:
            found: dict[str, Seen] = {"local": [], "center": []}
            for model, optimizer in self.trained(case, place):
                for key in found:
                    with optimizer.center() if key == "center" else nullcontext():
                        found[key].append([value.numpy().copy() for value in model.state_dict().values()])
            return found

        def center_state_dict(self) -> Any:
            """Exported outside and inside of ``center()``, next to the replicated one, under the names of the model."""
            results: dict[str, Any] = {}
            for case in ("easgd_rho", "agn_momentum"):
                expected: Any = None
                for place in ("replicated", "root", "sharded", "root, root 1"):
                    *_, (model, optimizer) = self.trained(case, place)
                    found = hvdp.center_state_dict(model, optimizer)
                    with optimizer.center():
                        inside = hvdp.center_state_dict(model, optimizer.synchronizer)
                    assert list(found) == list(inside) == list(model.state_dict())
                    expected = found if expected is None or place.endswith("1") else expected
                    results[f"{case}, {place}"] = [
                        compare(found.values(), expected.values()),
                        compare(inside.values(), found.values())[0],
                    ]
            return results

        def copies(self) -> Any:
            """A deep copy, made by all ranks, goes on like the original; the original like itself."""
            results = {}
            for case, place in crossed(SOME_CASES, ("root", "sharded")):
                trainer = self.trainer(case, place)
                trainer.train(self.rank, range(3))
                with patch.object(module, "TorchReplica", SmallBuckets):
                    other = copy.deepcopy(trainer)
                expected = trainer.follow(self.rank, range(3, 7))
                results[f"{case}, {place}"] = compare(flat(other.follow(self.rank, range(3, 7))), flat(expected))[0]
            return results

        def not_elementwise(self) -> Any:
            """Optimizers that look at a tensor as a whole: refused, or the same as on the replicated center."""
            results: dict[str, Any] = {}
            for name, moves in {
                "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),
                "Muon": lambda groups: torch.optim.Muon(groups, lr=0.05),
            }.items():

                def run(place: str, moves: Any = moves) -> Seen:
                    generator = torch.Generator().manual_seed(0)
                    w = torch.nn.Parameter(torch.randn(6, 4, generator=generator))
                    inner = torch.optim.SGD([w], lr=0.1)
                    optimizer = hvdp.AGNOptimizer(inner, [("w", w)], 1, outer_optimizer=moves, **PLACES[place])
                    for _ in range(3):
                        w.grad = torch.randn(6, 4, generator=generator)
                        optimizer.step()
                    return [[w.detach().numpy()]]

                expected, found = flat(run("replicated")), []
                error = attempt(lambda run=run, found=found: found.append(run("sharded")))
                results[name] = [error, 0.0 if error else compare(flat(found[0]), expected)[1]]
            return results

        def empty_shares(self) -> Any:
            """One step of the center's optimizer on this rank alone, which may hold nothing: the error, or none."""
            results = {}
            for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adafactor"):
                for place in ("root", "sharded"):
                    w = torch.nn.Parameter(torch.ones(1))
                    inner = torch.optim.SGD([w], lr=0.1)
                    moves = getattr(torch.optim, name)
                    optimizer = hvdp.AGNOptimizer(inner, [("w", w)], 1, outer_optimizer=moves, **PLACES[place])
                    step = optimizer.synchronizer.exchanged.center_optimizer.step
                    results[f"{name}, {place}"] = attempt(step, ArithmeticError)
            return results

    torch.set_num_threads(1)
    return TorchProgram()


def tensorflow_program() -> Program:
    """Return the scenarios in TensorFlow, through Keras."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    import hvd_periodic.tensorflow as hvdp
    from hvd_periodic.tensorflow import lifecycle as module
    from tests.parallel.keras_scenarios import LOOPS, batches, bits, train_step

    class SmallBuckets(module.VariableReplica):
        """A replica with small buckets where nothing is said."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, bucket_bytes=BUCKET_BYTES_IN_GRAPHS, **options)

    def small_buckets() -> Any:
        return patch.object(module, "VariableReplica", SmallBuckets)

    def wrap(case: str, place: str, model: Any = None) -> Any:
        kind, _, moved = case.partition("_")
        options = PLACES[place]
        if kind == "agn":
            rates = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5) if moved == "schedule" else 0.1
            inner = keras.optimizers.SGD(rates, momentum=0.5 if moved == "momentum" else 0.0)
            adam = keras.optimizers.Adam(0.05) if moved == "adam" else None
            return hvdp.AGNOptimizer(inner, model, 2, outer_optimizer=adam, **options)
        inner = keras.optimizers.SGD(0.1, momentum=0.5)
        if kind in OUTER:
            return hvdp.PeriodicOptimizer(inner, model, OUTER[kind], 2, **options)
        if kind == "average":
            return hvdp.ModelAverageOptimizer(inner, model, 2, **options)
        rho = 0.5 if moved == "rho" else 0.0
        return hvdp.ElasticAverageOptimizer(inner, model, 2, moving_rate=0.25, rho=rho, **options)

    class KerasTrainer(Trainer):
        def __init__(self, case: str, place: str, loop: str, arrays: list[Array]) -> None:
            self.variables = [keras.Variable(a, dtype=a.dtype.name, name=f"v{i}") for i, a in enumerate(arrays)]
            self.optimizer = wrap(case, place)
            with small_buckets():
                self.optimizer.build(self.variables)

            def apply(shown: list[Any]) -> None:
                self.optimizer.apply_gradients(zip(shown, self.variables, strict=True))

            self.apply = tf.function(apply) if loop == "function" else apply

        def values(self) -> list[Array]:
            return [np.array(variable.numpy()) for variable in self.variables]

        def assign(self, values: list[Array]) -> None:
            for variable, value in zip(self.variables, values, strict=True):
                variable.assign(value)

        def step(self, shown: list[Array]) -> None:
            self.apply([tf.constant(gradient) for gradient in shown])

        def center_state_elements(self) -> int:
            state = self.synchronizer.exchanged.center_optimizer.state() or [0, 0]
            return sum(np.size(value) for value in state[2:])

        def save(self) -> bytes:
            local = [np.array(variable.numpy()) for variable in self.optimizer.inner.variables]
            return pickle.dumps((self.values(), local, self.synchronizer.state_dict()))

        def load(self, saved: bytes, exchange: bool) -> None:
            values, local, state = pickle.loads(saved)
            self.assign(values)
            for variable, value in zip(self.optimizer.inner.variables, local, strict=True):
                variable.assign(value)
            if exchange:
                self.synchronizer.load_state_dict(state)

    def small_network() -> Any:
        return keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(5, use_bias=False),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dense(2),
            ]
        )

    class TensorFlowProgram(Program):
        loops = tuple(LOOPS)

        def __init__(self) -> None:
            self.hvd = hvd
            self.scenarios = (*Program.scenarios, *OF_FRAMEWORKS["tensorflow"])

        def trainer(self, case: str, place: str, loop: str = "eager", arrays: list[Array] | None = None) -> Trainer:
            return KerasTrainer(case, place, loop, self.start() if arrays is None else arrays)

        def network(self, case: str, place: str) -> dict[str, Seen]:
            keras.utils.set_random_seed(self.rank)
            model = small_network()
            with small_buckets():
                optimizer = wrap(case, place, model)
            step = train_step(model, optimizer)
            found: dict[str, Seen] = {"local": [], "center": []}
            for data in batches(0, 7):
                step(data[:, :3] + self.rank)
                for key in found:
                    with optimizer.center() if key == "center" else nullcontext():
                        found[key].append([np.array(weight.numpy()) for weight in model.weights])
            return found

        def scheduled_rate(self) -> Any:
            """The center's optimizer follows a schedule of the local one, on ranks without any center as well."""
            results = {}
            expected: Any = None
            for place in ("replicated", "root", "sharded"):
                found = self.trainer("agn_schedule", place, "function").follow(self.rank, range(5))
                expected = found if expected is None else expected
                results[place] = compare(flat(found), flat(expected))
            return results

        def files(self) -> Any:
            """A file per rank, saved in mid-period and loaded: training goes on to the bit."""
            results = {}
            for case, place in (("easgd_rho", "sharded"), ("agn_adam", "sharded"), ("agn_momentum", "root")):
                for way in ("keras", "checkpoint"):
                    with small_buckets(), tempfile.TemporaryDirectory() as folder:
                        results[f"{case}, {place}, {way}"] = self._save_and_go_on(case, place, way, Path(folder))
            return results

        def _save_and_go_on(self, case: str, place: str, way: str, folder: Path) -> list[bool]:
            model = small_network()
            optimizer = wrap(case, place, model)
            model.compile(optimizer, loss="mse", jit_compile=False)
            step = train_step(model, optimizer)
            for data in batches(1, 5):
                step(data[:, :3])
            if way == "keras":
                model.save(folder / "model.keras")
            else:
                path = tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(folder / "checkpoint"))
            for data in batches(2, 4):
                step(data[:, :3])
            if way == "keras":
                other_model = keras.models.load_model(folder / "model.keras")
                other = other_model.optimizer
                other.attach(other_model)
            else:
                other_model = small_network()
                other = wrap(case, place, other_model)
                tf.train.Checkpoint(model=other_model, optimizer=other).read(path)
            step = train_step(other_model, other)
            for data in batches(2, 4):
                step(data[:, :3])
            pairs = list(zip(optimizer.variables, other.variables, strict=True))
            state = [pair for pair in pairs if "exchange_seconds" not in pair[0].path]
            with optimizer.center(), other.center():
                centers = bits(model.weights) == bits(other_model.weights)
            return [centers, bits([here for here, _ in state]) == bits([there for _, there in state])]

        def file_of_another_rank(self) -> Any:
            """All ranks load the root's file, whose shares have the shapes of theirs: an error, or the center."""
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, use_bias=False)])
            optimizer = wrap("easgd", "sharded", model)
            model.compile(optimizer, loss="mse", jit_compile=False)
            optimizer.apply([tf.reshape(tf.range(6.0), (3, 2)) + self.rank], model.trainable_variables)
            optimizer.synchronizer.sync()
            with optimizer.center():
                center = model.get_weights()
            with tempfile.TemporaryDirectory() as folder:
                model.save(f"{folder}/model.keras")
                mine = Path(f"{folder}/model.keras").read_bytes()
                Path(f"{folder}/root.keras").write_bytes(hvd.broadcast_object(mine, 0, name="file of the root"))
                found: list[Any] = []

                def load() -> None:
                    loaded = keras.models.load_model(f"{folder}/root.keras")
                    loaded.optimizer.attach(loaded)
                    loaded.optimizer.start()
                    with loaded.optimizer.center():
                        found.extend(loaded.get_weights())

                error = attempt(load)
            return [error, not error and compare(found, center)[0]]

        def callbacks(self) -> Any:
            """Which ranks enter ``center()`` at the end of an epoch; nobody communicates here."""
            results = {}
            for place in ("replicated", "root", "sharded"):
                model = small_network()
                optimizer = wrap("easgd", place, model)
                model.compile(optimizer, loss="mse", jit_compile=False)
                entered = []

                def enter(entered: list[int] = entered) -> Any:
                    entered.append(1)
                    return nullcontext()

                with tempfile.TemporaryDirectory() as folder, patch.object(optimizer, "center", enter):
                    callback = hvdp.callbacks.SaveBestCenter(f"{folder}/best.keras", monitor="loss")
                    callback.set_model(model)
                    callback.on_epoch_end(0, {"loss": 1.0})
                results[place] = len(entered)
            return results

        def not_elementwise(self) -> Any:
            """Optimizers that look at a tensor as a whole: refused, or the same as on the replicated center."""
            results: dict[str, Any] = {}
            for name, moves in {
                "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
                "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
                "Lamb": lambda: keras.optimizers.Lamb(0.1),
            }.items():

                def run(place: str, moves: Any = moves) -> Seen:
                    generator = np.random.default_rng(0)
                    w = keras.Variable(generator.standard_normal((6, 4)), dtype="float32", name="w")
                    inner = keras.optimizers.SGD(0.1)
                    optimizer = hvdp.AGNOptimizer(inner, None, 1, outer_optimizer=moves(), **PLACES[place])
                    optimizer.build([w])
                    for _ in range(3):
                        optimizer.apply([tf.constant(generator.standard_normal((6, 4)), tf.float32)])
                    return [[w.numpy()]]

                expected, found = flat(run("replicated")), []
                error = attempt(lambda run=run, found=found: found.append(run("sharded")))
                results[name] = [error, 0.0 if error else compare(flat(found[0]), expected)[1]]
            return results

        def mixed_types(self) -> Any:
            """Variables of float32 and float64: the error of a first step, or none."""
            results = {}
            for place in ("replicated", "root", "sharded"):
                variables = [keras.Variable([1.0, 2.0, 3.0], dtype=dtype) for dtype in ("float32", "float64")]
                optimizer = wrap("easgd", place)
                optimizer.build(variables)
                results[place] = attempt(lambda o=optimizer, v=variables: o.apply([tf.ones_like(x) for x in v]))
            return results

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    return TensorFlowProgram()


def main(folder: Path, framework: str) -> None:
    """Run the scenarios of a framework."""
    program = {"torch": torch_program, "tensorflow": tensorflow_program}[framework]()
    program.hvd.init()
    if program.hvd.size() > 2:  # Graphs take long: they are compiled on two ranks.
        program.loops = program.loops[:1]
    scenario = Scenarios()
    for name in dict.fromkeys((*program.scenarios, *itertools.chain(*OF_FRAMEWORKS.values()))):
        if name in program.scenarios:
            scenario(getattr(program, name))
        else:
            scenario.without(name, f"not with {framework}")
    scenario.run(folder, program.rank, gloo="TORCHELASTIC_RUN_ID" in os.environ)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
