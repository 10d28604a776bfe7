"""Train a classifier of handwritten digits by transformers' Trainer, on ranks that exchange every ten steps.

torchrun --nproc-per-node 2 examples/huggingface_digits.py
"""

from __future__ import annotations

from typing import Any

import digits
import digits_torch
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed

import hvd_periodic.torch as hvdp
from hvd_periodic.torch.huggingface import PeriodicTrainerCallback


class Digits(nn.Module):
    """The network, called as a Trainer calls models."""

    def __init__(self) -> None:
        super().__init__()
        self.model = digits_torch.build_model()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def examples(data: Any) -> list[dict[str, torch.Tensor]]:
    """Return images and labels by name."""
    return [{"images": image, "labels": label} for image, label in data]


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """Return the fraction of images that are recognized."""
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def periodic(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer with periodic exchange."""
    return hvdp.ElasticAverageOptimizer(optimizer, model, communication_period=10)


arguments = TrainingArguments(
    digits.folder(__doc__, "results/huggingface"),
    use_cpu=True,
    num_train_epochs=10,
    per_device_train_batch_size=32,
    lr_scheduler_type="constant",
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=1,
    report_to=[],
    disable_tqdm=True,
)
set_seed(1)
train, test = digits_torch.data()
model = Digits()
trainer = Trainer(
    model,
    arguments,
    train_dataset=examples(train),
    eval_dataset=examples(test),
    compute_metrics=accuracy,
    optimizers=(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), None),
    callbacks=[PeriodicTrainerCallback(periodic)],
)
trainer.train()
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    print(f"accuracy of the center: {metrics['eval_accuracy']:.4f}")
