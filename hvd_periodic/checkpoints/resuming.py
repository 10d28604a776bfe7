"""Resumes from a checkpoint: each rank by itself, from the files that it sees."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from hvd_periodic.checkpoints.files import naming, read_content
from hvd_periodic.checkpoints.saving import require_complete
from hvd_periodic.checkpoints.sets import Source, find_file
from hvd_periodic.checkpoints.tree import Leaves, decode
from hvd_periodic.comm.membership import TrainingGroup
from hvd_periodic.logs import logger

STATES, MORE = "states", "more"
"""Keys of the states of additional objects, and of plain values, in a file."""

OwnContent = Callable[[], dict[str, Any] | None]
"""Returns the content of the file that this rank has written; None if there is none."""


def resume(
    path: Path,
    everyone: TrainingGroup,
    step: int | None,
    leaves: Leaves,
    stateful: Collection[str],
    restore: Callable[[dict[str, Any], bool, OwnContent], None],
    on_error: Callable[[str], None],
) -> dict[str, Any]:
    """Load the file from which this rank resumes; return its plain values, or none if there is no file.

    Args:
        path: folder of the sets.
        everyone: the ranks; there is no communication with them.
        step: local steps of the set. Default: the newest set.
        leaves: handles the tensors of a framework.
        stateful: names of the objects whose states are restored.
        restore: receives the content of the file, whether it was saved among other ranks, and a function that returns
            the content of the file that this rank has written, for what is each rank's own; or None, with a warning.
        on_error: called with an error before it is raised, to tell the other ranks if this one continues; first with
            "".

    Raises:
        ValueError: the file is damaged or of another kind; or as ``restore``.
        FileNotFoundError: there is no set of this ``step``.
        RuntimeError: a background save into the folder is in flight.
    """
    on_error("")
    try:
        require_complete(path)
        source = find_file(path, everyone.global_rank, everyone.fingerprint, everyone.is_root, step)
        if source is None:
            return {}
        content = read_content(source.file)
        with naming(source.file):
            saved: dict[str, Any] = decode(content, leaves)
        missing = sorted(set(stateful) - saved[STATES].keys())
        if missing:
            there = ", ".join(saved[STATES]) or "none"
            raise ValueError(f"{source.file} has no state of `{missing[0]}`. It has states of: {there}")

        def own_content() -> dict[str, Any] | None:
            if source.own:
                return saved
            file = source.own_file()
            if file is None:
                text = "Rank %d has written no file of %s: its 'local' parameters keep the values of its own model"
                logger.warning(text, everyone.global_rank, source.saved.folder)
                return None
            with naming(file):
                found: dict[str, Any] = decode(read_content(file), leaves)
                return found

        restore(saved, source.among_others, own_content)
    except Exception as error:
        on_error(str(error))
        raise
    _log_source(source, everyone)
    plain: dict[str, Any] = saved[MORE]
    return plain


def _log_source(source: Source, everyone: TrainingGroup) -> None:
    """Log the file from which training resumes."""
    step, folder = source.saved.step, source.saved.folder
    if not source.among_others and not source.own:
        logger.warning(
            "Rank %d resumes from %s, the file of the root, at step %d", everyone.global_rank, source.file, step
        )
    elif everyone.is_root and source.among_others:
        logger.warning("%s was saved by other ranks: all ranks start from its center, at step %d", folder, step)
    elif everyone.is_root:
        logger.info("All ranks resume from %s, at step %d", folder, step)
