"""Options of numpy optimizers in addition to the options of all front ends."""

from __future__ import annotations

from typing import Annotated

from hvd_periodic.comm import Communicator, LocalCommunicator
from hvd_periodic.options import Options


class NumpyOptions(Options, total=False):
    """Options of the numpy front end.

    Attributes:
        communicator: another name for ``process_set``, which must be a :class:`~hvd_periodic.Communicator` here.
            Default: this process alone.
    """

    communicator: Annotated[Communicator | None, None]


def communicator_of(options: NumpyOptions) -> Communicator:
    """Return the ranks that exchange.

    Raises:
        TypeError: both names are used, or the value is not a communicator.
    """
    given = [value for value in (options["communicator"], options["process_set"]) if value is not None]
    if len(given) > 1:
        raise TypeError("`communicator` and `process_set` are two names of the ranks that exchange: pass one")
    communicator = given[0] if given else LocalCommunicator()
    if not isinstance(communicator, Communicator):
        raise TypeError(f"`communicator` must be a Communicator. Received: {type(communicator).__name__}")
    return communicator
