"""Warns where a new optimizer takes over parameters of another one whose last local steps were not exchanged."""

from __future__ import annotations

import threading
import weakref
from typing import Any

_started: list[weakref.ref[Any]] = []
"""The synchronizers of this process that have started, as long as they exist."""

_lock = threading.Lock()
"""Ranks may be threads."""


def warn_of_former(synchronizer: Any) -> None:
    """Warn, on the root, where a living synchronizer of some of the same parameters has steps since its last exchange.

    A new one starts all ranks from the root's parameters: the other ranks lose these steps.

    Args:
        synchronizer: the one that is about to start.
    """
    with _lock:
        living = [former for former in (reference() for reference in _started) if former is not None]
        _started[:] = [weakref.ref(each) for each in {id(each): each for each in (*living, synchronizer)}.values()]
    ours = {id(tensor): tensor for tensor in synchronizer.replica.parameters.tensors()}
    for former in living if synchronizer.membership.is_root else []:
        shared = any(tensor is ours.get(id(tensor)) for tensor in former.replica.parameters.tensors())
        if former is synchronizer or not shared:
            continue
        counters = former.counters
        if counters.local_steps > counters.last_exchange and not former.phase.equal:
            synchronizer.membership.log.warning(
                "A new optimizer takes over parameters of one that has taken %d local steps since its last exchange, "
                "at step %d: all ranks start from the root's parameters, and what other ranks learned in these steps "
                "is lost. Call finalize() of the former optimizer first",
                counters.local_steps - counters.last_exchange,
                counters.last_exchange,
            )
