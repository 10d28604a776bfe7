"""Every algorithm, placement and front end goes exactly where an earlier version went; see ``tests/golden``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.golden import files, jobs
from tests.golden.course import difference
from tests.parallel.program import THOROUGH
from tests.parallel.tiers import thorough

NEEDED = {"numpy": "numpy", "torch": "horovod.torch", "keras": "horovod.tensorflow", "contrib": "horovod.tensorflow"}

IN_EVERY_RUN = {"numpy": (1, 2), "torch": (2,)}
"""Numbers of ranks; of other front ends one."""

JOBS = [
    (front_end, size) if size in IN_EVERY_RUN.get(front_end, (1,)) else thorough(front_end, size)
    for front_end in jobs.FRONT_ENDS
    for size in jobs.SIZES
]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("front_end", "size"), JOBS)
def test_to_the_bit(front_end: str, size: int, tmp_path: Path) -> None:
    pytest.importorskip(NEEDED[front_end])
    found, recorded = jobs.run(front_end, size, tmp_path), files.read(front_end, size)
    differences = []
    for rank, (lines, others) in enumerate(zip(found, recorded, strict=True)):
        whole = os.environ[THOROUGH] == "1" or front_end == "numpy"
        expected = others.keys() if whole else others.keys() & lines.keys()
        assert lines.keys() == expected, "Cases have come or gone: python -m tests.golden.record"
        for case in lines:
            problem = difference(lines[case], others[case])
            if problem is not None:
                differences.append(f"{case}: rank {rank}, {problem}")
    assert not differences, "\n".join([f"{len(differences)} differ", *differences])
