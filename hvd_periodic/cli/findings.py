"""Findings of the doctor, and helpers that its checks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OK, WARNING, PROBLEM = "ok", "warning", "problem"

SETUP = "bash run_scripts/setup.sh --use-current-env  # in a clone of hvd_periodic"
"""Command that sets up Horovod in an environment."""

OF_LAUNCHERS = ("OMPI_COMM_", "OMPI_UNIVERSE", "PMIX_", "PMI_", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_")
"""Prefixes of variables that a launcher sets for its ranks; jobs that a rank starts must not see these variables."""


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        status: ``"ok"``; ``"warning"``: some features fail or are slow; ``"problem"``: training does not work.
        what: subject of the check.
        text: a sentence.
        mend: the command that fixes it; if the status is ok, one that may help. "" if there is none.
    """

    status: str
    what: str
    text: str
    mend: str = ""


def fresh(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of a launcher.

    Example:
        >>> fresh({"PATH": "/bin", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_btl": "tcp"})
        {'PATH': '/bin', 'OMPI_MCA_btl': 'tcp'}
    """
    return {name: value for name, value in environment.items() if not name.startswith(OF_LAUNCHERS)}
