"""Images per second of a residual network in PyTorch, trained on random images.

horovodrun -np 2 python torch_synthetic.py
"""

import argparse
import time

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--batch-size", type=int, default=64, help="images per step and rank")
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
parser.add_argument("--blocks", type=int, default=2, help="per stage")
parser.add_argument("--lr", type=float, default=0.01, help="of one rank")
parser.add_argument("--num-warmup-batches", type=int, default=10)
parser.add_argument("--num-batches-per-iter", type=int, default=10)
parser.add_argument("--num-iters", type=int, default=10)
args = parser.parse_args()

hvd.init()
torch.manual_seed(hvd.rank())
device = torch.device("cpu")
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda")


class Block(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature maps."""
        y = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def residual_net(width: int, blocks: int, classes: int = 1000) -> nn.Module:
    """Return a network of four stages, each with half the resolution and twice the channels of the one before."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    for stage in range(4):
        channels = width * 2**stage
        layers += [Block(channels, channels, 1) for _ in range(blocks)]
        layers += [Block(channels, 2 * channels, 2)] if stage < 3 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes))


model = residual_net(args.width, args.blocks).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
labels = torch.randint(1000, (args.batch_size,), device=device)


def train(batches: int) -> float:
    """Take some steps; return the images per second of this rank."""
    started = time.perf_counter()
    for _ in range(batches):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return batches * args.batch_size / (time.perf_counter() - started)


train(args.num_warmup_batches)
speeds = []
for i in range(args.num_iters):
    speeds.append(train(args.num_batches_per_iter))
    if hvd.rank() == 0:
        print(f"Iteration {i}: {speeds[-1]:.1f} images/s per rank")
mean, deviation = np.mean(speeds), 1.96 * np.std(speeds)
if hvd.rank() == 0:
    print(f"Images/s per rank: {mean:.1f} +- {deviation:.1f}")
    print(f"Images/s on {hvd.size()} ranks: {hvd.size() * mean:.1f} +- {hvd.size() * deviation:.1f}")
