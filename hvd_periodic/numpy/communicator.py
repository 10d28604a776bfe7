"""The ranks that numpy optimizers exchange with."""

from __future__ import annotations

from hvd_periodic.comm import Communicator, LocalCommunicator


def communicator_of(process_set: object) -> Communicator:
    """Return the ranks that exchange.

    Args:
        process_set: a communicator; None: this process alone.

    Raises:
        TypeError: neither.
    """
    communicator = LocalCommunicator() if process_set is None else process_set
    if not isinstance(communicator, Communicator):
        raise TypeError(f"`process_set` must be a Communicator. Received: {type(communicator).__name__}")
    return communicator
