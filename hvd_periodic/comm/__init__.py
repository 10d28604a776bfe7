"""Communicators: how ranks exchange. One file each; import the one you need, so that none loads what it does not use."""

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.local import LocalCommunicator

__all__ = ["Communicator", "LocalCommunicator"]
