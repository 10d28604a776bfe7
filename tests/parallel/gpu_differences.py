"""How far results on a GPU may be from those on the CPU, and how far they are."""

from __future__ import annotations

import torch

EXACT, LOSSY = 1e-5, 0.05
"""Relative differences that are rounding: in float32; in 16 bits, or where a quantum more or less may travel."""

CLOSE = 1e-3
"""What is left of rounding in float32 after several steps of a network."""


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, as a part of the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def mostly(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the difference that 999 of 1000 values do not exceed, as a part of the largest value."""
    differences = (found - expected).abs().sort().values
    return float(differences[int(0.999 * (len(differences) - 1))] / expected.abs().max())
