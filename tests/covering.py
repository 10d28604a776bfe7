"""Which combinations of parameters a test has, of the many that there are: in every run, and with ``--all``."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest

Case = tuple[int, ...]


def covering(
    *factors: Collection[Any], together: int = 2, in_all: int = 0, always: Sequence[tuple[Any, ...]] = ()
) -> list[Any]:
    """Return combinations of values, one of each factor, as parameters of a test; some are marked as thorough.

    Args:
        factors: the values of each parameter.
        together: every run has each combination of the values of so many factors: with 1, each value at least once;
            with 2, each pair of values.
        in_all: the same for the thorough ones; with 0, they are all that there are.
        always: further combinations that every run has.

    Example:
        >>> [case.values for case in covering("ab", (1, 2), together=1) if not case.marks]
        [('a', 1), ('b', 2)]
    """
    cases = list(itertools.product(*(range(len(factor)) for factor in factors)))
    values = {case: tuple(list(f)[i] for f, i in zip(factors, case, strict=True)) for case in cases}
    fixed = [case for case in cases if values[case] in always]
    assert len(fixed) == len(always), f"among {always} are unknown values"
    every_run = _chosen(cases, fixed, together)
    everything = _chosen(cases, every_run, in_all) if in_all else cases
    return [
        pytest.param(*values[case], marks=[] if case in every_run else [pytest.mark.thorough])
        for case in cases
        if case in everything
    ]


def _chosen(cases: Sequence[Case], fixed: Sequence[Case], together: int) -> list[Case]:
    """Return some cases, and as many more as it takes, of values that were used least."""
    chosen = list(fixed)
    parts = {case: set(itertools.combinations(enumerate(case), together)) for case in cases}
    missing = set().union(*parts.values()).difference(*(parts[case] for case in chosen))
    used = Counter(value for case in chosen for value in enumerate(case))
    while missing:
        best = min(cases, key=lambda case: (-len(missing & parts[case]), sum(used[value] for value in enumerate(case))))
        chosen.append(best)
        missing -= parts[best]
        used.update(enumerate(best))
    return chosen
