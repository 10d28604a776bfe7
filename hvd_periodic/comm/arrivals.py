"""Records arrivals at the first handshake, before ranks know each other's addresses.

A rank signs in the storage of its job: in the store of a library that has one, on horovodrun's own server under Gloo,
otherwise in the folder of Open MPI's session on this host. All that is read there is whether a signature exists.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_FOLDER = "PMIX_SERVER_TMPDIR"
_SECONDS = 2.0


_stores: dict[str, Any] = {}
"""Stores of a job's library by the name of the ranks."""


def mark_arrived(name: str, rank: int, store: Any = None) -> None:
    """Record that a rank has arrived at the first handshake of some ranks; without storage for it, do nothing.

    Args:
        name: name of the ranks.
        rank: this rank.
        store: has ``set(key, value)`` and ``check(keys)``; given if the job's library has one that a thread may query.
    """
    try:
        if store is not None:
            _stores[name] = store
            store.set(_key(name, rank), "here")
        elif all(variable in os.environ for variable in _SERVER):
            _ask("PUT", name, rank)
        elif _FOLDER in os.environ:
            _file(name, rank).touch()
    except (OSError, RuntimeError, http.client.HTTPException):
        return


def missing_ranks(name: str, ranks: Iterable[int], own: int, one_host: bool) -> list[int] | None:
    """Return the ranks that have not signed; None if that is unknown.

    Args:
        name: name of the ranks.
        ranks: all of them.
        own: this rank, which has signed.
        one_host: whether all ranks are on this host.
    """
    deadline = time.monotonic() + _SECONDS
    try:
        if name in _stores:
            missing = [rank for rank in (own, *ranks) if not _stores[name].check([_key(name, rank)])]
        elif all(variable in os.environ for variable in _SERVER):
            missing = []
            for rank in (own, *ranks):
                if time.monotonic() > deadline:
                    return None
                if _ask("GET", name, rank) != http.client.OK:
                    missing.append(rank)
        elif one_host and _FOLDER in os.environ:
            missing = [rank for rank in ranks if not _file(name, rank).exists()]
        else:
            return None
    except (OSError, RuntimeError, http.client.HTTPException):
        return None
    return None if own in missing else missing


def _key(name: str, rank: int) -> str:
    return f"{name}.{rank}"


def _file(name: str, rank: int) -> Path:
    return Path(os.environ[_FOLDER], _key(name, rank))


def _ask(method: str, name: str, rank: int) -> int:
    host, port = (os.environ[variable] for variable in _SERVER)
    connection = http.client.HTTPConnection(host, int(port), timeout=_SECONDS)
    try:
        connection.request(method, f"/{name}/{rank}", b"here" if method == "PUT" else None)
        return connection.getresponse().status
    finally:
        connection.close()
