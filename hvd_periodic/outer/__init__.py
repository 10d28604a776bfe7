"""Outer optimizers: what moves the center, given a gradient for it.

On vectors, as part of an algorithm: ``sgd``. Of a framework, over the tensors of the center: ``framework`` says what a
front end provides.
"""

from hvd_periodic.outer.base import Outer
from hvd_periodic.outer.sgd import OuterSGD

__all__ = ["Outer", "OuterSGD"]
