"""Ranks of the job in which a command runs, through any framework that Horovod was built with, and their costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from hvd_periodic import Algorithm, Communicator, ReplicaSynchronizer, Wire
from hvd_periodic.cli.usage_error import UsageError, as_usage_error
from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.cost_model import Method, Network, fit_method, fit_network

ALLREDUCES = (2**10, 2**14, 2**18, 2**20, 2**22)
"""Elements of float32 in measured allreduces: from latency-bound to bandwidth-bound."""

EXCHANGES = (2**12, 2**22)
"""Elements of float32 in measured exchanges, of one bucket each."""

REPETITIONS = 7

_NEVER = 10**9


@dataclass(frozen=True)
class Ranks:
    """The ranks of this job.

    Attributes:
        communicator: moves tensors between the ranks.
        tensor: converts a numpy array to a tensor of the communicator.
        exchanger: makes a synchronizer of a number of parameters in host memory; None: this cannot be measured here.
    """

    communicator: Communicator
    tensor: Callable[[Any], Any]
    exchanger: Callable[[Algorithm, Wire, int], ReplicaSynchronizer[Any]] | None = None


def torch_ranks() -> Ranks:
    """Return the ranks, with tensors of PyTorch."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    return Ranks(HorovodCommunicator("horovod.torch", None, torch.from_numpy), torch.from_numpy, _torch_exchanger)


def _torch_exchanger(algorithm: Algorithm, wire: Wire, size: int) -> ReplicaSynchronizer[Any]:
    import torch

    from hvd_periodic.torch import PeriodicOptimizer

    x = torch.nn.Parameter(torch.zeros(size))
    x.grad = torch.zeros(size)
    local = torch.optim.SGD([x], 0.1)
    optimizer = PeriodicOptimizer(local, [("x", x)], algorithm, _NEVER, compression=wire)
    optimizer.step()
    return optimizer.synchronizer


def tensorflow_ranks() -> Ranks:
    """Return the ranks, with tensors of TensorFlow."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator

    hvd.init()
    return Ranks(TensorFlowCommunicator(), tf.convert_to_tensor)


FRAMEWORKS: dict[str, Callable[[], Ranks]] = {"torch": torch_ranks, "tensorflow": tensorflow_ranks}


def job() -> Ranks:
    """Return the ranks of this job.

    Raises:
        UsageError: no framework has Horovod; or, on all ranks, Horovod does not know of the others.
    """
    reasons = []
    for name, ranks in FRAMEWORKS.items():
        try:
            return ranks()
        except ImportError as error:
            reasons.append(f"{name}: {error}")
        except RuntimeError as error:
            raise UsageError(str(error)) from error
    raise UsageError(f"This needs Horovod with PyTorch or TensorFlow, see hvdp doctor. {'; '.join(reasons)}")


def network(ranks: Ranks, tick: Callable[[int], None]) -> Network:
    """Return the measured costs of collectives among these ranks. Collective."""
    found = []
    for size in ALLREDUCES:
        sum_up = partial(_sum, ranks.communicator, ranks.tensor(np.zeros(size, np.float32)))
        found.append((4.0 * size, _seconds(ranks.communicator, sum_up)))
        tick(1)
    return fit_network(ranks.communicator.size, found)


def method(
    ranks: Ranks, network: Network, algorithm: Algorithm, wire: Wire, tick: Callable[[int], None]
) -> Method | None:
    """Return the measured costs of the ranks' own work in an exchange; None: it cannot be measured. Collective."""
    if ranks.exchanger is None:
        return None
    found = []
    for size in EXCHANGES:
        with as_usage_error():
            exchanger = ranks.exchanger(algorithm, wire, size)
        found.append((4.0 * size, _seconds(ranks.communicator, exchanger.sync)))
        exchanger.finalize()
        tick(1)
    return fit_method(network, ranks.communicator.size, found, wire)


def _sum(communicator: Communicator, buffer: Any) -> None:
    communicator.allreduce(buffer, "hvdp.sum")()


def _seconds(communicator: Communicator, act: Callable[[], object]) -> float:
    """Return the median duration of ``act`` on the slowest rank; all ranks start together. Collective."""
    found = []
    for repetition in range(REPETITIONS + 2):
        communicator.gather_integers(np.zeros(1, np.int64), "hvdp.together")
        started = time.perf_counter()
        act()
        taken = np.array([1e9 * (time.perf_counter() - started)]).astype(np.int64)
        slowest = communicator.gather_integers(taken, "hvdp.nanoseconds").max()
        if repetition >= 2:
            found.append(float(slowest) / 1e9)
    return median(found)
