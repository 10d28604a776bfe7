"""The worker's side of asynchronous exchange."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np

from hvd_periodic.algorithms.base import Algorithm, Exchange
from hvd_periodic.asynchronous import leaving
from hvd_periodic.asynchronous.board import Board, BoardInMemory
from hvd_periodic.asynchronous.center_file import CenterFile
from hvd_periodic.asynchronous.center_in_memory import ExchangedTensors, numbered
from hvd_periodic.asynchronous.hub import HubTransport
from hvd_periodic.asynchronous.ledger import Ledger, lack
from hvd_periodic.asynchronous.meeting import Meeting
from hvd_periodic.asynchronous.remote_center import CenterOfRounds, RemoteCenter
from hvd_periodic.asynchronous.rounds import Quorum, Rounds
from hvd_periodic.asynchronous.rounds_in_memory import RoundsInMemory
from hvd_periodic.asynchronous.service import ServiceTransport
from hvd_periodic.asynchronous.transport import MemoryTransport, Transport
from hvd_periodic.centers.error_feedback import Packed
from hvd_periodic.centers.sharded import Sharded
from hvd_periodic.centers.tensor_group import TensorGroup, all_buckets
from hvd_periodic.comm.base import Communicator, DifferentCallsError, barrier_id
from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.comm.membership import Membership
from hvd_periodic.comm.transports import NoSharedMemoryError
from hvd_periodic.logs import logger
from hvd_periodic.outer.framework import OuterOptimizer
from hvd_periodic.ranks import named, titled
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.layout import Bucket, chunk

VARIABLE = "HVD_PERIODIC_TRANSPORT"
"""Environment variable: ``service`` forces the service thread even if all ranks share memory; ``window`` forbids it.
If unset, the service is used if ranks are on several hosts or do not have enough shared memory."""


class Worker:
    """One rank that exchanges with the center on its own clock.

    :meth:`open` is collective, and so is :meth:`close`, which runs automatically when the process ends. All other calls
    involve this rank alone, unless they say otherwise.

    Args:
        membership: all workers, and the root, which holds the center, and starts and restores it.
        replica: replica of this rank.
        outer: optimizer that moves the center, if one does.
        parts: tensors that are exchanged.
        sharded: every rank holds one n-th of the center, unless the center is in memory that all ranks share.
        use_locking: whether transactions in shared memory wait for each other.
        center_file: file that holds the center, if there is one.
        quorum: workers exchange together, in rounds that need so many of them; None: each alone.

    Attributes:
        use_locking: as given.
        interrupted: an exchange of this worker has begun and not ended; a holder may be waiting for its messages.
        on_pull: called with a group, a bucket, its center and the exchange, just before the replica pulls.

    Raises:
        TypeError, ValueError: the center cannot have the optimizer that it needs.
    """

    def __init__(
        self,
        membership: Membership,
        replica: Replica[Any],
        outer: OuterOptimizer,
        parts: Sequence[ExchangedTensors],
        sharded: bool,
        use_locking: bool,
        center_file: Path | None = None,
        quorum: Quorum | None = None,
    ) -> None:
        self._quorum = quorum
        self.membership, self._replica, self._outer = membership, replica, outer
        self._file = None if center_file is None else CenterFile(center_file, membership, parts)
        self._lost: list[int] = []
        self._parts, self._sharded, self.use_locking = list(parts), sharded, use_locking
        self._transport: Transport | None = None
        self._shared_board: BoardInMemory | None = None
        self._calls = 0
        self._final: list[np.ndarray] | None = None
        self.interrupted = False
        self.on_pull: Callable[[TensorGroup[Any], Bucket, Any, Exchange], None] | None = None
        self._places = numbered(parts, [part.layout for part in parts])
        self._numbers = {(part, key, bucket.index): i for i, (part, key, bucket) in enumerate(self._places)}
        kind = RemoteCenter if quorum is None else CenterOfRounds
        self.placements = [kind(membership.communicator, membership.root, self, part) for part in range(len(parts))]
        self._shapes: list[tuple[tuple[int, ...], str]] = []
        if parts[0].optimized:
            self._shapes = outer.shapes(parts[0].layout)

    @property
    def transport(self) -> Transport:
        """The transport to the center.

        Raises:
            RuntimeError: there is no transport yet.
        """
        if self._transport is None:
            raise RuntimeError("The synchronizer has not been started: call start() on all ranks")
        return self._transport

    @property
    def communicator(self) -> Communicator:
        """All workers."""
        return self.membership.communicator

    def open(self) -> None:
        """Create the center and the transport to it; collective.

        Raises:
            RuntimeError: the way the job was launched rules out asynchronous exchange; or the environment asks for
                shared memory, and these ranks have none, or not enough; or the file cannot be created.
            ValueError: the center is sharded, so that no file could hold the whole.
        """
        communicator = self.communicator
        shares = _can_share_memory(communicator)
        memory = self._in_memory() if shares else None
        self._has_shards = self._sharded and memory is None
        self._transport = memory or (self._by_messages() if self._quorum is None else self._in_rounds(self._quorum))
        if self.membership.is_root:
            text = "Asynchronous exchange of %d ranks through %s"
            text = text if self._quorum is None else "Rounds of %d ranks through %s"
            self.membership.log.info(text, communicator.size, self.transport.description)
        if communicator.size > 1:
            communicator.idle_callers = [*communicator.idle_callers, self.transport]
        if communicator.processes and communicator.size > 1:
            leaving.add(self)

    def _in_memory(self) -> Transport | None:
        try:
            center = self._center_in_file(everywhere=True)
            allocate = self.communicator.shared_memory
            worker = self.communicator.rank, self.communicator.size
            transport: Transport
            if self._quorum is not None:
                transport = RoundsInMemory(
                    *(allocate, self._parts, self.communicator.global_ranks, worker[0], self.membership.root),
                    optimizer=self._outer,
                    shapes=self._shapes,
                    rounds=self._rounds(self._quorum, time.monotonic),
                    dead_ranks=self.communicator.dead_ranks,
                )
            else:
                outer, shapes = self._outer, self._shapes
                transport = MemoryTransport(allocate, self._parts, worker, outer, shapes, self.use_locking, center)
            try:
                self._shared_board = BoardInMemory(allocate, *worker)
            except NoSharedMemoryError:
                transport.close()
                raise
            return transport
        except NoSharedMemoryError as error:
            if _requested_transport() == "window":
                raise RuntimeError(
                    f"{VARIABLE}=window, but the ranks cannot share the center's memory: {error}. Unset it to exchange "
                    "through a service thread, or give more memory (docker: --shm-size)"
                ) from error
            if self.membership.is_root:
                self.membership.log.warning(
                    "No shared memory for the asynchronous center; using a service thread: %s", error
                )
            return None

    def _rounds(self, quorum: Quorum, now: Callable[[], float] | None = None) -> Rounds:
        communicator = self.communicator
        return Rounds(communicator.global_ranks, quorum, lambda: communicator.tracker.timeout, now)

    def _by_messages(self) -> Transport:
        communicator = self.communicator
        holders = list(range(communicator.size)) if self._sharded else [self.membership.root]

        def bounds(bucket: Bucket) -> list[tuple[int, int]]:
            return [chunk(bucket.size, place, len(holders)) for place in range(len(holders))]

        center = self._center_in_file(everywhere=False)
        requests, replies = communicator.messages(), communicator.messages()
        workers, leaves = communicator.size, self._replica.leaves
        return ServiceTransport(requests, replies, self._parts, workers, holders, bounds, self._outer, leaves, center)

    def _in_rounds(self, quorum: Quorum) -> Transport:
        communicator = self.communicator
        if communicator.processes and communicator.shares_memory():
            with suppress(NoSharedMemoryError):
                communicator.shared_memory(1)  # From now on, the ranks of one host know which of them are dead.
        channels = communicator.messages(), communicator.messages()
        ranks, root = communicator.global_ranks, self.membership.root
        outer, leaves = self._outer, self._replica.leaves
        rounds, dead_ranks = self._rounds(quorum), communicator.dead_ranks
        return HubTransport(*channels, self._parts, ranks, root, outer, leaves, rounds, dead_ranks)

    def _center_in_file(self, everywhere: bool) -> np.ndarray | None:
        """Return the memory of a center in a file, on the ranks that hold it; None if there is no file."""
        if self._file is None:
            return None
        if self._sharded and not everywhere:
            raise ValueError(
                "`center_file` needs the whole center in one place, but with center='sharded' on several hosts every "
                f"rank holds a shard: use center='root'. Received: center_file={str(self._file.path)!r}"
            )
        return self._file.open(f"hvd_periodic.{self.membership.number}.center_file", everywhere)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Mark the exchange of this worker inside a ``with`` block."""
        self.resume_training()
        self._publish_file()
        self.interrupted = True
        try:
            yield
        except DifferentCallsError:  # Nobody waits for its messages any more.
            self.interrupted = False
            raise
        except KeyboardInterrupt:
            self.interrupted = not self.transport.at_rest
            raise
        self.interrupted = False

    def exchange(
        self, parts: Sequence[TensorGroup[Any]], exchange: Exchange, left_out: bool = False, counts: bool = True
    ) -> int:
        """Run one exchange of this worker; return the number of bytes that it pushed.

        If it is left out of a round, it sends zeros, and starts from the center that it gets. If it has no weight, so
        that it does not count, it sends zeros as well, and keeps its error memory; its own message is dropped once the
        center has moved. Messages that it encodes with error memory are bounded here, as the holder sees them with that
        only, and so are those of a worker that exchanges alone: in elastic averaging it reads the center before. Those
        that it encodes without error memory are formed from the center as it is.
        """
        buckets, sent, packed = list(all_buckets(parts)), 0, dict[int, Packed[Any]]()
        unbounded, read = exchange, list[Any]()

        def payloads(centers: Sequence[np.ndarray] = ()) -> Iterator[np.ndarray]:
            nonlocal sent
            asked = [
                self._replica.from_host(center, bucket) for center, (_, bucket) in zip(centers, buckets, strict=False)
            ]
            if asked and not left_out:
                self._measure(parts[0], asked, exchange)
            seen = [*(asked or read), *[None] * len(buckets)]
            for place, (part, bucket) in enumerate(buckets):
                if left_out or not counts:
                    payload = np.zeros_like(self._parts[parts.index(part)].new_payload(bucket))
                elif part.error_feedback.wire.lossy:
                    packed[place] = part.packed(bucket, exchange, seen[place])
                    payload = np.frombuffer(self._replica.to_bytes(packed[place].payload), np.uint8)
                else:
                    of_part = exchange if part is parts[0] else unbounded
                    payload = self._replica.to_host(part.payload(bucket, of_part, seen[place]), bucket)
                sent += payload.nbytes
                yield payload

        pulls = False
        with self.transaction():
            if counts and not left_out:
                exchange, read = self._limited(parts[0], exchange)
            if self._parts[0].asks_for_center:
                vectors = cast(Meeting, self.transport).exchange_from_center(exchange, payloads)
            else:
                vectors = self.transport.exchange(exchange, payloads())
            # All buckets, or none if nobody had anything to contribute to a round. The transport comes first: asked for
            # one bucket more, it receives the staleness.
            for pulled, (place, (part, bucket)) in zip(vectors, enumerate(buckets), strict=False):
                pulls = True
                cut = exchange.cut if exchange.cut is not None else self.transport.cut
                as_read = place < len(read) and not part.algorithm.reads_after
                center = read[place] if as_read else self._replica.from_host(pulled, bucket)
                if self.on_pull is not None:
                    self.on_pull(part, bucket, center, exchange)
                if left_out:
                    part.start_from(bucket, center)
                else:
                    if not counts:
                        part.payload(bucket, exchange)  # Empties what the worker has gathered.
                    of_part = replace(exchange, cut=cut) if part is parts[0] else unbounded
                    part.pull(bucket, center, of_part, packed.get(place))
            if pulls:
                for place, each in packed.items():
                    part, bucket = buckets[place]
                    part.error_feedback.keep(bucket, each)
                for part in parts:
                    part.remember_taken()
        return sent

    def _limited(self, part: TensorGroup[Any], exchange: Exchange) -> tuple[Exchange, list[Any]]:
        """Return the exchange with the factor for a message that is bounded here, and the center if that needs it."""
        if part.limiter is None:
            return exchange, []
        buckets = part.values.layout.buckets
        read = [part.published_center(bucket, exchange) for bucket in buckets] if part.needs_published else []
        return part.limiter.limit_message(exchange, buckets, read)[0], read

    def _measure(self, part: TensorGroup[Any], centers: Sequence[Any], exchange: Exchange) -> None:
        """Measure the message that will be encoded, given the center, if there is a bound on norms of messages."""
        bounds = self._parts[0].bounds
        if bounds is not None and bounds.message is not None:
            of_buckets = zip(part.values.layout.buckets, centers, strict=True)
            previews = (part.preview(bucket, exchange, center) for bucket, center in of_buckets)
            norm = math.sqrt(sum(self._replica.space.square(preview) for preview in previews))
            cast(Meeting, self.transport).message_norm = norm

    def wait_for_group(self, parts: Sequence[TensorGroup[Any]], grace: float) -> float:
        """Wait, after a push, for those who push within ``grace`` seconds of the first of a group; take the center.

        Return the seconds for which this worker has waited.
        """
        since = time.perf_counter()
        self.transport.wait_for_group(grace)
        waited = time.perf_counter() - since
        with self.transaction():
            self.transport.take()
            self.take(parts)
        return waited

    def number(self, part: int, key: str, bucket: Bucket) -> int:
        """Return the number of a bucket of a vector, see :func:`~.center_in_memory.numbered`."""
        return self._numbers[part, key, bucket.index]

    def read(self, index: int, bucket: Bucket) -> Any:
        """Return the bucket of a number as a vector of the front end."""
        if self._final is not None:
            return self._replica.from_host(self._final[index], bucket)
        return self._replica.from_host(self.transport.read(index), bucket)

    def state(self) -> Any:
        """Return a copy of the state of the center's optimizer, for a checkpoint.

        Raises:
            RuntimeError: Horovod has been shut down.
        """
        if not self._parts[0].optimized:
            return None
        if not self.communicator.alive():
            raise RuntimeError("The state of the center's optimizer was lost with hvd.shutdown(): save it before")
        return self.transport.optimizer_state()

    def pushes(self) -> dict[str, Any]:
        """Return the ledger of pushes, and the rank of this worker, for a checkpoint."""
        memory = self._final[-1] if self._final is not None else self.transport.read(len(self._places))
        return {"worker": self.communicator.rank, **self._ledger(memory).save()}

    def _ledger(self, memory: np.ndarray | None = None) -> Ledger:
        """Return a ledger in some memory; by default one that counts from zero."""
        count = sum(len(part.layout.buckets) for part in self._parts)
        if memory is None:
            memory = np.zeros(Ledger.size(count, self.communicator.size), np.int64)
        return Ledger(count, memory)

    def facts(self) -> dict[str, object]:
        """Return the values on which all ranks must agree.

        Raises:
            ValueError: the environment asks for a transport that does not exist.
        """
        return {
            f"environment variable {VARIABLE}": _requested_transport(),
            "sharded center": self._sharded,
            "use_locking": self.use_locking,
            "center_file": None if self._file is None else str(self._file.path),
        }

    @property
    def place(self) -> str:
        """Where the center lives unless it is in memory that all ranks share, as ``center=`` of the user."""
        return "sharded" if self._sharded else "root"

    @property
    def finished(self) -> bool:
        """Whether training has ended: :meth:`finish` was the last call."""
        return self._final is not None

    def start(self, parts: Sequence[TensorGroup[Any]]) -> None:
        """Set the center, and the vectors that are kept with it, to those of the root's replica; collective."""
        self.resume_training()

        def buckets() -> Iterator[np.ndarray]:
            for part, key, bucket in self._places:
                vector = parts[part].initial_center(parts[part].values.read(bucket))[key]
                yield self._replica.to_host(vector, bucket)
            yield self._ledger().memory

        if self.membership.is_root:
            self.transport.write(buckets())
        self._wait_for_root()

    def resume(
        self, parts: Sequence[TensorGroup[Any]], state: dict[str, Any] | None, each_its_own: bool = True
    ) -> None:
        """Set the center to the state that the root has loaded, or else to the root's replica; collective.

        If each worker goes on from a state of its own, one whose pushes in that state are not those in the root's takes
        the center, and so do all if their number has changed: of an algorithm for which workers keep what they took.

        Raises:
            ValueError: as :meth:`check`; on all ranks.
        """
        membership = self.membership
        if membership.is_root and state is None:
            text = "No center was saved with the replica of rank %d: the center starts from that replica"
            membership.log.warning(text, membership.root)
        self._check_all(state)
        rank = self.communicator.rank
        own = None if state is None else state.get("pushes") or {}
        loaded = self.communicator.allgather_object(own, f"hvd_periodic.{membership.number}.center")
        known = loaded[membership.root]
        if known is None:
            self.start(parts)
            return
        self.resume_training()
        lacking = {}
        if each_its_own and self._hands_out(parts[0].algorithm):
            reasons = (lack(worker, each, known, len(loaded)) for worker, each in enumerate(loaded))
            lacking = {worker: reason for worker, reason in enumerate(reasons) if reason}
        if membership.is_root and state is not None:
            self.transport.write(self._saved(parts, state, list(lacking)), state["center_optimizer"])
        tells = membership.is_root and self._parts[0].optimized
        settings = self._wait_for_root(self._outer.hyperparameters() if tells else None)
        if not membership.is_root:
            self._outer.take_hyperparameters(settings)
        if rank in lacking:
            membership.log.warning(
                "Rank %d takes the center, and what it had not pushed is lost: %s",
                membership.global_rank,
                lacking[rank],
            )
            self.take(parts)
            for part in parts:
                part.error_feedback.reset()

    def take(self, parts: Sequence[TensorGroup[Any]]) -> None:
        """Set the replica to the center, statistics too, if workers keep what they took, or take it in rounds."""
        if self._hands_out(parts[0].algorithm):
            for part in parts:
                part.take_center(Exchange(self.communicator.size, period=1))

    def _hands_out(self, algorithm: Algorithm) -> bool:
        """Return whether a worker may take the center instead of what it has, if it lacks the latest pushes."""
        return algorithm.taken_state is not None or (self._quorum is not None and algorithm.reads_after)

    def check(self, state: dict[str, Any]) -> None:
        """Check a state before it is loaded.

        Raises:
            ValueError: the state of the center's optimizer was saved with other holders, or does not fit the optimizer
                of this holder; or the state counts rounds, and this training has none, or the other way round.
            RuntimeError: there is no transport yet, which decides who holds the center.
        """
        _ = self.transport
        counted = state.get("pushes") or {}
        in_rounds = bool(sum(counted.get("rounds", ())))
        if in_rounds != (self._quorum is not None) and sum(counted.get("pushes", ())):
            then, now = (
                ("with a quorum", "asynchronous") if in_rounds else ("in asynchronous training", "with a quorum")
            )
            raise ValueError(
                f"The state was saved {then}, and this training is {now}: their workers count what they have taken "
                "differently. Start from its center instead"
            )
        of_holder = self.select(state["center_optimizer"])
        if of_holder is not None and self.transport.holds_center:
            self._outer.check(of_holder)

    def select(self, saved: Any) -> Any:
        """Return this rank's state of the center's optimizer, given what :meth:`state` returned.

        Raises:
            ValueError: it was saved with other holders.
        """
        holders = Sharded(self.communicator, self.membership.root) if self._has_shards else self.placements[0]
        return holders.select(saved)

    def united(self, own: Any) -> Any:
        """Return what :meth:`state` returns, given the states of the holders, each on its own rank; collective."""
        name = f"hvd_periodic.{self.membership.number}.optimizer"
        states = self.communicator.allgather_object(own, name)
        return {"sharded": states} if self._has_shards and own is not None else states[self.membership.root]

    def _check_all(self, state: dict[str, Any] | None) -> None:
        """Check the state of every rank before it is the center, as that of a model file only is now; collective.

        Raises:
            ValueError: as :meth:`check`; on all ranks.
        """
        problem = None
        try:
            if state is not None:
                self.check(state)
        except ValueError as error:
            problem = str(error)
        except Exception as error:  # A damaged state; the others wait for this rank.
            rank = named([self.communicator.global_rank])
            problem = f"Training cannot start: loading the checkpoint failed on {rank}: {error!r}"
        told = self.communicator.allgather_object(problem, f"hvd_periodic.{self.membership.number}.fits")
        problem = problem or next((each for each in told if each is not None), None)
        if problem is not None:
            raise ValueError(problem)

    def _publish_file(self) -> None:
        """Rename the center's file to its final name, once training has begun and its initial state has been read."""
        if self._file is not None and self.membership.is_root:
            self._file.publish()

    def _wait_for_root(self, told: Any = None) -> Any:
        """Wait until the root has written; return what it tells."""
        name = f"hvd_periodic.{self.membership.number}.written"
        return self.communicator.allgather_object(told, name)[self.membership.root]

    def read_from_saved(self, parts: Sequence[TensorGroup[Any]], state: dict[str, Any]) -> None:
        """Use a saved state as the center for reading, until training continues."""
        self._final = list(self._saved(parts, state))

    def _saved(
        self, parts: Sequence[TensorGroup[Any]], state: dict[str, Any], taking: Sequence[int] = ()
    ) -> Iterator[np.ndarray]:
        """Yield what a state has of all vectors, by number, and the ledger, in which some workers take the center."""
        for (part, key), of_vector in groupby(self._places, lambda place: place[:2]):
            store = self._replica.new_temporary_store(self._parts[part].layout)
            self._replica.load(store, state["vectors"][parts[part].name][key])
            for _, _, bucket in of_vector:
                yield self._replica.to_host(store.read(bucket), bucket)
        ledger = self._ledger()
        ledger.load(state.get("pushes") or {}, taking)
        yield ledger.memory

    def finish(self, posted: bytes = b"") -> dict[int, bytes]:
        """Wait until all workers are done, and keep the final center; collective.

        Args:
            posted: what this worker shows to the others.

        Returns:
            what workers show that have come as well; on the root, or on all ranks.
        """
        self._publish_file()
        with self.communicator.tracker.at("finalize() of asynchronous exchange"):
            self._post(posted)
            self.wait_for_all(Purpose.LEAVE)
            self._log_dead_ranks()
            found = self._board.posted(self._calls + 1)
            self._final = [self.transport.read(index) for index in range(len(self._places) + 1)]
            if self._hands_out(self._parts[0].algorithm):  # All take the center now, see Asynchronous.leave().
                self.transport.take()
                self._ledger(self._final[-1]).take(range(self.communicator.size))
            self.communicator.idle_barrier(self._id_of(Purpose.LEAVE))
            self._calls += 1
        if self._file is not None:
            self.transport.show()
            self._file.release()
        self.transport.pause()
        return found

    def audit(self, posted: bytes) -> dict[int, bytes]:
        """Show something to the others, and return what they show, as :meth:`finish` does; training goes on."""
        with self.communicator.call_of_all(), self.communicator.tracker.at("audit()", idle=False):
            self._post(posted)
            self.wait_for_all(Purpose.AUDIT)
            found = self._board.posted(self._calls + 1)
            self.communicator.idle_barrier(self._id_of(Purpose.AUDIT))  # Nobody posts more before all have read.
            self._calls += 1
        return found

    def _post(self, data: bytes) -> None:
        if not self._board.post(self._calls + 1, data, self.membership.root):
            self.membership.log.warning(
                "No shared memory for digests of %d bytes: what no exchange touches is not compared with that of rank "
                "%d",
                len(data),
                self.membership.global_rank,
            )

    @property
    def _board(self) -> Board:
        return self._shared_board or cast(ServiceTransport, self.transport)

    def final(self, index: int) -> np.ndarray:
        """Return a bucket of the final center, after :meth:`finish`."""
        if self._final is None:
            raise RuntimeError("There is no final center before finish()")
        return self._final[index]

    def resume_training(self) -> None:
        """Discard the final center, if training continues after :meth:`finish`."""
        self._final = None

    def any_dead(self) -> bool:
        """Return in adopt() whether a rank has died, the same on all ranks that live; collective, within the timeout.

        The first barrier waits for every rank that lives; others may close rounds without this one, and come to a
        barrier in another call. The second tells all whether some rank knows of a death: it enters with the id of the
        first, and the others join.

        Raises:
            RuntimeError: other ranks are in another call; on all ranks.
        """
        self.transport.stay_out(True)
        try:
            with self.communicator.call_of_all(self.transport), self.communicator.tracker.at("adopt()", idle=False):
                self.wait_for_all(Purpose.ADOPT)
                knows = bool(self.communicator.dead_ranks())
                return self.communicator.idle_barrier(self._id_of(Purpose.ADOPT) if knows else 0) > 0
        finally:
            self.transport.stay_out(False)
            self.transport.apart(False)

    def wait_for_all(self, purpose: Purpose) -> None:
        """Wait in an idle barrier.

        Raises:
            RuntimeError: ranks are in different calls; on all of them.
        """
        self.communicator.wait_for_all(self._id_of(purpose))

    def _id_of(self, purpose: Purpose) -> int:
        return barrier_id(purpose, self.membership.number)

    def close(self, where: str = "the end of the process, after asynchronous exchange") -> None:
        """Wait for all ranks, then release everything; collective.

        Args:
            where: the call in which the ranks are.
        """
        leaving.remove(self)
        callers = self.communicator.idle_callers
        self.communicator.idle_callers = [each for each in callers if each is not self._transport]
        if not self.communicator.alive():
            return
        with self.communicator.tracker.at(where):
            self.communicator.idle_barrier(self._id_of(Purpose.LEAVE))
        if not self.communicator.dead_ranks():
            self.transport.close()
            if self._shared_board is not None:
                self._shared_board.close()

    def _log_dead_ranks(self) -> None:
        lost = self.communicator.dead_ranks()
        if lost and lost != self._lost:
            logger.warning(
                "%s died: the center keeps earlier pushes, and the other ranks continue. Collectives of Horovod would "
                "hang",
                titled(lost),
            )
        self._lost = lost


def _can_share_memory(communicator: Communicator) -> bool:
    transport = _requested_transport()
    if communicator.size == 1:
        return True
    if transport == "service":
        return False
    one_host = communicator.shares_memory()
    if transport == "window" and not one_host:
        raise RuntimeError(f"{VARIABLE}=window needs all ranks on one host, but they are on several")
    return one_host


def _requested_transport() -> str:
    transport = os.environ.get(VARIABLE, "")
    if transport not in ("", "window", "service"):
        raise ValueError(f"The environment variable {VARIABLE} must be 'window' or 'service'. Received: {transport!r}")
    return transport
