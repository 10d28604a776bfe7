"""Arrays that represent variables while a graph waits for Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
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

_HANDLE = tf.TensorSpec([], tf.resource)
"""The handle of a variable."""

_Kinds = tuple[tuple[tf.DType, tuple[int, ...]], ...]
"""Dtypes and shapes of variables."""

Key = tuple[int, int, int]
"""Key of a block: identity of the store, index of the bucket, and the block's first element in it."""


class _Place(NamedTuple):
    """Location of a variable's elements ``[start, stop)``, at an offset in a block."""

    key: Key
    offset: int
    start: int
    stop: int


class _VariableBlock:
    """The variables of a block, read and assigned eagerly.

    A single operation reads or assigns several variables, by a function of their handles. Blocks of the same dtypes and
    shapes share the function, whichever optimizer they belong to. It runs in the thread that calls it, as
    all others of TensorFlow may be waiting for this one.

    Args:
        variables: those of a layout.
        block: the elements that belong to this block.

    Attributes:
        variables: the variables of the block.
        size: number of elements.
        at_once: whether one operation reads or assigns the block: it holds all elements of a variable, or of several
            in host memory.
    """

    def __init__(self, variables: Sequence[Any], block: Bucket) -> None:
        self.variables = [variables[piece.tensor] for piece in block.pieces]
        self.size, self._kind = block.size, block.kind
        sizes = [variable.shape.num_elements() for variable in self.variables]
        self._slices = [slice(piece.start, piece.stop) for piece in block.pieces]
        whole = self._slices == [slice(0, size) for size in sizes]
        self.at_once = whole and (len(sizes) == 1 or all(map(is_in_host_memory, self.variables)))

    @cached_property
    def _handles(self) -> list[tf.Tensor]:
        return [variable.handle for variable in self.variables]

    @cached_property
    def _kinds(self) -> _Kinds:
        return tuple((variable.dtype.base_dtype, tuple(variable.shape.as_list())) for variable in self.variables)

    def read(self) -> np.ndarray:
        """Return the elements, not to be changed: they may be the memory of a variable."""
        if len(self.variables) > 1 and self.at_once:
            return np.asarray(_called(_reader(self._kinds, self._kind), self._handles, [tf.as_dtype(self._kind)])[0])
        pairs = zip(self._handles, self._kinds, self._slices, strict=True)
        parts = [_memory_of(handle, dtype)[elements] for handle, (dtype, _), elements in pairs]
        array = parts[0].astype(self._kind, copy=False) if len(parts) == 1 else joined(parts, self._kind)
        array.flags.writeable = False
        return array

    def assign(self, array: np.ndarray) -> None:
        """Assign the elements at once; the variables may keep the memory of the array."""
        if len(self.variables) > 1:
            _called(_writer(self._kinds, self._kind), [as_tensor(array), *self._handles], [])
        else:
            _assign(self.variables[0], array)


class Blocks:
    """The blocks of stores: whole variables, or parts of large ones; small variables share a block.

    Attributes:
        runs: groups of blocks that are written together, each with its store.
        of_key: the variables of every block.
        of_bucket: the blocks of a bucket, by the identity of its store and its index.
        of_variable: the locations of a variable's elements, by the identity of the variable.
    """

    def __init__(self, stores: Sequence[Store[Any]]) -> None:
        self.runs: list[tuple[Store[Any], list[Bucket]]] = []
        self.of_key: dict[Key, _VariableBlock] = {}
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
            self.of_key |= {key_of(store, block): _VariableBlock(variables, block) for block in blocks}
            for block in blocks:
                for piece in block.pieces:
                    place = _Place(key_of(store, block), piece.offset, piece.start, piece.stop)
                    self.of_variable.setdefault(id(variables[piece.tensor]), []).append(place)
            if bucket.index in store.layout.ends or bucket is store.layout.buckets[-1]:
                self.runs += [(store, run)] if run else []
                run = []


class _Arrays(dict[Key, np.ndarray]):
    """The arrays that represent blocks; those that are not given are read when they are needed."""

    def __init__(self, blocks: Blocks, given: Iterable[tuple[Key, np.ndarray]] = ()) -> None:
        super().__init__(given)
        self._blocks = blocks

    def __missing__(self, key: Key) -> np.ndarray:
        array = self[key] = self._blocks.of_key[key].read()
        return array


class HostValues:
    """The values of variables as flat numpy arrays.

    While a graph waits for Python, an array represents each block of its stores: the block is read at most once, and
    assigned once if it has changed. Otherwise, variables are read and assigned directly. An array that was read must
    not be changed, and is valid until the next write.
    """

    def __init__(self) -> None:
        self._blocks = Blocks([])
        self._arrays = _Arrays(self._blocks)
        self._whole: dict[tuple[int, int], np.ndarray] = {}
        self._changed: set[Key] = set()
        self._own: set[Key] = set()

    @contextmanager
    def standing_for(self, blocks: Blocks, arrays: Iterable[tuple[Key, np.ndarray]] = ()) -> Iterator[None]:
        """Represent the blocks by arrays inside the ``with`` block; those not given are read when they are needed."""
        self._blocks, self._arrays = blocks, _Arrays(blocks, arrays)
        try:
            yield
        finally:
            self._forget()

    def holds(self, variable: Any) -> bool:
        """Return whether arrays represent a variable now."""
        return id(variable) in self._blocks.of_variable

    def read(self, variable: Any) -> np.ndarray:
        """Return the elements of a variable."""
        places = self._blocks.of_variable.get(id(variable))
        if places is None:
            none = variable.shape.num_elements() == 0  # A session cannot read it here.
            dtype = variable.dtype.base_dtype
            return np.empty(0, dtype.as_numpy_dtype) if none else _memory_of(variable.handle, dtype)
        if len(places) == 1:
            key, offset, start, stop = places[0]
            return self._arrays[key][offset : offset + stop - start]
        parts = [self._arrays[key][offset : offset + stop - start] for key, offset, start, stop in places]
        return joined(parts, parts[0].dtype)

    def write(self, variable: Any, array: np.ndarray) -> None:
        """Set the elements of a variable."""
        places = self._blocks.of_variable.get(id(variable))
        if places is None:
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.constant(array.reshape(variable.shape)))
            return
        for key, offset, start, stop in places:
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
            if within == slice(0, self._blocks.of_key[key].size):
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

    def release(self) -> None:
        """Write changed values to the variables, for code that reads or assigns them."""
        at_once, others = list[tuple[_VariableBlock, np.ndarray]](), dict[int, tuple[Any, np.ndarray]]()
        for key in self._changed:
            block = self._blocks.of_key[key]
            if block.at_once:
                at_once.append((block, self._arrays[key]))
            else:
                others |= {id(variable): (variable, self.read(variable)) for variable in block.variables}
        self._forget()
        for block, array in at_once:
            block.assign(array)
        for variable, array in others.values():
            _assign(variable, array)

    def _parts(self, store: Store[Any], bucket: Bucket) -> list[tuple[Key, slice, slice]]:
        """Return all blocks that overlap with (part of) a bucket: key, slice of the block, slice of the bucket."""
        return [
            (
                key,
                slice(max(bucket.start - block.start, 0), min(bucket.stop, block.stop) - block.start),
                slice(max(block.start - bucket.start, 0), min(bucket.stop, block.stop) - bucket.start),
            )
            for key, block in self._blocks.of_bucket.get((id(store), bucket.index), ())
            if bucket.start < block.stop and block.start < bucket.stop
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
        self._blocks, self._whole = Blocks([]), {}
        self._arrays = _Arrays(self._blocks)
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
    can_share = array.flags.writeable and array.flags.c_contiguous and array.size and array.dtype.isbuiltin == 1
    if can_share and address_of(array) % _ALIGNMENT == 0:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    with tf.device("CPU:0"):
        return tf.constant(array)


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


def _memory_of(handle: tf.Tensor, dtype: tf.DType) -> np.ndarray:
    """Return the memory of a variable, flat; an assignment gives the variable other memory."""
    flat = np.asarray(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)).reshape(-1)
    flat.flags.writeable = False
    return flat


def _assign(variable: Any, array: np.ndarray) -> None:
    """Assign the elements of a variable, which may keep the memory of the array."""
    value = array.reshape(variable.shape).astype(variable.dtype.as_numpy_dtype, copy=False)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=as_tensor(value))


def is_in_host_memory(variable: Any) -> bool:
    """Return whether a variable is in the memory in which Python runs."""
    device = tf.DeviceSpec.from_string(variable.device)
    return (device.device_type, device.device_index) == ("CPU", 0)


@cache
def _reader(kinds: _Kinds, kind: str) -> Any:
    """Return a function of the handles of variables that returns their elements as one vector."""

    def read(*handles: tf.Tensor) -> tf.Tensor:
        flat, parts = tf.constant([-1]), []
        for handle, (dtype, _) in zip(handles, kinds, strict=True):
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            parts.append(tf.cast(tf.raw_ops.Reshape(tensor=value, shape=flat), kind))
        return tf.concat(parts, axis=0)

    return _traced(read, [_HANDLE] * len(kinds))


@cache
def _writer(kinds: _Kinds, kind: str) -> Any:
    """Return a function of a vector and the handles of variables that assigns their elements."""
    sizes = [tf.TensorShape(shape).num_elements() for _, shape in kinds]

    def assign(vector: tf.Tensor, *handles: tf.Tensor) -> None:
        shapes = {shape: tf.constant(shape, tf.int32) for _, shape in kinds}
        for handle, part, (dtype, shape) in zip(handles, tf.split(vector, sizes), kinds, strict=True):
            value = tf.cast(tf.raw_ops.Reshape(tensor=part, shape=shapes[shape]), dtype)
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    return _traced(assign, [tf.TensorSpec([sum(sizes)], kind), *[_HANDLE] * len(kinds)])


def _traced(function: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> Any:
    """Return a function for the processor, on arguments of these specifications."""

    def on_processor(*arguments: tf.Tensor) -> Any:
        with tf.device("CPU:0"):
            return function(*arguments)

    return tf.function(on_processor, autograph=False).get_concrete_function(*specs)


def _called(function: Any, arguments: Sequence[tf.Tensor], kinds: Sequence[tf.DType]) -> list[tf.Tensor]:
    """Return the results of a function; the checks of an ordinary call would take ten times as long."""
    results: list[tf.Tensor] = tf.raw_ops.StatefulPartitionedCall(
        args=arguments, Tout=kinds, f=function, executor_type="SINGLE_THREADED_EXECUTOR"
    )
    return results
