"""Torch tensors in files and messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvd_periodic.checkpoints.tree import Leaves


class Tensors(Leaves):
    """Torch tensors as arrays; dtypes that numpy lacks are stored as integers with the same bits."""

    def to_array(self, value: Any, copy: bool) -> tuple[np.ndarray, str] | None:
        """Return a tensor as an array in host memory, and its dtype; None for other values and tensors not dense."""
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized or value.is_meta:
            return None
        tensor = value.detach().resolve_conj().resolve_neg().to("cpu", copy=copy)
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in _KNOWN_TO_NUMPY:
            tensor = tensor.view(_OF_BYTES[tensor.element_size()])
        return tensor.numpy(), kind

    def from_array(self, array: np.ndarray, kind: str) -> Any:
        """Return the tensor that :meth:`to_array` stored as an array."""
        dtype = getattr(torch, kind, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"it holds a tensor of {kind}, which this version of torch does not know")
        tensor = torch.from_numpy(array)
        return tensor if tensor.dtype == dtype else tensor.view(dtype)

    def to_name(self, value: Any) -> str | None:
        """Return the name of a dtype, a layout, a memory format or a device."""
        if isinstance(value, torch.device):
            return f"device {value}"
        constant = isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
        return str(value).removeprefix("torch.") if constant else None

    def from_name(self, name: str) -> Any:
        """Return the object with a name from :meth:`to_name`."""
        if name.startswith("device "):
            return torch.device(name.removeprefix("device "))
        value = getattr(torch, name, None)
        if not isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            raise ValueError(f"it holds torch.{name}, which this version of torch does not know")
        return value


_KNOWN_TO_NUMPY = {
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
