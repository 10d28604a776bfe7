"""Exchanges that one run of a session starts in any order take place in one order on all ranks."""

from __future__ import annotations

from threading import Event, Thread

import pytest

pytest.importorskip("horovod.tensorflow")

from hvd_periodic import Communicator
from hvd_periodic.tensorflow.contrib_opt.turns import SessionTurns
from tests.helpers import run_ranks

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("orders", [[[1, 2], [2, 1]], [[2, 1], [1, 2]], [[3, 1, 2], [2, 3, 1], [1, 2, 3]]])
def test_ranks_agree_on_the_order(orders: list[list[int]]) -> None:
    def work(communicator: Communicator) -> list[int]:
        turns, order = SessionTurns(communicator), orders[communicator.rank]
        turns.constructed = len(order)
        asked, went = [Event() for _ in order], list[int]()

        def exchange(place: int) -> None:
            if place:
                asked[place - 1].wait()
            asked[place].set()
            turns.begin(order[place])
            went.append(order[place])
            turns.end(order[place])

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
        turns = SessionTurns(communicator)
        turns.constructed = 1
        if communicator.rank == 0:  # The other rank never comes.
            turns.begin(1)
            turns.end(1)
        return True

    assert run_ranks(2, work) == [True, True]
