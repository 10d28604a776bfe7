"""The contract of messages over TCP and in memory, with threads as ranks; over MPI and in jobs, see tests/parallel."""

from __future__ import annotations

import pytest

from hvd_periodic.comm.socket_messages import SocketMessages
from hvd_periodic.comm.threads import ThreadCommunicator, run
from hvd_periodic.comm.transports import Messages
from tests.conformance.messages_contract import check_messages
from tests.sockets import closed_at_the_end, connected

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("over", ["TCP", "memory"])
def test_the_contract(over: str, size: int) -> None:
    def check(communicator: ThreadCommunicator) -> None:
        def meet() -> object:
            return communicator.allgather_object(None, "met")

        def made() -> Messages:
            if over == "memory":
                return communicator.messages()
            return closed_at_the_end(communicator, SocketMessages(communicator.rank, connected(communicator)))

        check_messages(made, size, meet)

    run(size, check)
