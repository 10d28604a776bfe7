"""The ranks of the job that a command runs in, by whichever framework Horovod was built with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from hvd_periodic import Communicator
from hvd_periodic.cli.refusal import RefusalError
from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.cost_model import Network, fit_network

SIZES = (2**10, 2**14, 2**18, 2**20, 2**22)
"""Elements of float32: from latency to bandwidth."""


Ranks = tuple[Communicator, Callable[[Any], Any]]
"""A communicator, and what turns a numpy array into what it exchanges."""


def torch_ranks() -> Ranks:
    """Return the ranks, with tensors of PyTorch."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    return HorovodCommunicator("horovod.torch", None, torch.from_numpy), torch.from_numpy


def tensorflow_ranks() -> Ranks:
    """Return the ranks, with tensors of TensorFlow."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator

    hvd.init()
    return TensorFlowCommunicator(), tf.convert_to_tensor


FRAMEWORKS: dict[str, Callable[[], Ranks]] = {"torch": torch_ranks, "tensorflow": tensorflow_ranks}


def job() -> Ranks:
    """Return the ranks of this job.

    Raises:
        RefusalError: Horovod is there for no framework; or, from all ranks, it does not know of the others.
    """
    reasons = []
    for name, ranks in FRAMEWORKS.items():
        try:
            return ranks()
        except ImportError as error:
            reasons.append(f"{name}: {error}")
        except RuntimeError as error:
            raise RefusalError(str(error)) from error
    raise RefusalError(f"This needs Horovod with PyTorch or TensorFlow, see hvdp doctor. {'; '.join(reasons)}")


def measure(
    job: Ranks, sizes: Sequence[int], repetitions: int, tick: Callable[[int], None]
) -> list[tuple[float, float]]:
    """Return bytes and seconds of allreduces: medians of what they take on the slowest rank. Collective."""
    communicator, tensor = job
    found = []
    for size in sizes:
        seconds = []
        for repetition in range(repetitions + 2):
            buffer = tensor(np.zeros(size, np.float32))
            communicator.gather_integers(np.zeros(1, np.int64), "hvdp.together")
            started = time.perf_counter()
            communicator.allreduce(buffer, "hvdp.allreduce")()
            taken = int(1e9 * (time.perf_counter() - started))
            slowest = communicator.gather_integers(np.array([taken], np.int64), "hvdp.seconds").max()
            if repetition >= 2:
                seconds.append(float(slowest) / 1e9)
        found.append((4.0 * size, median(seconds)))
        tick(1)
    return found


def network(job: Ranks, tick: Callable[[int], None]) -> Network:
    """Return what a collective costs among these ranks. Collective."""
    return fit_network(job[0].size, measure(job, SIZES, 7, tick))
