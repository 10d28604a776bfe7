"""Checkpoints of PyTorch jobs, saved and loaded by ranks of the same number and of others.

mpirun -np 2 python -m tests.parallel.checkpoint_scenarios FOLDER SHARED
"""

from __future__ import annotations

import errno
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hvd_periodic.torch as hvdp
from hvd_periodic.centers import saved_states
from hvd_periodic.checkpoints import files
from tests.conftest import PATIENCE
from tests.parallel.program import Scenarios, attempt, repeated
from tests.parallel.scenarios import bits
from tests.parallel.torch_job import WITHOUT_HOROVOD, hvd

scenario = Scenarios()

SHARED = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
"""What jobs leave for others."""

SAVED, END = 5, 11
"""Steps at the save, which is in the middle of a period of 3, and at the end."""

OF_HOROVOD = ("distributed", "post-local")
"""Cases around an optimizer of Horovod's own."""

SOME = ("agn", "agn root", "agn sharded", "agn fragments", "agn fragments sharded", "average overlap")
"""Cases without Horovod of every run, which has the others over Horovod."""

REPEATED = ("easgd adam", "diloco fragments")
"""Cases of two choices that other cases of every run have each."""


def network() -> torch.nn.Module:
    """Return a model that differs between ranks, with statistics and a parameter that is frozen."""
    torch.manual_seed(17 + hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    model[3].bias.requires_grad_(False)
    return model


def sgd(model: torch.nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: torch.nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


def groups() -> Any:
    return hvdp.rank_groups([[0, 1], [2]] if hvd.size() == 3 else [[rank] for rank in range(hvd.size())])


def distributed(model: torch.nn.Module) -> Any:
    found = groups()
    inner = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), process_set=found.local)
    return hvdp.ModelAverageOptimizer(inner, model, 3, process_set=found.cross)


def levels(model: torch.nn.Module) -> Any:
    inner = hvdp.ElasticAverageOptimizer(sgd(model), model, 2, process_set=groups().local)
    return hvdp.ModelAverageOptimizer(inner, model, 4)


def after_a_synchronous_phase(model: torch.nn.Module) -> Any:
    schedule = hvdp.PostLocal(7, 3)
    return hvdp.ModelAverageOptimizer(hvd.DistributedOptimizer(sgd(model), model.named_parameters()), model, schedule)


CASES: dict[str, Callable[[torch.nn.Module], Any]] = {
    "easgd": lambda m: hvdp.ElasticAverageOptimizer(sgd(m), m, 3, rho=0.01),
    "easgd adam": lambda m: hvdp.ElasticAverageOptimizer(adam(m), m, 3),
    "average": lambda m: hvdp.ModelAverageOptimizer(adam(m), m, 3, optimizer_state="average"),
    "agn": lambda m: hvdp.AGNOptimizer(adam(m), m, 3),
    "agn root": lambda m: hvdp.AGNOptimizer(sgd(m), m, 3, center="root", root_rank=hvd.size() - 1),
    "agn sharded": lambda m: hvdp.AGNOptimizer(adam(m), m, 3, center="sharded"),
    "diloco sharded": lambda m: hvdp.PeriodicOptimizer(adam(m), m, hvdp.DiLoCo(), 3, center="sharded"),
    "diloco fragments": lambda m: hvdp.PeriodicOptimizer(sgd(m), m, hvdp.DiLoCo(), 3, fragments=2),
    "agn fragments": lambda m: hvdp.AGNOptimizer(adam(m), m, 3, fragments=2),
    "agn fragments sharded": lambda m: hvdp.AGNOptimizer(adam(m), m, 3, fragments=2, center="sharded"),
    "slowmo": lambda m: hvdp.PeriodicOptimizer(sgd(m), m, hvdp.SlowMo(), 3),
    "bmuf overlap": lambda m: hvdp.PeriodicOptimizer(sgd(m), m, hvdp.BMUF(), 3, overlap="period"),
    "average overlap": lambda m: hvdp.ModelAverageOptimizer(sgd(m), m, 3, overlap=2, fragments=2),
    "int8": lambda m: hvdp.ModelAverageOptimizer(sgd(m), m, 3, compression=hvdp.Compression.int8),
    "topk": lambda m: hvdp.PeriodicOptimizer(sgd(m), m, hvdp.DiLoCo(), 3, compression=hvdp.Compression.topk(0.1)),
    "levels": levels,
    "distributed": distributed,
    "post-local": after_a_synchronous_phase,
}
CASES = {name: make for name, make in CASES.items() if not (WITHOUT_HOROVOD and name in OF_HOROVOD)}
FOLLOWED = [name for name in CASES if repeated(name) or ((name in SOME) == WITHOUT_HOROVOD and name not in REPEATED)]
"""Cases that go on to the bit, and among others."""


def train(model: torch.nn.Module, optimizer: Any, first: int, last: int, scheduler: Any = None) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        inputs = torch.randn(8, 3, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :2]).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def everything(model: torch.nn.Module, optimizer: Any) -> list[str]:
    """Return digests of the replica, the local optimizer and the center."""
    inner = optimizer
    while hasattr(inner, "synchronizer"):
        inner = inner.inner
    state = [v for s in inner.state.values() for _, v in sorted(s.items()) if isinstance(v, torch.Tensor)]
    center = hvdp.center_state_dict(model, optimizer)
    return [bits(list(model.state_dict().values())), bits(state), bits(list(center.values()))]


def made(name: str) -> tuple[Any, Any, Any]:
    model = network()
    optimizer = CASES[name](model)
    inner = optimizer
    while hasattr(inner, "synchronizer"):
        inner = inner.inner
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(inner, [3, 7], 0.5)


class Held:
    """Holds writers back until they are let go; or lets one fail."""

    def __init__(self, failing: bool = False) -> None:
        self.go, self.failing = threading.Event(), failing

    def __enter__(self) -> Held:
        self._write = files._Digesting.write

        def write(stream: Any, data: Any) -> int:
            if threading.current_thread() is not threading.main_thread():
                self.go.wait(100 * PATIENCE)
                if self.failing:
                    raise OSError(errno.ENOSPC, "No space left on device")
            return self._write(stream, data)

        files._Digesting.write = write  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        files._Digesting.write = self._write  # type: ignore[method-assign]


@scenario
def beside_collectives_without_names() -> Any:
    """The writer of one rank is held back, that of the others is not, while ranks take means: these, and the sets.

    This is the first scenario: each rank numbers its collectives without names by itself, in Horovod, and counts all
    that it has issued. Exchanges among some of the ranks would make them differ.
    """
    path, means = folder("unnamed"), []
    model, optimizer, _ = made("easgd")
    with Held() as held:
        if hvd.rank() > 0:
            held.go.set()
        hvdp.save(path, model, optimizer, background=True)
        for step in range(20):
            means.append(float(hvd.allreduce(torch.tensor(float(step + hvd.rank())))))
            train(model, optimizer, step, step + 1)
        held.go.set()
    meanwhile = len(list(path.glob("*/manifest.json")))
    optimizer.finalize()
    return [means, meanwhile, len(list(path.glob("*/manifest.json")))]


@scenario
def exact() -> Any:
    """Of every case: the steps and values that are loaded; everything at the end, of training that was not
    interrupted and of training that was; and the center when it was saved.
    """
    results = {}
    for number, name in enumerate(FOLLOWED):
        path = SHARED / f"{hvd.size()}" / name
        model, optimizer, scheduler = made(name)
        train(model, optimizer, 0, SAVED, scheduler)
        center = hvdp.center_state_dict(model, optimizer)
        options = {"background": number % 2 == 0, "keep": 2}
        saving = hvdp.save(path, model, optimizer, scheduler=scheduler, epoch=number, seen=(name, [1.5]), **options)
        train(model, optimizer, SAVED, END, scheduler)
        saving.wait()
        uninterrupted = everything(model, optimizer)
        model, optimizer, scheduler = made(name)
        values = hvdp.load(path, model, optimizer, scheduler=scheduler, epoch=-1, new="default")
        steps = optimizer.synchronizer.local_steps
        train(model, optimizer, SAVED, END, scheduler)
        results[name] = {
            "values": [values["epoch"], values["new"], values["seen"][0], type(values["seen"]).__name__, steps],
            "ends": [uninterrupted, everything(model, optimizer)],
            "rates": [group["lr"] for group in optimizer.param_groups],
            "center": bits([center[name] for name, _ in model.named_parameters()]),
        }
        optimizer.finalize()
    return results


@scenario
def among_others() -> Any:
    """Of what jobs of other numbers of ranks have saved: what is loaded, at which step, and how training goes on."""
    results = {}
    for saved in sorted(SHARED.iterdir()):
        for name in [] if saved.name == str(hvd.size()) else FOLLOWED:
            model, optimizer, scheduler = made(name)
            values = hvdp.load(saved / name, model, optimizer, scheduler=scheduler, epoch=-1)
            loaded = bits(list(model.parameters()))
            counters = optimizer.synchronizer.counters
            error = attempt(lambda: train(model, optimizer, SAVED, END, scheduler))  # noqa: B023
            optimizer.finalize()
            with optimizer.center():
                end = bits(list(model.parameters()))
            results[f"{saved.name} {name}"] = [loaded, values["epoch"], counters.local_steps, error, end]
    return results


def saved_by_all(path: Path, name: str = "easgd", steps: tuple[int, ...] = (SAVED,)) -> None:
    """Save at some steps."""
    model, optimizer, _ = made(name)
    last = 0
    for step in steps:
        train(model, optimizer, last, step)
        hvdp.save(path, model, optimizer, epoch=step)
        last = step
    optimizer.finalize()


def folder(name: str, own: bool = False) -> Path:
    """Return a folder for all ranks, or one of this rank, as if on a disk of its own."""
    return SHARED.with_name(f"{SHARED.name}-{hvd.size()}-{name}") / (str(hvd.rank()) if own else "")


@scenario
def the_file_of_the_root_alone() -> Any:
    """Visible to all ranks, and to the root alone; loaded there alone, with and without the broadcasts of a script.

    What is reported: steps and values; replicas before and after a step; whether the first update was left out.
    """
    path, results = folder("root"), {}
    saved_by_all(path)
    if hvd.rank() == 0:
        for file in path.glob("*/rank-*.npz"):
            if file.name != "rank-0.npz":
                file.unlink()
    hvd.barrier()
    broadcasts = () if WITHOUT_HOROVOD else ("broadcasts",)
    for case in ("visible", "not visible", "on the root", *broadcasts):
        model, optimizer, _ = made("easgd")
        values: dict[str, Any] = {}
        if case == "visible" or hvd.rank() == 0:
            values = hvdp.load(path, model, optimizer, epoch=-1)
        elif case == "not visible":
            values = hvdp.load(path / "elsewhere", model, optimizer, epoch=-1)
        if case == "broadcasts":
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        skipped = optimizer.synchronizer.counters.skipped_updates
        train(model, optimizer, SAVED, SAVED + 1)
        counters = optimizer.synchronizer.counters
        held = hvdp.center_state_dict(model, optimizer)
        center = bits([held[name] for name, _ in model.named_parameters()])
        results[case] = [values.get("epoch"), counters.local_steps, counters.skipped_updates - skipped, center]
        optimizer.finalize()
    return results


@scenario
def damage() -> Any:
    """The file of the last rank was altered: what load() and the step after it raise; the same of an older set."""
    path, results = folder("damage"), []
    saved_by_all(path, steps=(2, SAVED))
    last = path / f"000002-step{SAVED}" / f"rank-{hvd.size() - 1}.npz"
    if hvd.rank() == 0:
        data = bytearray(last.read_bytes())
        data[len(data) // 2] ^= 4
        last.write_bytes(data)
    hvd.barrier()
    for step in (None, 2):
        model, optimizer, _ = made("easgd")
        results.append(attempt(lambda: hvdp.load(path, model, optimizer, at_step=step)))  # noqa: B023
        results.append(attempt(lambda: train(model, optimizer, 0, 1)))  # noqa: B023
    return results


@scenario
def disks_of_their_own() -> Any:
    """Every rank sees a disk of its own. What is loaded; and where a crash has come between two disks."""
    path = folder("disks", own=True)
    saved_by_all(path, steps=(2, SAVED))
    model, optimizer, _ = made("easgd")
    exact = [hvdp.load(path, model, optimizer)["epoch"], attempt(lambda: train(model, optimizer, SAVED, SAVED + 1))]
    seen = sorted(file.name for file in path.glob("*/*"))
    if hvd.rank() == hvd.size() - 1:
        (path / f"000002-step{SAVED}" / "manifest.json").unlink()
    hvd.barrier()
    model, optimizer, _ = made("easgd")
    between = [hvdp.load(path, model, optimizer)["epoch"], attempt(lambda: train(model, optimizer, SAVED, SAVED + 1))]
    model, optimizer, _ = made("easgd")
    older = [hvdp.load(path, model, optimizer, at_step=2)["epoch"], attempt(lambda: train(model, optimizer, 2, 3))]
    return {"exact": exact, "seen": seen, "between": between, "older": older}


@scenario
def around_the_beginning() -> Any:
    """Nothing is there; a save before training; a save of what was loaded; one inside of ``center()``."""
    path, results = folder("beginning"), {}
    for name in [name for name in ("easgd", "average", "agn sharded", "distributed") if name in CASES]:
        here = path / name
        model, optimizer, _ = made(name)
        results[name] = [hvdp.load(here, model, optimizer, epoch=0)]
        hvdp.save(here, model, optimizer)
        start = bits(list(model.parameters()))
        model, optimizer, _ = made(name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        hvdp.load(here, model, optimizer)
        results[name].append(bits(list(model.parameters())) == start)
        hvdp.save(here, model, optimizer)
        model, optimizer, _ = made(name)
        hvdp.load(here, model, optimizer)
        train(model, optimizer, 0, SAVED)
        results[name].append(optimizer.synchronizer.local_steps)

        def inside(here: Path = here, model: Any = model, optimizer: Any = optimizer) -> None:
            with optimizer.center():
                hvdp.save(here, model, optimizer)

        results[name].append(attempt(inside))
        optimizer.finalize()
    return results


class Watching:
    """Notes which sets are complete when it is asked for its state."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, []

    def state_dict(self) -> dict[str, Any]:
        self.seen.append(len(list(self.path.glob("*/manifest.json"))))
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@scenario
def in_the_background() -> Any:
    """While writers are held back, ranks exchange; then what was saved is what was there at first.

    Exchanges and sets meanwhile; sets that a save finds which waits for the one before; both ends.
    """
    path = folder("background")
    model, optimizer, _ = made("easgd")
    train(model, optimizer, 0, SAVED)
    rounds = optimizer.synchronizer.rounds
    with Held() as held:
        saving = hvdp.save(path, model, optimizer, background=True)
        train(model, optimizer, SAVED, END)
        meanwhile = [optimizer.synchronizer.rounds - rounds, len(list(path.glob("*/manifest.json")))]
        held.go.set()
        watching = Watching(path)
        second = hvdp.save(path, model, optimizer, background=True, watching=watching)
        ends = [everything(model, optimizer)]
    saving.wait()
    second.wait()
    optimizer.finalize()
    model, optimizer, _ = made("easgd")
    hvdp.load(path, model, optimizer, at_step=SAVED)
    train(model, optimizer, SAVED, END)
    ends.append(everything(model, optimizer))
    optimizer.finalize()
    return [meanwhile, watching.seen, ends]


@scenario
def failing_in_the_background() -> Any:
    """The thread of the last rank cannot write: the errors of waiting, and of the next save; then one that works."""
    path, results = folder("failing"), []
    model, optimizer, _ = made("easgd")
    for waits in (True, False):
        with Held(failing=hvd.rank() == hvd.size() - 1) as held:
            held.go.set()
            saving = hvdp.save(path, model, optimizer, background=True)
            if waits:
                results.append(attempt(saving.wait))
            else:
                results.append(attempt(lambda: hvdp.save(path, model, optimizer)))
    results.append(attempt(lambda: hvdp.save(path, model, optimizer, background=True).wait()))
    optimizer.finalize()
    hvd.barrier()
    return [*results, sorted(file.name for file in path.glob("*/*"))]


@scenario
def in_different_places() -> Any:
    """The last rank is a step behind when it saves; or exchanges, while the others save."""
    results = []
    for steps in (4, 6):
        model, optimizer, _ = made("easgd")
        train(model, optimizer, 0, 4)
        last = hvd.rank() == hvd.size() - 1

        def save(last: bool = last, steps: int = steps, model: Any = model, optimizer: Any = optimizer) -> None:
            train(model, optimizer, 4, steps if last else 5)
            hvdp.save(folder("places"), model, optimizer)

        results.append(attempt(save))
    return results


@scenario
def a_loop_of_its_own() -> Any:
    """A synchronizer around any loop, with the local optimizer among what is saved besides: both ends."""
    ends = []
    for resumed in (False, True):
        model = network()
        local = adam(model)
        synchronizer = hvdp.Synchronizer(model, hvdp.AGN(), 3, optimizer=local)
        first = hvdp.load(folder("loop"), model, synchronizer, local=local, step=0)["step"] if resumed else 0
        for step in range(first, END):
            if step == SAVED and not resumed:
                hvdp.save(folder("loop"), model, synchronizer, local=local, step=step)
            inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
            local.zero_grad()
            model(inputs).square().mean().backward()
            synchronizer.prepare_gradients()
            local.step()
            synchronizer.step()
        ends.append([bits(list(model.parameters())), first])
        synchronizer.finalize()
    return ends


@scenario
def asynchronous() -> Any:
    """Each rank has its own number of steps: those that were saved and loaded."""
    steps = []
    for resumed in (False, True):
        model = network()
        optimizer = hvdp.AGNOptimizer(sgd(model), model, 3, asynchronous=True)
        if resumed:
            hvdp.load(folder("asynchronous"), model, optimizer)
        else:
            train(model, optimizer, 0, 4 + hvd.rank())
            optimizer.finalize()
            hvdp.save(folder("asynchronous"), model, optimizer)
        steps.append(optimizer.synchronizer.local_steps)
        center = hvdp.center_state_dict(model, optimizer)
        steps.append(bits([center[name] for name, _ in model.named_parameters()]))
        train(model, optimizer, 0, 2)
        optimizer.finalize()
    return steps


def main() -> None:
    hvd.init(process_sets="dynamic")
    saved_states._SMALL_BYTES = 16  # So that also the states of these models are not gathered as a whole.
    scenario.run(Path(sys.argv[1]), hvd.rank(), mpi=hvd.mpi_enabled())
    # The last thing that this process does: it may end, and Horovod with it, when all have written.
    model, optimizer, _ = made("easgd")
    train(model, optimizer, 0, 2)
    shutil.rmtree(folder("end", own=True), ignore_errors=True)
    hvdp.save(folder("end", own=True), model, optimizer, big=torch.ones(2_000_000), background=True)


if __name__ == "__main__":
    main()
