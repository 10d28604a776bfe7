"""Train a classifier of handwritten digits by PyTorch Ignite, on ranks that exchange every ten steps.

torchrun --nproc-per-node 2 examples/ignite_digits.py      # or horovodrun -np 2 python examples/ignite_digits.py
"""

from __future__ import annotations

import digits_torch
import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import hvd_periodic.torch as hvdp
from hvd_periodic.torch.ignite import PeriodicHandler

digits_torch.start()
torch.manual_seed(idist.get_rank())
train, test = digits_torch.data()
share = {"num_replicas": idist.get_world_size(), "rank": idist.get_rank()}
train_loader = DataLoader(train, 32, sampler=DistributedSampler(train, **share))
test_loader = DataLoader(test, 60, sampler=DistributedSampler(test, **share, shuffle=False))

model = digits_torch.build_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvdp.ElasticAverageOptimizer(optimizer, model, communication_period=10)
trainer = create_supervised_trainer(model, optimizer, cross_entropy)
evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})  # of the center, on all ranks


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate() -> None:
    """Look at the center."""
    train_loader.sampler.set_epoch(trainer.state.epoch)
    evaluator.run(test_loader)


PeriodicHandler(model, optimizer).attach(trainer, evaluator)
trainer.run(train_loader, max_epochs=10)
evaluator.run(test_loader)
if idist.get_rank() == 0:
    print(f"accuracy of the center: {evaluator.state.metrics['accuracy']:.4f}")
