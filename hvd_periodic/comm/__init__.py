"""Communicators: how ranks exchange. One file each, imported only where it is used."""

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.local import LocalCommunicator

__all__ = ["Communicator", "LocalCommunicator"]
