"""The figures of the documentation, recorded anew."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from docs.figures.speeds import METHODS, POINTS
from tests.parallel.launch import start

for module in ("horovod.torch", "matplotlib", "rich", "sklearn"):
    pytest.importorskip(module)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_small_jobs_are_recorded_and_drawn(tmp_path: Path) -> None:
    start("python", 1, ["-m", "docs.figures.draw", "--record", "--small", "--folder", str(tmp_path)], 120)
    recorded = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "recorded").iterdir()}
    assert len(list(tmp_path.glob("*.svg"))) == 6

    whole = 12_000
    sent = [{place: sum(one["sent"].values()) for place, one in rank.items()} for rank in recorded["placements"]]
    others = {"replicated": whole, "root": whole, "sharded": whole + whole / 3}
    assert sent == [others | {"root": 2 * whole}, others, others]

    for name, exchanges, landings in (("waiting", 2, 0), ("overlapped", 2, 2), ("in fragments", 4, 4)):
        for rank in recorded["overlap"][name]:
            assert len(rank["steps"]) == 16
            assert len(rank["exchanged"]) == exchanges
            assert len(rank["messages"]) == exchanges
            assert len(rank["taken"]) == landings
            assert all(first[1] <= second[0] for first, second in pairwise(rank["steps"]))
            for exchange, message in zip(rank["exchanged"], rank["messages"], strict=True):
                assert exchange[0] <= message[0] <= exchange[1]

    for bucket in recorded["buckets"]:
        assert bucket["packed"][1] == bucket["travels"][0] <= bucket["travels"][1] <= bucket["taken"][1]

    for curves in recorded["speeds"].values():
        assert list(curves) == list(METHODS)
        for curve in curves.values():
            assert len(curve["seconds"]) == len(curve["losses"]) == POINTS
            assert all(first <= second for first, second in pairwise(curve["seconds"]))
