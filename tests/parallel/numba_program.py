"""Encodes with loops that numba compiles and without them, in numpy and PyTorch: the same bytes."""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from hvd_periodic import Compression
from hvd_periodic.torch.coding import TensorCoding
from hvd_periodic.wires import loops
from tests.unit.test_wires import CODING, kinds

LENGTHS = [1, 3, 257, 100_003]
WIRES: dict[str, Any] = {"e3m0": Compression.e3m0, "int2": Compression.int2}


def main() -> None:
    """Print which loops are compiled, and how many messages were compared."""
    compared = 0
    for name, wire in WIRES.items():
        for length in LENGTHS:
            rows = np.stack(
                [*kinds(length, length).values(), np.full(length, np.nan, "f4"), np.full(length, np.inf, "f4")]
            )
            rows.setflags(write=False)
            with patch(f"hvd_periodic.wires.{name}.compiled", lambda loop: None):
                expected = wire.encode(CODING, rows)
            for found in (
                wire.encode(CODING, rows),
                wire.encode(TensorCoding(), torch.from_numpy(rows)).numpy(),
                wire.encode(CODING, np.asfortranarray(rows)),
            ):
                np.testing.assert_array_equal(found, expected)
                compared += len(rows)
    signatures = {
        loop.__name__: len(getattr(loops.compiled(loop), "signatures", [])) for loop in (loops.ternary, loops.powers)
    }
    json.dump({"compiled": signatures, "compared": compared, "numba": "numba" in sys.modules}, sys.stdout)


if __name__ == "__main__":
    main()
