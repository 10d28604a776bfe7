"""Training by Ignite, as each rank sees it.

mpirun -np 2 python -m tests.parallel.ignite_scenarios FOLDER
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping
from ignite.metrics import Average

import hvd_periodic.torch as hvdp
from hvd_periodic.torch.ignite import PeriodicHandler
from tests.parallel.program import Scenarios, attempt
from tests.parallel.torch_job import UNDER_TORCHRUN
from tests.parallel.trainer_ranks import PERIOD, Batches, Quadratic, begin, distance, easgd

scenario = Scenarios()
FOLDER = Path(sys.argv[1])
RANK, SIZE = begin()


class Job:
    """A trainer and an evaluator, of which the latter says what the model holds, as a mean over ranks."""

    def __init__(self, **options: Any) -> None:
        self.net = Quadratic(RANK)
        self.optimizer = hvdp.ElasticAverageOptimizer(self.net.sgd(), self.net, PERIOD, **options)
        self.trainer = create_supervised_trainer(
            self.net, self.optimizer, lambda loss, _: loss, prepare_batch=lambda batch, **_: (batch, 0)
        )
        self.evaluator = Engine(lambda *_: float(self.net.x.detach().sum()) + RANK)
        Average().attach(self.evaluator, "total")
        self.seen: list[list[float]] = []
        self.logged: list[int] = []
        self.evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: self.seen.append(self.net.x.tolist()))
        self.handler = PeriodicHandler(self.net, self.optimizer)
        self.handler.report(lambda values, step: self.logged.append(step))

    def run(self, batches: Any, epochs: int = 1, at: Any = Events.EPOCH_COMPLETED) -> Job:
        self.trainer.add_event_handler(at, lambda: self.evaluator.run([0]))
        self.handler.attach(self.trainer, self.evaluator)
        self.trainer.run(batches, epochs)
        return self


@scenario
def goes_where_the_oracle_goes() -> dict[str, Any]:
    job = Job().run(range(13), at=Events.ITERATION_COMPLETED(every=6))
    shown = [easgd(SIZE, set(range(PERIOD, steps + 1, PERIOD)), steps)[1] for steps in (6, 12)]
    return {
        "ranks": [idist.get_rank(), idist.get_world_size()],
        "seen": [distance(a, b) for a, b in zip(job.seen, shown, strict=True)],
        "metric": abs(job.evaluator.state.metrics["total"] - sum(shown[-1]) - 0.5),
        "end": distance(job.net.x.tolist(), easgd(SIZE, {4, 8, 12, 13}, 13)[1]),
        "logged": job.logged,
    }


@scenario
def files() -> dict[str, Any]:
    """A center in shards, which all ranks read; the root writes it."""
    job, own = Job(center="sharded"), FOLDER / f"of rank {RANK}"
    saving = Checkpoint({"model": job.handler}, DiskSaver(str(own), create_dir=True), n_saved=None)
    job.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=6), saving)
    job.run(range(7))
    found = sorted(file.name for file in own.rglob("*")) if own.exists() else []
    saved = torch.load(own / found[0])["x"].tolist() if found else None
    return {"files": found, "saved": saved and distance(saved, easgd(SIZE, {4}, 6)[1])}


@scenario
def uneven_data() -> dict[str, Any]:
    found = {}
    for kind in ("iterable", "counted"):
        number = 5 + 3 * RANK
        job = Job().run(Batches(number) if kind == "iterable" else range(number), epochs=2)
        found[kind] = [job.optimizer.synchronizer.local_steps, job.net.x.tolist(), len(job.seen)]
    return found


@scenario
def further_evaluators() -> dict[str, Any]:
    """One that is attached later sees the center; one that never is, the replica."""
    job, replicas = Job(), []
    other = Engine(lambda *_: replicas.append(job.net.x.tolist()))
    job.trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: other.run([0]))
    job.handler.attach(job.trainer)
    job.run(range(6))
    expected = easgd(SIZE, {4}, 6)
    return {
        "attached": distance(job.seen[0], expected[1]),
        "other": distance(replicas[0], expected[0][RANK]),
        "logged": job.logged,
    }


@scenario
def evaluations_that_not_all_come_to() -> dict[str, str]:
    """The root comes to the end of its data, of its training or of its epoch, before the other rank evaluates."""

    def run(number: int, **options: Any) -> str:
        job = Job(**options)
        said = attempt(lambda: job.run(range(number), at=Events.ITERATION_COMPLETED(every=6)))
        job.optimizer.finalize()
        return said

    def leaves_by(method: str) -> str:
        job = Job()
        if RANK == 0:
            leave = getattr(job.trainer, method)
            job.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: leave())
        return attempt(lambda: job.run(range(7), at=Events.ITERATION_COMPLETED(every=6)))

    alone = {} if UNDER_TORCHRUN else {"asynchronous": run(5 + 3 * RANK, asynchronous=True)}  # That needs MPI.
    return alone | {
        "fewer batches": run(5 + 3 * RANK),
        "sharded": run(5 + 3 * RANK, center="sharded"),
        "terminate": leaves_by("terminate"),
        "terminate_epoch": leaves_by("terminate_epoch"),
    }


@scenario
def terminates_in_an_epoch() -> dict[str, Any]:
    """The root alone, before the last exchange of an epoch and after it, by all events or without the last of them."""

    def run(batches: Any, at: int, skip: bool, both: bool = False) -> list[Any]:
        job, ends = Job(), []
        job.trainer.add_event_handler(Events.COMPLETED, lambda: ends.append(job.trainer.state.iteration))
        if RANK == 0 or both:
            leave = partial(job.trainer.terminate, skip_completed=skip)
            job.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=at + both * RANK), lambda: leave())
        job.handler.attach(job.trainer, job.evaluator)
        job.trainer.run(batches, 3)
        center = job.optimizer.synchronizer.center_tensors()[0].tolist()
        iterations, steps = job.trainer.state.iteration, job.optimizer.synchronizer.local_steps
        return [[iterations, steps, len(ends)], job.net.x.tolist(), job.net.x.tolist() == center]

    return {
        f"{kind} {at} {'both' if both else 'root'}": [run(data(), at, skip, both) for skip in (False, True)]
        for kind, data in (("even", lambda: range(10)), ("uneven", lambda: Batches(10 + 3 * RANK)))
        for at in (5, 9, 10, 15)[: 4 if kind == "even" else 1]
        for both in (False, True)
    }


@scenario
def terminates_asynchronously() -> list[Any]:
    """The root alone; the others hear of it at the end of their epoch."""
    if UNDER_TORCHRUN:  # Asynchronous exchange needs MPI.
        return []
    job = Job(asynchronous=True)
    if RANK == 0:
        leave = partial(job.trainer.terminate, skip_completed=True)
        job.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: leave())
    job.handler.attach(job.trainer)
    job.trainer.run(range(10), 3)
    return [job.trainer.state.iteration, job.net.x.tolist()]


@scenario
def stops_early_on_all() -> list[int]:
    """One rank alone sees nothing improve."""
    job = Job()
    stopping = EarlyStopping(2, lambda engine: (RANK * -2 + 1) * job.trainer.state.epoch, job.trainer)
    job.evaluator.add_event_handler(Events.COMPLETED, stopping)
    job.run(range(3), epochs=20)
    return [job.trainer.state.epoch, job.optimizer.synchronizer.local_steps]


@scenario
def an_evaluator_that_fails() -> list[bool]:
    """Training goes on with the replica, and the evaluation where it was, with the center."""
    job, inside = Job(), []
    view = job.optimizer.synchronizer.center_reader

    def fail(engine: Engine) -> None:
        inside.append(view.in_center_block)
        if len(inside) == 1:
            raise ArithmeticError("on purpose")

    job.evaluator.add_event_handler(Events.ITERATION_COMPLETED, fail)
    at = Events.ITERATION_COMPLETED(every=2)
    job.trainer.add_event_handler(at, lambda: attempt(lambda: job.evaluator.run([0] * 3), ArithmeticError))
    job.run(range(5), at=Events.COMPLETED)
    return [*inside, view.in_center_block]


@scenario
def what_is_refused() -> str:
    net = Quadratic(RANK)
    return attempt(lambda: PeriodicHandler(net, net.sgd()))


if __name__ == "__main__":
    scenario.run(FOLDER, RANK)
