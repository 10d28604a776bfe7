"""Finds placements by name."""

from __future__ import annotations

from hvd_periodic.centers.base import Placement
from hvd_periodic.choices import choices

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
