"""Counts the parameters in a file, without loading them if the format allows it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hvd_periodic.cli.usage_error import UsageError

_OPTIMIZER = "optim"
"""Keys that begin with this hold the state of an optimizer, not parameters."""


def parameters_of(path: Path) -> int:
    """Return the number of floating-point numbers in a file of parameters.

    Statistics, e.g. of batch normalization, are counted, too, and complex numbers as two each.

    Raises:
        UsageError: the file or the library of its format is missing, or it cannot be read in one of the formats.
    """
    kind = next((kind for kind in READERS if path.name.endswith(kind)), None)
    if kind is None:
        raise UsageError(f"`--model` must end in one of {', '.join(READERS)}. Received: {path}")
    if not path.is_file():
        raise UsageError(f"`--model`: there is no file {path}")
    try:
        count = READERS[kind](path)
    except ImportError as error:
        raise UsageError(f"`--model`: {kind} needs {error.name}: pip install {error.name}") from error
    except Exception as error:
        # Readers of damaged files raise many kinds of errors.
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise UsageError(f"`--model`: {path} cannot be read as {kind}: {reason}") from error
    if count == 0:
        raise UsageError(f"`--model`: {path} holds no floating-point numbers")
    return count


def _safetensors(path: Path) -> int:
    """Read the header only: JSON, after its length in 8 bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header: dict[str, Any] = json.loads(file.read(length))
    tensors = [value for key, value in header.items() if key != "__metadata__"]
    parts = {"F": 1, "B": 1, "C": 2}  # F32, BF16 and C64; BOOL has no parts.
    numbers = [tensor for tensor in tensors if tensor["dtype"] != "BOOL"]
    return sum(prod(tensor["shape"]) * parts.get(tensor["dtype"][0], 0) for tensor in numbers)


def _npz(path: Path) -> int:
    """Read the header of each array only."""
    count = 0
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if not name.endswith(".npy"):
                continue
            with archive.open(name) as file:
                version = np.lib.format.read_magic(file)
                read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[version[0]]
                shape, _, dtype = read(file)
                if np.issubdtype(dtype, np.inexact):
                    count += prod(shape) * (2 if np.issubdtype(dtype, np.complexfloating) else 1)
    return count


def _h5(path: Any) -> int:
    import h5py

    count = 0

    def visit(name: str, item: Any) -> None:
        nonlocal count
        if isinstance(item, h5py.Dataset) and not name.startswith(_OPTIMIZER) and item.dtype.kind == "f":
            count += item.size

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return count


def _keras(path: Path) -> int:
    """Read the file of weights in the zip archive."""
    with zipfile.ZipFile(path) as archive, archive.open("model.weights.h5") as file:
        return _h5(file)


def _torch(path: Path) -> int:
    """Leave tensors on disk, and run no code of the file."""
    import torch

    return _counted(torch.load(path, weights_only=True, mmap=True, map_location="cpu"), torch)


def _counted(value: Any, torch: Any) -> int:
    if isinstance(value, torch.Tensor):
        real = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        return int(real.numel()) if real.is_floating_point() else 0
    if isinstance(value, Mapping):
        return sum(_counted(item, torch) for key, item in value.items() if not str(key).startswith(_OPTIMIZER))
    if isinstance(value, (list, tuple)):
        return sum(_counted(item, torch) for item in value)
    return 0


READERS: dict[str, Callable[[Path], int]] = {
    ".safetensors": _safetensors,
    ".npz": _npz,
    ".keras": _keras,
    ".h5": _h5,
    ".pt": _torch,
    ".pth": _torch,
}
