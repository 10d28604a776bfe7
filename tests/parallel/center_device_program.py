"""Trains on a device with its center beside it, and in host memory: ``... FOLDER NUMBER``."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch

import hvd_periodic.torch as hvdp
from hvd_periodic import LocalCommunicator
from hvd_periodic.comm.base import Communicator
from tests.helpers import run_ranks
from tests.parallel import second_device
from tests.parallel.second_device import OfSecond

ALGORITHMS: dict[str, Any] = {
    "easgd": lambda: hvdp.EASGD(beta=0.9, rho=0.1),
    "averaging": hvdp.Averaging,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": lambda: hvdp.BMUF(nesterov=True),
    "agn": hvdp.AGN,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": 2},
    "whole": {"overlap": "period", "nonfinite": "ignore"},
    "int8": {"compression": hvdp.Compression.int8},
    "both": {"overlap": 1, "compression": hvdp.Compression.topk(0.3)},
    "fragments": {"fragments": 2},
    "late": {"fragments": 2, "overlap": 1},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "policy": {"optimizer_state": "average", "nonfinite": "skip", "audit_every": 1},
}
PERIOD, STEPS, SAVED_AT = 4, 11, 6
"""A state is saved where an exchange may be under way."""


class Trainer:
    """One rank: a model on the device, gradients of its own, and an optimizer."""

    def __init__(self, communicator: Communicator, algorithm: str, options: dict[str, Any], where: Any) -> None:
        self.generator = torch.Generator().manual_seed(communicator.rank)
        self.model = torch.nn.Module()
        for name, shape in (("weight", (5, 7)), ("scale", ()), ("bias", (3,))):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(7))
            self.model.register_parameter(name, torch.nn.Parameter(OfSecond(values)))
        self.model.register_buffer("running_mean", OfSecond(torch.full((3,), float(communicator.rank))))
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer: Any = hvdp.PeriodicOptimizer(
            inner, self.model, ALGORITHMS[algorithm], PERIOD, process_set=communicator, center_device=where, **options
        )

    def step(self) -> None:
        """Take a local step."""
        for parameter in self.model.parameters():
            pull = torch.randn(parameter.shape, generator=self.generator)
            parameter.grad = OfSecond(pull + 0.3 * parameter.detach().cpu())
        self.model.running_mean.add_(0.25)
        self.optimizer.step()

    def seen(self) -> list[Any]:
        """Return parameters, statistics and center."""
        values = [tensor.detach().cpu().tolist() for tensor in self.model.state_dict().values()]
        with self.optimizer.center():
            centers = [tensor.detach().cpu().tolist() for tensor in self.model.state_dict().values()]
        return [values, centers, self.optimizer.synchronizer.distance()]


def work(communicator: Communicator, algorithm: str, options: dict[str, Any], where: Any, then: Any) -> list[Any]:
    """Train; go on from a state that was saved on the way, with the center elsewhere; return what both end with."""
    trainer = Trainer(communicator, algorithm, options, where)
    for _ in range(SAVED_AT):
        trainer.step()
    saved = copy.deepcopy([trainer.optimizer.state_dict(), trainer.model.state_dict()])
    resumed = Trainer(communicator, algorithm, options, then)
    resumed.optimizer.load_state_dict(saved[0])
    resumed.model.load_state_dict(saved[1])
    resumed.generator.set_state(trainer.generator.get_state())
    ends = []
    for each in (trainer, resumed):
        for _ in range(STEPS - SAVED_AT):
            each.step()
        each.optimizer.finalize()
        group = each.optimizer.synchronizer.tensor_groups.parameters
        stores = [*group.center_state.values(), *(s for s in (group.snapshot, group.total) if s is not None)]
        ends.append([each.seen(), sorted({t.device.type for store in stores for t in store.tensors()})])
    return ends


def with_a_rate_on_the_device(where: Any, overlap: int) -> list[float]:
    """Return where training ends if the learning rate, which the optimizer of the center takes over, is a tensor."""
    parameter = torch.nn.Parameter(OfSecond(torch.ones(3)))
    inner = torch.optim.AdamW([parameter], lr=OfSecond(torch.tensor(0.1)))
    optimizer = hvdp.AGNOptimizer(
        inner, [("w", parameter)], 2, process_set=LocalCommunicator(), center_device=where, overlap=overlap
    )
    for step in range(4):
        parameter.grad = OfSecond(torch.full((3,), 1.0 + step))
        optimizer.step()
    optimizer.finalize()
    return parameter.detach().cpu().tolist()


def mixed() -> str:
    """Return what torch says where tensors of both devices are added."""
    try:
        OfSecond(torch.ones(2)).add_(torch.ones(2))
    except RuntimeError as error:
        return str(error)
    return ""


def main(folder: Path, number: int) -> None:
    """Train each algorithm with one of so many options, others of them for the next algorithm."""
    second_device.register()
    ways: dict[str, Any] = {}
    for i, algorithm in enumerate(ALGORITHMS):
        for name in list(OPTIONS)[i % number :: number]:
            ways[f"{algorithm}, {name}"] = [
                run_ranks(2, lambda rank, a=algorithm, n=name, w=where, t=then: work(rank, a, OPTIONS[n], w, t))
                for where, then in ((None, None), ("cpu", "cpu"), ("cpu", None))
            ]
    rates = [[with_a_rate_on_the_device(where, overlap) for where in (None, "cpu")] for overlap in (0, 1)]
    found = {"ways": ways, "rates": rates, "mixed": mixed()}
    (folder / "0.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
