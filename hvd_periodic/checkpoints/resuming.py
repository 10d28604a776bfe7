"""Resumes from a checkpoint: each rank on its own, from the files it sees."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from hvd_periodic.checkpoints.files import naming, read_content
from hvd_periodic.checkpoints.saving import require_complete
from hvd_periodic.checkpoints.sets import Source, find_file
from hvd_periodic.checkpoints.tree import Leaves, decode
from hvd_periodic.comm.training_group import TrainingGroup

logger = logging.getLogger("hvd_periodic")

STATES, MORE = "states", "more"
"""Keys under which a file holds, by name, the states of additional objects, and plain values."""


def resume(
    path: Path,
    everyone: TrainingGroup,
    step: int | None,
    leaves: Leaves,
    stateful: Collection[str],
    put_back: Callable[[dict[str, Any], bool], None],
    failed: Callable[[str], None],
) -> dict[str, Any]:
    """Load the file from which this rank resumes; return its plain values, or none if there is no file.

    Args:
        path: folder of the sets.
        everyone: the ranks; there is no communication with them.
        step: local steps of the set. Default: the newest set.
        leaves: handles the tensors of a framework.
        stateful: names of the objects whose states are to be restored.
        put_back: receives the content of the file, and whether it was saved among other ranks.
        failed: called with an error before it is raised, to tell the other ranks if this one goes on; first with "".

    Raises:
        ValueError: the file is damaged or of another kind; or as ``put_back``.
        FileNotFoundError: there is no set of this ``step``.
        RuntimeError: a background save into the folder is in flight.
    """
    failed("")
    try:
        require_complete(path)
        source = find_file(path, everyone.global_rank, everyone.fingerprint, everyone.is_root, step)
        if source is None:
            return {}
        content = read_content(source.file)
        with naming(source.file):
            saved = decode(content, leaves)
        missing = sorted(set(stateful) - saved[STATES].keys())
        if missing:
            there = ", ".join(saved[STATES]) or "none"
            raise ValueError(f"{source.file} has no state of `{missing[0]}`. It has those of: {there}")
        put_back(saved, source.among_others)
    except Exception as error:
        failed(str(error))
        raise
    _say(source, everyone)
    plain: dict[str, Any] = saved[MORE]
    return plain


def _say(source: Source, everyone: TrainingGroup) -> None:
    """Log the file from which training resumes."""
    step, folder = source.saved.step, source.saved.folder
    if not source.among_others and not source.own:
        logger.warning(
            "Rank %d goes on from %s, the file of the root, at step %d", everyone.global_rank, source.file, step
        )
    elif everyone.is_root and source.among_others:
        logger.warning("%s is of other ranks than these: all start from its center, at step %d", folder, step)
    elif everyone.is_root:
        logger.info("All ranks go on from %s, at step %d", folder, step)
