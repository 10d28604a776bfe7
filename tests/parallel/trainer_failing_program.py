"""Training by a trainer, of which rank 1 fails in its third step; see ``test_trainers.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import hvd_periodic.torch as hvdp
from tests.parallel.trainer_ranks import Quadratic, begin


class Fails(Quadratic):
    """Fails on one rank."""

    steps = 0

    def forward(self, labels: Any) -> Any:
        self.steps += 1
        if self.steps == 3 and self.rank == 1:
            raise ArithmeticError("on purpose, on rank 1")
        return self.loss()


class FailsWithDictionary(Fails):
    """The same, as transformers wants models: they return more than a loss."""

    def forward(self, labels: Any) -> Any:
        return {"loss": super().forward(labels)}


def periodic(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Any:
    return hvdp.ModelAverageOptimizer(optimizer, model, 4)


def lightning(folder: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from hvd_periodic.torch.lightning import PeriodicCallback, PeriodicStrategy

    rank, size = begin()
    net = Fails(rank)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch)

        def configure_optimizers(self) -> Any:
            return periodic(net.sgd(), self)

    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy=PeriodicStrategy(), callbacks=[PeriodicCallback()], max_epochs=1, **options)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(20 * size)))


def huggingface(folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from hvd_periodic.torch.huggingface import PeriodicTrainerCallback

    rank, size = begin(folder)
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[], per_device_train_batch_size=1)
    data = [{"labels": torch.zeros(1)}] * 20 * size
    net = FailsWithDictionary(rank)
    Trainer(net, arguments, train_dataset=data, callbacks=[PeriodicTrainerCallback(periodic)]).train()


def ignite(folder: Path) -> None:
    from ignite.engine import create_supervised_trainer

    from hvd_periodic.torch.ignite import PeriodicHandler

    rank, _ = begin()
    net = Fails(rank)
    optimizer = periodic(net.sgd(), net)
    batch = torch.zeros(1), torch.zeros(1)
    trainer = create_supervised_trainer(net, optimizer, lambda loss, _: loss)
    PeriodicHandler(net, optimizer).attach(trainer)
    trainer.run([batch] * 20)


if __name__ == "__main__":
    {"lightning": lightning, "huggingface": huggingface, "ignite": ignite}[sys.argv[2]](Path(sys.argv[1]))
