"""Arrays that represent variables while a compiled step waits for Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvd_periodic.vectors.blocks import cut_into_blocks
from hvd_periodic.vectors.layout import Bucket
from hvd_periodic.vectors.store import Store

_BLOCK_BYTES = 512 * 2**10
"""Size at which an operation takes much longer than its launch."""

_ALIGNMENT = 64
"""Alignment in bytes at which TensorFlow and numpy can share memory."""

Key = tuple[int, int, int]
"""Key of a block: identity of the store, index of the bucket, and the block's first element in it."""


class _Place(NamedTuple):
    """Location of a variable's elements ``[start, stop)``, at an offset in a block."""

    key: Key
    offset: int
    start: int
    stop: int


class Blocks:
    """The blocks of stores: whole variables, or parts of large ones; small variables share a block.

    Attributes:
        runs: groups of blocks that are written together, each with its store.
        of_bucket: the blocks of a bucket, by the identity of its store and its index.
        of_variable: the locations of a variable's elements, by the identity of the variable.
    """

    def __init__(self, stores: Sequence[Store[Any]]) -> None:
        self.runs: list[tuple[Store[Any], list[Bucket]]] = []
        self.of_bucket: dict[tuple[int, int], list[tuple[Key, Bucket]]] = {}
        self.of_variable: dict[int, list[_Place]] = {}
        for store in stores:
            self._add(store)

    def _add(self, store: Store[Any]) -> None:
        run: list[Bucket] = []
        variables = store.tensors()
        for bucket in store.layout.buckets:
            blocks = blocks_of(bucket) if bucket.size else ()
            run += blocks
            self.of_bucket[id(store), bucket.index] = [(key_of(store, block), block) for block in blocks]
            for block in blocks:
                for piece in block.pieces:
                    place = _Place(key_of(store, block), piece.offset, piece.start, piece.stop)
                    self.of_variable.setdefault(id(variables[piece.tensor]), []).append(place)
            if bucket.index in store.layout.ends or bucket is store.layout.buckets[-1]:
                self.runs += [(store, run)] if run else []
                run = []


class HostValues:
    """The values of variables as flat numpy arrays.

    While a compiled step waits for Python, an array represents each block of its stores: the graph packs small
    variables and passes the memory of large ones, since an operation that Python starts takes ten times as long.
    Otherwise, variables are read and assigned directly. An array that was read is valid until the next write, and must
    not be changed.
    """

    def __init__(self) -> None:
        self._blocks = Blocks([])
        self._arrays: dict[Key, np.ndarray] = {}
        self._whole: dict[tuple[int, int], np.ndarray] = {}
        self._changed: set[Key] = set()
        self._own: set[Key] = set()

    @contextmanager
    def standing_for(self, blocks: Blocks, arrays: Iterable[tuple[Key, np.ndarray]]) -> Iterator[None]:
        """Represent all or some of the blocks by arrays inside the ``with`` block."""
        self._blocks, self._arrays = blocks, dict(arrays)
        try:
            yield
        finally:
            self._forget()

    def holds(self, variable: Any) -> bool:
        """Return whether arrays represent a variable now."""
        places = self._blocks.of_variable.get(id(variable), ())
        return bool(places) and all(place.key in self._arrays for place in places)

    def read(self, variable: Any) -> np.ndarray:
        """Return the elements of a variable."""
        if variable.shape.num_elements() == 0:
            return np.empty(0, variable.dtype.as_numpy_dtype)
        if not self.holds(variable):
            return _memory_of(variable)
        places = self._blocks.of_variable[id(variable)]
        parts = [self._arrays[key][offset : offset + stop - start] for key, offset, start, stop in places]
        return parts[0] if len(parts) == 1 else joined(parts, parts[0].dtype)

    def write(self, variable: Any, array: np.ndarray) -> None:
        """Set the elements of a variable."""
        if not self.holds(variable):
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.constant(array.reshape(variable.shape)))
            return
        for key, offset, start, stop in self._blocks.of_variable[id(variable)]:
            self._copy_of(key)[offset : offset + stop - start] = array[start:stop]

    def read_bucket(self, store: Store[Any], bucket: Bucket) -> np.ndarray | None:
        """Return a bucket of a store, or a part of one; None if no array represents it now."""
        whole = self._whole.get((id(store), bucket.index))
        if whole is not None and whole.size == bucket.size:
            return whole
        parts = [self._arrays[key][within] for key, within, _ in self._parts(store, bucket)]
        if len(parts) > 1:
            return joined(parts, bucket.kind)
        return parts[0] if parts else None

    def write_bucket(self, store: Store[Any], bucket: Bucket, array: np.ndarray) -> bool:
        """Set a bucket of a store, or a part of one; return False if no array represents it now."""
        parts = self._parts(store, bucket)
        for key, within, of_bucket in parts:
            if within == slice(0, self._arrays[key].size):
                self._replace(key, array[of_bucket])
            else:
                self._copy_of(key)[within] = array[of_bucket]
        if len(parts) > 1 and bucket.size == store.layout.buckets[bucket.index].size:
            self._whole[id(store), bucket.index] = array
        return bool(parts)

    def lend(self, store: Store[Any], block: Bucket, array: np.ndarray) -> None:
        """Represent a block by an array whose values its variables already have."""
        self._replace(key_of(store, block), array)
        self._changed.discard(key_of(store, block))

    def changed(self, store: Store[Any], blocks: Iterable[Bucket]) -> bool:
        """Return whether any of these blocks has values that its variables do not have yet."""
        return any(key_of(store, block) in self._changed for block in blocks)

    def release(self, but: Sequence[Store[Any]] = ()) -> None:
        """Write changed values to the variables, for code that reads or assigns them; skip the stores in ``but``."""
        written = [
            (store, block, self._arrays[key_of(store, block)])
            for store, run in self._blocks.runs
            if self.changed(store, run) and all(store is not other for other in but)
            for block in run
        ]
        self._forget()
        for store, block, array in written:
            store.write(block, array)

    def _parts(self, store: Store[Any], bucket: Bucket) -> list[tuple[Key, slice, slice]]:
        """Return all blocks that overlap with (part of) a bucket: key, slice of the block, slice of the bucket."""
        return [
            (
                key,
                slice(max(bucket.start - block.start, 0), min(bucket.stop, block.stop) - block.start),
                slice(max(block.start - bucket.start, 0), min(bucket.stop, block.stop) - bucket.start),
            )
            for key, block in self._blocks.of_bucket.get((id(store), bucket.index), ())
            if bucket.start < block.stop and block.start < bucket.stop and key in self._arrays
        ]

    def _replace(self, key: Key, array: np.ndarray) -> None:
        self._arrays[key] = array
        self._whole.pop(key[:2], None)
        self._own.discard(key)
        self._changed.add(key)

    def _copy_of(self, key: Key) -> np.ndarray:
        """Return the array of a block for modification, after replacing a read-only one with a copy."""
        if key not in self._own:
            self._replace(key, self._arrays[key].copy())
            self._own.add(key)
        self._whole.pop(key[:2], None)
        self._changed.add(key)
        return self._arrays[key]

    def _forget(self) -> None:
        self._blocks, self._arrays, self._whole = Blocks([]), {}, {}
        self._changed.clear()
        self._own.clear()


def key_of(store: Store[Any], block: Bucket) -> Key:
    """Return the key of a block of a store."""
    return id(store), block.index, block.start


def blocks_of(bucket: Bucket) -> Sequence[Bucket]:
    """Cut a bucket into blocks: whole variables, or parts of large ones; small variables share a block."""
    return cut_into_blocks(bucket, _BLOCK_BYTES // bucket.itemsize, cut_tensors=False)


def empty(size: int, dtype: Any) -> np.ndarray:
    """Return an uninitialized array whose memory TensorFlow can share without a copy."""
    nbytes = size * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype)


def joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """Concatenate arrays, in the given dtype."""
    out = empty(sum(part.size for part in parts), dtype)
    return np.concatenate(parts, out=out, casting="unsafe") if parts else out


def as_tensor(array: np.ndarray) -> tf.Tensor:
    """Return a tensor of an array, which shares its memory if possible: neither may be changed."""
    with tf.device("CPU:0"):
        if array.ctypes.data % _ALIGNMENT or not (array.flags.writeable and array.flags.c_contiguous and array.size):
            return tf.constant(array)
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def as_array(tensor: tf.Tensor) -> np.ndarray:
    """Return a writable array in the memory of a tensor, which nothing else may use any more."""
    return np.asarray(_Memory(tensor))


class _Memory:
    """The memory of a tensor, to which TensorFlow gives numpy only read access."""

    def __init__(self, tensor: tf.Tensor) -> None:
        array = np.asarray(tensor)
        self.__array_interface__ = array.__array_interface__ | {"data": (address_of(array), False)}
        self._array = array  # keeps the memory


class TensorFlowMemory:
    """TensorFlow tensors as arrays; arrays, which stand for variables in host memory, unchanged."""

    def to_host(self, buffer: Any) -> np.ndarray:
        """Return an array itself, or a copy of a tensor's values, which nothing may change."""
        return buffer if isinstance(buffer, np.ndarray) else np.array(buffer)

    def from_host(self, array: np.ndarray, like: Any) -> Any:
        """Return an array, or a tensor on the device of ``like``."""
        if isinstance(like, np.ndarray):
            return array
        with tf.device(like.device):
            return tf.constant(array)


def copied_if_in(array: np.ndarray, given: set[int]) -> np.ndarray:
    """Return an array, or a copy if it is a view of memory at one of the addresses in ``given``."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return joined([array], array.dtype) if address_of(owner) in given else array


def address_of(array: np.ndarray) -> int:
    """Return the address of the first element."""
    address: int = array.__array_interface__["data"][0]
    return address


def _memory_of(variable: Any) -> np.ndarray:
    """Return the memory of a variable, flat; an assignment gives the variable other memory."""
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype.base_dtype)
    flat = np.reshape(np.asarray(value), -1)
    flat.flags.writeable = False
    return flat
