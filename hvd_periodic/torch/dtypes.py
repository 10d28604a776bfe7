"""The dtypes that tensors have in flat vectors."""

from __future__ import annotations

import torch

REALS = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""The dtype of center and accumulators: a 16-bit center does not move under a small rate."""

INTEGERS = {
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}
"""The dtype in which integers travel: Horovod reduces no others. All else travels as the root's only, as int64."""
