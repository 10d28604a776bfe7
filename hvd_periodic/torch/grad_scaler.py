"""The part of a step that a ``GradScaler`` leaves to an optimizer that unscales its gradients itself."""

from __future__ import annotations

import torch

from hvd_periodic.torch import foreach


def unscale(optimizer: torch.optim.Optimizer) -> bool:
    """Divide the gradients by the scale that a GradScaler left on the optimizer; return whether they are finite.

    Raises:
        ValueError: float16 gradients.
    """
    found_inf: torch.Tensor | None = vars(optimizer).get("found_inf")
    if found_inf is None:
        return True
    if bool(found_inf):
        return False
    scale: torch.Tensor | None = vars(optimizer).get("grad_scale")
    if scale is not None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("Attempting to unscale FP16 gradients: GradScaler is for float32 parameters")
        with torch.no_grad():
            foreach.multiply(gradients, 1.0 / float(scale))
    return True
