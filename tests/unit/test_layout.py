"""The packing: buckets tile the arenas, pieces tile the tensors, and no exchange depends on where the cuts are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import ceil, prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_periodic import AGN, EASGD, Algorithm, Averaging, Communicator, Every
from hvd_periodic.vectors.layout import DEFAULT_BUCKET_BYTES, Layout, TensorSpec
from hvd_periodic.vectors.store import FlatStore, PackedStore
from tests.covering import covering
from tests.helpers import Array, NumpyTrainer, random_arrays, run_ranks

ITEMSIZES = {"float32": 4, "float64": 8}

deterministic = settings(derandomize=True, deadline=None)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
bucket_sizes = st.one_of(st.integers(1, 200), st.just(DEFAULT_BUCKET_BYTES))


@st.composite
def spec_lists(draw: st.DrawFn) -> list[TensorSpec]:
    """Tensors of any shape, 0-d and empty ones included, of mixed kinds."""
    kinds = draw(st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEMSIZES))), max_size=8))
    return [TensorSpec(f"p{i}", shape, kind, ITEMSIZES[kind]) for i, (shape, kind) in enumerate(kinds)]


def arrange(values: Array, shape: tuple[int, ...], order: str) -> Array:
    """Return the values in an array of the shape, with the strides that ``order`` names."""
    contiguous = values.reshape(shape)
    if order == "C" or not shape:
        return contiguous.copy()
    if order == "F":
        return np.asfortranarray(contiguous)
    if order == "reversed":
        index = (slice(None, None, -1),) * len(shape)
        return contiguous[index].copy()[index]
    parent = np.full(tuple(2 * n for n in shape), np.nan, contiguous.dtype)
    view = parent[(slice(None, None, 2),) * len(shape)]
    view[...] = contiguous
    return view


@st.composite
def packed_stores(draw: st.DrawFn) -> tuple[PackedStore[Array], list[Array]]:
    """Distinct values in C, Fortran-ordered, strided and reversed arrays, some in 16 bits, and a store over them."""
    specs = draw(spec_lists())
    arrays, first = [], 1.0
    for spec in specs:
        dtype = draw(st.sampled_from(["float16", "float32"])) if spec.kind == "float32" else "float64"
        order = draw(st.sampled_from(["C", "F", "strided", "reversed"]))
        values = np.arange(first, first + spec.size) % 2048
        arrays.append(arrange(values.astype(dtype), spec.shape, order))
        first += spec.size
    layout = Layout(specs, draw(bucket_sizes))
    return PackedStore(layout, arrays, lambda bucket: np.full(bucket.size, np.nan, bucket.kind)), arrays


@deterministic
@given(spec_lists(), bucket_sizes)
def test_buckets_tile_each_arena(specs: list[TensorSpec], bucket_bytes: int) -> None:
    layout = Layout(specs, bucket_bytes)
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    for kind, total in layout.arenas.items():
        assert total == sum(prod(spec.shape) for spec in specs if spec.kind == kind)
        buckets = [bucket for bucket in layout.buckets if bucket.kind == kind]
        edges = [0, *(bucket.stop for bucket in buckets)]
        assert [bucket.start for bucket in buckets] == edges[:-1]
        assert edges[-1] == total
        elements = max(1, bucket_bytes // ITEMSIZES[kind])
        assert all(0 < bucket.size <= elements for bucket in buckets)
        assert len(buckets) == ceil(total / elements), "buckets are not filled"
        for bucket in buckets:
            assert bucket.itemsize == ITEMSIZES[kind]
            assert bucket.nbytes == bucket.size * bucket.itemsize <= max(bucket_bytes, bucket.itemsize)
    assert {bucket.kind for bucket in layout.buckets} <= layout.arenas.keys() == {spec.kind for spec in specs}


@deterministic
@given(spec_lists(), bucket_sizes)
def test_pieces_tile_each_tensor_and_each_bucket(specs: list[TensorSpec], bucket_bytes: int) -> None:
    layout = Layout(specs, bucket_bytes)
    covered: list[list[int]] = [[] for _ in specs]
    for bucket in layout.buckets:
        offset = 0
        for piece in bucket.pieces:
            kind, start, _ = layout.span(piece.tensor)
            assert kind == bucket.kind
            assert piece.offset == offset, "a gap or an overlap inside a bucket"
            assert bucket.start + piece.offset == start + piece.start, "bucket and tensor disagree on the arena"
            assert piece.stop > piece.start
            offset += piece.stop - piece.start
            covered[piece.tensor] += range(piece.start, piece.stop)
        assert offset == bucket.size
    assert covered == [list(range(spec.size)) for spec in specs]


@deterministic
@given(spec_lists(), bucket_sizes)
def test_spans_follow_the_order_of_the_tensors(specs: list[TensorSpec], bucket_bytes: int) -> None:
    layout = Layout(specs, bucket_bytes)
    ends = dict.fromkeys(layout.arenas, 0)
    for i, spec in enumerate(specs):
        kind, start, stop = layout.span(i)
        assert (kind, start, stop) == (spec.kind, ends[spec.kind], ends[spec.kind] + spec.size)
        ends[kind] = stop
    assert ends == layout.arenas
    assert list(layout.arenas) == list(dict.fromkeys(spec.kind for spec in specs))


@deterministic
@given(spec_lists(), bucket_sizes)
def test_equal_input_gives_an_equal_layout(specs: list[TensorSpec], bucket_bytes: int) -> None:
    one, two = Layout(specs, bucket_bytes), Layout(list(specs), bucket_bytes)
    assert one.buckets == two.buckets
    assert list(one.arenas.items()) == list(two.arenas.items())
    assert one.offsets == two.offsets


@pytest.mark.parametrize("bucket_bytes", [0, -4])
def test_bucket_bytes_must_be_positive(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match=rf"`bucket_bytes`.*Received: bucket_bytes={bucket_bytes}"):
        Layout([], bucket_bytes)


def test_one_kind_has_one_itemsize() -> None:
    with pytest.raises(ValueError, match=r"one itemsize.*'b' of kind 'k' with 8 bytes after 4"):
        Layout([TensorSpec("a", (1,), "k", 4), TensorSpec("b", (1,), "k", 8)])


def test_a_bucket_stays_below_what_a_c_int_counts() -> None:
    layout = Layout([TensorSpec("huge", (2**31 + 5,), "float64", 8)], bucket_bytes=2**40)
    assert [bucket.size for bucket in layout.buckets] == [2**31 - 1, 6]


def arenas_of(layout: Layout, arrays: list[Array]) -> dict[str, Array]:
    """Return what every arena must hold, without using any bucket."""
    return {
        kind: np.concatenate([a.ravel() for s, a in zip(layout.specs, arrays, strict=True) if s.kind == kind])
        for kind in layout.arenas
    }


@deterministic
@given(packed_stores())
def test_packed_store_reads_every_element_at_its_place(packed: tuple[PackedStore[Array], list[Array]]) -> None:
    store, arrays = packed
    expected = arenas_of(store.layout, arrays)
    for bucket in store.layout.buckets:
        values = store.read(bucket)
        assert values.dtype == bucket.kind
        np.testing.assert_array_equal(values, expected[bucket.kind][bucket.start : bucket.stop])
        out = np.full(bucket.size, np.nan, bucket.kind)
        assert store.read(bucket, out=out) is out
        np.testing.assert_array_equal(out, values)


@deterministic
@given(packed_stores())
def test_packed_store_writes_one_bucket_and_nothing_else(packed: tuple[PackedStore[Array], list[Array]]) -> None:
    store, arrays = packed
    layouts = [(array.ctypes.data, array.strides, array.dtype) for array in arrays]
    expected = [array.ravel().copy() for array in arrays]
    for bucket in store.layout.buckets:
        store.write(bucket, -store.read(bucket))
        for piece in bucket.pieces:
            expected[piece.tensor][piece.start : piece.stop] *= -1
        for array, values in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(array.ravel(), values)
    assert all((array < 0).all() or (array == 0).any() for array in arrays), "some element was never written"
    assert [(array.ctypes.data, array.strides, array.dtype) for array in arrays] == layouts, "an array has moved"
    assert all(a is b for a, b in zip(store.tensors(), arrays, strict=True))


@deterministic
@given(packed_stores())
def test_flat_store_holds_what_a_packed_store_reads(packed: tuple[PackedStore[Array], list[Array]]) -> None:
    store, arrays = packed
    flat = FlatStore(store.layout, lambda kind, size: np.zeros(size, kind))
    for bucket in store.layout.buckets:
        flat.write(bucket, store.read(bucket))
    for tensor, array in zip(flat.tensors(), arrays, strict=True):
        assert tensor.shape == array.shape
        np.testing.assert_array_equal(tensor, array)
        tensor *= 3  # The tensors are views: what is written through them is read from the buckets.
    for bucket in flat.layout.buckets:
        assert np.shares_memory(flat.read(bucket), flat.read(bucket))
        np.testing.assert_array_equal(flat.read(bucket), 3 * store.read(bucket))
        out = np.empty(bucket.size, bucket.kind)
        assert flat.read(bucket, out=out) is out
        np.testing.assert_array_equal(out, 3 * store.read(bucket))


class Corrupted(Communicator):
    """Another communicator with a planted bug: the sums of one bucket lose this rank's share."""

    def __init__(self, inner: Communicator, bucket: int) -> None:
        self.rank, self.size = inner.rank, inner.size
        self._inner, self._suffix = inner, f".parameters.{bucket}"

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        if name.endswith(self._suffix):
            return lambda: buffer
        return self._inner.allreduce(buffer, name, op)

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        return self._inner.broadcast(buffer, name, root)

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        return self._inner.reducescatter(buffer, name)

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        return self._inner.allgather(buffer, name, out)

    def allgather_object(self, value: object, name: str) -> list[Any]:
        return self._inner.allgather_object(value, name)


ALGORITHMS = [EASGD(0.2), EASGD(rho=0.1), Averaging(), AGN(), AGN("average")]


def train(algorithm: Algorithm, bucket_bytes: int, corrupted_bucket: int = -1) -> tuple[list[list[bytes]], int]:
    """Return all replicas and centers of three ranks after two rounds, to the bit, and the number of buckets."""

    def work(communicator: Communicator) -> tuple[list[bytes], int]:
        if corrupted_bucket >= 0:
            communicator = Corrupted(communicator, corrupted_bucket)
        arrays = random_arrays(0) + random_arrays(1, "float32") + random_arrays(2, "float16")
        arrays[3] = np.asfortranarray(arrays[3])
        trainer = NumpyTrainer(communicator, arrays, algorithm, Every(2), bucket_bytes=bucket_bytes)
        for step in range(4):
            trainer.step([(x - communicator.rank + 0.1 * step).astype(x.dtype) for x in arrays])
        buckets = len(trainer.replica.parameters.layout.buckets)
        return [array.tobytes() for array in (*arrays, *trainer.center())], buckets

    results = run_ranks(3, work)
    return [values for values, _ in results], results[0][1]


reference_of = functools.cache(functools.partial(train, bucket_bytes=DEFAULT_BUCKET_BYTES))


@pytest.mark.parametrize(("algorithm", "bucket_bytes"), covering(ALGORITHMS, (300, 100, 12, 1), together=1), ids=str)
def test_results_do_not_depend_on_the_buckets(algorithm: Algorithm, bucket_bytes: int) -> None:
    reference, buckets = reference_of(algorithm)
    assert buckets == 2, "one per dtype of accumulation"
    values, buckets = train(algorithm, bucket_bytes)
    assert buckets >= {1: 150, 12: 50, 100: 9, 300: 3}[bucket_bytes], "too few buckets to notice anything"
    assert values == reference


@pytest.mark.parametrize("bucket", [0, 1, 2, 8])
def test_a_bug_in_any_one_bucket_is_noticed(bucket: int) -> None:
    """The test above has teeth: every bucket is filled, and a sum that goes wrong in one of them shows."""
    reference, _ = reference_of(EASGD(0.2))
    assert train(EASGD(0.2), 100, corrupted_bucket=bucket)[0] != reference
