"""The cases in PyTorch.

mpirun -np 2 python -m tests.golden.torch_program FOLDER [save]
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import hvd_periodic.torch as hvdp
from tests.golden import cases, course
from tests.golden.cases import Array, Case, gradients

GROUPS: list[Any] = []


class Model(torch.nn.Module):
    """Parameters and, if asked for, statistics."""

    running_mean: torch.Tensor
    num_batches_tracked: torch.Tensor

    def __init__(self, arrays: list[Array], statistics: bool) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList(torch.from_numpy(array) for array in arrays)
        if statistics:
            self.register_buffer("running_mean", torch.zeros(2))
            self.register_buffer("num_batches_tracked", torch.tensor(0))


class TorchTrainer:
    """A model."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = Model(case.start(hvd.rank()), case.kind == "statistics")
        inner = optimizer(case, self.model)
        options: dict[str, Any] = {"center": case.center}
        if case.kind == "groups":
            named = self.model.named_parameters()
            inner = hvd.DistributedOptimizer(inner, named_parameters=named, process_set=GROUPS[0].local)
            options["process_set"] = GROUPS[0].cross
        elif case.kind == "distributed":
            inner = hvd.DistributedOptimizer(inner, named_parameters=self.model.named_parameters())
        elif case.kind == "asynchronous":
            options["asynchronous"] = True
        local_first = case.kind in ("post_local", "distributed")
        period = hvdp.PostLocal(*cases.POST_LOCAL) if local_first else cases.PERIOD
        self.optimizer: Any
        if case.algorithm == "average":
            self.optimizer = hvdp.ModelAverageOptimizer(inner, self.model, period, **options)
        elif case.algorithm.startswith("agn"):
            op = "average" if case.algorithm == "agn_average" else "sum"
            self.optimizer = hvdp.AGNOptimizer(inner, self.model, period, op=op, **options)
        else:
            rho = cases.RHO if case.algorithm == "elastic_rho" else 0.0
            self.optimizer = hvdp.ElasticAverageOptimizer(
                inner, self.model, period, cases.MOVING_RATE, rho=rho, **options
            )

    def step(self, step: int) -> None:
        values = [parameter.detach().numpy() for parameter in self.model.parameters()]
        shown = [torch.from_numpy(gradient) for gradient in gradients(self.case, values, hvd.rank(), step)]
        self.optimizer.zero_grad()
        pairs = zip(shown, self.model.parameters(), strict=True)
        torch.stack([(gradient * parameter).sum() for gradient, parameter in pairs]).sum().backward()
        if self.case.kind == "statistics":
            statistic = torch.from_numpy(self.case.statistic(hvd.rank(), step))
            self.model.running_mean.mul_(0.5).add_(0.5 * statistic)
            self.model.num_batches_tracked += 1 + hvd.rank()
        self.optimizer.step()

    def skip(self) -> None:
        self.optimizer.skip()

    def values(self) -> list[Array]:
        return [tensor.detach().numpy().copy() for tensor in (*self.model.parameters(), *self.model.buffers())]

    def center(self) -> list[Array]:
        with self.optimizer.center():
            return self.values()

    def distance(self) -> float:
        return float(self.optimizer.synchronizer.distance())

    def counters(self) -> tuple[int, int, int]:
        counters = self.optimizer.synchronizer.counters
        return counters.local_steps, counters.rounds, counters.skipped_updates

    def finalize(self) -> None:
        self.optimizer.finalize()

    def save(self, path: Path) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, path.with_suffix(".pt"))

    def load(self, path: Path) -> None:
        state = torch.load(path.with_suffix(".pt"))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def optimizer(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the local optimizer."""
    if case.local == "adam":
        betas = (cases.ADAM["beta1"], cases.ADAM["beta2"])
        return torch.optim.Adam(model.parameters(), cases.ADAM["rate"], betas, cases.ADAM["epsilon"])
    return torch.optim.SGD(model.parameters(), cases.RATE, cases.MOMENTUM if case.local == "momentum" else 0.0)


def planned(size: int) -> list[Case]:
    """Return the cases for some ranks."""
    more = (cases.with_adam, cases.around_horovod, cases.mixed)
    return [*cases.cases(size), *cases.statistics(), *(case for some in more for case in some(size))]


def main(folder: Path, saving: bool) -> None:
    """Run all cases."""
    warnings.simplefilter("ignore")
    hvd.init(process_sets="dynamic")
    if hvd.size() == sum(map(len, cases.GROUPS)):
        GROUPS.append(hvdp.rank_groups(cases.GROUPS))
    course.run("torch", TorchTrainer, planned(hvd.size()), hvd.rank(), hvd.size(), folder, saving)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "save" in sys.argv)
