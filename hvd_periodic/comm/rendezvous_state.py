"""The state of a torch rendezvous in its store: signed, read without running code, and judged by this host's clock.

torch keeps who takes part in one value in a store, pickled, with the times of the workers' last signs of life by the
clocks of their hosts. What is between torch and the store here:

- signs every value with the secret of the job, and unpickles nothing but the classes of such a state;
- replaces the times of others by those at which this process has first seen them, by its own clock: clocks of hosts may
  differ, and a worker whose time does not change for long counts as dead;
- remembers what the state says about this process and the others, for whoever waits for them.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

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
        round: the latest complete round in which this process takes part; -1 before the first.
        members: the workers of that round.
        lost: whether a worker of that round has left it, or is dead: nobody can exchange in it any more.
        waiting: whether workers wait for the next round.
        taking_part: number of workers in the current round, which may be incomplete.
    """

    round: int = -1
    members: frozenset[str] = frozenset()
    lost: bool = False
    waiting: bool = False
    taking_part: int = 0


@dataclass
class _Times:
    """Times of other hosts by this host's clock, and back.

    Attributes:
        seen: for each key, the time as it was read, and when this process first saw it, by the monotonic clock.
    """

    seen: dict[str, tuple[datetime, float]] = field(default_factory=dict)

    def here(self, key: str, there: datetime, ahead: float = 0.0) -> datetime:
        """Return by this host's clock a time that another one has written, ``ahead`` seconds before which it was."""
        now = time.monotonic()
        if key not in self.seen or self.seen[key][0] != there:
            self.seen[key] = there, now
        return datetime.now(timezone.utc) + timedelta(seconds=ahead - (now - self.seen[key][1]))


class RendezvousState(C10dRendezvousBackend):
    """The state of a job's rendezvous in a store.

    Args:
        store: the store, over a connection that nothing blocks.
        job: name of the job.
        secret: the key of signatures.
        own: how the state names this process.
        last_call: seconds that a round stays open once the minimum of workers is there.
        told: called with the view after every access.
    """

    def __init__(
        self, store: Store, job: str, secret: bytes, own: str, last_call: float, told: Callable[[View], None]
    ) -> None:
        self.view = View()
        self._secret, self._own, self._last_call, self._told = secret, own, last_call, told
        self._times = _Times()
        self._written: dict[str, tuple[datetime, datetime]] = {}
        self._lock = threading.RLock()  # Signs of life come from another thread.
        super().__init__(store, job)

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state and its token; None if there is none."""
        with self._lock:
            found = super().get_state()
            return found and (self._received(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Set the state unless it has changed since the token; return the state, its token, and whether it was set."""
        with self._lock:
            found = super().set_state(self._signed(state), token)
            return found and (self._received(found[0]), *found[1:])

    def sign(self, data: bytes) -> bytes:
        """Return the signature of some bytes."""
        return hmac.digest(self._secret, data, "sha256")

    def _signed(self, state: bytes) -> bytes:
        """Return a state with the times that others have written, after its signature."""
        found = pickle.loads(state)  # Pickled by this process.
        for node, stamp in found.last_heartbeats.items():
            found.last_heartbeats[node] = self._as_written(node.addr, stamp)
        if found.deadline is not None:
            found.deadline = self._as_written("", found.deadline)
        data = pickle.dumps(found)
        return self.sign(data) + data

    def _received(self, signed: bytes) -> bytes:
        """Return a state by this host's clock; remember what it says."""
        digest, data = signed[:_DIGEST], signed[_DIGEST:]
        if not hmac.compare_digest(digest, self.sign(data)):
            raise OtherSecretError
        state = _StateUnpickler(io.BytesIO(data)).load()
        self._written = {}
        for node, stamp in state.last_heartbeats.items():
            if node.addr != self._own:
                state.last_heartbeats[node] = self._read(node.addr, stamp)
        if state.deadline is not None:
            state.deadline = self._read("", state.deadline, self._last_call)
        self._look_at(state)
        return pickle.dumps(state)

    def _read(self, key: str, there: datetime, ahead: float = 0.0) -> datetime:
        here = self._times.here(key, there, ahead)
        self._written[key] = here, there
        return here

    def _as_written(self, key: str, here: datetime) -> datetime:
        """Return the time as it was read, unless this process has set it since."""
        given, there = self._written.get(key, (None, here))
        return there if given == here else here

    def _look_at(self, state: Any) -> None:
        """Update the view."""
        known = self.view
        current = frozenset(node.addr for node in state.participants)
        if state.complete and self._own in current and state.round != known.round:
            known = View(state.round, current)
        lost = state.round != known.round or not known.members <= current
        self.view = View(known.round, known.members, lost, bool(state.wait_list), len(current))
        self._told(self.view)


class _StateUnpickler(pickle.Unpickler):
    """Unpickles states of a rendezvous, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of a state."""
        if (module, name) not in _OF_STATES:
            raise pickle.UnpicklingError(f"The state of a rendezvous names {module}.{name}, which no such state does")
        return super().find_class(module, name)
