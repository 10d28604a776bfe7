"""The stages in the life of a Keras optimizer."""

from enum import IntEnum, auto


class Stage(IntEnum):
    """The stage that an optimizer has reached; it never goes back.

    The stage does not tell whether the optimizer was loaded, which never changes; whether training has begun since a
    state was loaded, which the synchronizer knows; or whether ``fit`` runs, which may be called at every stage.
    """

    CONSTRUCTING = auto()
    """Keras constructs the wrapper; its settings do not reach the optimizer inside yet."""
    UNBUILT = auto()
    """The arguments are checked; the variables are not known."""
    BUILDING = auto()
    """Keras builds the wrapper, which must not create variables that belong to the optimizer inside."""
    BUILT = auto()
    """The variables are known, Keras's ``built``. A loaded optimizer waits here for its ranks and model."""
    CREATED = auto()
    """The synchronizer exists, with all its variables."""
    STARTED = auto()
    """The ranks have agreed, and started from the same values."""
    OPEN = auto()
    """The first step has compared which rank has loaded which state since then."""
