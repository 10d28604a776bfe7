"""Parameters to which only the ranks contribute whose local steps had a gradient of them since the last exchange."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_periodic.arguments import refuse_with_quorum
from hvd_periodic.participation.base import Policy, Setting
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.coding import packed_bits

Seen = Sequence[Sequence[str]]
"""For every fragment, the names of the parameters that had a gradient since its last exchange; empty if none had."""

_NOBODY = -1.0
"""In an array, the weight of a parameter for which nobody is present."""


class Present(Policy):
    """The algorithm exchanges them among the ranks that are present, see :class:`Presence`.

    A parameter for which no rank is present does not move.
    """

    name = "present"
    described = "of those present"
    known_early = False  # Weights among those present are known after the handshake only.

    def check(self, setting: Setting) -> None:
        """Raise a ValueError where ranks do not know who is present, or norms and means are over all of them."""
        algorithm = setting.algorithm
        refuse_with_quorum(setting.quorum, parameters=(self.name, True))
        if setting.asynchronous and algorithm.reads_after:
            raise ValueError(
                "`parameters` can be 'present' in asynchronous exchange with elastic averaging only, since nobody "
                f"knows who else is present. Received: {algorithm!r}"
            )
        if setting.bounds is not None:
            raise ValueError(
                "`max_message_norm` and `max_mean_norm` are norms over all that a rank exchanges, and `parameters` "
                f"makes some of it 'present' on some ranks only: leave out one of the two. Received: {setting.bounds}"
            )
        setting.refuse_averaged_gradients()
        if setting.optimizer_state.touches and setting.fragments > 1:
            raise ValueError(
                "`fragments`, `optimizer_state` and `parameters` that are 'present' cannot be combined, since a "
                "fragment does not know who was present in the whole period: leave out one of them. Received: "
                f"fragments={setting.fragments}, optimizer_state={setting.optimizer_state}"
            )
        if algorithm.reduction != "sum":
            raise ValueError(
                "`parameters` can be 'present' only if messages are summed, and "
                f"{type(algorithm).__name__} takes another reduction: {algorithm.reduction!r}"
            )


class Presence:
    """Finds which of the ``"present"`` parameters had a gradient, and this rank's weights that follow at an exchange.

    p_i = 1 for a parameter of which an update of rank i since the last exchange had a gradient that was not None, even
    if it was zeros; otherwise p_i = 0. What ranks tell each other is one bit per parameter and fragment, and travels
    with the handshake.

    Args:
        replica: the replica of this rank.
        fragments: number of fragments, which are exchanged at different steps.
    """

    def __init__(self, replica: Replica[Any], fragments: int) -> None:
        self._replica, self.fragments = replica, fragments
        names = [spec.name for spec in replica.parameters.layout.specs]
        self._indices = {names.index(name): name for name in replica.present}

    @classmethod
    def of(cls, replica: Replica[Any], fragments: int) -> Presence | None:
        """Return it; None if a replica has no such parameters."""
        return cls(replica, fragments) if replica.present else None

    def found(self) -> list[str]:
        """Return the names of the parameters that have a gradient in the update to come."""
        return [self._indices[i] for i in sorted(self._replica.with_gradient_now(self._indices.keys()))]

    def packed(self, seen: Seen) -> np.ndarray:
        """Return what this rank has seen as bits, in 64-bit integers."""
        bits = [[name in part for name in self._replica.present] for part in seen or [()] * self.fragments]
        return packed_bits(np.array(bits, bool).reshape(-1))

    def weights(
        self, packed: Sequence[np.ndarray], rank: int, weights: Sequence[float] | None
    ) -> list[dict[str, float | None]]:
        """Return, for every fragment, this rank's weight among the ranks that are present, by parameter.

        Args:
            packed: the bits of all ranks, by rank.
            rank: this rank.
            weights: the weights of all ranks, 1 on average; None if all are equal.
        """
        names, of_ranks = self._replica.present, weights or [1.0] * len(packed)
        shape = len(packed), self.fragments, len(names)
        bits = np.array([np.unpackbits(part.view(np.uint8), count=shape[1] * shape[2]) for part in packed])
        return [
            {name: weight_among(of_ranks, here, rank) for name, here in zip(names, of_fragment.T.tolist(), strict=True)}
            for of_fragment in bits.reshape(shape).swapaxes(0, 1)
        ]

    def alone(self, seen: Seen) -> dict[str, float | None]:
        """Return p_i by name, for an asynchronous exchange of this rank."""
        return {name: float(any(name in part for part in seen)) for name in self._replica.present}

    def after(self, seen: Seen, exchanged: Collection[int]) -> Seen:
        """Return what has been seen since the last exchange of every fragment, once some, by index, are exchanged."""
        left = [[] if i in exchanged else list(part) for i, part in enumerate(seen)]
        return left if any(left) else []


def weight_among(weights: Sequence[float], present: Sequence[int], rank: int) -> float | None:
    """Return the weight of a rank among those present, w_i p_i n / Σ_j w_j p_j; None if none is or all weigh nothing.

    Example:
        >>> weight_among([1.0, 1.0, 1.0], [1, 1, 0], rank=0), weight_among([1.0, 1.0, 1.0], [1, 1, 0], rank=2)
        (1.5, 0.0)
        >>> weight_among([1.0, 1.0], [0, 0], rank=0)
    """
    of_present = [weight * here for weight, here in zip(weights, present, strict=True)]
    total = math.fsum(of_present)
    return of_present[rank] * (len(of_present) / total) if total else None


def presence_to_array(presence: Mapping[str, float | None], names: Sequence[str]) -> np.ndarray:
    """Return presence as one float64 per tensor, for a message: the weight, −1 for None, NaN for a tensor not in it.

    Example:
        >>> presence_to_array({"a": 0.5, "b": None}, ["a", "b", "c"])
        array([ 0.5, -1. ,  nan])
    """
    weights = (presence.get(name, math.nan) for name in names)
    return np.array([_NOBODY if weight is None else weight for weight in weights], np.float64)


def presence_from_array(weights: np.ndarray, names: Sequence[str]) -> dict[str, float | None]:
    """Return the presence that :func:`presence_to_array` was given."""
    pairs = ((name, float(weight)) for name, weight in zip(names, weights, strict=True) if not math.isnan(weight))
    return {name: None if weight == _NOBODY else weight for name, weight in pairs}
