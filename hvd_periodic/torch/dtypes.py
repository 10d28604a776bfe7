"""The dtypes that tensors have in flat vectors."""

from __future__ import annotations

import torch

REALS = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""The dtype of center and accumulators: a small rate would not move a 16-bit center."""

INTEGERS = {
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}
"""The dtype in which integers are sent: Horovod reduces no others. All else is only sent from the root, as int64."""
