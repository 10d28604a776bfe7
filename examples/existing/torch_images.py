"""Train a classifier of handwritten digits in PyTorch.

horovodrun -np 2 python torch_images.py
"""

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.01, help="of one rank")
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()

hvd.init()
torch.manual_seed(args.seed + hvd.rank())
device = torch.device("cpu")
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda")

digits = load_digits()
pixels = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
split = train_test_split(pixels, torch.tensor(digits.target), test_size=0.2, random_state=0)
train_images, test_images, train_labels, test_labels = split
dataset = TensorDataset(train_images, train_labels)
sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset, hvd.size(), hvd.rank(), seed=args.seed)
loader = DataLoader(dataset, args.batch_size, sampler=sampler)


def shifted(images: Tensor) -> Tensor:
    """Move the images of a batch by up to one pixel."""
    down, right = torch.randint(3, (2,)).tolist()
    return pad(images, (1, 1, 1, 1))[:, :, down : down + 8, right : right + 8]


model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(32 * 4 * 4, 10),
).to(device)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

for epoch in range(args.epochs):
    model.train()
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(shifted(images).to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
    scheduler.step()

    model.eval()
    with torch.no_grad():
        mine = slice(hvd.rank(), None, hvd.size())
        predicted = model(test_images[mine].to(device)).argmax(dim=1).cpu()
        accuracy = hvd.allreduce((predicted == test_labels[mine]).float().mean(), name="accuracy")
    if hvd.rank() == 0:
        print(f"Epoch {epoch}: loss {loss:.4f}, test accuracy {accuracy:.4f}", flush=True)
