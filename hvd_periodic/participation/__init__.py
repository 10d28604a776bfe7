"""Which tensors of a model take part in exchanges, and how. A policy for parameters is one file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hvd_periodic.choices import choices
from hvd_periodic.participation.average import Average
from hvd_periodic.participation.base import Policy
from hvd_periodic.participation.broadcast import Broadcast
from hvd_periodic.participation.local import Local
from hvd_periodic.participation.patterns import Policies, PolicyArgument
from hvd_periodic.participation.present import Present
from hvd_periodic.participation.rows import Rows
from hvd_periodic.replica import Replica

__all__ = [
    "EXCHANGED",
    "NONE_AVERAGED",
    "PARAMETERS",
    "POLICIES",
    "Average",
    "Broadcast",
    "Local",
    "Policies",
    "Policy",
    "Present",
    "Rows",
    "by_policy",
    "facts_of",
    "participation_of",
    "policies_of",
]

POLICIES: dict[str, Policy] = {name: kind() for name, kind in choices("hvd_periodic.participation", Policy).items()}
"""The policies for parameters, by the users' names for them."""

PARAMETERS = PolicyArgument("parameters", "parameter", tuple(POLICIES))

EXCHANGED = tuple(name for name, policy in POLICIES.items() if policy.exchanged)
"""Policies of the parameters on which the algorithm acts."""

NONE_AVERAGED = ", without those that `parameters` makes 'local' or 'broadcast'"
"""The end of an error message: no parameter is left to exchange."""


def participation_of(
    parameters: Policies, named: Sequence[tuple[str, Any]], others: Iterable[str] = ()
) -> dict[str, str]:
    """Return the policy of each parameter, by name.

    Args:
        parameters: policies.
        named: the parameters.
        others: further names that patterns may match: of parameters before ``adopt()``, or of frozen ones.

    Raises:
        TypeError, ValueError: as :class:`PolicyArgument` raises.

    Example:
        >>> participation_of({"head.*": "local"}, [("body.weight", None), ("head.weight", None)])
        {'body.weight': 'average', 'head.weight': 'local'}
    """
    PARAMETERS.check(parameters)
    PARAMETERS.check_patterns(parameters, [*dict.fromkeys([*(name for name, _ in named), *others])])
    return {name: PARAMETERS.policy_of(parameters, name, tensor) or Average.name for name, tensor in named}


def by_policy(participation: Mapping[str, str], named: Iterable[tuple[str, Any]]) -> dict[str, list[str]]:
    """Return the names of parameters by policy, without the default; of empty ones only where each rank has its own.

    Example:
        >>> import numpy as np
        >>> policies = {"body": "average", "head": "present", "empty": "present"}
        >>> by_policy(policies, [("body", np.zeros(2)), ("head", np.zeros(2)), ("empty", np.zeros(0))])
        {'present': ['head']}
    """
    found: dict[str, list[str]] = {policy: [] for policy in POLICIES if policy != Average.name}
    for name, tensor in named:
        policy = participation.get(name, Average.name)
        if policy in found and (policy == Local.name or math.prod(tensor.shape)):
            found[policy].append(name)
    return {policy: names for policy, names in found.items() if names}


def policies_of(replica: Replica[Any]) -> list[Policy]:
    """Return the policies of a replica's parameters, without the default."""
    return [POLICIES[name] for name in replica.by_policy]


def facts_of(replica: Replica[Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the parameters on whose policy ranks have to agree: in words, and by name."""
    for policy, names in replica.by_policy.items():
        if POLICIES[policy].described:
            yield f"parameters {POLICIES[policy].described}", names
