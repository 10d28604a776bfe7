"""Where a Keras optimizer is in its life."""

from enum import IntEnum, auto


class Stage(IntEnum):
    """What an optimizer has reached; it never goes back.

    Three facts are apart from it: whether the optimizer was loaded, which is so for its whole life; whether training
    has begun since a state was loaded, which a synchronizer knows; and ``fit``, which may be called at every stage.
    """

    CONSTRUCTING = auto()
    """Keras constructs the wrapper, of which nothing is set that acts on the optimizer inside."""
    UNBUILT = auto()
    """The arguments are checked; the variables are not known."""
    BUILDING = auto()
    """Keras builds the wrapper, which is not to have the variables that belong to the optimizer inside."""
    BUILT = auto()
    """The variables are known: what Keras calls ``built``. A loaded optimizer waits here for its ranks and model."""
    CREATED = auto()
    """There is a synchronizer with all its variables."""
    STARTED = auto()
    """The ranks have agreed, and started from the same values."""
    OPEN = auto()
    """The first step has found out who had loaded what since then."""
