"""Centers: where the center lives (one file per placement), and the exchange of tensors with it, bucket by bucket."""

from hvd_periodic.centers.base import Placement
from hvd_periodic.centers.placement import PLACEMENTS, placement_of
from hvd_periodic.centers.replicated import Replicated
from hvd_periodic.centers.root import Root
from hvd_periodic.centers.sharded import Sharded

__all__ = ["PLACEMENTS", "Placement", "Replicated", "Root", "Sharded", "placement_of"]
