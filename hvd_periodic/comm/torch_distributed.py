"""torch.distributed: PyTorch tensors over a process group, with any backend that carries them."""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvd_periodic.comm import nccl_groups
from hvd_periodic.comm.elastic import RanksLostError
from hvd_periodic.comm.gloo_connections import GlooConnections
from hvd_periodic.comm.island import Island
from hvd_periodic.comm.job import JobCommunicator
from hvd_periodic.comm.local import started_by_mpi
from hvd_periodic.comm.stall_protocol import stable_hash
from hvd_periodic.logs import logger
from hvd_periodic.vectors.layout import chunk

# Some builds of PyTorch have no torch.distributed; with them, this file is imported but not used.
_c10d: Any = importlib.import_module("torch.distributed.distributed_c10d") if dist.is_available() else None
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
"""Under its name in torch 2.13, or under its earlier name."""

_FOR_EVER = timedelta(days=365)
"""The stall monitor detects waits that are too long; the library's own timeout would end legitimate waits."""

_HEAD = 1024
"""Bytes that every rank contributes to a gather of unknown sizes: small data needs no second gather."""

_PADDED = 2**16
"""Elements, after padding, up to which all contributions are padded to the longest, even if most of that is padding."""

_ON_THIS_HOST = (
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
)
"""Environment variables of launchers with the number of processes on this host, and in total."""

_OF_GLOO = ("cpu", "cuda")
"""Kinds of devices whose tensors Gloo carries, in every collective that is used here; others it only claims."""


class TorchDistributedCommunicator(JobCommunicator):
    """The ranks of a ``torch.distributed`` process group.

    Collectives run in a separate group of the same ranks, which these ranks alone create at the first collective.
    Otherwise, collectives of the user's program and its threads would be interleaved with them in a different order on
    each rank. Handshakes and objects travel over Gloo; tensors over the backends of the given group.

    Args:
        group: the process group, or a ``DeviceMesh`` of one dimension. Default: all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: this rank is not in the group, or the mesh has several dimensions.
    """

    native = torch.Tensor
    _own: ClassVar[dict[str, _Own]] = {}
    """Groups of these communicators, by name."""

    def __init__(self, group: Any = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed is not initialized: call torch.distributed.init_process_group() before the "
                "optimizer is constructed"
            )
        if isinstance(group, DeviceMesh):
            group = _of_mesh(group)
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"`process_set` must contain this rank ({dist.get_rank()}): construct the optimizer only on the ranks "
                "of the process group. Received: GroupMember.NON_GROUP_MEMBER, which is what "
                "torch.distributed.new_group() returns on the others"
            )
        ranks = sorted(dist.get_process_group_ranks(group))
        self.between_islands = group is _elastic.group is not dist.group.WORLD
        rank = _elastic.rank if self.between_islands else dist.get_rank()
        super().__init__(group, ranks, rank, f"hvd_periodic.torch.{group.group_name}.meeting")
        self._world = group if self.between_islands else dist.group.WORLD
        self._backends = _backends_of(group)
        self.description = f"torch.distributed ({', '.join(dict.fromkeys(self._backends.values()))})"
        over_mpi = "mpi" in self._backends.values()
        self.sums = frozenset() if over_mpi else frozenset({"f2"})  # type: ignore[misc]
        self.host = stable_hash(socket.gethostname())
        self.elastic = self.tracker.elastic = _elastic.group is self._world

    @property
    def one_host(self) -> bool:
        """Whether all ranks of the job are on one host, as far as the launcher reports."""
        if self.elastic:
            return _elastic.one_host
        if os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1"):
            return True
        return any(os.environ.get(here) == os.environ.get(of_all, "") for here, of_all in _ON_THIS_HOST)

    def store(self) -> Any:
        """Return a separate connection to the store of the job, which a thread may query while another waits there."""
        if "mpi" in self._backends.values():  # The MPI backend has no store.
            return None
        return _separate(_elastic.store) if self.elastic else _store_of_the_job()

    def whole_job(self) -> TorchDistributedCommunicator:
        """Return the communicator of all ranks of the job."""
        return TorchDistributedCommunicator()

    def changed(self) -> str | None:
        """Return how torch.distributed was shut down or reinitialized since construction; None if it was not."""
        if not dist.is_initialized():
            return "torch.distributed has been shut down"
        if (_elastic.group if self.elastic else dist.group.WORLD) is not self._world:
            return "torch.distributed has been reinitialized since the optimizer was constructed: construct it again"
        return None

    def alive(self) -> bool:
        """Return whether torch.distributed is unchanged since construction."""
        return self.changed() is None and super().alive()

    def settle(self, alike: str = "") -> None:
        """Raise an error on all ranks of an island if one of them has lost a rank of another island, or they differ."""
        if self.between_islands and _elastic.island is not None:
            _elastic.island.settle(alike)

    def of_array(self, array: np.ndarray) -> torch.Tensor:
        """Return a tensor in host memory."""
        return torch.from_numpy(array)

    def carries(self, kind: type) -> bool:
        """Return whether these are tensors of PyTorch."""
        return issubclass(kind, torch.Tensor)

    def check_devices(self, kinds: Iterable[str]) -> None:
        """Raise a ValueError if the backends of the group carry no tensors of a kind of device."""
        for kind in sorted(set(kinds) - self._backends.keys()):
            backends = ", ".join(f"{backend} for {device}" for device, backend in self._backends.items())
            raise ValueError(
                f"The process group carries no tensors of a {kind} device ({backends or 'no backend'}), and part of "
                "the model is on one: move the model, or call torch.distributed.init_process_group("
                "'cpu:gloo,cuda:nccl'), which carries both"
            )

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Start an allreduce in place."""
        operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        return self._begin(lambda: dist.all_reduce(buffer, operation, self._group, async_op=True), buffer)

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Broadcast in place."""
        source = self.ranks[root]
        return self._begin(lambda: dist.broadcast(buffer, source, self._group, async_op=True), buffer)()

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to send each rank its chunk of every buffer; the receiver sums them, in rank order."""
        bounds = [chunk(len(buffer), rank, self.size) for rank in range(self.size)]
        counts = [stop - start for start, stop in bounds]
        mine = counts[self.rank]
        finish = self._scatter(buffer, counts, [mine] * self.size)

        def summed() -> Any:
            parts = finish().split(mine) if mine else (buffer[:0],)
            total = parts[0]
            for part in parts[1:]:
                total = total.add_(part)
            return total

        return summed

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Gather into ``out``, or into a new tensor."""
        sizes = self.gather(np.array([len(buffer)]), name).tolist()
        if out is None:
            out = buffer.new_empty(sum(sizes))
        return self._gather(buffer, sizes, out)

    def begin_allgather(self, buffer: Any, name: str, out: Any) -> Callable[[], Any]:
        """Start to gather into ``out``."""
        return self._begin(lambda: _all_gather(out, buffer, self._group, async_op=True), out)

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Start to exchange parts, into a new tensor."""
        out = torch.empty_like(buffer)
        return self._begin(lambda: dist.all_to_all_single(out, buffer, group=self._group, async_op=True), out)

    def tile(self, buffer: Any, times: int) -> Any:
        """Return ``times`` concatenated copies of a tensor."""
        return buffer.repeat(times)

    def gather(self, array: np.ndarray, name: str) -> np.ndarray:
        """Gather an array, whose size may differ between ranks."""
        data = np.frombuffer(np.ascontiguousarray(array), np.uint8)
        head = np.zeros(_HEAD, np.uint8)
        head[:8] = np.array([data.size], np.int64).view(np.uint8)
        first, rest = data[: _HEAD - 8], data[_HEAD - 8 :]
        head[8 : 8 + first.size] = first
        heads = self._gather(torch.from_numpy(head), [_HEAD] * self.size).numpy().reshape(self.size, _HEAD)
        sizes = [int(found[:8].view(np.int64)[0]) for found in heads]
        parts = [found[8 : 8 + size] for found, size in zip(heads, sizes, strict=True)]
        if max(sizes) > _HEAD - 8:
            left = [max(size - (_HEAD - 8), 0) for size in sizes]
            more = self._gather(torch.from_numpy(rest.copy()), left).numpy()
            following = np.split(more, np.cumsum(left)[:-1])
            parts = [part for pair in zip(parts, following, strict=True) for part in pair]
        return np.concatenate(parts).view(array.dtype)

    def send_bytes(self, data: np.ndarray, counts: np.ndarray, name: str) -> tuple[np.ndarray, Sequence[int]]:
        """Send each rank its part, after the number of its bytes."""
        coming = self.alltoall(torch.from_numpy(counts), name)().tolist()
        received = self._scatter(torch.from_numpy(data.copy()), counts.tolist(), coming)()
        return received.numpy(), coming

    def started_mpi(self) -> bool:
        """Return whether an MPI launcher has started this process."""
        return started_by_mpi()

    def _gather(self, buffer: torch.Tensor, sizes: Sequence[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the concatenated tensors of all ranks, whose sizes all ranks know."""
        longest = max(sizes)
        if out is None:
            out = buffer.new_empty(sum(sizes))
        if min(sizes) == longest:
            finish: Callable[[], torch.Tensor] = self.begin_allgather(buffer, "", out)
            return finish()
        if longest * self.size > max(2 * sum(sizes), _PADDED):
            parts = list(torch.split(out, list(sizes)))
            parts[self.rank].copy_(buffer)
            for root, part in enumerate(parts):
                if part.numel():
                    self.broadcast(part, "", root)
            return out
        padded = torch.cat([buffer, buffer.new_zeros(longest - len(buffer))])
        everything = self.begin_allgather(padded, "", buffer.new_empty(longest * self.size))()
        rows = [row[:size] for row, size in zip(everything.split(longest), sizes, strict=True)]
        return torch.cat(rows, out=out)

    def _scatter(self, buffer: Any, going: list[int], coming: list[int]) -> Callable[[], Any]:
        """Start to send each rank as many elements as ``going`` says; the returned function waits for ``coming``."""
        out = buffer.new_empty(sum(coming))
        return self._begin(lambda: dist.all_to_all_single(out, buffer, coming, going, self._group, True), out)

    def _begin(self, call: Callable[[], Any], result: Any) -> Callable[[], Any]:
        """Start a collective; return a function that waits for it, sleeping, and returns the result."""
        _ = self._checked(lambda: self._group)  # Before this rank records the start of the collective.
        number, work = self.tracker.start_collective(), self._checked(call)
        if self.elastic:
            _elastic.under_way.append(work)

        def finish() -> Any:
            self.tracker.wait_for(number, work.is_completed)
            self._checked(work.wait)
            if self.elastic:
                _elastic.under_way.remove(work)
            return result

        return finish

    def _checked(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call to the library; explain its errors."""
        try:
            return call()
        except RuntimeError as error:
            kind = RanksLostError if self.elastic else RuntimeError
            raise kind(
                f"torch.distributed has failed in {self.tracker.place()}, as it does when another rank has ended: "
                f"{error}"
            ) from error

    @property
    def _group(self) -> Any:
        """This package's own group; the first use is collective among its ranks."""
        if "mpi" in self._backends.values():  # MPI creates no group without all ranks of the job.
            return self.process_set
        if self.between_islands:  # Nobody else uses this group.
            return self.process_set
        name = f"{self.handshake_name}.own"
        known = self._own.get(name)
        if known is None or known.given is not self.process_set:
            number = 1 if known is None else known.number + 1
            made = self.tracker.run_blocking(lambda: _duplicate(self.ranks, self._backends, f"{name}.{number}"))
            known = self._own[name] = _Own(self.process_set, made, number)
        return known.made

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), None if self.process_set is self._world else self.handshake_name)


@dataclass
class _Elastic:
    """The group of the ranks of an elastic job that exchange, which is created again whenever they change.

    Attributes:
        group: the current group: all ranks; or in islands, the ranks with the same position in all of them.
        rank: global rank of this process.
        store: the store of these ranks.
        island: the island of this process, if the workers are islands.
        one_host: whether all ranks are on this host.
        connections: the connections of all groups.
        under_way: collectives that have started and not finished.
    """

    group: Any = None
    rank: int = 0
    store: Any = None
    island: Island | None = None
    one_host: bool = False
    connections: GlooConnections = field(default_factory=GlooConnections)
    under_way: list[Any] = field(default_factory=list)


_elastic = _Elastic()

_CREATION = timedelta(seconds=30)
"""Within which all ranks of an elastic job create a group: one may be lost meanwhile."""


def open_world(store: Any, rank: int, size: int, one_host: bool, backends: str = "gloo") -> None:
    """Initialize torch.distributed for the current ranks of an elastic job; collective.

    Args:
        store: the store of these ranks, which no other set of ranks uses.
        rank: this process among them.
        size: their number.
        one_host: whether all of them are on this host.
        backends: what carries tensors: Gloo, for CUDA tensors also NCCL.

    Raises:
        RanksLostError: a rank was lost meanwhile.
    """
    try:
        with _elastic.connections.of_group(store, "world", rank, size):
            dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=_CREATION)
        _c10d._set_pg_timeout(_FOR_EVER, dist.group.WORLD)
        _elastic.group, _elastic.rank = dist.group.WORLD, rank
        _elastic.store, _elastic.one_host = store, one_host
        # Now that all are here: later, one may restore a commit for long.
        nccl_groups.connect(TorchDistributedCommunicator()._group)
    except RuntimeError as error:
        raise RanksLostError(f"A process was lost while all ranks connected: {error}") from error


def open_between(store: Any, name: str, number: int, count: int, one_host: bool) -> None:
    """Create the group over which ranks with the same position in all islands exchange; collective among these.

    torch.distributed stays initialized with the ranks of the island. The global rank of the process at position p of
    island i is i k + p, where k is the number of ranks of an island.

    Args:
        store: the store of these ranks, which no other set of ranks uses.
        name: name of the group, new to this process.
        number: this island among the islands.
        count: their number.
        one_host: whether all of them are on this host.

    Raises:
        RanksLostError: a rank was lost meanwhile.
    """
    within = _elastic.island.ranks  # type: ignore[union-attr]  # This process takes part as part of one.
    ranks = [within.size * other + within.rank for other in range(count)]
    try:
        with _elastic.connections.of_group(store, name, number, count):
            group = _created(ranks, number, "gloo", store, name, _CREATION)
        _c10d._set_pg_timeout(_FOR_EVER, group)
    except RuntimeError as error:
        raise RanksLostError(f"A process was lost while all islands connected: {error}") from error
    _elastic.group, _elastic.rank = group, ranks[number]
    _elastic.store, _elastic.one_host = store, one_host


def take_part_as(island: Island | None) -> None:
    """Take part in an elastic job as part of an island, or as a worker of its own; before any group is opened."""
    _elastic.island = island


def island_here() -> Island | None:
    """Return the ranks with which a program has initialized torch.distributed; None if a rendezvous has, or nobody."""
    if not dist.is_initialized() or _elastic.group is dist.group.WORLD:
        return None
    return Island(TorchDistributedCommunicator())


def elastic_group() -> Any:
    """Return the group of the ranks of an elastic job that exchange; None while this process has not joined any."""
    return _elastic.group


_ENDING = 10.0
"""Seconds that a collective has to end once the connections are closed; it takes moments."""


def close_world() -> None:
    """Abort the collectives of an elastic job, and destroy its groups; local. Those of an island stay."""
    _elastic.connections.close()
    nccl_groups.abort(_c10d._world.pg_names if _elastic.island is None else [])
    deadline = time.monotonic() + _ENDING
    while not all(work.is_completed() for work in _elastic.under_way):  # They may still write into tensors.
        if time.monotonic() > deadline:
            _keep_groups()
            break
        time.sleep(1e-3)
    _elastic.under_way.clear()
    group, _elastic.group, _elastic.store = _elastic.group, None, None
    if _elastic.island is not None:
        if group is not None:
            dist.destroy_process_group(group)
        return
    TorchDistributedCommunicator._own.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    _c10d._world.group_count = 0  # Names of groups count them, also those that could not be created.


def _keep_groups() -> None:
    """Keep all groups until the process ends, with a collective that has not ended, and nothing comes for it any more.

    Destroying a group waits for its collectives, and the interpreter destroys at its end all that it still refers to:
    so these get a reference that nobody gives back.
    """
    logger.warning(
        "A collective of torch.distributed has not ended %.1f s after its connections were closed. This process goes "
        "on without it; its threads stay until the process ends",
        _ENDING,
    )
    for group in [dist.group.WORLD, _elastic.group, *(own.made for own in TorchDistributedCommunicator._own.values())]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


_registered: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Groups by their ranks, each with the group of all ranks that existed when it was created."""


def register_group(ranks: list[int]) -> Any:
    """Return the process group of some ranks, or its placeholder on others; collective among all ranks of the job."""
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    world, known = _registered.get(tuple(ranks), (None, None))
    if world is None or world is not dist.group.WORLD:
        known = dist.new_group(ranks)
        _registered[tuple(ranks)] = dist.group.WORLD, known
    return known


def _restored(cls: type[TorchDistributedCommunicator], handshake_name: str | None) -> TorchDistributedCommunicator:
    """Return the communicator of all ranks, or of a group, which only the process that made it knows."""
    if handshake_name is None:
        return cls()
    known = TorchDistributedCommunicator._own.get(f"{handshake_name}.own")
    if known is None:
        raise RuntimeError(
            "An optimizer over a torch.distributed.ProcessGroup can be unpickled only in the process that created the "
            "group: save its state_dict() instead"
        )
    return cls(known.given)


@dataclass(frozen=True)
class _Own:
    """A group of this package.

    Attributes:
        given: the user's group, of the same ranks.
        made: this group.
        number: how many groups have had its name, including this one: torch.distributed may be reinitialized.
    """

    given: Any
    made: Any
    number: int


def _of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of this rank in a mesh."""
    if mesh.ndim != 1:
        raise ValueError(
            "`process_set` must be a DeviceMesh of one dimension: pass the one over which ranks exchange, as in "
            f"mesh[{(mesh.mesh_dim_names or ('replicate',))[0]!r}]. Received: {mesh}"
        )
    return mesh.get_group()


def _backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backends of a group by the kind of device whose tensors they carry."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return {device: name for device, name in pairs if name != "gloo" or device in _OF_GLOO}


def _duplicate(ranks: list[int], backends: Mapping[str, str], name: str) -> Any:
    """Return a group of some ranks, created by these ranks alone; its name must be new to them."""
    rank = ranks.index(dist.get_rank())
    config = ",".join(f"{device}:{backend}" for device, backend in ({"cpu": "gloo"} | dict(backends)).items())
    store = _store_of_the_job() or _c10d._get_default_store()
    elastic = _elastic.group is dist.group.WORLD
    with _elastic.connections.of_group(store, name, rank, len(ranks)) if elastic else nullcontext():
        group = _created(ranks, rank, config, store, name, _CREATION if elastic else _FOR_EVER)
    if elastic:
        _c10d._set_pg_timeout(_FOR_EVER, group)
    return group


def _created(ranks: list[int], rank: int, config: str, store: Any, name: str, timeout: timedelta) -> Any:
    """Return a group of some global ranks, of which this process is number ``rank``.

    ``dist.new_group()`` needs all ranks of the job, or derives a name from the number of groups that a rank is in,
    which may differ between ranks: this uses names of torch that are not public. Tests: ``test_torch_distributed.py``.
    """
    world: Any = dist.group.WORLD
    # If bound to a device, the group would be split off from the group of all ranks, by all of them.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        group, _ = _c10d._new_process_group_helper(len(ranks), rank, ranks, config, store, name, timeout=timeout)
    finally:
        world.bound_device_id = bound
    _c10d._world.pg_group_ranks[group] = {number: place for place, number in enumerate(ranks)}
    return group


def _store_of_the_job() -> Any:
    """Return a separate connection to the store of the job; None before torch 2.6, whose stores cannot be cloned."""
    return _separate(_c10d._get_default_store())


def _separate(store: Any) -> Any:
    """Return a separate connection to a store; None before torch 2.6."""
    return store.clone() if hasattr(store, "clone") else None
