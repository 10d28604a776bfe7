"""Exchanges the local optimizer's state, by the policy that the user has chosen."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from hvd_periodic.algorithms.base import Exchange
from hvd_periodic.centers.replicated import Replicated
from hvd_periodic.centers.tensor_group import TensorGroup
from hvd_periodic.comm.membership import Membership
from hvd_periodic.local_state.base import LocalState
from hvd_periodic.local_state.mean import Mean
from hvd_periodic.participation.base import LocalOptimizer
from hvd_periodic.replica import Replica
from hvd_periodic.vectors.store import Store

V = TypeVar("V")

Pairs = Sequence[tuple[str, Any]]
"""Names of parameters, with a state tensor for each."""


class OptimizerState(LocalOptimizer, Protocol[V]):
    """The state of a local optimizer, as a front end provides it.

    Attributes:
        complete: whether the whole state exists before the first step.
    """

    complete: bool

    def entries(self) -> Mapping[str, Pairs]:
        """Return the optimizer's state in the shape of parameters, by the optimizer's names, without step counters."""

    def store(self, pairs: Pairs) -> Store[V]:
        """Return the tensors of an entry as a store."""

    def learn_start(self) -> None:
        """Determine the initial values of the entries, to which :meth:`reset` sets them.

        Raises:
            TypeError: they cannot be determined.
        """

    def reset(self, but: Collection[str] = ()) -> None:
        """Set all entries to their initial values, ``but`` those of some parameters, by name."""


class OptimizerStateExchange(Generic[V]):
    """Applies a policy to the state of a local optimizer.

    Args:
        policy: which entries are averaged, and when.
        state: the state of this rank's local optimizer.
        replica: provides working buffers.
        membership: the ranks that exchange.
    """

    def __init__(
        self, policy: LocalState, state: OptimizerState[V], replica: Replica[V], membership: Membership
    ) -> None:
        self._policy, self._state, self._replica, self._membership = policy, state, replica, membership
        if policy.resets:
            state.learn_start()

    def facts(self) -> dict[str, object]:
        """Return the facts on which ranks must agree before an exchange: names, shapes and dtypes of averaged tensors.

        It is empty as long as the optimizer has not stepped, and so has no state.
        """
        entries = self._state.entries()
        return {
            f"{entry} of {name} in the optimizer's state": f"{tensor.dtype}{list(tensor.shape)}"
            for entry in (self._policy.averaged(list(entries)) if entries or self._state.complete else ())
            for name, tensor in entries[entry]
        }

    def problem(self) -> str | None:
        """Return why this rank cannot apply the policy, or None."""
        try:
            self.facts()
        except ValueError as error:
            return str(error)
        return None

    def exchange(self, exchange: Exchange, rounds: int) -> int:
        """Average the entries due after ``rounds`` exchanges, or reset the state; return the bytes sent.

        The state of a ``"present"`` parameter becomes the mean over the ranks present, on all; it stays if none is.
        """
        entries, sent = self._state.entries(), 0
        for entry, every in (self._policy.averaged(list(entries)) if entries else {}).items():
            has_elements = any(math.prod(tensor.shape) for _, tensor in entries[entry])
            if has_elements and (rounds + 1) % every == 0:
                sent += self._group(entry, entries[entry]).exchange(exchange)
        if self._policy.resets:
            self._state.reset(but=[name for name, weight in exchange.presence.items() if weight is None])
        return sent

    def _group(self, entry: str, pairs: Pairs) -> TensorGroup[V]:
        placement = Replicated(self._membership.communicator, self._membership.root)
        store = self._state.store(pairs)
        return TensorGroup(f"state.{entry}", store, Mean(), self._replica, placement, self._membership)


def state_exchange(
    policy: LocalState, state: OptimizerState[V] | None, replica: Replica[V], membership: Membership
) -> OptimizerStateExchange[V] | None:
    """Return the exchange of the local optimizer's state; None if the policy does not touch it.

    Raises:
        ValueError: the local optimizer is unknown.
    """
    if not policy.touches:
        return None
    if state is None:
        raise ValueError(f"`optimizer_state` needs the local optimizer: pass `optimizer`. Received: {policy}")
    return OptimizerStateExchange(policy, state, replica, membership)
