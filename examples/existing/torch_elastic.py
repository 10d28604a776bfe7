"""Train a classifier of handwritten digits in PyTorch, while workers come and go.

horovodrun --gloo -np 2 --min-np 1 --host-discovery-script hosts.sh python torch_elastic.py
"""

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--lr", type=float, default=0.01, help="of one rank")
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--batches-per-commit", type=int, default=10)
args = parser.parse_args()

hvd.init()
torch.manual_seed(1)
digits = load_digits()
pixels = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
split = train_test_split(pixels, torch.tensor(digits.target), test_size=0.2, random_state=0)
train_images, test_images, train_labels, test_labels = split
dataset = TensorDataset(train_images, train_labels)
sampler = hvd.elastic.ElasticSampler(dataset)
loader = DataLoader(dataset, args.batch_size, sampler=sampler)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(16 * 4 * 4, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    """Train from wherever the state is."""
    for state.epoch in range(state.epoch, args.epochs):  # noqa: B020
        model.train()
        for batch, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            sampler.record_batch(batch, args.batch_size)
            if batch % args.batches_per_commit == 0:
                state.commit()
        sampler.set_epoch(state.epoch + 1)

        model.eval()
        with torch.no_grad():
            mine = slice(hvd.rank(), None, hvd.size())
            predicted = model(test_images[mine]).argmax(dim=1)
            accuracy = hvd.allreduce((predicted == test_labels[mine]).float().mean(), name="accuracy")
        if hvd.rank() == 0:
            print(f"Epoch {state.epoch}: {hvd.size()} ranks, test accuracy {accuracy:.4f}", flush=True)


def on_reset() -> None:
    """Let the rate follow the number of ranks."""
    for group in optimizer.param_groups:
        group["lr"] = args.lr * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
state.register_reset_callbacks([on_reset])
train(state)
