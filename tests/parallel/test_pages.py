"""Every code block of README and documentation runs, each page in a process of its own, or in two where it says so."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.parallel.launch import BEYOND, MODULES, ROOT, start

PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
LANGUAGES = {"python", "diff", "bash", "text"}
BLOCKS = re.compile(r"^```(\w*).*?^```$", re.MULTILINE | re.DOTALL)
LINKS = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
OUTSIDE = ("README.md", "CONTRIBUTING.md", "run_scripts/README.md", "examples/existing/README.md")
"""Pages whose links MkDocs does not check."""

FRAMEWORKS = {
    "torch": re.compile(r"^(?:import|from) (?:torch|horovod\.torch|hvd_periodic\.torch|tests\.pages\.for_torch)", re.M),
    "tensorflow": re.compile(
        r"^(?:import|from) (?:keras|(?:horovod\.|hvd_periodic\.)?tensorflow|tests\.pages\.for_(?:keras|graphs)"
        r"|torch\.utils\.tensorboard)",  # which imports TensorFlow, where it is installed
        re.M,
    ),
}
"""Lines of pages that import a framework."""

MODULES["pages"] = ("horovod.torch", "hvd_periodic.torch", "torch.utils.tensorboard", "sybil.parsers.markdown")
BEYOND["pages"] = "tensorflow"
"""What pages about both frameworks share."""

RANKS = re.compile(r"<!-- ranks: (\d) -->")


def languages(page: Path) -> list[str]:
    return BLOCKS.findall(page.read_text())


def test_every_block_says_its_language() -> None:
    """Only text is not looked at."""
    others = {name: set(languages(page)) - LANGUAGES for name, page in PAGES.items()}
    assert not any(others.values()), others


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if set(languages(page)) - {"text"}])
def test_the_blocks_run(name: str, tmp_path: Path) -> None:
    text = PAGES[name].read_text()
    several = RANKS.search(text)
    launcher, ranks = ("python", 1) if several is None else ("mpirun", int(several[1]))
    imported = [framework for framework, lines in FRAMEWORKS.items() if lines.search(text)]
    if "tests.pages.for_" in text or "import horovod" in text:
        pytest.importorskip("horovod")
    framework = "pages" if len(imported) > 1 else next(iter(imported), None)
    if find_spec("horovod") is None:
        framework = None  # Processes that share imports have imported it, too.
    output = start(launcher, ranks, ["-m", "tests.pages", str(PAGES[name]), str(tmp_path)], 60, framework)
    assert len(re.findall(r"^[1-9]\d* blocks$", output, re.MULTILINE)) == ranks, output


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_short(name: str) -> None:
    assert len(PAGES[name].read_text().splitlines()) < (121 if name == "README.md" else 300)


def anchors(page: Path) -> set[str]:
    """Return what links may point to: headings in small letters, without punctuation, with hyphens."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", OUTSIDE)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target, anchor in LINKS.findall(page.read_text()):
        found = (page.parent / target) if target else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), f"{target}#{anchor}"
