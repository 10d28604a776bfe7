"""The figures of the documentation are what the recordings show, and pages say what is seen."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")

from docs.figures import draw, trajectories  # noqa: E402

ROOT = Path(__file__).parents[2]
FIGURES = sorted(draw.HERE.glob("*.svg"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IMAGE = re.compile(r"^!\[([^\]]*)\]\(\S*figures/(\w+\.svg)\)\n\n((?:.+\n)+)", re.MULTILINE)
MADE = "python -m docs.figures.draw"

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
HASH = re.compile(r"\b[a-z][0-9a-f]{10}\b")
"""Names that matplotlib makes of what it draws."""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    draw.draw(draw.HERE / "recorded", folder)
    return folder


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_it_shows_the_recording(figure: Path, drawn: Path) -> None:
    """Up to what processors round differently, by the version of matplotlib that has drawn it."""
    there, here = HASH.sub("", figure.read_text()), HASH.sub("", (drawn / figure.name).read_text())
    if f"Matplotlib v{matplotlib.__version__}," not in there:
        pytest.skip(f"drawn by another version than {matplotlib.__version__}")
    assert NUMBER.split(here) == NUMBER.split(there)
    numbers = [np.array([float(number) for number in NUMBER.findall(text)]) for text in (here, there)]
    np.testing.assert_allclose(*numbers, rtol=0, atol=0.02)


def test_all_are_there(drawn: Path) -> None:
    assert [file.name for file in sorted(drawn.glob("*.svg"))] == [figure.name for figure in FIGURES]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_it_is_small_and_needs_nothing_else(figure: Path) -> None:
    text = figure.read_text()
    assert len(text) < 100_000
    assert not re.search(r"<(image|text|script)\b|href=\"(?!#)|\d{4}-\d\d-\d\d", text)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_pages_say_what_is_seen(figure: Path) -> None:
    shown = [image for page in PAGES for image in IMAGE.findall(page.read_text()) if image[1] == figure.name]
    assert shown, "no page shows it"
    for alternative, _, caption in shown:
        assert len(alternative) > 40
        assert len(caption) > 100
        assert MADE in " ".join(caption.split())


def test_trajectories_are_those_of_today() -> None:
    recorded = json.loads((draw.HERE / "recorded/trajectories.json").read_text())
    assert list(recorded) == list(trajectories.ALGORITHMS)
    for name, walks in trajectories.recorded().items():
        for walk, before in zip(walks, recorded[name], strict=True):
            for key in ("replica", "center"):
                np.testing.assert_allclose(walk[key], before[key], rtol=0, atol=2e-4, err_msg=f"{name}, {key}")


@pytest.mark.parametrize("rank", range(3))
def test_placements_hold_and_send_what_the_guide_says(rank: int) -> None:
    recorded: Any = json.loads((draw.HERE / "recorded/placements.json").read_text())[rank]
    whole = recorded["replicated"]["held"]["replica"]
    held = {place: (record["held"]["center"], record["held"]["state"]) for place, record in recorded.items()}
    assert held == {
        "replicated": (whole, whole),
        "root": (whole, whole) if rank == 0 else (0, 0),
        "sharded": (whole / 3, whole / 3),
    }
    sent = {place: sum(record["sent"].values()) for place, record in recorded.items()}
    assert sent == {"replicated": whole, "root": 2 * whole if rank == 0 else whole, "sharded": whole + whole / 3}
