"""The operations of wires on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from hvd_periodic.torch import foreach
from hvd_periodic.torch.dtypes import REALS
from hvd_periodic.vectors.coding import BLOCK, ROUNDER, Coding, shifts

_TYPES = {
    "f4": torch.float32,
    "f2": torch.float16,
    "bf2": torch.bfloat16,
    "i1": torch.int8,
    "i4": torch.int32,
    "u1": torch.uint8,
}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their number of bytes."""

_OF_ARRAYS: Coding[np.ndarray[Any, Any]] = Coding()


class TensorCoding(Coding[torch.Tensor]):
    """The operations of wires on tensors on any device."""

    def at_once(self, x: torch.Tensor, elements: int) -> int | None:
        """Return the best number per call on the host; None on a GPU, which processes all at once.

        A call of PyTorch takes microseconds, which weigh more than the farther cache that large blocks need. But the
        C library keeps only twice the largest memory that was freed, here that of a decoded message: the intermediate
        results of blocks of more than a quarter of it would be returned to the system, and fetched again.
        """
        return min(max(BLOCK, elements // 4), 4 * BLOCK) if x.is_cpu else None

    def host_array(self, x: torch.Tensor) -> np.ndarray[Any, Any] | None:
        """Return the memory of a tensor on the CPU."""
        return x.detach().numpy() if x.is_cpu else None

    def from_host(self, x: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return a tensor with the memory of an array."""
        return torch.from_numpy(x)

    def cast(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """Return the tensor in another type, or the tensor itself if it already has that type."""
        if kind == "u1" and x.is_floating_point():
            x = x.int()  # PyTorch converts in two steps several times as fast.
        return x.to(_TYPES[kind])

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32."""
        return x.float()

    def like(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return ``x`` in the type of ``other``."""
        return x.to(other.dtype)

    def clip(self, x: torch.Tensor, limit: float) -> torch.Tensor:
        """Return ``x`` clipped so that no element is larger than the limit in magnitude."""
        return x.clamp(-limit, limit)

    def are_finite(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether no element is NaN or infinite, in types that have such values; waits once for each device.

        Norms decide this in one pass and one call. If a norm is not finite, perhaps only because it overflows, the
        least and the largest element decide: both are NaN if any element is.
        """
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in tensors:
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
        for (_, dtype), same_kind in by_kind.items():
            if dtype.is_complex:
                same_kind = [torch.view_as_real(tensor.resolve_conj()) for tensor in same_kind]
            elif dtype not in REALS:
                continue
            if not bool(torch.stack(foreach.norm(same_kind)).isfinite().all()):
                filled = [tensor for tensor in same_kind if tensor.numel()]
                extremes = torch.stack([extreme for tensor in filled for extreme in torch.aminmax(tensor)])
                if not bool(extremes.isfinite().all()):
                    return False
        return True

    def is_finite_or(self, x: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether every element is finite, or equal to the same element of another tensor."""
        return bool((x.isfinite() | (x == other.to(x.device))).all())

    def rows(self, x: torch.Tensor, count: int, length: int) -> torch.Tensor:
        """Return the elements in rows, with zeros after the last element."""
        return self.padded(x.reshape(1, -1), count * length).reshape(count, length)

    def padded(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """Return rows with zeros appended up to a length."""
        return x if x.shape[1] == length else torch.nn.functional.pad(x, (0, length - x.shape[1]))

    def constant(self, values: Any, other: torch.Tensor) -> torch.Tensor:
        """Return numbers as float32, on the device of ``other``."""
        numbers = np.asarray(values, np.float32)
        return _constant(numbers.tobytes(), numbers.shape, other.device)

    def max_abs(self, x: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of every row."""
        return torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)).abs_()

    def at_least(self, x: torch.Tensor, limit: float) -> torch.Tensor:
        """Return ``x`` with smaller elements replaced by the limit; overwrites ``x``."""
        return x.clamp_min_(limit)

    def above(self, x: torch.Tensor, floor: float) -> torch.Tensor:
        """Return magnitudes, with 0 where they are not larger than the floor; may overwrite ``x``."""
        return torch.threshold_(x, floor, 0.0)

    def count(self, x: torch.Tensor) -> torch.Tensor:
        """Return the number of ones in every row."""
        return x.sum(-1, keepdim=True)

    def exceeds(self, x: torch.Tensor, limit: float | torch.Tensor) -> torch.Tensor:
        """Return 1 where an element is larger than the limit; several times as fast as a boolean that is converted."""
        return torch.gt(x, limit, out=torch.empty_like(x))

    def negative(self, x: torch.Tensor) -> torch.Tensor:
        """Return 1 where an element is less than 0."""
        return torch.lt(x, 0.0, out=torch.empty_like(x))

    def ratio(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return ``x / y``; 0 where ``y`` is 0."""
        return x / y.masked_fill(y == 0, torch.inf)

    def quotient(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the integers nearest to ``x / y``; 0 where ``y`` is 0."""
        return self.ratio(x, y).round_()

    def rounded(self, x: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the lowest byte of the nearest integers plus an offset."""
        return x.add_(ROUNDER + offset).view(torch.int32).to(torch.uint8)

    def exponents(self, x: torch.Tensor) -> torch.Tensor:
        """Return the exponents of the nearest powers of 2."""
        bits = x.view(torch.int32) >> 23
        bits &= 1
        bits += x.view(torch.int32)
        bits += 0x3FFFFF - (127 << 23)
        bits >>= 23
        return bits

    def to_bytes(self, x: torch.Tensor) -> torch.Tensor:
        """Return the bytes of every row."""
        return x.contiguous().view(torch.uint8)

    def from_bytes(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """Return the rows that :meth:`to_bytes` was given; a copy, whose memory is aligned for the type."""
        return x.clone(memory_format=torch.contiguous_format).view(_TYPES[kind])

    def packed(self, x: torch.Tensor, bits: int) -> torch.Tensor:
        """Return rows of numbers of 1, 2, 4 or 8 bits in as many bits each."""
        if bits == 1 and x.is_cpu:
            return torch.from_numpy(np.asarray(_OF_ARRAYS.packed(x.numpy(), 1)))
        if bits == 8:
            return x
        words = x.contiguous().view(_WORDS[8 // bits])
        return (words * shifts(bits) >> (64 // bits - 8)).to(torch.uint8)

    def bits(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Return the lowest bits of integers, the lowest first."""
        if x.is_cpu:
            return torch.from_numpy(np.asarray(_OF_ARRAYS.bits(x.numpy(), count)))
        return ((x.unsqueeze(-1) >> torch.arange(count, dtype=torch.int32, device=x.device)) & 1).to(torch.uint8)

    def looked_up(self, table: np.ndarray[Any, Any], x: torch.Tensor) -> torch.Tensor:
        """Return the numbers of one entry of the table for every byte."""
        entries = _entries(table.tobytes(), table.dtype.str, x.device)
        return entries.index_select(0, x.reshape(-1).int()).view(torch.float32).reshape(*x.shape[:-1], -1)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the rows of several tensors, joined side by side."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)

    def new_rows(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """Return rows with any values."""
        return x.new_empty(len(x), length)

    def largest(self, x: torch.Tensor, count: int, floor: float = 0.0) -> torch.Tensor:
        """Return the indices of the largest magnitudes of every row; of equal ones, the first."""
        if x.is_cpu:
            return torch.from_numpy(np.asarray(_OF_ARRAYS.largest(x.detach().numpy(), count, floor)))
        magnitudes = self.above(x.abs(), floor)
        least = magnitudes.topk(count).values[:, -1:]
        chosen = magnitudes >= least
        if int(chosen.count_nonzero()) > x.shape[0] * count:
            larger = magnitudes > least
            chosen &= larger | ((chosen & ~larger).cumsum(1) <= count - larger.sum(1, keepdim=True))
        return chosen.nonzero()[:, 1].reshape(-1, count).int()

    def take(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the elements of every row at its indices."""
        return x.gather(1, places.long())

    def nonzero_rows(self, x: torch.Tensor) -> np.ndarray[Any, Any]:
        """Return for every row whether any element is not 0; waits for the device."""
        touched = (x.amax(dim=1) != 0) | (x.amin(dim=1) != 0)  # Several times as fast as any().
        return np.asarray(touched.cpu().numpy())

    def take_rows(self, x: torch.Tensor, places: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return the rows at these indices."""
        return x[torch.from_numpy(places).to(x.device)]

    def put_rows(self, x: torch.Tensor, places: np.ndarray[Any, Any], rows: torch.Tensor) -> torch.Tensor:
        """Copy rows to these indices."""
        return x.index_copy_(0, torch.from_numpy(places).to(x.device), rows)

    def scattered(self, values: torch.Tensor, places: torch.Tensor, length: int) -> torch.Tensor:
        """Return rows of zeros with these values at these indices."""
        return values.new_zeros(values.shape[0], length).scatter_(1, places.long(), values)


@lru_cache
def _constant(numbers: bytes, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return float32 on a device, which are not overwritten; kept there, as small operations take the host long."""
    values = np.frombuffer(numbers, np.float32)
    # Filled on the device: to copy from host memory makes the host wait. Few differ from the first.
    found = torch.full(shape, float(values[0]), dtype=torch.float32, device=device)
    for i in np.flatnonzero(values != values[0]):
        found.view(-1)[int(i)].fill_(float(values[i]))
    return found


@lru_cache
def _entries(table: bytes, kind: str, device: torch.device) -> torch.Tensor:
    """Return a table on a device; kept there, as to copy it makes the host wait."""
    return torch.from_numpy(np.frombuffer(table, kind).copy()).to(device)
