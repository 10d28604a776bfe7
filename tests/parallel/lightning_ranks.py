"""What the programs of Lightning share: trainers that write and show nothing, and their data."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

from hvd_periodic.torch.lightning import PeriodicCallback, PeriodicStrategy
from tests.parallel.torch_job import hvd

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
CHECKPOINTS = {"enable_checkpointing": True}


def batches(number: int) -> Any:
    """As many on every rank, after Lightning has given each its share."""
    return DataLoader(TensorDataset(torch.zeros(number * hvd.size(), 1)), batch_size=1)


def trainer(*callbacks: Any, strategy: Any = None, **options: Any) -> Trainer:
    found = PeriodicStrategy() if strategy is None else strategy
    return Trainer(strategy=found, callbacks=[PeriodicCallback(), *callbacks], **(QUIET | {"max_epochs": 1} | options))
