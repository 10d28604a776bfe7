"""The contract of messages over TCP, with threads as ranks; over MPI and between processes, in tests/parallel."""

from __future__ import annotations

import pytest

from hvd_periodic.comm.socket_messages import SocketMessages
from hvd_periodic.comm.threads import ThreadCommunicator, run
from tests.conformance.messages_contract import check_messages
from tests.sockets import connected

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_contract(size: int) -> None:
    def check(communicator: ThreadCommunicator) -> None:
        def meet() -> object:
            return communicator.allgather_object(None, "met")

        check_messages(lambda: SocketMessages(communicator.rank, connected(communicator)), size, meet)

    run(size, check)
