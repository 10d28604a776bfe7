"""What every rank does around an ``hvd.DistributedOptimizer``; see ``scenarios.py``.

mpirun -np 4 python -m tests.parallel.distributed_scenarios FOLDER '[[0, 1], [2, 3]]'
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import hvd_periodic.torch as hvdp
from tests import oracle
from tests.parallel.program import Scenarios, attempt, crossed

scenario = Scenarios()
GROUPS: list[Any] = []
FOLDER: list[Path] = []

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "easgd": lambda o, m, **k: hvdp.ElasticAverageOptimizer(o, m, 2, moving_rate=0.25, **k),
    "easgd_rho": lambda o, m, **k: hvdp.ElasticAverageOptimizer(o, m, 2, moving_rate=0.25, rho=0.5, **k),
    "average": lambda o, m, **k: hvdp.ModelAverageOptimizer(o, m, 2, **k),
    "agn": lambda o, m, **k: hvdp.AGNOptimizer(o, m, 4, **k),
}


def parameter() -> torch.nn.Parameter:
    """The oracle's start on rank 0, another on the others."""
    return torch.nn.Parameter(torch.tensor(oracle.START, dtype=torch.float64) + hvd.rank())


def distributed(w: torch.nn.Parameter, process_set: Any = hvd.global_process_set, **options: Any) -> Any:
    inner = torch.optim.SGD([w], lr=oracle.RATE, momentum=oracle.MOMENTUM)
    return hvd.DistributedOptimizer(inner, named_parameters=[("w", w)], process_set=process_set, **options)


def backward(w: torch.nn.Parameter, times: float = 1.0) -> None:
    """Put the oracle's gradient where backward() does, so that Horovod's hooks see it."""
    gradient = torch.tensor(oracle.gradient(hvd.rank(), w.detach().tolist()), dtype=torch.float64)
    (times * gradient * w).sum().backward()


def train(w: torch.nn.Parameter, optimizer: Any, steps: int = oracle.STEPS) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(w)
        optimizer.step()


def center_of(w: torch.nn.Parameter, optimizer: Any) -> list[float]:
    with optimizer.center():
        return list(w.detach().tolist())


@scenario
def members() -> Any:
    """The groups, and the sets of this rank."""
    groups = GROUPS[0]
    return [groups.ranks, list(groups.local.ranks or []), list(groups.cross.ranks or [])]


@scenario
def hierarchical() -> Any:
    """x and c after the oracle's steps."""
    results = {}
    for name, make in OPTIMIZERS.items():
        w = parameter()
        optimizer = make(distributed(w, GROUPS[0].local), [("w", w)], process_set=GROUPS[0].cross)
        train(w, optimizer)
        results[name] = [w.detach().tolist(), center_of(w, optimizer), optimizer.synchronizer.rounds]
    return results


@scenario
def schedules() -> Any:
    """Exchange steps where losses and speeds differ inside of groups, whose ranks have to exchange at the same step."""
    results: dict[str, Any] = {}
    for schedule in (hvdp.AdaComm(4, 1), hvdp.Seconds(0.2)):
        w = parameter()
        inner = distributed(w, GROUPS[0].local)
        optimizer = hvdp.ModelAverageOptimizer(inner, [("w", w)], schedule, process_set=GROUPS[0].cross)
        found = []
        for step in range(1, 13):
            time.sleep(0.01 * hvd.rank())
            optimizer.synchronizer.report(4.0 if step <= 4 else 0.5 + 0.5 * hvd.rank())
            train(w, optimizer, 1)
            if optimizer.synchronizer.counters.last_exchange == step:
                found.append(step)
        optimizer.synchronizer.audit()
        results[type(schedule).__name__] = found
    return results


@scenario
def variants() -> Any:
    """Clipping after synchronize(), compression, two backward passes per step: x, next to the plain form."""
    results: dict[str, Any] = {}
    for name in ("plain", "clipped", "compressed", "two passes"):
        w = parameter()
        options = {
            "compressed": {"compression": hvd.Compression.fp16},
            "two passes": {"backward_passes_per_step": 2},
        }.get(name, {})
        inner = distributed(w, GROUPS[0].local, **options)
        optimizer = OPTIMIZERS["average"](inner, [("w", w)], process_set=GROUPS[0].cross)
        for _ in range(4):
            optimizer.zero_grad()
            if name == "two passes":
                backward(w, 0.25)
                backward(w, 0.75)
            else:
                backward(w)
            if name == "clipped":
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_([w], 0.5)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        results[name] = w.detach().tolist()
    return results


@scenario
def post_local() -> Any:
    """Gradients averaged over all ranks until step 4, then exchanges after every third; also resumed at 3 and at 6."""
    results: dict[str, Any] = {}
    for name in ("easgd", "easgd_rho", "average", "agn"):
        for stop in (None, 3, 6):

            def make(name: str = name) -> tuple[Any, Any]:
                w = parameter()
                schedule = hvdp.PostLocal(4, 3)
                if name == "average":
                    return w, hvdp.ModelAverageOptimizer(distributed(w), [("w", w)], schedule)
                if name == "agn":
                    return w, hvdp.AGNOptimizer(distributed(w), [("w", w)], schedule)
                rho = 0.5 if name == "easgd_rho" else 0.0
                return w, hvdp.ElasticAverageOptimizer(distributed(w), [("w", w)], schedule, 0.25, rho=rho)

            w, optimizer = make()
            train(w, optimizer, stop or oracle.STEPS)
            if stop is not None:
                state, value = optimizer.state_dict(), w.detach().clone()
                w, optimizer = make()
                optimizer.load_state_dict(state)
                w.data.copy_(value)
                train(w, optimizer, oracle.STEPS - stop)
            results[f"{name} {stop}"] = [w.detach().tolist(), center_of(w, optimizer), optimizer.synchronizer.rounds]
    w = parameter()
    optimizer = hvdp.ElasticAverageOptimizer(distributed(w), [("w", w)], hvdp.PostLocal(9, 3))
    train(w, optimizer, 4)
    results["center before"] = [center_of(w, optimizer), w.detach().tolist()]
    optimizer.finalize()
    results["center after"] = [center_of(w, optimizer), w.detach().tolist()]
    return results


@scenario
def statistics() -> Any:
    """Batch normalization and a sparse embedding, other data on each rank; on both sides of the switch."""
    torch.manual_seed(hvd.rank())
    layers = (
        torch.nn.Embedding(5, 3, sparse=True),
        torch.nn.Flatten(0, 1),
        torch.nn.BatchNorm1d(3),
        torch.nn.Linear(3, 1),
    )
    model = torch.nn.Sequential(*layers)
    inner = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    optimizer = hvdp.AGNOptimizer(inner, model, hvdp.PostLocal(2, 3))
    seen = []
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randint(0, 5, (2, 4))).square().sum().backward()
        optimizer.step()
        values = torch.cat([p.detach().ravel() for p in model.parameters()]).tolist()
        seen.append([values, model[2].running_mean.tolist(), int(model[2].num_batches_tracked)])
    return seen


@scenario
def started() -> Any:
    """Other weights on every rank: what all start from, also after a load on rank 0; of all algorithms and places."""
    results = {}
    for name, center in crossed(list(OPTIMIZERS), ("replicated", "root", "sharded")):
        w = parameter()
        inner = distributed(w, GROUPS[0].local)
        optimizer = OPTIMIZERS[name](inner, [("w", w)], process_set=GROUPS[0].cross, center=center)
        seen = [w.tolist()]
        if hvd.rank() == 0:
            w.data.fill_(7.0)
        optimizer.zero_grad()
        backward(w)
        optimizer.step()
        optimizer.synchronizer.audit()
        with optimizer.center():
            seen.append(w.tolist())
        results[f"{name} {center}"] = [*seen, optimizer.synchronizer.counters.skipped_updates]
        optimizer.finalize()
    return results


@scenario
def restored_on_the_root() -> Any:
    """The state of rank 0, loaded there alone and broadcast(): x, x and steps after one more step; or the error."""
    results = {}
    for name, schedule in (("groups", 2), ("post-local", hvdp.PostLocal(4, 3))):

        def make(schedule: Any = schedule) -> tuple[Any, Any]:
            w = parameter()
            local, cross = (GROUPS[0].local, GROUPS[0].cross) if schedule == 2 else (None, None)
            inner = distributed(w, local or hvd.global_process_set)
            return w, hvdp.ElasticAverageOptimizer(inner, [("w", w)], schedule, 0.25, process_set=cross)

        w, optimizer = make()
        train(w, optimizer, 7)
        state, value = optimizer.state_dict(), w.detach().clone()
        w, optimizer = make()
        if hvd.rank() == 0:
            optimizer.load_state_dict(state)
            w.data.copy_(value)
        if schedule == 2:
            results[name] = attempt(optimizer.synchronizer.broadcast)
            continue
        optimizer.synchronizer.broadcast()
        start = w.detach().tolist()
        train(w, optimizer, 1)
        results[name] = [start, w.detach().tolist(), optimizer.synchronizer.local_steps]
    return results


@scenario
def scaled() -> Any:
    """Under a GradScaler: x and x without one; the error where gradients are looked at too early."""
    found: list[Any] = []
    for scale in (1.0, 1024.0):
        w = parameter()
        optimizer = OPTIMIZERS["average"](distributed(w, GROUPS[0].local), [("w", w)], process_set=GROUPS[0].cross)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(4):
            optimizer.zero_grad()
            backward(w, float(scaler.scale(torch.ones(()))))
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        found.append(w.detach().tolist())
    w = parameter()
    optimizer = OPTIMIZERS["average"](distributed(w, GROUPS[0].local), [("w", w)], process_set=GROUPS[0].cross)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    backward(w)
    found.append(attempt(lambda: scaler.step(optimizer)))
    optimizer.synchronize()
    return found


@scenario
def levels() -> Any:
    """Averages inside of groups after every second step, and of all ranks after every sixth."""
    return averages_of_averages(GROUPS[0].local)


@scenario
def levels_in_step() -> Any:
    """The same, where a function says who is in a group."""
    return averages_of_averages(lambda: next(group for group in GROUPS[0].ranks if hvd.rank() in group))


def averages_of_averages(within: Any) -> list[Any]:
    """Return what this rank has after each step, and the rounds of both levels."""
    w = parameter()
    inner: Any = torch.optim.SGD([w], lr=oracle.RATE, momentum=oracle.MOMENTUM)
    inner = hvdp.ModelAverageOptimizer(inner, [("w", w)], 2, process_set=within)
    optimizer = hvdp.ModelAverageOptimizer(inner, [("w", w)], 6)
    w.data.copy_(torch.tensor(oracle.START, dtype=torch.float64))
    seen = []
    for step in range(12):
        if step == 7:
            optimizer.load_state_dict(optimizer.state_dict())
        train(w, optimizer, 1)
        seen.append(w.detach().tolist())
    optimizer.finalize()
    return [seen, inner.synchronizer.rounds, optimizer.synchronizer.rounds]


@scenario
def ends_together() -> Any:
    """Who has arrived at the end when this rank goes on, where groups exchange apart; the later ranks are slow."""
    w = parameter()
    optimizer = OPTIMIZERS["average"](distributed(w, GROUPS[0].local), [("w", w)], process_set=GROUPS[0].cross)
    train(w, optimizer, 3)
    if GROUPS[0].cross.ranks and 0 not in GROUPS[0].cross.ranks:
        time.sleep(0.5)
    (FOLDER[0] / f"{hvd.rank()}.ended").touch()
    optimizer.finalize()
    return sorted(path.name for path in FOLDER[0].glob("*.ended"))


@scenario
def refused() -> Any:
    """Arguments that are wrong, on all ranks."""
    w = parameter()
    other = next(group for group in GROUPS[0].ranks if hvd.rank() not in group)

    def over_all() -> None:
        OPTIMIZERS["average"](distributed(w), [("w", w)])

    def inside_the_group() -> None:
        OPTIMIZERS["average"](distributed(w, GROUPS[0].local), [("w", w)], process_set=GROUPS[0].local)

    def without_waiting() -> None:
        hvdp.AGNOptimizer(distributed(w, GROUPS[0].local), [("w", w)], 2, asynchronous=True)

    def of_another_group() -> None:
        everybody = hvd.allgather_object((hvd.rank(), GROUPS[0].local.process_set_id))
        number = next(found for rank, found in everybody if rank == other[0])
        elsewhere = hvd.ProcessSet(list(other))
        elsewhere.process_set_id = number
        OPTIMIZERS["average"](torch.optim.SGD([w], lr=0.1), [("w", w)], process_set=elsewhere)

    def closure() -> None:
        optimizer = OPTIMIZERS["average"](distributed(w, GROUPS[0].local), [("w", w)], process_set=GROUPS[0].cross)
        optimizer.step(lambda: torch.zeros(()))

    def other_periods() -> None:
        """Each place in a group has a period of its own: those that exchange agree, those of a group do not."""
        period = 2 + next(group for group in GROUPS[0].ranks if hvd.rank() in group).index(hvd.rank())
        inner = distributed(w, GROUPS[0].local)
        hvdp.ModelAverageOptimizer(inner, [("w", w)], period, process_set=GROUPS[0].cross)

    def post_local_optimizer() -> Any:
        return hvdp.ModelAverageOptimizer(distributed(w), [("w", w)], hvdp.PostLocal(2, 2))

    size = hvd.size()
    return {
        "other periods": attempt(other_periods),
        "other groups": attempt(lambda: hvdp.rank_groups([[0], range(1, size)] if hvd.rank() else [range(size)])),
        "a string": attempt(lambda: hvdp.node_groups("2")),
        "copy": attempt(lambda: copy.deepcopy(post_local_optimizer())),
        "over all": attempt(over_all),
        "inside the group": attempt(inside_the_group),
        "asynchronous": attempt(without_waiting),
        "another group": attempt(of_another_group),
        "closure": attempt(closure),
        "around": attempt(
            lambda: hvd.DistributedOptimizer(OPTIMIZERS["average"](torch.optim.SGD([w], 0.1), [("w", w)]))
        ),
        "overlap": attempt(lambda: hvdp.rank_groups([range(size), [0]])),
        "missing": attempt(lambda: hvdp.rank_groups([range(size - 1)])),
        "size": attempt(lambda: hvdp.node_groups(0)),
    }


def main(folder: Path, groups: str) -> None:
    """Run all scenarios in these groups."""
    torch.set_num_threads(1)
    FOLDER.append(folder)
    if groups == "nodes":
        GROUPS.append(hvdp.node_groups())
        only = Scenarios()
        only(members)
        only.run(folder, hvd.rank())
    else:
        GROUPS.append(hvdp.rank_groups(json.loads(groups)))
        scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
