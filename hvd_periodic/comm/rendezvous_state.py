"""The state of a torch rendezvous in its store: signed, read without running code, and independent of hosts' clocks.

torch keeps who takes part in one value in a store, pickled, with the times of the workers' last signs of life by the
clocks of their hosts. What is between torch and the store here:

- signs every value with the secret of the job, and unpickles nothing but the classes of such a state;
- counts signs of life in keys of their own, one per worker. A worker whose count does not change for long, by the clock
  of who looks, counts as dead; and the value changes only if the workers do, however many there are. One that leaves
  puts a word in place of its count, and counts as dead at once;
- lets workers into the next round only when those of the former one have come or are lost: torch completes a round at
  the maximum, and new workers would take the places of those who hold the center;
- moves workers that wait for a full round to torch's list of spare ones, who call for no round before a place is free;
- remembers what the state says about this process and the others, for whoever waits for them.

The terms on which workers take part are another value in the store, which the first worker of a job signs and sets.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import io
import json
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from hvd_periodic.comm.rendezvous_settings import JOB

_OF_STATES = {
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_RendezvousState"),
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_NodeDesc"),
    *(("datetime", name) for name in ("datetime", "timezone", "timedelta")),
    *(("builtins", name) for name in ("set", "dict", "object")),
    ("copyreg", "_reconstructor"),
}
"""Classes and functions that the pickle of a state names; all others are refused."""

_DIGEST = hashlib.sha256().digest_size


class OtherSecretError(RuntimeError):
    """The state was signed with another secret."""


@dataclass
class View:
    """What this process knows of the rendezvous.

    Attributes:
        own: how the state names this process.
        round: the latest complete round in which this process takes part; -1 before the first.
        members: the workers of that round.
        lost: whether a worker of that round has left it, or is dead: nobody can exchange in it any more.
        waiting: whether workers wait for the next round.
        taking_part: number of workers in the current round, which may be incomplete, with this one.
    """

    own: str = ""
    round: int = -1
    members: frozenset[str] = frozenset()
    lost: bool = False
    waiting: bool = False
    taking_part: int = 1


_NEVER = datetime.min.replace(tzinfo=UTC)
"""In place of the time of a sign of life: in the store, and of a worker that has left."""

_LATER = timedelta(days=1)
"""From now to the end of a round that waits for workers: it is set again at every access, which may be late."""

_LONGEST_GAP = 2.0
"""Seconds between two accesses that count at most: where this process has not run, others may not have either."""

_LEFT = b"left"
"""In place of the count of a worker that has left."""


class RendezvousState(C10dRendezvousBackend):
    """The state of a job's rendezvous in a store.

    Args:
        store: the store, over a connection that nothing blocks.
        job: name of the job.
        secret: the key of signatures.
        own: how the state names this process.
        last_call: seconds that a round stays open once the minimum of workers is there, and nobody else is expected.
        lost_seconds: seconds without a sign of life after which a worker counts as lost.
        maximum: number of workers above which others wait.
        told: called with the view after every access.
        ranks: number of ranks that take part as this worker; it gives a sign of life when all of them have.

    Attributes:
        view: what this process knows of the rendezvous.
    """

    def __init__(
        self,
        store: Any,
        job: str,
        secret: bytes,
        own: str,
        last_call: float,
        lost_seconds: float,
        maximum: int,
        told: Callable[[View], None],
        ranks: int = 1,
    ) -> None:
        self.view = View(own)
        self._secret, self._own, self._told = secret, own, told
        self._last_call, self._lost = timedelta(seconds=last_call), timedelta(seconds=lost_seconds)
        self._maximum = maximum
        self._former: tuple[int, frozenset[str]] = -1, frozenset()
        self._beats, self._members = f"hvd_periodic.{job}.beats.", f"hvd_periodic.{job}.members"
        self._seen: dict[str, tuple[Any, float]] = {}
        self._own_sign = self._signed = _NEVER
        self._left = self._kept_out = False
        self._seconds, self._accessed = 0.0, time.monotonic()
        self._deadline: tuple[datetime | None, datetime | None] = None, None
        self._stored: dict[str, Any] = {}
        self._lock = threading.RLock()  # Signs of life come from another thread.
        super().__init__(store, job)
        self._others = [f"{self._beats}{own}.{rank}" for rank in range(1, ranks)]
        self._heard: dict[str, bytes] = {}
        for key in [self._beats + own, *self._others]:
            self._call_store("add", key, 0)  # A store waits for a key that it does not have.

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state and its token; None if there is none."""
        with self._lock:
            found = super().get_state()
            return found and (self._received(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Set the state unless it has changed since the token; return the state, its token, and whether it was set."""
        with self._lock:
            wanted = pickle.loads(state)  # Pickled by this process.
            self._prepare(wanted)
            if token and vars(wanted) == self._stored:  # There was nothing but a sign of life.
                now = self.get_state()
                return now and (*now, True)
            data = pickle.dumps(wanted)
            found = super().set_state(self.sign(data) + data, token)
            return found and (self._received(found[0]), *found[1:])

    def leave(self) -> None:
        """Give no sign of life from now on, and let the others count this process as dead."""
        with self._lock:
            self._left = True
            self._call_store("set", self._beats + self._own, _LEFT)

    def sign(self, data: bytes) -> bytes:
        """Return the signature of some bytes."""
        return hmac.digest(self._secret, data, "sha256")

    def _prepare(self, state: Any) -> None:
        """Count this process's sign of life, if the state has a new one; replace what was changed for this process."""
        if self._kept_out:
            state.complete, state.round = False, self._stored["round"]
        sign = state.last_heartbeats.get(self._node(state), self._own_sign)
        if sign != self._own_sign and not self._left:
            if self._others_live():
                self._call_store("add", self._beats + self._own, 1)
            self._own_sign, self._signed = sign, datetime.now(UTC)
        state.last_heartbeats = dict.fromkeys(state.last_heartbeats, _NEVER)
        here, there = self._deadline
        if state.deadline is not None and state.deadline == here:
            state.deadline = there

    def _others_live(self) -> bool:
        """Return whether all other ranks of this worker have given a sign of life since this last returned true."""
        if not self._others:
            return True
        counts = dict(zip(self._others, self._call_store("multi_get", self._others), strict=True))
        if any(self._heard.get(key) == count for key, count in counts.items()):
            return False
        self._heard = counts
        return True

    def _received(self, signed: bytes) -> bytes:
        """Return a state by this host's clock; remember what it says."""
        digest, data = signed[:_DIGEST], signed[_DIGEST:]
        if not hmac.compare_digest(digest, self.sign(data)):
            raise OtherSecretError
        state = _StateUnpickler(io.BytesIO(data)).load()
        self._stored = copy.deepcopy(vars(state))
        if state.complete and len(state.participants) >= self._maximum:
            state.redundancy_list |= state.wait_list
            state.wait_list = set()
        self._look_at(state)
        signs = self._signs(state)
        state.last_heartbeats = {node: signs[node.addr] for node in state.last_heartbeats}
        self._own_sign = state.last_heartbeats.get(self._node(state), _NEVER)
        now, arrived = datetime.now(UTC), {node.addr for node in state.participants}
        missing = () if state.complete else self._former[1] - arrived
        expected = [worker for worker in missing if now - signs[worker] < self._lost]
        if state.deadline is not None:
            there = state.deadline
            first_seen = self._here("", there)
            state.deadline = now + _LATER if expected or state.wait_list else first_seen + self._last_call
            self._deadline = state.deadline, there
        self._kept_out = bool(expected) and self._own not in self._former[1] | arrived
        state.complete |= self._kept_out
        self._told(self.view)
        return pickle.dumps(state)

    def _signs(self, state: Any) -> dict[str, datetime]:
        """Return the last signs of life of the workers in a state and in the former round."""
        workers = sorted({node.addr for node in state.last_heartbeats} | self._former[1])
        counts = self._call_store("multi_get", [self._beats + worker for worker in workers]) if workers else []
        signs = {worker: self._here(worker, count) for worker, count in zip(workers, counts, strict=True)}
        # Where this process has not run for long, torch would take it for dead itself, and give no sign of life again.
        # Where another rank of this worker has not, it would give one after the other.
        own = max(signs.get(self._own, _NEVER), self._signed, datetime.now(UTC) - self._lost / 2)
        return signs | {self._own: own}

    def _here(self, key: str, value: Any) -> datetime:
        """Return the time by this host's clock at which this process first saw the value of a key."""
        now = self._now()
        if value == _LEFT:
            return _NEVER
        known, since = self._seen.get(key, (None, now))
        if known != value:
            self._seen[key] = value, now
            since = now
        return datetime.now(UTC) - timedelta(seconds=now - since)

    def _now(self) -> float:
        """Return for how many seconds this process has been looking at the state."""
        now = time.monotonic()
        self._seconds += min(now - self._accessed, _LONGEST_GAP)
        self._accessed = now
        return self._seconds

    def _node(self, state: Any) -> Any:
        """Return this process among the nodes of a state; None if it is none of them."""
        return next((node for node in state.last_heartbeats if node.addr == self._own), None)

    def _remember_members(self, state: Any, current: frozenset[str]) -> None:
        """Remember the workers of the latest complete round, also for processes that come when some have left it."""
        latest = state.round if state.complete else state.round - 1
        if self._former[0] >= latest:
            return
        number, members = -1, []
        if self._call_store("check", [self._members]):
            number, members = json.loads(self._call_store("get", self._members))
        if number < latest and state.complete:
            number, members = latest, sorted(current)
            self._call_store("set", self._members, json.dumps([number, members]))
        self._former = number, frozenset(members)

    def _look_at(self, state: Any) -> None:
        """Update the view."""
        known = self.view
        current = frozenset(node.addr for node in state.participants)
        self._remember_members(state, current)
        if state.complete and self._own in current and state.round != known.round:
            known = View(self._own, state.round, current)
        lost = state.round != known.round or not known.members <= current
        self.view = View(self._own, known.round, known.members, lost, bool(state.wait_list), len(current | {self._own}))


def require_same_terms(store: Any, job: str, secret: bytes, terms: Mapping[str, Any]) -> None:
    """Raise an error unless the first worker of a job takes part on the same terms; or be the first.

    Args:
        store: the store.
        job: name of the job.
        secret: the key of signatures.
        terms: what has to be equal in all workers, in words by what it is.

    Raises:
        OtherSecretError: the first worker has another secret.
        ValueError: it has other terms.
    """
    mine = {what: str(value) for what, value in terms.items()}
    text = json.dumps(mine, sort_keys=True)
    signed = json.dumps([text, hmac.digest(secret, text.encode(), "sha256").hex()])
    found = store.compare_set(f"hvd_periodic.{job}.fingerprint", "", signed).decode()
    if found == signed:
        return
    theirs, signature = json.loads(found)
    if not hmac.compare_digest(signature, hmac.digest(secret, theirs.encode(), "sha256").hex()):
        raise OtherSecretError
    theirs = json.loads(theirs)
    different = sorted(what for what in mine.keys() | theirs if mine.get(what) != theirs.get(what))
    described = "; ".join(f"{what}: {mine.get(what)} here, {theirs.get(what)} there" for what in different)
    raise ValueError(
        f"Job {job!r} at this rendezvous trains something else: {described}. Train the same in all workers; or name "
        f"this job in {JOB}"
    )


class _StateUnpickler(pickle.Unpickler):
    """Unpickles states of a rendezvous, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of a state."""
        if (module, name) not in _OF_STATES:
            raise pickle.UnpicklingError(f"The state of a rendezvous names {module}.{name}, which no such state does")
        return super().find_class(module, name)
