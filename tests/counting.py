"""An optimizer of torch that counts its steps in the parameter group."""

from __future__ import annotations

from typing import Any

import torch


class CountsInGroup(torch.optim.Optimizer):
    """Adam that counts in the group, where it puts the counter at its first step, as those of timm do."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            count = self.counted(group)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad**2, 0.001)
                p -= group["lr"] * (state["m"] / (1 - 0.9**count)) / ((state["v"] / (1 - 0.999**count)).sqrt() + 1e-8)

    def counted(self, group: dict[str, Any]) -> float:
        """Count a step, and return the number."""
        group["step"] = group.get("step", 0) + 1
        return float(group["step"])
