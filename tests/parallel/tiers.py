"""Which tests run when: ``test.sh``, which CI runs, leaves out those marked as thorough; ``test.sh --all`` runs all.

What is not marked has every kind of test: front ends, launchers, one rank, two and three, groups, hosts. Marked is what
repeats it with other numbers. A whole test or file is marked by ``@pytest.mark.thorough`` or ``pytestmark``; the cases
of a scenario, which the ranks of a job run one after another, are chosen by ``crossed`` and ``repeated``, both in
``program.py``.
"""

from __future__ import annotations

from typing import Any

import pytest


def thorough(*values: Any) -> Any:
    """Return the parameters of a test, or of a fixture, that only ``test.sh --all`` runs."""
    return pytest.param(*values, marks=pytest.mark.thorough)
