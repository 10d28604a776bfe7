"""Placements by name."""

from __future__ import annotations

from hvd_periodic.centers.base import Placement
from hvd_periodic.choices import choices

PLACEMENTS: dict[str, type[Placement]] = choices("hvd_periodic.centers", Placement)
"""The placements by the name that users give them."""


def placement_of(center: object) -> type[Placement]:
    """Return the placement of this name.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(center, str) or center not in PLACEMENTS:
        raise ValueError(f"`center` must be one of {tuple(PLACEMENTS)}. Received: center={center!r}")
    return PLACEMENTS[center]
