"""An optimizer that wraps another one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


class WrappingOptimizer(torch.optim.Optimizer):
    """An optimizer that shares parameter groups, state and hyper-parameters with the optimizer it wraps.

    Attributes:
        inner: the wrapped optimizer.
    """

    inner: torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the wrapped optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """State of the wrapped optimizer."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Default hyper-parameters of the wrapped optimizer."""
        return self.inner.defaults

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register the hook with the wrapped optimizer."""
        return self.inner.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register the hook with the wrapped optimizer."""
        return self.inner.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register the hook with the wrapped optimizer."""
        return self.inner.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register the hook with the wrapped optimizer."""
        return self.inner.register_load_state_dict_post_hook(hook, prepend)
