"""Training by a trainer, of which rank 1 fails in its third step; see ``test_trainers.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import hvd_periodic.torch as hvdp
from tests.parallel.trainer_ranks import Quadratic, begin

TRAINER = sys.argv[2]
RANK, SIZE = begin(Path(sys.argv[1]) if TRAINER == "huggingface" else None)


class Fails(Quadratic):
    """Fails on one rank."""

    steps = 0

    def forward(self, labels: Any) -> Any:
        self.steps += 1
        if self.steps == 3 and self.rank == 1:
            raise ArithmeticError("on purpose, on rank 1")
        return {"loss": self.loss()} if TRAINER == "huggingface" else self.loss()


def periodic(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Any:
    return hvdp.ModelAverageOptimizer(optimizer, model, 4)


def lightning(net: Fails) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from hvd_periodic.torch.lightning import PeriodicCallback, PeriodicStrategy

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
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(20 * SIZE)))


def huggingface(net: Fails) -> None:
    from transformers import Trainer, TrainingArguments

    from hvd_periodic.torch.huggingface import PeriodicTrainerCallback

    arguments = TrainingArguments(sys.argv[1], use_cpu=True, report_to=[], per_device_train_batch_size=1)
    data = [{"labels": torch.zeros(1)}] * 20 * SIZE
    Trainer(net, arguments, train_dataset=data, callbacks=[PeriodicTrainerCallback(periodic)]).train()


def ignite(net: Fails) -> None:
    from ignite.engine import create_supervised_trainer

    from hvd_periodic.torch.ignite import PeriodicHandler

    optimizer = periodic(net.sgd(), net)
    batch = torch.zeros(1), torch.zeros(1)
    trainer = create_supervised_trainer(net, optimizer, lambda loss, _: loss)
    PeriodicHandler(net, optimizer).attach(trainer)
    trainer.run([batch] * 20)


if __name__ == "__main__":
    globals()[TRAINER](Fails(RANK))
