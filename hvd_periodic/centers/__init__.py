"""Centers: where the center lives (one file per placement), and the exchange of tensors with it, bucket by bucket."""

from hvd_periodic.centers.base import Placement
from hvd_periodic.centers.replicated import Replicated
from hvd_periodic.centers.root import Root
from hvd_periodic.centers.sharded import Sharded
from hvd_periodic.choices import choices

__all__ = ["PLACEMENTS", "Placement", "Replicated", "Root", "Sharded", "placement_of"]

PLACEMENTS: dict[str, type[Placement]] = choices("hvd_periodic.centers", Placement)
"""The placements, by the users' names for them."""


def placement_of(center: object) -> type[Placement]:
    """Return the placement with this name.

    Raises:
        ValueError: there is no such placement.
    """
    if not isinstance(center, str) or center not in PLACEMENTS:
        raise ValueError(f"`center` must be one of {tuple(PLACEMENTS)}. Received: center={center!r}")
    return PLACEMENTS[center]
