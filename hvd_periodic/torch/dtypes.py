"""The dtypes that tensors have in flat vectors, where complex numbers are pairs of real ones."""

from __future__ import annotations

import torch

REALS = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""The dtype of center and accumulators: a small rate would not move a 16-bit center."""

COMPLEX = frozenset({torch.complex64, torch.complex128})
"""Dtypes of parameters that are exchanged as pairs of reals."""

INTEGERS = {
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}
"""The dtype in which integers are sent: Horovod reduces no others. All else is only sent from the root, as int64."""


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as reals of shape (…, 2), in the same memory; other tensors as they are.

    Every algorithm acts elementwise with real factors, so that exchanging the pairs exchanges the complex numbers.
    """
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
