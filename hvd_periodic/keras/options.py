"""Options of whatever exchanges a Keras model, in addition to those of all front ends."""

from __future__ import annotations

from typing import Annotated

from hvd_periodic.options import Options
from hvd_periodic.participation.patterns import Policies


class ModelOptions(Options, total=False):
    """Options of whatever exchanges a Keras model.

    Attributes:
        buffers: policy for the model's untrained weights at an exchange. ``"average"`` sets real ones to their mean
            over ranks, and integers to their maximum; ``"maximum"``; ``"broadcast"`` sets all to the values of
            ``root_rank``; ``"local"`` broadcasts them at the start only. Either one of these for all variables that
            layers have created as not trainable; or a dict from patterns of paths (``variable.path``) to policies, of
            which the first match counts; or a function (path, variable) that returns a policy or None. Patterns and
            functions apply to frozen weights as well. Default, and for weights that a dict or function leaves open:
            ``"average"`` for variables of layers whose names mark them as statistics (``moving_mean``,
            ``moving_variance``) and for integers, otherwise ``"local"``.
    """

    buffers: Annotated[Policies, None]
