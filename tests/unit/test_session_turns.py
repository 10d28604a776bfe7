"""Exchanges that one run of a session starts in any order take place in one order on all ranks."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow")

from hvd_periodic import Communicator, LocalCommunicator
from hvd_periodic.tensorflow.contrib_opt import turns
from tests.helpers import run_ranks

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("orders", [[[1, 2], [2, 1]], [[2, 1], [1, 2]], [[3, 1, 2], [2, 3, 1], [1, 2, 3]]])
def test_ranks_agree_on_the_order(orders: list[list[int]]) -> None:
    def work(communicator: Communicator) -> list[int]:
        mine, order = turns.SessionTurns(communicator), orders[communicator.rank]
        mine.constructed = len(order)
        asked, went = [Event() for _ in order], list[int]()

        def exchange(place: int) -> None:
            if place:
                asked[place - 1].wait()
            asked[place].set()
            mine.begin(order[place])
            went.append(order[place])
            mine.end(order[place])

        threads = [Thread(target=exchange, args=(place,)) for place in range(len(order))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return went

    found = run_ranks(len(orders), work)
    assert found == [found[0]] * len(orders)
    assert sorted(found[0]) == sorted(orders[0])


def test_one_optimizer_asks_nobody() -> None:
    def work(communicator: Communicator) -> bool:
        mine = turns.SessionTurns(communicator)
        mine.constructed = 1
        if communicator.rank == 0:  # The other rank never comes.
            mine.begin(1)
            mine.end(1)
        return True

    assert run_ranks(2, work) == [True, True]


def test_ranks_that_run_different_optimizers_get_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for an exchange that never comes tells the others, which would wait for ever."""
    monkeypatch.setattr(turns, "_PATIENCE_SECONDS", 0.05)

    def work(communicator: Communicator) -> list[str]:
        mine = turns.SessionTurns(communicator)
        mine.constructed = 2
        found = []
        for _ in range(2):  # The turn of the failed one is over.
            with pytest.raises(RuntimeError) as caught:
                mine.begin(1 + communicator.rank)
            found.append(str(caught.value))
        return found

    for texts in run_ranks(2, work):
        assert all(text.startswith("Ranks waited for exchanges of different optimizers") for text in texts)


def test_a_failed_question_ends_the_turn() -> None:
    class Broken(LocalCommunicator):
        size = 2

        def gather_integers(self, values: Any, name: str) -> Any:
            raise RuntimeError("a rank is lost")

    mine = turns.SessionTurns(Broken())
    mine.constructed = 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a rank is lost"):
            mine.begin(1)
