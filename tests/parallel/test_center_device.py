"""A center in host memory, of parameters on another device: it goes where it goes beside them, to the bit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

from tests.parallel.center_device_program import ALGORITHMS, OPTIONS
from tests.parallel.launch import run_scenarios
from tests.parallel.tiers import thorough


@pytest.fixture(scope="module", params=[len(ALGORITHMS), thorough(3)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what a process has found: torch forgets no device that it was told of."""
    folder = tmp_path_factory.mktemp("center_device")
    return run_scenarios("python", 1, "center_device_program", folder, 60, str(request.param), framework="torch")[0]


def test_the_devices_are_two(found: Any) -> None:
    assert "tensors of both devices" in found["mixed"]


@pytest.mark.timeout(90)
def test_a_center_in_host_memory_goes_the_same_way(found: Any) -> None:
    """Also on from a state that was saved while an exchange was under way, and with the center elsewhere then."""
    assert len(found["ways"]) in (len(OPTIONS), 2 * len(OPTIONS))
    for name, (beside, host, moved) in found["ways"].items():
        ends = [[end for rank in way for end, _ in rank] for way in (beside, host, moved)]
        assert ends[0] == ends[1] == ends[2], name
        assert ends[0][::2] == ends[0][1::2], name


def test_a_learning_rate_on_the_device(found: Any) -> None:
    for beside, host in found["rates"]:
        assert beside == pytest.approx(host, rel=1e-6)
        assert beside != [1.0] * 3


@pytest.mark.timeout(90)
def test_where_it_lies(found: Any) -> None:
    """With what moves it, and the snapshot of an exchange under way; where all lies on the root, there."""
    for name, ways in found["ways"].items():
        places = [[place for rank in way for _, place in rank if place] for way in ways]
        assert len(places[0]) == (2 if name.endswith("root") else 4)
        assert all(place == ["second"] for place in places[0]), name
        assert all(place == ["cpu"] for place in places[1]), name
        assert places[2] == [["cpu"], ["second"]] * (len(places[2]) // 2), name
