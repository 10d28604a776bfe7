"""Python code that a compiled step waits for, as if it were an operation of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvd_periodic.tensorflow.host import outside
from hvd_periodic.vectors.blocks import cut_into_blocks
from hvd_periodic.vectors.layout import Bucket
from hvd_periodic.vectors.store import Store

_ALIGNMENT = 64
"""Bytes."""

_BLOCK_BYTES = 512 * 2**10
"""Operations on as many take much longer than to start them."""

Key = tuple[int, int, int]
"""Identity of a store, index of one of its buckets, and first element of a block of that."""


class _Place(NamedTuple):
    """Elements ``[start, stop)`` of a variable, which begin at an offset in a block."""

    key: Key
    offset: int
    start: int
    stop: int


class HostValues:
    """The values of variables as flat numpy arrays.

    While a compiled step waits for Python, arrays stand for the variables of its stores, one for each block: the graph
    packs small variables and hands over the memory of large ones, as an operation that Python starts takes ten times as
    long. Elsewhere, a variable is read and assigned at once. An array that was read is valid until the next write, and
    must not be changed.
    """

    def __init__(self) -> None:
        self._stores: dict[int, Store[Any]] = {}
        self._blocks: dict[tuple[int, int], list[tuple[Key, Bucket]]] = {}
        self._places: dict[int, list[_Place]] = {}
        self._arrays: dict[Key, np.ndarray] = {}
        self._buckets: dict[tuple[int, int], np.ndarray] = {}
        self._changed: set[Key] = set()
        self._copied: set[Key] = set()

    def holds(self, variable: Any) -> bool:
        """Return whether arrays stand for a variable now."""
        return id(variable) in self._places

    def read(self, variable: Any) -> np.ndarray:
        """Return the elements of a variable."""
        if not self.holds(variable):
            return _memory_of(variable)
        parts = [self._arrays[key][at : at + stop - start] for key, at, start, stop in self._places[id(variable)]]
        return parts[0] if len(parts) == 1 else joined(parts, parts[0].dtype)

    def write(self, variable: Any, array: np.ndarray) -> None:
        """Set the elements of a variable."""
        if not self.holds(variable):
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.constant(array.reshape(variable.shape)))
            return
        for key, offset, start, stop in self._places[id(variable)]:
            self._copy_of(key)[offset : offset + stop - start] = array[start:stop]

    def read_bucket(self, store: Store[Any], bucket: Bucket) -> np.ndarray | None:
        """Return a bucket of a store, or a part of one; None where no array stands for it now."""
        whole = self._buckets.get((id(store), bucket.index))
        if whole is not None and whole.size == bucket.size:
            return whole
        parts = [self._arrays[key][within] for key, within, _ in self._parts(store, bucket)]
        if len(parts) > 1:
            return joined(parts, bucket.kind)
        return parts[0] if parts else None

    def write_bucket(self, store: Store[Any], bucket: Bucket, array: np.ndarray) -> bool:
        """Set a bucket of a store, or a part of one; return False where no array stands for it now."""
        parts = self._parts(store, bucket)
        for key, within, of_bucket in parts:
            if within == slice(0, self._arrays[key].size):
                self._replace(key, array[of_bucket])
            else:
                self._copy_of(key)[within] = array[of_bucket]
        if len(parts) > 1 and len(parts) == len(self._blocks[id(store), bucket.index]):
            self._buckets[id(store), bucket.index] = array
        return bool(parts)

    def lend(self, store: Store[Any], block: Bucket, array: np.ndarray) -> None:
        """Let an array stand for a block of a store, whose variables have its values already."""
        if _key(store, block) not in self._arrays:
            self._add(store, block, array)
        self._replace(_key(store, block), array)
        self._changed.discard(_key(store, block))

    def _add(self, store: Store[Any], block: Bucket, array: np.ndarray) -> None:
        key, variables = _key(store, block), store.tensors()
        self._stores[id(store)], self._arrays[key] = store, array
        self._blocks.setdefault((id(store), block.index), []).append((key, block))
        for piece in block.pieces:
            place = _Place(key, piece.offset, piece.start, piece.stop)
            self._places.setdefault(id(variables[piece.tensor]), []).append(place)

    def _replace(self, key: Key, array: np.ndarray) -> None:
        self._arrays[key] = array
        self._buckets.pop(key[:2], None)
        self._copied.discard(key)
        self._changed.add(key)

    def _parts(self, store: Store[Any], bucket: Bucket) -> list[tuple[Key, slice, slice]]:
        """Return in which blocks a bucket or a part of one is: the elements in each, and those of it."""
        return [
            (
                key,
                slice(max(bucket.start - block.start, 0), min(bucket.stop, block.stop) - block.start),
                slice(max(block.start - bucket.start, 0), min(bucket.stop, block.stop) - bucket.start),
            )
            for key, block in self._blocks.get((id(store), bucket.index), ())
            if bucket.start < block.stop and block.start < bucket.stop
        ]

    def _copy_of(self, key: Key) -> np.ndarray:
        """Return an array that is about to be changed, in the place of one that may not."""
        if key not in self._copied:
            self._replace(key, self._arrays[key].copy())
            self._copied.add(key)
        self._buckets.pop(key[:2], None)
        self._changed.add(key)
        return self._arrays[key]

    def changed(self, store: Store[Any], block: Bucket) -> bool:
        """Return whether the variables do not have the values of a block yet."""
        return _key(store, block) in self._changed

    def assigned(self, store: Store[Any], block: Bucket) -> None:
        """Note that the variables have the values of a block."""
        self._changed.discard(_key(store, block))

    @contextmanager
    def standing_for(self, stores: Sequence[Store[Any]], arrays: Sequence[np.ndarray]) -> Iterator[None]:
        """Let arrays stand for the variables of stores inside the block, in the order of their blocks."""
        blocks = [(store, block) for store in stores for run in runs_of(store) for block in run]
        for (store, block), array in zip(blocks, arrays, strict=True):
            self._add(store, block, array)
        try:
            yield
        finally:
            self._forget()

    def release(self) -> None:
        """Give the variables their values, for code that reads or assigns the variables themselves."""
        unassigned = self.unassigned()
        self._forget()
        for store, block, array in unassigned:
            store.write(block, array)

    def unassigned(self, but: Sequence[Store[Any]] = ()) -> list[tuple[Store[Any], Bucket, np.ndarray]]:
        """Return blocks of stores, but some, whose values variables do not have yet, and those written with them."""
        return [
            (store, block, self._arrays[_key(store, block)])
            for store in self._stores.values()
            if all(store is not other for other in but)
            for run in runs_of(store)
            if any(self.changed(store, block) for block in run)
            for block in run
        ]

    def _forget(self) -> None:
        for known in (self._stores, self._blocks, self._places, self._arrays, self._buckets):
            known.clear()
        self._changed.clear()
        self._copied.clear()


def _key(store: Store[Any], block: Bucket) -> Key:
    return id(store), block.index, block.start


def blocks_of(bucket: Bucket) -> Sequence[Bucket]:
    """Return parts of a bucket that are whole variables, or parts of those that are larger; small ones share a part."""
    return cut_into_blocks(bucket, _BLOCK_BYTES // bucket.itemsize, cut_tensors=False) if bucket.size else ()


def runs_of(store: Store[Any]) -> list[list[Bucket]]:
    """Return the blocks of a store, in the groups that are written together."""
    runs: list[list[Bucket]] = [[]]
    for bucket in store.layout.buckets:
        runs[-1].extend(blocks_of(bucket))
        if bucket.index in store.layout.ends:
            runs.append([])
    return [run for run in runs if run]


def hosted(
    run: Callable[[], object], values: HostValues, stores: Sequence[Store[Any]], others: Sequence[Any] = ()
) -> Callable[[], tf.Tensor]:
    """Return a function that lets a graph wait for Python, and returns True.

    Of all such functions, Python runs one at a time, in the order of the program: no process can have two handshakes
    under way. TensorFlow raises an error of Python as a ``tf.errors.OpError`` that cites its type and text.

    Args:
        run: Python code that reads and writes variables through ``values``.
        values: arrays that stand for the variables of ``stores`` meanwhile.
        stores: variables whose order the graph knows from this.
        others: variables that Python reads or assigns themselves; the graph keeps their order as well.
    """
    runs = [(store, run_of_blocks) for store in stores for run_of_blocks in runs_of(store)]
    blocks = [(store, block) for store, run_of_blocks in runs for block in run_of_blocks]

    def call(*arrays: np.ndarray) -> list[np.ndarray]:
        for array in arrays:
            array.flags.writeable = False  # It may be the memory of a variable.
        with values.standing_for(stores, arrays):
            run()
            changed = [any(values.changed(store, block) for block in of_run) for store, of_run in runs]
            after = [
                _own(store.read(block)) if is_changed else np.empty(0, block.kind)
                for is_changed, (store, of_run) in zip(changed, runs, strict=True)
                for block in of_run
            ]
            unassigned = values.unassigned(but=stores)
        for store, block, array in unassigned:
            store.write(block, array)
        return [np.array(changed, bool), *after]

    def wait() -> tf.Tensor:
        turn = _turn()
        with tf.control_dependencies([turn.assign_add(1).op, *(variable.read_value().op for variable in others)]):
            taken = [store.read(block) for store, block in blocks]
            with tf.device("CPU:0"):
                changed, *after = tf.numpy_function(call, taken, [tf.bool, *(block.kind for _, block in blocks)])
            are_changed = tf.unstack(changed, len(runs))
        for is_changed, (store, of_run) in zip(are_changed, runs, strict=True):
            vectors, after = after[: len(of_run)], after[len(of_run) :]
            tf.cond(is_changed, partial(_assign, store, of_run, vectors), lambda: tf.constant(False))
        with tf.control_dependencies([changed]):
            turn.assign_add(1)
            for variable in others:
                variable.assign(variable.read_value())
            return tf.constant(True)

    return wait


def _assign(store: Store[Any], buckets: Sequence[Bucket], vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Assign buckets in a graph."""
    for bucket, vector in zip(buckets, vectors, strict=True):
        store.write(bucket, tf.ensure_shape(vector, [bucket.size]))
    return tf.constant(True)


_turns: list[tf.Variable] = []


def _turn() -> tf.Variable:
    """Return the variable by which functions that wait for Python wait for each other."""
    if not _turns:
        with outside():
            _turns.append(tf.Variable(0, dtype=tf.int64, trainable=False))
    return _turns[0]


def is_in_host_memory(variable: Any) -> bool:
    """Return whether a variable is in the memory in which Python runs."""
    device = tf.DeviceSpec.from_string(variable.device)
    return (device.device_type, device.device_index) == ("CPU", 0)


def _memory_of(variable: Any) -> np.ndarray:
    """Return the memory of a variable, flat; an assignment gives the variable other memory."""
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype.base_dtype)
    flat = np.reshape(np.asarray(value), -1)
    flat.flags.writeable = False
    return flat


def empty(size: int, dtype: Any) -> np.ndarray:
    """Return an array at an address where TensorFlow takes its memory over, and does not copy it."""
    nbytes = size * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype)


def joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """Return one array of several, in another type if need be."""
    out = empty(sum(part.size for part in parts), dtype)
    return np.concatenate(parts, out=out, casting="unsafe") if parts else out


def as_tensor(array: np.ndarray) -> tf.Tensor:
    """Return a tensor of an array, in whose memory if possible: both must not be changed."""
    with tf.device("CPU:0"):
        if array.ctypes.data % _ALIGNMENT or not (array.flags.writeable and array.flags.c_contiguous and array.size):
            return tf.constant(array)
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _own(array: np.ndarray) -> np.ndarray:
    """Return an array that is not memory of TensorFlow: one that is would keep the array of each exchange before."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner.base is None:
        return array
    copied = empty(array.size, array.dtype)
    copied[:] = array
    return copied
