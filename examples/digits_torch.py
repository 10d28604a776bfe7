"""What the digits examples in PyTorch share: the model, the data as tensors, and how ranks know of each other."""

from __future__ import annotations

import os

import digits
import torch
from torch import nn
from torch.utils.data import TensorDataset


def build_model() -> nn.Module:
    """Return a small convolutional network with batch normalization."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def data() -> tuple[TensorDataset, TensorDataset]:
    """Return all training images, which the trainers divide among ranks, and the test images."""
    train, test = digits.load(0, 1)
    return dataset(train), dataset(test)


def dataset(images: digits.Digits) -> TensorDataset:
    """Return images and labels as tensors."""
    return TensorDataset(torch.from_numpy(images.images), torch.from_numpy(images.labels))


def start() -> None:
    """Let the ranks know of each other: by torch.distributed under torchrun, otherwise by Horovod."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torch.distributed.init_process_group("gloo")
    else:
        import horovod.torch as hvd

        hvd.init()
