"""How messages are encoded: each wire is one file."""

from hvd_periodic.wires.base import Link, Sent, Wire
from hvd_periodic.wires.given import Compression, as_wire

__all__ = ["Compression", "Link", "Sent", "Wire", "as_wire"]
