"""Options of Keras optimizers, in addition to those of all that exchanges a Keras model."""

from __future__ import annotations

from typing import Annotated

from hvd_periodic.keras.options import ModelOptions


class KerasOptions(ModelOptions, total=False):
    """Options of Keras optimizers.

    Attributes:
        name: name of the optimizer.
    """

    name: Annotated[str | None, None]
