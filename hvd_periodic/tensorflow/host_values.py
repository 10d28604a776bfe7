"""Arrays that represent variables while a graph waits for Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import chain
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

_KEPT = 64
"""Functions that read, and as many that assign, which are kept for other exchanges and optimizers."""

_HANDLE = tf.TensorSpec([], tf.resource)
"""The handle of a variable."""

_Form = tuple[tuple[tuple[str, tuple[int, ...]], ...], str]
"""Dtypes and shapes of the variables of a block, and the dtype of the block."""

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

    Args:
        variables: those of a layout.
        block: the elements that belong to this block.

    Attributes:
        variables: the variables of the block.
        size: number of elements.
        kind: dtype of the block.
        at_once: whether an operation may read and assign the block with others: it holds all elements of its variables,
            which are in host memory.
    """

    def __init__(self, variables: Sequence[Any], block: Bucket) -> None:
        self.variables = [variables[piece.tensor] for piece in block.pieces]
        self.size, self.kind = block.size, block.kind
        sizes = [variable.shape.num_elements() for variable in self.variables]
        self._slices = [slice(piece.start, piece.stop) for piece in block.pieces]
        whole = self._slices == [slice(0, size) for size in sizes]
        self.at_once = whole and all(map(is_in_host_memory, self.variables))

    @cached_property
    def handles(self) -> list[tf.Tensor]:
        """The handles of the variables."""
        return [variable.handle for variable in self.variables]

    @cached_property
    def form(self) -> _Form:
        """The dtypes and shapes of the variables, and the dtype of the block."""
        variables = self.variables
        return tuple((v.dtype.base_dtype.name, tuple(v.shape.as_list())) for v in variables), self.kind

    def read(self) -> np.ndarray:
        """Return the elements, each variable for itself."""
        pairs = zip(self.variables, self._slices, strict=True)
        parts = [_memory_of(variable)[elements] for variable, elements in pairs]
        return parts[0].astype(self.kind, copy=False) if len(parts) == 1 else joined(parts, self.kind)


class Blocks:
    """The blocks of stores: whole variables, or parts of large ones; small variables share a block.

    Attributes:
        runs: groups of blocks that are written together, each with its store.
        of_key: the variables of every block.
        of_store: the blocks of a store, by its identity.
        of_bucket: the blocks of a bucket, by the identity of its store and its index.
        of_variable: the locations of a variable's elements, by the identity of the variable.
    """

    def __init__(self, stores: Sequence[Store[Any]]) -> None:
        self.runs: list[tuple[Store[Any], list[Bucket]]] = []
        self.of_key: dict[Key, _VariableBlock] = {}
        self.of_store: dict[int, dict[Key, _VariableBlock]] = {}
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
            of_bucket = {key_of(store, block): _VariableBlock(variables, block) for block in blocks}
            self.of_key |= of_bucket
            self.of_store.setdefault(id(store), {}).update(of_bucket)
            for block in blocks:
                for piece in block.pieces:
                    place = _Place(key_of(store, block), piece.offset, piece.start, piece.stop)
                    self.of_variable.setdefault(id(variables[piece.tensor]), []).append(place)
            if bucket.index in store.layout.ends or bucket is store.layout.buckets[-1]:
                self.runs += [(store, run)] if run else []
                run = []


class _Arrays(dict[Key, np.ndarray]):
    """The arrays that represent blocks; if one is not given, all of its store are read when it is needed.

    They must not be changed, since they may be the memory of variables.
    """

    def __init__(self, blocks: Blocks, given: Iterable[tuple[Key, np.ndarray]] = ()) -> None:
        super().__init__(given)
        self._blocks = blocks

    def __missing__(self, key: Key) -> np.ndarray:
        needed = {each: block for each, block in self._blocks.of_store[key[0]].items() if each not in self}
        for each, array in zip(needed, _read(list(needed.values())), strict=True):
            array.flags.writeable = False
            self[each] = array
        return self[key]


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
            return np.empty(0, variable.dtype.as_numpy_dtype) if none else _memory_of(variable)
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
        at_once: list[tuple[_VariableBlock, np.ndarray]] = []
        others: dict[int, tuple[Any, np.ndarray]] = {}
        for key, block in self._blocks.of_key.items():
            if key not in self._changed:
                continue
            if block.at_once:
                at_once.append((block, self._arrays[key]))
            else:
                others |= {id(variable): (variable, self.read(variable)) for variable in block.variables}
        self._forget()
        _assign_all(at_once)
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
    """Return a tensor of an array, which shares its memory if possible: neither may be changed.

    Otherwise, the array is copied once; ``tf.constant`` would copy it a second time, into aligned memory.
    """
    if not array.size or array.dtype.isbuiltin != 1:
        with tf.device("CPU:0"):
            return tf.constant(array)
    can_share = array.flags.writeable and array.flags.c_contiguous and address_of(array) % _ALIGNMENT == 0
    shared = array if can_share else empty(array.size, array.dtype).reshape(array.shape)
    if not can_share:
        shared[...] = array
    return tf.experimental.dlpack.from_dlpack(shared.__dlpack__())


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
    flat = np.asarray(value).reshape(-1)
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


def _read(blocks: Sequence[_VariableBlock]) -> list[np.ndarray]:
    """Return the elements of blocks, which may be the memory of variables."""
    at_once = [block for block in blocks if block.at_once]
    if sum(len(block.variables) for block in at_once) < 2:
        return [block.read() for block in blocks]
    handles = list(chain.from_iterable(block.handles for block in at_once))
    kinds = [tf.as_dtype(block.kind) for block in at_once]
    found = iter(_called(_reader(tuple(block.form for block in at_once)), handles, kinds))
    return [np.asarray(next(found)) if block.at_once else block.read() for block in blocks]


def _assign_all(arrays: Sequence[tuple[_VariableBlock, np.ndarray]]) -> None:
    """Assign blocks at once; their variables may keep the memory of the arrays."""
    handles = list(chain.from_iterable(block.handles for block, _ in arrays))
    if len(handles) == 1:
        _assign(arrays[0][0].variables[0], arrays[0][1])
    elif handles:
        vectors = [as_tensor(array) for _, array in arrays]
        _called(_writer(tuple(block.form for block, _ in arrays)), [*vectors, *handles], [])


def _called(function: Any, arguments: Sequence[tf.Tensor], kinds: Sequence[tf.DType]) -> list[tf.Tensor]:
    """Return the results of a function that one operation calls; checks of an ordinary call take ten times as long.

    It runs in this thread, since all others of TensorFlow may be waiting for it.
    """
    with tf.device("CPU:0"):  # TensorFlow would choose a GPU, although the variables are here.
        results: list[tf.Tensor] = tf.raw_ops.StatefulPartitionedCall(
            args=arguments, Tout=kinds, f=function, executor_type="SINGLE_THREADED_EXECUTOR"
        )
    return results


@lru_cache(_KEPT)
def _reader(forms: tuple[_Form, ...]) -> Any:
    """Return a function of the handles of variables that returns blocks; for all blocks of these forms."""

    def read(*handles: tf.Tensor) -> list[tf.Tensor]:
        rest, flat = iter(handles), tf.constant([-1])
        vectors = []
        for variables, kind in forms:
            parts = []
            for dtype, shape in variables:
                value = tf.raw_ops.ReadVariableOp(resource=next(rest), dtype=dtype)
                parts.append(tf.cast(value if len(shape) == 1 else tf.reshape(value, flat), kind))
            vectors.append(parts[0] if len(parts) == 1 else tf.concat(parts, axis=0))
        return vectors

    return _traced(read, [_HANDLE] * sum(len(variables) for variables, _ in forms))


@lru_cache(_KEPT)
def _writer(forms: tuple[_Form, ...]) -> Any:
    """Return a function of blocks and the handles of their variables that assigns these; for all of these forms."""
    sizes = [[math.prod(shape) for _, shape in variables] for variables, _ in forms]
    vectors = [tf.TensorSpec([sum(each)], kind) for each, (_, kind) in zip(sizes, forms, strict=True)]

    def assign(*arguments: tf.Tensor) -> None:
        rest, shapes = iter(arguments[len(forms) :]), dict[tuple[int, ...], tf.Tensor]()
        for vector, of_block, (variables, _) in zip(arguments[: len(forms)], sizes, forms, strict=True):
            parts = [vector] if len(of_block) == 1 else tf.split(vector, of_block)
            for part, (dtype, shape) in zip(parts, variables, strict=True):
                if len(shape) != 1:
                    if shape not in shapes:
                        shapes[shape] = tf.constant(shape, tf.int32)
                    part = tf.reshape(part, shapes[shape])
                tf.raw_ops.AssignVariableOp(resource=next(rest), value=tf.cast(part, dtype))

    return _traced(assign, [*vectors, *[_HANDLE] * sum(map(len, sizes))])


def _traced(function: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> Any:
    """Return a function for the processor, on arguments of these specifications."""

    def on_processor(*arguments: tf.Tensor) -> Any:
        with tf.device("CPU:0"):
            return function(*arguments)

    return tf.function(on_processor, autograph=False).get_concrete_function(*specs)
