"""Checks one framework's Horovod with an allreduce whose sum is known: ``verify.py torch|tensorflow [SIZE]``.

Run it alone or under a launcher; with SIZE, the job must have that many ranks.
"""

import sys
from types import ModuleType


def torch_sum(value: float) -> tuple[ModuleType, float]:
    """Sums `value` over the ranks with torch."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.tensor([value + hvd.rank()]), op=hvd.Sum, name="verify")
    return hvd, total.item()


def tensorflow_sum(value: float) -> tuple[ModuleType, float]:
    """Sums `value` over the ranks with TensorFlow."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    total = hvd.allreduce(tf.constant([value + hvd.rank()]), op=hvd.Sum, name="verify")
    return hvd, float(total.numpy()[0])


def main() -> None:
    """Exits with a message when the sum or the number of ranks is not the expected one."""
    framework = sys.argv[1]
    hvd, total = {"torch": torch_sum, "tensorflow": tensorflow_sum}[framework](1.0)
    size = hvd.size()
    if len(sys.argv) > 2 and size != int(sys.argv[2]):
        raise SystemExit(f"{framework}: the job should have {sys.argv[2]} ranks, Horovod sees {size}")
    expected = size * (size + 1) / 2  # Rank r contributes r + 1.
    if total != expected:
        raise SystemExit(f"{framework}: allreduce of 1..{size} should be {expected}, got {total}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
