"""Training by Lightning, as each rank sees it.

mpirun -np 2 python -m tests.parallel.lightning_scenarios FOLDER
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import hvd_periodic.torch as hvdp
from hvd_periodic.torch.lightning import PeriodicCallback, PeriodicStrategy
from tests import oracle
from tests.parallel import lightning_finetuning
from tests.parallel.lightning_ranks import CHECKPOINTS, QUIET, batches, trainer
from tests.parallel.program import Scenarios, attempt, crossed
from tests.parallel.trainer_ranks import PERIOD, Batches, Quadratic, begin, distance, easgd

scenario = Scenarios()
FOLDER = Path(sys.argv[1])
RANK, SIZE = begin()


class Module(LightningModule):
    """The oracle's loss; what validation sees of the model is what it logs."""

    def __init__(self, rank: int = RANK, make: Callable[..., Any] = hvdp.ElasticAverageOptimizer, **options: Any):
        super().__init__()
        self.net, self.make, self.options = Quadratic(rank), make, options
        self.module = torch.nn.Identity()  # As an average of weights calls the model that it averages.
        self.seen: list[list[float]] = []
        self.steps: list[int] = []
        self.mean = MeanMetric()

    def training_step(self, batch: Any, index: int) -> Any:
        return self.net.loss()

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.append(self.net.x.tolist())
        self.log("total", self.net.x.sum().float(), sync_dist=True)
        self.log("rank", float(RANK), sync_dist=True, reduce_fx="sum")
        self.mean.update(float(RANK))
        self.log("metric", self.mean)

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> list[float]:
        return self.net.x.tolist()

    def configure_optimizers(self) -> Any:
        self.optimizer = self.make(self.net.sgd(), self, PERIOD, **self.options)
        return self.optimizer


@scenario
def who_is_who() -> dict[str, Any]:
    """Ranks, and what Lightning gives each of the data."""
    seen: list[int] = []

    class Looks(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            seen.extend(batch.tolist())
            return super().training_step(batch, index)

    made = trainer()
    made.fit(Looks(), DataLoader(range(6 * SIZE), batch_size=2))
    names = ("global_rank", "world_size", "local_rank", "node_rank", "is_global_zero")
    return {"seen": seen} | {name: getattr(made, name) for name in names}


@scenario
def goes_where_the_oracle_goes() -> dict[str, Any]:
    """Thirteen steps: exchanges at 4, 8, 12 and the end; validation after 6 and 12, twice a step later."""
    module, made = Module(), trainer(val_check_interval=6)
    made.fit(module, batches(13), batches(1))
    shown = [easgd(SIZE, set(range(PERIOD, steps + 1, PERIOD)), steps)[1] for steps in (6, 12)]
    _, center = easgd(SIZE, {4, 8, 12, 13}, 13)
    logged = {name: float(value) for name, value in made.callback_metrics.items()}
    tested = made.test(module, batches(1), verbose=False)[0]
    predicted = made.predict(module, batches(1))[0]
    return {
        "validated": [distance(a, b) for a, b in zip(module.seen, shown, strict=False)],
        "looks": len(module.seen),
        "logged": abs(logged["total"] - sum(shown[-1])),
        "ranks": logged["rank"],
        "metric": logged["metric"],
        "end": distance(module.net.x.tolist(), center),
        "tested": abs(tested["total"] - sum(center)),
        "predicted": distance(predicted, center),
        "steps": made.global_step,
    }


@scenario
def centers_that_are_elsewhere() -> dict[str, Any]:
    """All ranks read a center in shards or on the root together, also where a checkpoint is written."""
    found = {}
    for center in ("root", "sharded"):
        module = Module(center=center)
        made = trainer(ModelCheckpoint(FOLDER / center, every_n_train_steps=6), val_check_interval=6, **CHECKPOINTS)
        made.fit(module, batches(7), batches(1))
        _, then = easgd(SIZE, {4}, 6)
        saved = torch.load(FOLDER / center / "epoch=0-step=6.ckpt")["state_dict"]["net.x"]
        found[center] = [distance(module.seen[0], then), distance(saved.tolist(), then)]
    return found


@scenario
def files() -> dict[str, Any]:
    """Each rank asks for a folder of its own; what is written is the root's."""
    own = FOLDER / f"of rank {RANK}"
    callbacks = [ModelCheckpoint(own, monitor="total", save_last=True, save_top_k=-1)]
    logs = CSVLogger(own)
    made = trainer(*callbacks, max_epochs=2, logger=logs, log_every_n_steps=1, **CHECKPOINTS)
    made.fit(Module(), batches(5), batches(1))
    made.strategy.barrier()
    found = sorted(str(file.relative_to(own)) for file in own.rglob("*") if file.is_file())
    table = next(own.rglob("metrics.csv"), None)
    saved = sorted(torch.load(FOLDER / "of rank 0" / "last.ckpt")["state_dict"]["net.x"].tolist())
    _, center = easgd(SIZE, {4, 8}, 10)
    return {
        "files": found,
        "exchanges": "exchange/rounds" in table.read_text() if table else None,
        "saved": distance(saved, sorted(center)),
    }


def bits(module: Module) -> list[str]:
    """Replica, center and momentum."""
    center = module.optimizer.synchronizer.center_tensors()
    momentum = [state["momentum_buffer"] for state in module.optimizer.state.values()]
    return [tensor.detach().numpy().tobytes().hex() for tensor in (module.net.x, *center, *momentum)]


class Ends(Callback):
    """Notes what a rank has before training is settled."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.bits = bits(pl_module)


def resumed(folder: Path, damage: Callable[[], object] = lambda: None, every_rank: bool = True) -> list[Any]:
    """Two epochs and two; return what a rank has at the end, and at the second start, and the number of steps."""
    parts, started = Ends(), []
    checkpoint = ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=True)
    strategy = PeriodicStrategy(every_rank=every_rank)
    trainer(checkpoint, strategy=strategy, max_epochs=2, **CHECKPOINTS).fit(Module(rho=0.01), batches(5))
    again = Module(rho=0.01)

    class Starts(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            started.extend(pl_module.net.x.tolist())

    strategy.barrier()
    damage()
    strategy = PeriodicStrategy(every_rank=every_rank)
    made = trainer(parts, Starts(), strategy=strategy, max_epochs=4)
    made.fit(again, batches(5), ckpt_path=folder / "epoch=1-step=10.ckpt")
    return [parts.bits, started, made.global_step]


@scenario
def resumes_to_the_bit() -> dict[str, Any]:
    """Four epochs at once, and two and two."""
    whole = Ends()
    trainer(whole, max_epochs=4).fit(Module(rho=0.01), batches(5))
    parts, _, steps = resumed(FOLDER / "exact")
    own = FOLDER / "exact" / "epoch=1-step=10.ckpt.ranks" / f"{RANK}.ckpt"
    folders = sorted(folder.name for folder in own.parent.parent.glob("*.ranks"))
    return {"equal": whole.bits == parts, "steps": steps, "own": own.is_file(), "folders": folders}


@scenario
def goes_on_from_the_center() -> dict[str, Any]:
    """Where the root alone has saved, or the file of a rank is lost."""
    found, name = {}, "epoch=1-step=10.ckpt"
    lost = FOLDER / "lost" / f"{name}.ranks" / "1.ckpt"
    for case, every_rank in (("root", False), ("lost", True)):
        _, started, _ = resumed(FOLDER / case, lambda: lost.unlink(missing_ok=True), every_rank)
        found[case] = started == torch.load(FOLDER / case / name)["state_dict"]["net.x"].tolist()
    return found | {"files of ranks": (FOLDER / "root" / f"{name}.ranks").exists()}


@scenario
def accumulates() -> list[Any]:
    """Ten batches, three to a step: four steps, of which the last is of one batch."""
    module, made = Module(), trainer(accumulate_grad_batches=3)
    made.fit(module, batches(10))
    return [made.global_step, module.optimizer.synchronizer.local_steps, module.optimizer.synchronizer.rounds]


class Averages(Callback):
    """Averages the replica of this rank by itself, as a callback of Lightning does."""

    def __init__(self, kind: str) -> None:
        self.kind, self.own, self.count = kind, torch.zeros(len(oracle.START), dtype=torch.float64), 0
        self.validated: list[list[float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *of_batch: Any) -> None:
        if self.kind == "ema":
            self.update(pl_module, 0.1)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.kind == "swa":
            self.update(pl_module, 1 / (self.count + 1))

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.validated.append(self.of_all(trainer))

    def update(self, module: Any, share: float) -> None:
        self.own += (module.net.x.detach() - self.own) * (share if self.count else 1)
        self.count += 1

    def of_all(self, trainer: Trainer) -> list[float]:
        return torch.stack(trainer.strategy.gather(self.own)).mean(0).tolist()


@scenario
def averages_weights() -> dict[str, Any]:
    """The mean over ranks of what each has averaged, wherever the callback is in the list: seen, saved and left."""
    found = {}
    for kind, order in crossed(("ema", "swa"), ("first", "last")):
        average = EMAWeightAveraging(decay=0.9) if kind == "ema" else StochasticWeightAveraging(0.05, 1)
        folder, own, module = FOLDER / f"{kind} {order}", Averages(kind), Module()
        listed = [average, PeriodicCallback()] if order == "first" else [PeriodicCallback(), average]
        made = Trainer(
            strategy=PeriodicStrategy(),
            callbacks=[*listed, own, ModelCheckpoint(folder)],
            **(QUIET | {"max_epochs": 3} | CHECKPOINTS),
        )
        made.fit(module, batches(5), batches(1))
        made.save_checkpoint(folder / "end.ckpt")
        end, states = own.of_all(made), {}
        for file in folder.glob("*.ckpt"):
            states[file.name] = torch.load(file, weights_only=False)["state_dict"]["net.x"].tolist()
        saved = distance(states["epoch=2-step=15.ckpt"], end) if kind == "ema" else 0.0
        seen = [distance(a, b) for a, b in zip(module.seen, own.validated, strict=True)] if kind == "ema" else []
        found[f"{kind} {order}"] = {
            "errors": [distance(module.net.x.tolist(), end), distance(states["end.ckpt"], end), saved, *seen],
            "left": module.net.x.tolist(),
            "looks": len(module.seen),
        }
    return found


@scenario
def averages_go_on() -> dict[str, Any]:
    """Three epochs at once, and two and one, with checkpoints at the same steps."""
    left = []
    for epochs in ((3,), (2, 3)):
        folder = FOLDER / f"averages {epochs}"
        for last in epochs:
            module, strategy = Module(), PeriodicStrategy(every_rank=True)
            callbacks = [EMAWeightAveraging(decay=0.9), ModelCheckpoint(folder)]
            made = trainer(*callbacks, strategy=strategy, max_epochs=last, **CHECKPOINTS)
            saved = None if last == epochs[0] else folder / "epoch=1-step=10.ckpt"
            made.fit(module, batches(5), ckpt_path=saved, weights_only=False)
        left.append(module.net.x.tolist())
    return {"equal": left[0] == left[1], "difference": distance(*left)}


class Net(Module):
    """A model that autocast has something to do for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layer = torch.nn.Linear(4, 1)
        self.types: set[str] = set()
        self.batch = 0

    def training_step(self, batch: Any, index: int) -> Any:
        out = self.layer(torch.ones(2, 4) * (1 + RANK))
        self.types.add(str(out.dtype))
        self.batch += 1
        return self.spoiled(out.float().square().mean())

    def spoiled(self, loss: torch.Tensor) -> Any:
        return loss

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.layer.parameters(), lr=0.01)
        self.optimizer = hvdp.ModelAverageOptimizer(sgd, self.layer, PERIOD)
        return self.optimizer


@scenario
def precisions() -> dict[str, Any]:
    found = {}
    for precision in ("bf16-mixed", "bf16-true", "16-mixed"):
        module = Net()
        trainer(precision=precision).fit(module, batches(9), batches(1))
        state = module.optimizer.synchronizer.center_tensors()
        found[precision] = [sorted(module.types), sorted({str(value.dtype) for value in state})]
    return found


@scenario
def a_batch_that_overflows() -> list[int]:
    """Under a GradScaler, on one rank: the iteration counts, without an update."""

    class Overflows(Net):
        def spoiled(self, loss: torch.Tensor) -> Any:
            return loss * (torch.inf if RANK == 1 and self.batch == 3 else 1)

    module = Overflows()
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    trainer(plugins=[scaled]).fit(module, batches(9))
    counters = module.optimizer.synchronizer.counters
    return [counters.local_steps, counters.skipped_updates, counters.rounds]


@scenario
def stops_early_on_all() -> list[int]:
    """One rank alone sees nothing improve."""

    class OfOne(Module):
        def validation_step(self, batch: Any, index: int) -> None:
            self.log("own", float(self.trainer.current_epoch) if RANK == 1 else -float(self.trainer.current_epoch))

    module, made = OfOne(), trainer(EarlyStopping("own", patience=2), max_epochs=20)
    made.fit(module, batches(3), batches(1))
    return [made.current_epoch, made.global_step, module.optimizer.synchronizer.local_steps]


@scenario
def uneven_data() -> dict[str, Any]:
    """Ranks have other numbers of batches, of which one knows and one does not, for two epochs with validation."""
    found = {}
    for kind, data in (("iterable", Batches(5 + 3 * RANK)), ("counted", TensorDataset(torch.zeros(5 + 3 * RANK, 1)))):
        module, made = Module(), trainer(max_epochs=2, use_distributed_sampler=False)
        made.fit(module, DataLoader(data, batch_size=1), batches(1))
        synchronizer = module.optimizer.synchronizer
        found[kind] = [synchronizer.local_steps, made.global_step, module.net.x.tolist(), len(module.seen)]
    return found


@scenario
def ends_at_different_batches() -> list[Any]:
    """Ranks come to ``max_steps`` in different epochs: one is at its end while the other validates."""

    def fit() -> None:
        made = trainer(max_steps=6, max_epochs=4, use_distributed_sampler=False)
        made.fit(Module(), DataLoader(Batches(5 + 3 * RANK), batch_size=None), batches(1))

    said = attempt(fit)
    module, made = Module(), trainer(max_steps=6, max_epochs=5)
    made.fit(module, batches(5))
    return [said, made.global_step, distance(module.net.x.tolist(), easgd(SIZE, {4, 6}, 6)[1])]


@scenario
def cross_purposes() -> str:
    """A rank validates where the other trains on."""
    interval = 3 if RANK == 1 else 1.0
    return attempt(lambda: trainer(val_check_interval=interval).fit(Module(), batches(9), batches(1)))


def two_levels(inner: Any, model: Any, period: int) -> Any:
    return hvdp.ModelAverageOptimizer(hvdp.ModelAverageOptimizer(inner, model, period), model, 2 * period)


def misfits() -> dict[str, Callable[[], object]]:
    class Plain(Module):
        def configure_optimizers(self) -> Any:
            return self.net.sgd()

    class Normed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = torch.nn.BatchNorm1d(2)

    def fit(made: Trainer, module: Any = None) -> Callable[[], object]:
        return lambda: made.fit(module or Module(), batches(2))

    ddp = DDPStrategy(process_group_backend="gloo", cluster_environment=PeriodicStrategy().cluster_environment)
    ddp.setup_distributed = lambda: None  # type: ignore[method-assign]
    return {
        "ddp": fit(trainer(strategy=ddp, devices=2)),
        "auto": fit(trainer(strategy="auto", devices=1)),
        "no callback": fit(Trainer(strategy=PeriodicStrategy(), **QUIET)),
        "plain": fit(trainer(), Plain()),
        "pruning": fit(trainer(ModelPruning("l1_unstructured", amount=0.5)), Normed()),
        "weight averaging": fit(trainer(StochasticWeightAveraging(0.05)), Normed()),
        "finetuning": fit(trainer(lightning_finetuning.thawing()), lightning_finetuning.Module(two_levels)),
        "batch norm": fit(trainer(sync_batchnorm=True)),
        "gradients": lambda: trainer().strategy.all_gather(torch.ones(1), sync_grads=True),
        "reduction": lambda: trainer().strategy.reduce(torch.ones(1), reduce_op="product"),
    }


@scenario
def what_is_refused() -> dict[str, str]:
    return {name: attempt(function) for name, function in misfits().items()}


scenario.include(lightning_finetuning.scenario)

if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(RANK)
    scenario.run(FOLDER, RANK)
