"""What constructors of Keras optimizers and synchronizers take besides the options of all front ends."""

from __future__ import annotations

from typing import Annotated

from hvd_periodic.options import Options


class TensorFlowOptions(Options, total=False):
    """Options of the TensorFlow front end.

    Attributes:
        buffers: ``"average"``: at every exchange real statistics of the model (batch normalization) become their mean
            over ranks, integer ones their maximum; ``"local"``: they are broadcast at the start and then left alone.
            Default: ``"average"``, where a model is given.
    """

    buffers: Annotated[str | None, None]


class KerasOptions(TensorFlowOptions, total=False):
    """Options of Keras optimizers.

    Attributes:
        name: of the optimizer.
    """

    name: Annotated[str | None, None]
