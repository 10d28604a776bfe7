"""What every rank does with messages that PyTorch sends encoded; see ``scenarios.py``.

mpirun -np 2 python -m tests.parallel.compression_scenarios FOLDER
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hvd_periodic.torch as hvdp
from tests import oracle
from tests.overlap_oracle import PERIOD
from tests.parallel.program import Scenarios, attempt, rotated
from tests.parallel.torch_job import hvd

scenario = Scenarios()

WIRES: dict[str, Any] = {
    "fp16": hvdp.Compression.fp16,
    "bf16": hvdp.Compression.bf16,
    "int8": hvdp.Compression.int8,
    "topk": hvdp.Compression.topk(0.5),
}
ALGORITHMS: dict[str, Callable[[], Any]] = {
    "easgd": lambda: hvdp.EASGD(0.25),
    "average": hvdp.Averaging,
    "agn": hvdp.AGN,
    "diloco": hvdp.DiLoCo,
    "slowmo": hvdp.SlowMo,
    "bmuf": lambda: hvdp.BMUF(0.5),
}


@scenario
def compressed_quadratics() -> Any:
    """The losses of the oracle, with momentum: x after every step, and the center at the end."""
    results = {}
    for name, algorithm in ALGORITHMS.items():
        for wire, compression in WIRES.items():
            parameter = torch.nn.Parameter(torch.tensor(oracle.START, dtype=torch.float64))
            inner = torch.optim.SGD([parameter], lr=oracle.RATE, momentum=oracle.MOMENTUM)
            optimizer = hvdp.PeriodicOptimizer(inner, [("w", parameter)], algorithm(), PERIOD, compression=compression)
            seen = []
            for _ in range(oracle.STEPS):
                parameter.grad = torch.tensor(oracle.gradient(hvd.rank(), parameter.tolist()), dtype=torch.float64)
                optimizer.step()
                seen.append(parameter.tolist())
            with optimizer.center():
                results[f"{name} {wire}"] = [seen, parameter.tolist()]
    return results


@scenario
def compressed_networks() -> Any:
    """Batch normalization, other numbers of batches on every rank, with overlap and without.

    Returns the sums of parameters and of statistics of the center at the end: of the original, of a copy, and of what
    was loaded from a checkpoint.
    """
    results = {}
    cases = rotated(tuple(WIRES), ("average", "easgd", "agn", "diloco"), (0, 1, "period"))
    cases += [("int8", "average", 1), ("int8", "easgd", "period"), ("topk", "agn", 2)]
    for wire, name, overlap in cases:
        torch.manual_seed(hvd.rank())
        model = torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 2))

        def optimizer_of(model: Any, name: str = name, wire: str = wire, overlap: Any = overlap) -> Any:
            inner, algorithm = torch.optim.SGD(model.parameters(), 0.01, momentum=0.5), ALGORITHMS[name]()
            return hvdp.PeriodicOptimizer(inner, model, algorithm, PERIOD, overlap=overlap, compression=WIRES[wire])

        def train(model: Any, optimizer: Any, seed: int, batches: int) -> None:
            torch.manual_seed(seed)
            for _ in range(batches):
                data = torch.randn(16, 6) + hvd.rank()
                optimizer.zero_grad()
                (model(data) - data[:, :2]).square().mean().backward()
                optimizer.step()

        optimizer = optimizer_of(model)
        train(model, optimizer, 1, 2 * PERIOD + 1)
        copied, copy_of_optimizer = copy.deepcopy((model, optimizer))
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        loaded = copy.deepcopy(model)
        other = optimizer_of(loaded)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        loaded.load_state_dict(weights)
        other.load_state_dict(state)
        ends = []
        for trained, its_optimizer in ((model, optimizer), (copied, copy_of_optimizer), (loaded, other)):
            train(trained, its_optimizer, 2, 4 + 3 * hvd.rank())
            its_optimizer.synchronizer.finalize()
            with its_optimizer.center():
                ends.append(
                    [
                        [tensor.double().sum().item() for tensor in tensors]
                        for tensors in (trained.parameters(), trained.buffers())
                    ]
                )
        results[f"{name} {wire} {overlap}"] = ends
    return results


@scenario
def compressed_in_other_places() -> Any:
    """float16 with the center on the root, or sharded: the center after four exchanges; others: the error."""
    results = {}
    for wire, compression in WIRES.items():
        for place in ("replicated", "root", "sharded"):
            parameter = torch.nn.Parameter(torch.linspace(-1, 1, 50))

            def made(parameter: Any = parameter, place: str = place, compression: Any = compression) -> Any:
                inner = torch.optim.SGD([parameter], lr=0.1)
                return hvdp.ModelAverageOptimizer(inner, [("w", parameter)], 1, center=place, compression=compression)

            error = attempt(made)
            if error:
                results[f"{wire} {place}"] = error
                continue
            optimizer = made()
            for _ in range(4):
                parameter.grad = (parameter.detach() - hvd.rank()) * torch.linspace(0.5, 1, 50)
                optimizer.step()
            with optimizer.center():
                results[f"{wire} {place}"] = parameter.tolist()
    return results


@scenario
def not_finite_on_the_last_rank() -> Any:
    """The error, and the center after it."""
    results = {}
    for wire, compression in WIRES.items():
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvdp.ModelAverageOptimizer(
            torch.optim.SGD([parameter], lr=0.1), [("w", parameter)], 2, compression=compression
        )

        def step(value: float, parameter: Any = parameter, optimizer: Any = optimizer) -> None:
            parameter.grad = torch.full((3,), value)
            optimizer.step()

        step(1.0)
        last = hvd.rank() == hvd.size() - 1
        error = attempt(lambda: step(float("inf") if last else 1.0))  # noqa: B023
        with optimizer.center():
            results[wire] = [error, parameter.tolist()]
    return results


def main(folder: Path) -> None:
    """Run all scenarios."""
    torch.set_num_threads(1)
    hvd.init()
    scenario.run(folder, hvd.rank())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
