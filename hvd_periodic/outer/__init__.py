"""Outer optimizers: they move the center, given a gradient for it.

``sgd`` works on vectors, as part of an algorithm. ``framework`` is the interface that a front end implements for an
optimizer of its framework, over the tensors of the center.
"""

from hvd_periodic.outer.base import Outer
from hvd_periodic.outer.sgd import OuterSGD

__all__ = ["Outer", "OuterSGD"]
