"""Messages as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from hvd_periodic.wires.base import Link, Sent, Wire

V = TypeVar("V")


@dataclass(frozen=True)
class Plain(Wire):
    """Every element travels in the type of the center, and is summed in it."""

    lossy: ClassVar[bool] = False

    def start(self, link: Link[V], message: V) -> Sent[V]:
        """Reduce."""
        return Sent(link.reduce(message, link.name), None, link.nbytes)
