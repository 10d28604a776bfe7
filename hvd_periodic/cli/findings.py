"""What the doctor finds, and what its checks share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

OK, WARNING, PROBLEM = "ok", "warning", "problem"

SETUP = "bash run_scripts/setup.sh --use-current-env  # in a clone of hvd_periodic"
"""What sets up Horovod in an environment."""

OF_LAUNCHERS = ("OMPI_COMM_", "OMPI_UNIVERSE", "PMIX_", "PMI_", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_")
"""How variables begin that a launcher sets for its ranks; jobs that a rank starts must not see them."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        status: ``"ok"``, ``"warning"``: some things will not work, or slowly; ``"problem"``: training will not.
        what: was looked at.
        text: a sentence.
        mend: the command that mends it; of what is ok, one that may help. "" if there is none.
    """

    status: str
    what: str
    text: str
    mend: str = ""


def fresh(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what a launcher has said of a job.

    Example:
        >>> fresh({"PATH": "/bin", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_btl": "tcp"})
        {'PATH': '/bin', 'OMPI_MCA_btl': 'tcp'}
    """
    return {name: value for name, value in environment.items() if not name.startswith(OF_LAUNCHERS)}


def cores() -> int:
    """Return on how many cores this process may run."""
    return len(os.sched_getaffinity(0))
