"""Layers that callbacks of Lightning thaw in mid-run; part of the jobs of ``lightning_scenarios.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from torch.utils.data import DataLoader

import hvd_periodic.torch as hvdp
from hvd_periodic.torch.lightning import PeriodicStrategy
from tests.parallel.finetuning import Averaging, Net, off, sgd, values
from tests.parallel.lightning_ranks import CHECKPOINTS, batches, trainer
from tests.parallel.program import Scenarios, attempt
from tests.parallel.torch_job import hvd
from tests.parallel.trainer_ranks import PERIOD, Batches

scenario = Scenarios()

EPOCH, THAWED = 5, 2
"""Batches in an epoch, and the epoch at whose start the backbone is thawed."""


class Module(LightningModule):
    """The model in Lightning; validation sees the center."""

    def __init__(self, make: Callable[..., Any] = hvdp.ModelAverageOptimizer, **options: Any) -> None:
        super().__init__()
        self.net, self.make, self.options = Net(hvd.rank(), hvd.rank()), make, options
        self.seen: list[list[float]] = []

    @property
    def backbone(self) -> torch.nn.Module:
        """What a callback of Lightning freezes and thaws."""
        return self.net.backbone

    def training_step(self, batch: Any, index: int) -> Any:
        return self.net.loss()

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.append(values(self.net))

    def configure_optimizers(self) -> Any:
        self.optimizer = self.make(sgd(self.parameters()), self, PERIOD, **self.options)
        return self.optimizer


class Normed(Module):
    """The backbone ends with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.net.backbone = torch.nn.Sequential(self.net.backbone, torch.nn.BatchNorm1d(4).double())
        self.net.inputs = torch.randn(4, 3, dtype=torch.float64)


class Finetuning(BackboneFinetuning):
    """Freezes BatchNorm, too, and with it its running statistics."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.backbone, train_bn=False)


def thawing(epoch: int = THAWED) -> Finetuning:
    """Return a callback that thaws with half the learning rate."""
    return Finetuning(epoch, lambda_func=lambda epoch: 1.0, backbone_initial_ratio_lr=0.5)


@scenario
def thawed_layers() -> dict[str, Any]:
    """Exchanges at 4, 8, 10 (where the backbone is thawed), 14, 18 and the end, with validation after each epoch."""
    expected = Averaging([Net(0, rank) for rank in range(hvd.size())])
    for model in expected.models:
        model.backbone.requires_grad_(False)
    expected.optimizers = [sgd(model.parameters()) for model in expected.models]
    start = values(expected.models[0].backbone)
    expected.train(THAWED * EPOCH)
    expected.exchange()
    expected.add(lambda model: list(model.backbone.parameters()), lr=0.05)
    expected.train(2 * EPOCH)
    expected.exchange()
    module, made = Module(), trainer(thawing(), max_epochs=4)
    made.fit(module, batches(EPOCH), batches(1))
    moved = max(abs(a - b) for a, b in zip(values(module.backbone), start, strict=True))
    return {
        "error": off(module.net, expected),
        "moved": moved,
        "frozen": module.seen[THAWED - 1][: len(start)] == start,
        "looks": len(module.seen),
        "rounds": module.optimizer.synchronizer.rounds,
    }


class Layer(BaseFinetuning):
    """Thaws one layer of the backbone."""

    def __init__(self, number: int, epoch: int) -> None:
        super().__init__()
        self.number, self.epoch = number, epoch

    @property
    def state_key(self) -> str:
        """Names what Lightning saves of it."""
        return f"layer {self.number}"

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.backbone[self.number])

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(pl_module.backbone[self.number], optimizer, lr=0.05)


def deep(net: Net, start: int) -> Net:
    """Return the model with a backbone of two layers."""
    torch.manual_seed(start)
    net.backbone = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4)).double()
    return net


@scenario
def thawed_layers_of_two_callbacks() -> dict[str, Any]:
    """Exchanges at 4, 5 (where the second layer is thawed), 9, 10 (the first), 14, 18 and the end."""
    expected = Averaging([deep(Net(0, rank), 0) for rank in range(hvd.size())])
    for model in expected.models:
        model.backbone.requires_grad_(False)
    expected.optimizers = [sgd(model.parameters()) for model in expected.models]
    for layer in (1, 0):
        expected.train(EPOCH)
        expected.exchange()
        expected.add(lambda model, layer=layer: list(model.backbone[layer].parameters()), lr=0.05)
    expected.train(2 * EPOCH)
    expected.exchange()
    module = Module()
    deep(module.net, hvd.rank())
    trainer(Layer(0, 2), Layer(1, 1), max_epochs=4).fit(module, batches(EPOCH))
    groups = [group["lr"] for group in module.optimizer.param_groups]
    return {
        "error": off(module.net, expected),
        "groups": groups,
        "rounds": module.optimizer.synchronizer.rounds,
    }


@scenario
def thawed_layers_of_all_algorithms() -> list[list[float]]:
    """One center on all ranks, wherever it is; and ranks with other numbers of batches."""
    found = []
    for make, options in (
        (hvdp.ElasticAverageOptimizer, {"center": "root"}),
        (hvdp.AGNOptimizer, {"center": "sharded"}),
        (hvdp.ModelAverageOptimizer, {"overlap": 1}),
    ):
        module, uneven = Module(make, **options), DataLoader(Batches(EPOCH + 3 * hvd.rank()), batch_size=None)
        trainer(thawing(1), max_epochs=3, use_distributed_sampler=False).fit(module, uneven, batches(1))
        found.append(values(module.net))
    return found


class Ends(Callback):
    """Notes what a rank has before training is settled."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        optimizer = pl_module.optimizer
        momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
        tensors = [*pl_module.parameters(), *pl_module.buffers(), *optimizer.synchronizer.center_tensors(), *momentum]
        self.bits = [tensor.detach().numpy().tobytes().hex() for tensor in tensors]


@scenario
def thawed_layers_go_on() -> dict[str, Any]:
    """Four epochs at once; and three, and one from the checkpoint after the thawing, in mid-period; then one more."""
    found: dict[str, Any] = {}
    whole = Ends()
    trainer(thawing(), whole, max_epochs=4).fit(Normed(), batches(EPOCH))
    for every_rank in (True, False):
        folder = Path(sys.argv[1]) / f"thawed {every_rank}"
        strategy, parts = PeriodicStrategy(every_rank=every_rank), Ends()
        checkpoint = ModelCheckpoint(folder, save_on_train_epoch_end=True)
        trainer(thawing(), checkpoint, strategy=strategy, max_epochs=3, **CHECKPOINTS).fit(Normed(), batches(EPOCH))
        module, strategy = Normed(), PeriodicStrategy(every_rank=every_rank)
        made = trainer(thawing(), parts, strategy=strategy, max_epochs=4)
        made.fit(module, batches(EPOCH), ckpt_path=folder / "epoch=2-step=15.ckpt")
        found[f"equal {every_rank}"] = parts.bits == whole.bits
        made.fit_loop.max_epochs = 5
        made.fit(module, batches(EPOCH))
        found[f"end {every_rank}"] = values(module.net)
    return found


@scenario
def layers_that_one_rank_thaws() -> str:
    return attempt(lambda: trainer(thawing(1 + hvd.rank()), max_epochs=3).fit(Module(), batches(EPOCH)))
