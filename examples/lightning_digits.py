"""Train a classifier of handwritten digits by PyTorch Lightning, on ranks that exchange every ten steps.

torchrun --nproc-per-node 2 examples/lightning_digits.py      # or horovodrun -np 2 python examples/lightning_digits.py
"""

from __future__ import annotations

import digits
import digits_torch
import torch
import workers
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hvd_periodic.torch as hvdp
from hvd_periodic.torch.lightning import PeriodicCallback, PeriodicStrategy


class Digits(LightningModule):
    """The network; in ``validation_step`` and ``test_step`` it holds the center."""

    def __init__(self) -> None:
        super().__init__()
        self.model = digits_torch.build_model()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, labels = batch
        right = (self.model(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(labels))

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return hvdp.ElasticAverageOptimizer(optimizer, self, communication_period=10)


folder = digits.folder(__doc__, "results/lightning")
workers.init()
seed_everything(1)
train, test = digits_torch.data()
trainer = Trainer(
    strategy=PeriodicStrategy(),
    callbacks=[PeriodicCallback(), ModelCheckpoint(folder)],
    accelerator="cpu",
    max_epochs=10,
    logger=False,
    enable_progress_bar=False,
)
model = Digits()
trainer.fit(model, DataLoader(train, 32, shuffle=True), DataLoader(test, 60))
(metrics,) = trainer.test(model, DataLoader(test, 60), verbose=False)
if trainer.is_global_zero:
    print(f"accuracy of the center: {metrics['accuracy']:.4f}")
