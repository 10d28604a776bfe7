"""Process sets of groups, beside what Horovod has of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvd_periodic.comm import horovod as communicator


def test_process_sets_are_made_anew_when_horovod_was_initialized_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``shutdown()`` and ``init()`` the number of a set belongs to another one, or to none."""
    process_sets = pytest.importorskip("horovod.common.process_sets")
    registered: dict[int, list[int]] = {0: [0, 1, 2]}

    def add(made: Any) -> Any:
        made.process_set_id = len(registered)
        registered[len(registered)] = made.ranks
        return made

    horovod: Any = SimpleNamespace(
        size=lambda: 3, ProcessSet=process_sets.ProcessSet, add_process_set=add, __name__="any"
    )
    monkeypatch.setattr(
        process_sets, "_basics", SimpleNamespace(_get_process_set_ids_and_ranks=lambda: dict(registered))
    )
    monkeypatch.setattr(communicator, "_registered", {})
    first = communicator.register(horovod, [0, 1])
    assert communicator.register(horovod, [0, 1]) is first
    for others in ([[1, 2]], []):
        registered.clear()
        registered.update(enumerate([[0, 1, 2], *others]))
        again = communicator.register(horovod, [0, 1])
        assert registered[again.process_set_id] == [0, 1]
        assert again is not first
        first = again


def test_horovod_tells_the_ranks_of_a_process_set() -> None:
    hvd = pytest.importorskip("horovod.torch")
    hvd.init()
    try:
        assert communicator._ranks_of(hvd, hvd.global_process_set) == [0]
    finally:
        hvd.shutdown()  # Other tests of this process are about Horovod that is not initialized.
