"""Nested values as bytes, for another rank: exact, and bytes that are none are an error."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_periodic.checkpoints.packed import pack, unpack

VALUE = {
    "state": {0: {"step": np.array(3.0), "m": np.arange(6.0).reshape(2, 3), "amsgrad": None}},
    "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": False, "name": "a ä"}],
    "none": np.zeros((0, 4), np.int32),
    "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
}

SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["m", "<f8", "|O", "float", "array"])
KINDS = st.sampled_from(["dict", "tuple", "array", "deque", "enum", "float", "int", "name"])
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KINDS, inner, max_size=1),
    max_leaves=8,
)


def test_a_state_as_it_was() -> None:
    found = unpack(pack(VALUE))
    assert str(found) == str(VALUE)
    assert found["state"][0]["m"].dtype == np.float64
    assert found["state"][0]["m"].flags.writeable
    assert found["none"].shape == (0, 4)
    assert unpack(pack(None)) is None


@given(st.binary(max_size=80))
def test_noise(data: bytes) -> None:
    with pytest.raises(ValueError, match="bytes are not a packed value"):
        unpack(np.frombuffer(data, np.uint8))


@given(TREES, st.lists(st.tuples(SCALARS, SCALARS, TREES), max_size=2) | TREES)
def test_descriptions_that_no_rank_writes(tree: Any, arrays: Any) -> None:
    """They are a value, or a ValueError; nothing is run, and nothing larger than the bytes is allocated."""
    text = json.dumps({"tree": tree, "arrays": arrays}).encode()
    data = len(text).to_bytes(8, "little") + text
    with suppress(ValueError):
        unpack(np.frombuffer(data, np.uint8))


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_byte_that_has_changed(place: int, change: int) -> None:
    data = pack(VALUE).copy()
    data[place % data.size] ^= change
    with suppress(ValueError):
        unpack(data)


@pytest.mark.parametrize("shape", [[2**62], [-1, 5], [2**40, 2**40], [1.5], "ab"])
def test_an_array_that_does_not_fit(shape: Any) -> None:
    text = json.dumps({"tree": {"array": ["m", ""]}, "arrays": [["m", "<f8", shape]]}).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(80)
    with pytest.raises(ValueError, match="bytes are not a packed value"):
        unpack(np.frombuffer(data, np.uint8))
