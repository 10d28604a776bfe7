"""Policies for the buffers of a model at an exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from hvd_periodic.participation.buffers import AVERAGE, BUFFERS, LOCAL, MAXIMUM, is_statistic
from hvd_periodic.torch.dtypes import INTEGERS, REALS

Buffers: TypeAlias = str | Mapping[str, str] | Callable[[str, torch.Tensor], str | None] | None
"""One policy for all; a dict from name patterns to policies; a function (name, tensor) to a policy; None: by name."""


def policies(buffers: Buffers, named: Sequence[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the policy that is finally applied to each buffer, by name.

    Raises:
        TypeError: ``buffers`` has an unsupported type.
        ValueError: an unknown policy, a policy that a buffer cannot have, or a pattern that matches no buffer.
    """
    BUFFERS.check(buffers)
    BUFFERS.check_patterns(buffers, [name for name, _ in named])
    return {name: policy_of(buffers, name, tensor) for name, tensor in named}


def policy_of(buffers: Buffers, name: str, tensor: torch.Tensor) -> str:
    """Return the policy of one buffer, as :func:`policies` does."""
    policy = BUFFERS.policy_of(buffers, name, tensor)
    if policy is None:
        policy = AVERAGE if is_statistic(name) else LOCAL
    elif policy != LOCAL and not isinstance(buffers, str) and tensor.numel() == 0 and not tensor.is_meta:
        raise ValueError(
            f"Buffer {name!r} is empty, so {policy!r} would do nothing: run one forward pass before the optimizer is "
            "made, so that the buffer has its shape, or use 'local'"
        )
    elif policy in (AVERAGE, MAXIMUM) and not isinstance(buffers, str) and not _has_mean(tensor):
        raise ValueError(f"Buffer {name!r} of {tensor.dtype} has no {policy}: use 'broadcast' or 'local'")
    if tensor.numel() == 0 or tensor.is_meta or (policy in (AVERAGE, MAXIMUM) and not _has_mean(tensor)):
        return LOCAL
    return MAXIMUM if policy == AVERAGE and tensor.dtype in INTEGERS else policy


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.dtype in REALS or tensor.dtype in INTEGERS
