"""Communicators: collectives between ranks. One module each, imported only when it is used."""

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.local import LocalCommunicator

__all__ = ["Communicator", "LocalCommunicator"]
