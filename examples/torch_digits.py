"""Train a classifier of handwritten digits on several Horovod workers that exchange every few steps.

horovodrun -np 2 python examples/torch_digits.py --algorithm easgd --period 10
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

import digits
import horovod.torch as hvd
import torch
from checkpoints import EXIT_CODE, Checkpoints
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import hvd_periodic.torch as hvdp


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


@torch.no_grad()
def accuracy(model: nn.Module, data: digits.Digits) -> float:
    """Return the fraction of images that the model recognizes."""
    model.eval()
    predicted = model(torch.from_numpy(data.images)).argmax(dim=1)
    model.train()
    return float((predicted == torch.from_numpy(data.labels)).float().mean())


class EveryStep:
    """The baseline: Horovod's DistributedOptimizer, which averages gradients at every step."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        self.optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        self.bytes_per_step = sum(p.numel() * p.element_size() for p in model.parameters())
        self.exchanges = self.bytes_sent = 0
        self.exchange_seconds = self.staleness = 0.0

    def step(self) -> bool:
        started = time.perf_counter()
        self.optimizer.synchronize()
        self.exchange_seconds += time.perf_counter() - started
        self.exchanges += 1
        self.bytes_sent += self.bytes_per_step
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        return True

    def distance(self) -> float:
        return 0.0

    def finalize(self) -> None:
        pass

    def center(self) -> nullcontext[None]:
        return nullcontext()


class EveryPeriod:
    """Periodic exchange: the wrapped optimizer does everything by itself."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, args: digits.argparse.Namespace) -> None:
        where = {"center": args.center}
        if args.algorithm == "average":
            self.optimizer: hvdp.PeriodicOptimizer = hvdp.ModelAverageOptimizer(optimizer, model, args.period, **where)
        elif args.algorithm == "easgd":
            self.optimizer = hvdp.ElasticAverageOptimizer(
                optimizer,
                model,
                args.period,
                moving_rate=args.moving_rate,
                beta=args.beta,
                rho=args.rho,
                asynchronous=args.asynchronous,
                **where,
            )
        else:
            self.optimizer = hvdp.AGNOptimizer(
                optimizer, model, args.period, op=args.op, asynchronous=args.asynchronous, **where
            )
        self.synchronizer = self.optimizer.synchronizer
        self.distance = self.synchronizer.distance
        self.finalize = self.synchronizer.finalize
        self.center = self.optimizer.center

    @property
    def exchanges(self) -> int:
        return self.synchronizer.rounds

    @property
    def bytes_sent(self) -> int:
        return self.synchronizer.counters.bytes_sent

    @property
    def exchange_seconds(self) -> float:
        return self.synchronizer.counters.exchange_seconds

    @property
    def staleness(self) -> float:
        return self.synchronizer.counters.staleness_mean

    def step(self) -> bool:
        rounds = self.synchronizer.rounds
        self.optimizer.step()
        return self.synchronizer.rounds > rounds


def train(args: digits.argparse.Namespace) -> digits.Run:
    """Train this worker's replica; return the record of all workers."""
    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())  # different on purpose: the root's weights are given to all
    data, test = digits.load(hvd.rank(), hvd.size())
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=args.momentum)
    method = EveryStep(optimizer, model) if args.algorithm == "allreduce" else EveryPeriod(optimizer, model, args)

    losses: list[float] = []
    distances: list[float] = []
    exchange_steps: list[int] = []
    steps = args.epochs * (len(images) // args.batch_size)
    hidden = args.no_progress or hvd.rank() > 0
    checkpoints = Checkpoints(args.checkpoints) if args.checkpoints else None
    last, state = checkpoints.load() if checkpoints else (-1, None)
    if state is not None:
        model.load_state_dict(state["model"])
        method.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        losses, distances, exchange_steps = state["losses"], state["distances"], state["exchange_steps"]
        print(f"Rank {hvd.rank()} goes on after epoch {last} of {args.epochs}", flush=True)
    started = time.perf_counter()
    with tqdm(total=steps, desc=args.algorithm, unit="step", disable=hidden, mininterval=0.5) as progress:
        progress.update(len(losses))
        for epoch in range(last + 1, args.epochs):
            order = torch.randperm(len(images))
            for batch in order.split(args.batch_size)[: len(images) // args.batch_size]:
                optimizer.zero_grad()
                loss = cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                if method.step():
                    exchange_steps.append(len(losses) + 1)
                losses.append(loss.item())
                distances.append(method.distance())
                progress.update()
            if checkpoints is not None:
                state = {"model": model.state_dict(), "optimizer": method.optimizer.state_dict()}
                record = {"losses": losses, "distances": distances, "exchange_steps": exchange_steps}
                checkpoints.save(epoch, {**state, **record, "random": torch.get_rng_state()})
                if checkpoints.stopping():
                    print(f"Rank {hvd.rank()} was told to stop after epoch {epoch} of {args.epochs}", flush=True)
                    sys.exit(EXIT_CODE)
    seconds = time.perf_counter() - started
    method.finalize()
    worker_accuracy = accuracy(model, test)
    with method.center():
        center_accuracy = accuracy(model, test)
    mine = (worker_accuracy, losses, distances)
    workers = hvd.allgather_object(mine, name="record")
    return digits.Run(
        algorithm=args.algorithm,
        framework="torch",
        workers=hvd.size(),
        period=1 if args.algorithm == "allreduce" else args.period,
        steps=steps,
        worker_accuracy=[worker[0] for worker in workers],
        center_accuracy=center_accuracy,
        exchanges=method.exchanges,
        bytes_sent=method.bytes_sent,
        exchange_seconds=method.exchange_seconds,
        seconds=seconds,
        losses=[worker[1] for worker in workers],
        distances=[worker[2] for worker in workers],
        exchange_steps=exchange_steps,
        staleness=method.staleness if args.asynchronous else None,
    )


def main() -> None:
    """Train and report, or compare earlier runs."""
    args = digits.parse_arguments(
        __doc__.splitlines()[0], placements=("replicated", "root", "sharded"), checkpoints=True
    )
    if args.compare:
        digits.compare(args.compare)
        return
    run = train(args)
    if hvd.rank() == 0:
        digits.show([run])
        run.save(args.output)
        print(f"Record and plot: {args.output / args.algorithm}.json, .png")


if __name__ == "__main__":
    main()
