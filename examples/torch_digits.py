"""Train a classifier of handwritten digits on several workers that exchange every few steps.

horovodrun -np 2 python examples/torch_digits.py --algorithm easgd --period 10

Without Horovod, over torch.distributed or MPI:

torchrun --standalone --nproc-per-node 2 examples/torch_digits.py --algorithm easgd --period 10
HVD_PERIODIC_COMM=mpi mpirun -np 2 python examples/torch_digits.py --algorithm easgd --period 10
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

import digits
import flags
import torch
import workers
from checkpoints import EXIT_CODE, Checkpoints
from digits_torch import build_model
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import hvd_periodic.torch as hvdp

if workers.LIBRARY == "horovod":
    import horovod.torch as hvd


@torch.no_grad()
def accuracy(model: nn.Module, data: digits.Digits) -> float:
    """Return the fraction of images that the model recognizes."""
    model.eval()
    predicted = model(torch.from_numpy(data.images)).argmax(dim=1)
    model.train()
    return float((predicted == torch.from_numpy(data.labels)).float().mean())


class EveryStep:
    """The baseline: gradients are averaged at every step."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        model.load_state_dict(workers.gather(model.state_dict())[0])
        self.optimizer, self.parameters = optimizer, list(model.parameters())
        if workers.LIBRARY == "horovod":
            self.optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        self.bytes_per_step = sum(p.numel() * p.element_size() for p in model.parameters())
        self.exchanges = self.bytes_sent = 0
        self.exchange_seconds = self.staleness = 0.0

    def step(self, loss: float) -> bool:
        self.exchanges += 1
        self.bytes_sent += self.bytes_per_step
        started = time.perf_counter()
        if workers.LIBRARY == "horovod":
            self.optimizer.synchronize()
        else:
            for parameter in self.parameters:
                workers.average(parameter.grad.numpy())
        self.exchange_seconds += time.perf_counter() - started
        with self.optimizer.skip_synchronize() if workers.LIBRARY == "horovod" else nullcontext():
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

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, args: flags.argparse.Namespace, steps: int
    ) -> None:
        self.optimizer = hvdp.PeriodicOptimizer(
            optimizer,
            model,
            flags.algorithm(args),
            flags.schedule(args, steps),
            asynchronous=args.asynchronous,
            center=args.center,
            optimizer_state=args.optimizer_state,
            overlap=args.overlap,
            compression=flags.compression(args),
            fragments=args.fragments,
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

    def step(self, loss: float) -> bool:
        rounds = self.synchronizer.rounds
        self.synchronizer.report(loss)  # AdaComm asks for it
        self.optimizer.step()
        return self.synchronizer.rounds > rounds


def train(args: flags.argparse.Namespace) -> digits.Run:
    """Train this worker's replica; return the record of all workers."""
    workers.init()
    torch.manual_seed(args.seed + workers.rank())  # different on purpose: the root's weights are given to all
    data, test = digits.load(workers.rank(), workers.size())
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=args.momentum)
    steps = args.epochs * (len(images) // args.batch_size)
    every_step = args.algorithm == "allreduce"
    method = EveryStep(optimizer, model) if every_step else EveryPeriod(optimizer, model, args, steps)
    lowest = args.learning_rate / 10 if args.decay else args.learning_rate
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(method.optimizer, steps, lowest)

    losses: list[float] = []
    distances: list[float] = []
    exchange_steps: list[int] = []
    course: list[tuple[int, float]] = []
    hidden = args.no_progress or workers.rank() > 0
    checkpoints = Checkpoints(args.checkpoints) if args.checkpoints else None
    last, state = checkpoints.load() if checkpoints else (-1, None)
    if state is not None:
        model.load_state_dict(state["model"])
        method.optimizer.load_state_dict(state["optimizer"])
        decay.load_state_dict(state["decay"])
        torch.set_rng_state(state["random"])
        losses, distances, exchange_steps = state["losses"], state["distances"], state["exchange_steps"]
        course = state["course"]
        print(f"Rank {workers.rank()} goes on after epoch {last} of {args.epochs}", flush=True)
    started = time.perf_counter()
    with tqdm(total=steps, desc=args.algorithm, unit="step", disable=hidden or None, mininterval=0.5) as progress:
        progress.update(len(losses))
        for epoch in range(last + 1, args.epochs):
            order = torch.randperm(len(images))
            for batch in order.split(args.batch_size)[: len(images) // args.batch_size]:
                optimizer.zero_grad()
                loss = cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                losses.append(loss.item())
                if method.step(losses[-1]):
                    exchange_steps.append(len(losses))
                decay.step()
                distances.append(method.distance())
                progress.update()
            with method.center():
                course.append((method.exchanges, accuracy(model, test)))
            if checkpoints is not None:
                state = {
                    "model": model.state_dict(),
                    "optimizer": method.optimizer.state_dict(),
                    "decay": decay.state_dict(),
                }
                record = {"losses": losses, "distances": distances, "exchange_steps": exchange_steps, "course": course}
                checkpoints.save(epoch, {**state, **record, "random": torch.get_rng_state()})
                if checkpoints.stopping():
                    print(f"Rank {workers.rank()} was told to stop after epoch {epoch} of {args.epochs}", flush=True)
                    sys.exit(EXIT_CODE)
    seconds = time.perf_counter() - started
    method.finalize()
    worker_accuracy = accuracy(model, test)
    with method.center():
        center_accuracy = accuracy(model, test)
    mine = (worker_accuracy, losses, distances)
    records = workers.gather(mine)
    return digits.Run(
        algorithm=args.algorithm,
        framework="torch",
        workers=workers.size(),
        period=1 if args.algorithm == "allreduce" else args.period,
        steps=steps,
        worker_accuracy=[worker[0] for worker in records],
        center_accuracy=center_accuracy,
        exchanges=method.exchanges,
        bytes_sent=method.bytes_sent,
        exchange_seconds=method.exchange_seconds,
        seconds=seconds,
        losses=[worker[1] for worker in records],
        distances=[worker[2] for worker in records],
        exchange_steps=exchange_steps,
        staleness=method.staleness if args.asynchronous else None,
        schedule=args.schedule,
        optimizer_state=args.optimizer_state,
        overlap=args.overlap,
        compression=args.compression,
        fragments=args.fragments,
        course=course,
    )


def main() -> None:
    """Train and report, or compare earlier runs."""
    placements = ("replicated", "root", "sharded")
    args = flags.parse(__doc__.splitlines()[0], placements=placements, checkpoints=True, wires=tuple(flags.WIRES))
    if args.compare:
        digits.compare(args.compare)
        return
    for chosen in flags.runs(args):
        run = train(chosen)
        if workers.rank() == 0:
            run.save(args.output)
    if workers.rank() == 0:
        digits.report(args, run)


if __name__ == "__main__":
    main()
