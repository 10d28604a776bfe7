"""Asynchronous training in which one rank is killed; see ``test_dying.py``.

mpirun --enable-recovery -np 3 python -m tests.parallel.dying_program FOLDER ALGORITHM VICTIM WHERE MORE

Without a launcher, RANK and WORLD_SIZE say which rank this is, and ranks of PyTorch meet in FOLDER/rendezvous.
With WHERE = adopting it dies after finalize(), before the others adopt.
With WHERE = waited it dies when all others wait for it in finalize(), and the center lies in FOLDER/center.safetensors.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hvd_periodic.asynchronous.center_in_memory import CenterInMemory
from hvd_periodic.comm.mpi import MPICommunicator
from hvd_periodic.numpy import SGD, AGNOptimizer, ElasticAverageOptimizer
from tests.parallel.program import attempt

SIZE, RATE, KILLED_AT = 1000, 0.25, 6

OUTER_RATE, MOMENTUM = 0.1, 0.5
"""Of the optimizer that moves the center in AGN."""


def report(folder: Path, rank: int, **told: Any) -> None:
    (folder / f"{rank}.json").write_text(json.dumps({key: ends(value) for key, value in told.items()}))


def ends(value: Any) -> Any:
    """Return the first and the last element: those of each half are equal."""
    return [float(value[0]), float(value[-1])] if isinstance(value, np.ndarray) else value


def die_inside(folder: Path, rank: int, x: np.ndarray, optimizer: Any) -> None:
    """Let the next transaction be killed when half of a bucket has moved, or when the optimizer has stepped."""

    def half(held: CenterInMemory, index: int, payload: np.ndarray, exchange: Any) -> np.ndarray:
        center = held.vectors[0]["center"].read(held.buckets[index])
        center[: SIZE // 2] += RATE * (payload - center)[: SIZE // 2]
        report(folder, rank, x=x, steps=KILLED_AT)
        os.kill(os.getpid(), signal.SIGKILL)
        return payload

    CenterInMemory.transact = half  # type: ignore[method-assign]

    def killed(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    vars(optimizer.synchronizer.exchanged.center_optimizer)["push"] = killed


def die_waited_for(folder: Path, rank: int, size: int, x: np.ndarray) -> None:
    """Be killed once the others have reported all of their steps, after which they do no more."""
    others = [folder / f"{other}.json" for other in range(size) if other != rank]
    while not all(path.exists() for path in others):
        time.sleep(0.01)
    report(folder, rank, x=x, steps=KILLED_AT)
    os.kill(os.getpid(), signal.SIGKILL)


def of_torch(folder: Path, more: dict[str, Any]) -> tuple[Any, np.ndarray, Any, Any]:
    """Return an optimizer over Horovod, the memory of its parameter, what takes a step by a gradient, and the model.

    Over torch.distributed, if no launcher has started this process.
    """
    import torch

    import hvd_periodic.torch as hvdp

    if "WORLD_SIZE" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = torch.distributed.FileStore(str(folder / "rendezvous"), size)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    else:
        import horovod.torch as hvd

        hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    model, inner = torch.nn.ParameterDict({"x": parameter, "frozen": frozen}), torch.optim.SGD([parameter], lr=1.0)
    optimizer = hvdp.ElasticAverageOptimizer(inner, model, 1, RATE, asynchronous=True, **more)

    def step(gradient: np.ndarray) -> None:
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        frozen.fill_(optimizer.synchronizer.membership.global_rank)

    return optimizer, parameter.detach().numpy(), step, model


def of_numpy(algorithm: str, more: dict[str, Any]) -> tuple[Any, np.ndarray, Any, Any]:
    """Return the same over MPI alone."""
    x = np.zeros(SIZE)
    common: dict[str, Any] = {"asynchronous": True, "process_set": MPICommunicator(), **more}
    optimizer = (
        ElasticAverageOptimizer(SGD(1.0), {"x": x}, 1, moving_rate=RATE, **common)
        if algorithm == "easgd"
        else AGNOptimizer(SGD(OUTER_RATE, MOMENTUM), {"x": x}, 1, **common)
    )
    return optimizer, x, lambda gradient: optimizer.step([gradient]), {"x": x}


def main(folder: Path, algorithm: str, victim: int, where: str, more: int) -> None:
    """Train until the victim has died, and then so many more steps."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = {"center_file": folder / "center.safetensors"} if where == "waited" else {}
    optimizer, x, step, model = of_torch(folder, options) if algorithm == "torch" else of_numpy(algorithm, options)
    communicator = optimizer.synchronizer.membership.communicator
    rank = communicator.rank
    steps = after = 0
    while after < more or where == "adopting":
        if where == "waited" and steps == KILLED_AT:
            if rank == victim:
                die_waited_for(folder, rank, communicator.size, x)
            report(folder, rank, x=x, steps=steps)
            break
        if where == "adopting" and steps == KILLED_AT:
            break
        if where in ("inside", "between") and rank == victim and steps == KILLED_AT - 1:
            if where == "between":
                report(folder, rank, x=x, steps=steps)
                os.kill(os.getpid(), signal.SIGKILL)
            die_inside(folder, rank, x, optimizer)
        step(np.full(SIZE, -1.0 - rank))
        steps += 1
        after += bool(communicator.dead_ranks())
    optimizer.synchronizer.finalize()
    told = ""
    if where == "adopting":
        if rank == victim:
            report(folder, rank, x=x, steps=steps)
            os.kill(os.getpid(), signal.SIGKILL)
        told = attempt(lambda: optimizer.adopt(model))
    own, state = x.copy(), optimizer.synchronizer.exchanger.optimizer_state()
    velocity = state["velocities"][0] if algorithm == "agn" else None
    with optimizer.center():
        report(folder, rank, x=own, steps=steps, center=x, lost=communicator.dead_ranks(), velocity=velocity, told=told)
    print(f"Rank {rank} is at its end", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
