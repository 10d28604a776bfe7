"""What constructors of Keras optimizers and synchronizers take besides the options of all front ends."""

from __future__ import annotations

from typing import Annotated

from hvd_periodic.buffers import Policies
from hvd_periodic.options import Options


class TensorFlowOptions(Options, total=False):
    """Options of the TensorFlow front end.

    Attributes:
        buffers: what becomes of the model's weights that are not trained at an exchange. ``"average"``: real ones
            become their mean over ranks, integer ones their maximum; ``"maximum"``; ``"broadcast"``: all become those
            of ``root_rank``; ``"local"``: they are broadcast at the start and then left alone. One of these for all
            variables that layers have made as not trainable; a dict from patterns of paths (``variable.path``) to them,
            of which the first that matches counts; or a function (path, variable) to one of them or None. Patterns and
            functions are asked about frozen weights as well. Default, and for what a dict or function leaves open:
            ``"average"`` for variables of layers whose name says that they are statistics (``moving_mean``,
            ``moving_variance``) and for those of integers, otherwise ``"local"``.
    """

    buffers: Annotated[Policies, None]


class KerasOptions(TensorFlowOptions, total=False):
    """Options of Keras optimizers.

    Attributes:
        name: of the optimizer.
    """

    name: Annotated[str | None, None]
