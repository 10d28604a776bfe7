"""Learning rates of TensorFlow 1 optimizers, and the default strength of the elastic term, which depends on them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.centers.learning_rates import LearningRates

_DESCENDING = (
    tf.compat.v1.train.GradientDescentOptimizer,
    tf.compat.v1.train.MomentumOptimizer,
    tf.compat.v1.train.ProximalGradientDescentOptimizer,
)
"""Optimizers whose step is the learning rate times gradients; all other TensorFlow 1 optimizers rescale gradients."""


def _rate_as_given(opt: Any) -> Any:
    return getattr(opt, "_learning_rate", getattr(opt, "_lr", None))


def learning_rate_of(opt: Any) -> float | None:
    """Return the learning rate of a TensorFlow 1 optimizer; None if it is not a number."""
    rate = _rate_as_given(opt)
    return float(rate) if isinstance(rate, Real) else None


class SessionRates(LearningRates):
    """The learning rate of a TensorFlow 1 optimizer for all variables; the session provides it if it is not a number.

    Attributes:
        given: the value in the session, if :meth:`in_session` returns a tensor.

    Raises:
        ValueError: the optimizer has no learning rate.
    """

    given: Sequence[np.ndarray] = ()

    def __init__(self, opt: Any, count: int) -> None:
        super().__init__(lambda: [float(self.given[0]) if self.given else learning_rate_of(opt)] * count)
        self._opt = opt
        if _rate_as_given(opt) is None:
            raise ValueError(f"The algorithm needs the learning rate of local steps. {type(opt).__name__} has none")

    def in_session(self) -> dict[str, tf.Tensor]:
        """Return a learning rate that is not a number, by name, as a tensor of the graph being built."""
        rate = _rate_as_given(self._opt)
        number = isinstance(rate, Real)
        return {} if number else {"learning_rate": tf.convert_to_tensor(rate() if callable(rate) else rate)}


def default_rho(moving_rate: float, opt: Any) -> float:
    """Return contrib's ``moving_rate / learning_rate``; warn if the optimizer rescales gradients.

    Raises:
        ValueError: the learning rate is not a positive number.
    """
    rate = learning_rate_of(opt)
    if rate is None or rate <= 0:
        raise ValueError(
            "`rho` has no default, which would be moving_rate / learning_rate, because the learning rate of "
            f"{type(opt).__name__} is not a positive number: pass `rho`, 0.0 for no elastic term. "
            f"Received: learning rate {_rate_as_given(opt)!r}"
        )
    rho = moving_rate / rate
    if not isinstance(opt, _DESCENDING):
        # The term adds ρ (x − lc) to the gradient, but adaptive optimizers keep little more than the sign of the sum.
        warnings.warn(
            f"`ElasticAverageOptimizer(rho=None)` is moving_rate / learning_rate = {rho:.4g}, which suits gradient "
            f"descent. {type(opt).__name__} rescales gradients, and may follow the elastic term alone and not train: "
            "pass rho=0.0, or a small `rho`",
            stacklevel=2,
        )
    return rho
