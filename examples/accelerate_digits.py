"""Train a classifier of handwritten digits with accelerate, on ranks that exchange every ten steps.

torchrun --nproc-per-node 2 examples/accelerate_digits.py      # or accelerate launch
"""

from __future__ import annotations

import digits_torch
import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hvd_periodic.torch as hvdp
from hvd_periodic.torch.huggingface import prepare

accelerator = Accelerator(cpu=True)
torch.manual_seed(1)
train, test = digits_torch.data()
model = digits_torch.build_model().to(accelerator.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvdp.ElasticAverageOptimizer(optimizer, model, communication_period=10)
model, optimizer, train_loader, test_loader = prepare(
    accelerator, model, optimizer, DataLoader(train, 32, shuffle=True), DataLoader(test, 60)
)

for _ in range(10):
    for images, labels in train_loader:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(images), labels))
        optimizer.step()
hvdp.unwrap(optimizer).finalize()

model.eval()
right = []
with torch.no_grad(), hvdp.unwrap(optimizer).center():
    for images, labels in test_loader:
        right.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
accelerator.print(f"accuracy of the center: {torch.cat(right).float().mean():.4f}")
