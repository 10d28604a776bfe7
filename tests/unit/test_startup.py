"""What ranks conclude from what they tell each other: before data travels, and at the first step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hvd_periodic import Communicator
from hvd_periodic.comm.handshake import Purpose, Record, describe_conflict, integers, unpack_records
from hvd_periodic.numpy import SGD, ElasticAverageOptimizer
from hvd_periodic.sync.startup import CallPoint, LoadStatus, Start, decide
from tests.helpers import errors, run_ranks

NEW = LoadStatus(False, 0, (0, 10), "", "", "replica")
OLD = LoadStatus(True, 40, (40, 50), "run", "center", "replica")


def test_records_travel_as_integers() -> None:
    records = [Record(Purpose.EXCHANGE, 3, 0, 7, 2**55, 40, 39, 10, 10), Record(Purpose.LEAVE, 3)]
    assert unpack_records([value for record in records for value in integers(record)])[0] == records


def test_ranks_of_a_group_are_named_as_the_job_numbers_them() -> None:
    message = describe_conflict([Record(2, 1, local_steps=6), Record(4, 1, local_steps=6)], [1, 3])
    assert message is not None
    assert (
        "exchange of optimizer 1 at local step 6 on rank 1; save() of optimizer 1 at local step 6 on rank 3" in message
    )


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (Record(Purpose.EXCHANGE, 1), Record(Purpose.LEAVE, 1), None),
        (Record(Purpose.CONSTRUCT, 1), Record(Purpose.CONSTRUCT, 4), None),
        (Record(Purpose.EXCHANGE, 1), Record(Purpose.EXCHANGE, 2), "skip() if there is no update"),
        (Record(Purpose.EXCHANGE, 1), Record(Purpose.LEAVE, 2), "finalize() of optimizer 2"),
        (Record(Purpose.EXCHANGE, 1), Record(Purpose.START, 1), "load a state on every rank or on none"),
        (Record(Purpose.START, 1), Record(Purpose.START, 2), "first step of optimizer 2 on rank 1"),
        (Record(Purpose.EXCHANGE, 1), Record(Purpose.CONSTRUCT, 0), "construct their optimizers together"),
    ],
)
def test_cross_purposes(first: Record, second: Record, message: str | None) -> None:
    found = describe_conflict([first, second], [0, 1])
    assert found is None if message is None else message.lower() in str(found).lower()


def test_what_training_starts_from() -> None:
    assert decide({0: NEW, 1: NEW}, 0) is Start.FROM_PARAMETERS
    moved = replace(NEW, call_point=CallPoint.AFTER_UPDATE)
    assert decide({0: moved, 1: replace(NEW, call_point=CallPoint.END)}, 0) is Start.AS_CONSTRUCTED
    assert decide({0: moved, 1: NEW}, 0) is Start.FROM_PARAMETERS
    assert decide({0: OLD, 1: OLD}, 0) is Start.AS_LOADED
    assert decide({0: OLD, 1: NEW}, 0) is Start.FROM_ROOT
    assert decide({0: NEW, 2: OLD}, 2) is Start.FROM_ROOT
    later = replace(OLD, local_steps=43, center="other")
    assert decide({0: OLD, 1: later}, 0, asynchronous=True) is Start.AS_LOADED


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (replace(OLD, run="other"), "run run on rank 0; run other on rank 1"),
        (replace(OLD, local_steps=41), "step 40 on rank 0; step 41 on rank 1"),
        (replace(OLD, exchanges=(30, 50)), "exchanging at 40 and 50 on rank 0"),
        (replace(OLD, center="another"), "center another on rank 1"),
    ],
)
def test_states_that_do_not_belong_together(second: LoadStatus, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        decide({0: OLD, 1: second}, 0)


def test_a_rank_that_has_failed_to_load_is_an_error() -> None:
    for others in (OLD, NEW):
        with pytest.raises(RuntimeError, match="loading the checkpoint failed on rank 1: the file is damaged"):
            decide({0: others, 1: replace(NEW, failure="the file is damaged")}, root=0)


def test_a_root_without_state_or_with_a_share_of_it() -> None:
    with pytest.raises(RuntimeError, match="Rank 1 has loaded a state, and the root, rank 0, has none"):
        decide({0: NEW, 1: OLD}, 0)
    with pytest.raises(RuntimeError, match="has loaded its shard of the center"):
        decide({0: replace(OLD, center=""), 1: NEW}, 0)
    with pytest.raises(RuntimeError, match="load the state on every rank"):
        decide({0: OLD, 1: NEW}, 0, averaging=True)


@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
def test_arrays_that_are_set_after_construction(center: str) -> None:
    """On the root alone: its values are those of all, and the others leave out the first update."""

    def work(communicator: Communicator) -> list[float]:
        x = np.zeros(3)
        optimizer = ElasticAverageOptimizer(
            SGD(1.0), {"x": x}, 2, moving_rate=0.25, center=center, process_set=communicator
        )
        if communicator.rank == 0:
            x[:] = 5.0
        seen = []
        for _ in range(2):
            optimizer.step([np.full(3, -1.0)])
            seen.append(float(x[0]))
        with optimizer.center():
            return [*seen, float(x[0])]

    # Without the first update of rank 1: d = 2, 1.
    assert run_ranks(2, work) == [[6.0, 6.5, 5.75], [5.0, 5.75, 5.75]]


def test_ranks_that_construct_another_number_of_optimizers() -> None:
    def work(communicator: Communicator) -> None:
        x = np.zeros(1)
        optimizer = ElasticAverageOptimizer(SGD(1.0), {"x": x}, 2, process_set=communicator)
        if communicator.rank == 1:
            ElasticAverageOptimizer(SGD(1.0), {"x": x}, 2, process_set=communicator)
        optimizer.step([np.ones(1)])

    for kind, text in errors(2, work):
        assert kind is RuntimeError
        assert "first step of optimizer 1 on rank 0; construction of an optimizer on rank 1" in text
