"""A second device on any machine: its tensors lie in host memory, and torch refuses to mix them with others."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "second"
_MOVES = ("aten::copy_", "aten::_foreach_copy_", "aten::_to_copy")
"""What tensors of both devices may be given to."""


class OfSecond(torch.Tensor):
    """A tensor of the second device; ``held`` has its values, and views of it share their memory."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OfSecond:
        """Return a tensor like this one."""
        place = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, held.size(), **place, device=torch.device(NAME, 0))

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return the memory, for communicators of numpy arrays."""
        return self.held.numpy()

    def __deepcopy__(self, memo: Any) -> OfSecond:
        """Return a copy."""
        return OfSecond(self.held.clone())

    def data_ptr(self) -> int:
        """Return where the values are."""
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the values, where all tensors are of this device or numbers."""
        strangers: list[torch.Tensor] = []
        known: dict[int, OfSecond] = {}

        def inside(value: Any) -> Any:
            if isinstance(value, OfSecond):
                known[id(value.held)] = value
                return value.held
            if isinstance(value, torch.Tensor) and value.dim():
                strangers.append(value)
            return value

        args, kwargs = tree_map(inside, (args, kwargs or {}))
        if strangers and function._schema.name not in _MOVES:
            raise RuntimeError(f"{function} was given tensors of both devices")
        target = kwargs.pop("device", None)
        result = function(*args, **kwargs)
        if target is not None and torch.device(target).type == "cpu":
            return result.clone() if any(result is held.held for held in known.values()) else result

        def outside(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or any(value is stranger for stranger in strangers):
                return value
            return known[id(value)] if id(value) in known else OfSecond(value)

        return tree_map(outside, result)


def register() -> None:
    """Make the device known to torch, in this process, for good."""
    _setup_privateuseone_for_python_backend(NAME)

    def empty(size: Any, dtype: Any = None, **others: Any) -> torch.Tensor:
        return OfSecond(torch.empty(size, dtype=dtype, device="cpu"))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, **others: Any) -> torch.Tensor:
        return OfSecond(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    for name, function in (("empty.memory_format", empty), ("empty_strided", empty_strided)):
        torch.library.impl(f"aten::{name}", "PrivateUse1")(function)
