"""The contract of communicators, for any launcher: each rank calls :func:`check_communicator` with its own.

Values are chosen so that sums are exact, except where the order of summation is the point.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_periodic import Communicator
from hvd_periodic.comm import collectives
from hvd_periodic.vectors.layout import chunk

LAUNCHERS = {
    "LocalCommunicator": "pytest",
    "ThreadCommunicator": "pytest",
    "Subset": "pytest",
    "MPICommunicator": "mpirun",
    "HorovodCommunicator": "horovodrun",
    "TorchDistributedCommunicator": "torchrun",
    "AwaitedRanks": "hvdp.elastic.run",  # Refuses to exchange; ranks that have joined have the one above.
}
"""What starts the ranks of each communicator: plain pytest, here, or a launcher, in tests/parallel."""

SIZES = [0, 1, 7, 1000, 100_000]
"""Elements of the buffers; an empty one is legal."""

DTYPES = ["float32", "float64", "int64"]
MOVED = [*DTYPES, "float16"]
"""Types of values that move without being summed."""

Tensor = Callable[[np.ndarray], Any]


def check_communicator(communicator: Communicator, tensor: Tensor = np.asarray) -> None:
    """Run the contract; collective, on all ranks of the communicator.

    Args:
        communicator: the one under test.
        tensor: turns a numpy array into what the communicator takes; ``np.asarray`` must turn it back.
    """
    for check in (
        check_ranks,
        check_names,
        check_root_ranks,
        check_sum,
        check_max,
        check_large_integers,
        check_sums_are_identical,
        check_several_in_flight,
        check_broadcast,
        check_reducescatter,
        check_allgather,
        check_begin_allgather,
        check_alltoall,
        check_sums_in_half,
        check_objects,
        check_objects_in_pieces,
    ):
        check(communicator, tensor)


def values(rank: int, size: int, dtype: str, salt: int = 0) -> np.ndarray:
    """Return values that differ between ranks and between elements; small integers, some of them negative."""
    return ((np.arange(size) * (rank + 2) + 13 * rank + salt) % 101 - 50).astype(dtype)


def over_ranks(communicator: Communicator, size: int, dtype: str, salt: int = 0) -> np.ndarray:
    """Return the values of all ranks, one row each."""
    return np.stack([values(rank, size, dtype, salt) for rank in range(communicator.size)])


def assert_same(found: Any, expected: np.ndarray) -> None:
    array = np.asarray(found)
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


def check_ranks(communicator: Communicator, tensor: Tensor) -> None:
    ranks = communicator.allgather_object((communicator.rank, communicator.size), "contract.ranks")
    assert ranks == [(rank, communicator.size) for rank in range(communicator.size)]


def check_names(communicator: Communicator, tensor: Tensor) -> None:
    names = [communicator.unique_name() for _ in range(3)]
    assert len(set(names)) == 3
    assert communicator.allgather_object(names, "contract.names") == [names] * communicator.size


def check_root_ranks(communicator: Communicator, tensor: Tensor) -> None:
    for nobody in (-1, 10**6):
        try:
            communicator.rank_of(nobody)
        except ValueError as error:
            assert "`root_rank`" in str(error)  # noqa: PT017
            assert f"Received: {nobody}" in str(error)  # noqa: PT017
        else:
            raise AssertionError(f"rank_of({nobody}) found somebody")


def check_sum(communicator: Communicator, tensor: Tensor) -> None:
    for size, dtype in itertools.product(SIZES, DTYPES):
        wait = communicator.allreduce(tensor(values(communicator.rank, size, dtype)), f"contract.sum.{size}.{dtype}")
        assert_same(wait(), over_ranks(communicator, size, dtype).sum(axis=0, dtype=dtype))


def check_max(communicator: Communicator, tensor: Tensor) -> None:
    """Of several ranks; not the sum, not the values of one rank, and below zero as well."""
    for size, dtype in itertools.product(SIZES, DTYPES):
        wait = communicator.allreduce(
            tensor(values(communicator.rank, size, dtype)), f"contract.max.{size}.{dtype}", op="max"
        )
        assert_same(wait(), over_ranks(communicator, size, dtype).max(axis=0))


def check_large_integers(communicator: Communicator, tensor: Tensor) -> None:
    """Step counts travel as 2⁶² − step: no detour over float64."""
    mine = np.array([2**62 - communicator.rank, communicator.rank - 2**62], dtype="int64")
    result = communicator.allreduce(tensor(mine), "contract.large", op="max")()
    assert_same(result, np.array([2**62, communicator.size - 1 - 2**62], dtype="int64"))


def check_sums_are_identical(communicator: Communicator, tensor: Tensor) -> None:
    """All ranks receive the same bits, though the sum depends on the order."""
    for dtype in ("float32", "float64"):
        mine = np.random.default_rng(communicator.rank).standard_normal(1001).astype(dtype)
        mine *= 10.0 ** (communicator.rank % 5)
        result = np.asarray(communicator.allreduce(tensor(mine), f"contract.bits.{dtype}")()).tobytes()
        assert len(set(communicator.allgather_object(result, f"contract.bits.{dtype}.compare"))) == 1


def check_several_in_flight(communicator: Communicator, tensor: Tensor) -> None:
    """Different sizes, dtypes and operations at once, waited for in either order."""
    for order in (1, -1):
        calls = list(enumerate(itertools.product([3, 0, 500], DTYPES, ["sum", "max"])))
        waits = [
            communicator.allreduce(
                tensor(values(communicator.rank, size, dtype, salt)), f"contract.flight.{order}.{salt}", op=op
            )
            for salt, (size, dtype, op) in calls
        ]
        for (salt, (size, dtype, op)), wait in list(zip(calls, waits, strict=True))[::order]:
            rows = over_ranks(communicator, size, dtype, salt)
            assert_same(wait(), rows.sum(axis=0, dtype=dtype) if op == "sum" else rows.max(axis=0))


def check_broadcast(communicator: Communicator, tensor: Tensor) -> None:
    for root, size, dtype in itertools.product({0, communicator.size - 1, communicator.size // 2}, SIZES, MOVED):
        mine = tensor(values(communicator.rank, size, dtype))
        result = communicator.broadcast(mine, f"contract.broadcast.{root}.{size}.{dtype}", root)
        assert_same(result, values(root, size, dtype))


def check_reducescatter(communicator: Communicator, tensor: Tensor) -> None:
    for size, dtype in itertools.product(SIZES, DTYPES):
        mine = tensor(values(communicator.rank, size, dtype))
        part = communicator.reducescatter(mine, f"contract.scatter.{size}.{dtype}")()
        start, stop = chunk(size, communicator.rank, communicator.size)
        assert_same(part, over_ranks(communicator, size, dtype).sum(axis=0, dtype=dtype)[start:stop])


def check_allgather(communicator: Communicator, tensor: Tensor) -> None:
    """Equal sizes, sizes that differ, and nothing from some ranks; into a buffer and without one."""
    for dtype, grow, into in itertools.product(MOVED, (0, 1), (False, True)):
        sizes = [3 + grow * rank if grow else (rank + 1) % 2 * 5 for rank in range(communicator.size)]
        expected = np.concatenate([values(rank, size, dtype) for rank, size in enumerate(sizes)])
        out = tensor(np.zeros_like(expected)) if into else None
        name = f"contract.gather.{dtype}.{grow}.{into}"
        mine = tensor(values(communicator.rank, sizes[communicator.rank], dtype))
        assert_same(communicator.allgather(mine, name, out), expected)


def check_begin_allgather(communicator: Communicator, tensor: Tensor) -> None:
    """Two under way; bytes."""
    waits = []
    for salt in (0, 5):
        mine = values(communicator.rank, 7, "uint8", salt)
        out = tensor(np.zeros(7 * communicator.size, "uint8"))
        waits.append(communicator.begin_allgather(tensor(mine), f"contract.begin_allgather.{salt}", out))
    for salt, wait in zip((0, 5), waits, strict=True):
        assert_same(wait(), over_ranks(communicator, 7, "uint8", salt).ravel())


def check_alltoall(communicator: Communicator, tensor: Tensor) -> None:
    """Two under way; bytes, of which every rank gets another part."""
    rank, size = communicator.rank, communicator.size
    waits = []
    for part in (1, 5):
        mine = values(rank, part * size, "uint8")
        waits.append(communicator.alltoall(tensor(mine), f"contract.alltoall.{part}"))
    for part, wait in zip((1, 5), waits, strict=True):
        everything = over_ranks(communicator, part * size, "uint8").reshape(size, size, part)
        assert_same(wait(), everything[:, rank].ravel())


def check_sums_in_half(communicator: Communicator, tensor: Tensor) -> None:
    if "f2" in communicator.sums:
        mine = tensor(values(communicator.rank, 7, "float16"))
        assert_same(
            communicator.allreduce(mine, "contract.half")(),
            over_ranks(communicator, 7, "float16").sum(axis=0, dtype="float16"),
        )


def check_objects(communicator: Communicator, tensor: Tensor) -> None:
    """Objects of any type and of another length on every rank."""
    given: list[object] = [None, "", {"rank": [1.5, "é"]}, b"\0" * 1000, (1, {2}), np.arange(3).tolist()]
    rank, size = communicator.rank, communicator.size
    found = communicator.allgather_object(given[rank % len(given)], "contract.objects")
    assert found == [given[other % len(given)] for other in range(size)]
    found = communicator.allgather_object("x" * (1000 * rank), "contract.strings")
    assert [len(text) for text in found] == [1000 * other for other in range(size)]
    assert communicator.allgather_object(None, "contract.nothing") == [None] * size
    found = communicator.send_object("x" * (1000 * rank), 0, "contract.passed")
    assert found == ({other: "x" * (1000 * other) for other in range(size)} if rank == 0 else {})


def check_objects_in_pieces(communicator: Communicator, tensor: Tensor) -> None:
    """Where collectives take a few bytes at once, objects arrive all the same; sizes differ, some ranks end earlier."""
    limit, collectives.MAX_BYTES = collectives.MAX_BYTES, 50
    try:
        for count in (0, 1, 300):
            mine = ("é" * (count * communicator.rank), communicator.rank, np.arange(count))
            found = communicator.allgather_object(mine, f"contract.pieces.{count}")
            assert [text for text, _, _ in found] == ["é" * (count * rank) for rank in range(communicator.size)]
            for rank, (_, number, array) in enumerate(found):
                assert number == rank
                assert_same(array, np.arange(count))
            following, before = ((communicator.rank + step) % communicator.size for step in (1, -1))
            ((sender, (text, number, array)),) = communicator.send_object(mine, following, f"passed.{count}").items()
            assert (sender, text, number) == (before, "é" * (count * before), before)
            assert_same(array, np.arange(count))
    finally:
        collectives.MAX_BYTES = limit
