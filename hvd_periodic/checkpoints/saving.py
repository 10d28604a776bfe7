"""Saving: by all ranks together, at once or by a thread beside training."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_periodic.arguments import require_int
from hvd_periodic.checkpoints.everyone import Everyone
from hvd_periodic.checkpoints.files import sync_folder, write_content
from hvd_periodic.checkpoints.sets import Entry, Manifest, SavedSet, remove_old, remove_unfinished, sets_in
from hvd_periodic.checkpoints.tree import Content, Leaves, encode
from hvd_periodic.comm.attendance import aside
from hvd_periodic.vectors.lending import lending

logger = logging.getLogger("hvd_periodic")


class Saving:
    """A save that is over, or under way in a thread of its own, which Python waits for before it ends.

    Args:
        work: writes.
        background: beside training.
    """

    def __init__(self, work: Callable[[], None], background: bool) -> None:
        self._work = work
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if not background:
            work()
            return
        self._thread = threading.Thread(target=self._run, name="hvd_periodic.checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all ranks have written; all ranks hear of what went wrong.

        Raises:
            RuntimeError: on one of them a file could not be written; on all.
        """
        error = self.outcome()
        if error is not None:
            raise RuntimeError(f"A checkpoint that was written in the background failed: {error}") from error

    def outcome(self) -> Exception | None:
        """Wait, and return what went wrong, once."""
        self.join()
        error, self._error = self._error, None
        return error

    def join(self) -> None:
        """Wait, whatever comes of it."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with aside():
                self._work()
        except Exception as error:
            logger.error("A checkpoint that was written in the background failed: %s", error)
            self._error = error


_last: Saving | None = None
"""One is under way in a process at a time: memory holds one copy of the state, and ranks meet in one place."""


def join_last() -> None:
    """Wait for a save that is under way, whatever comes of it, before files are looked for."""
    if _last is not None:
        _last.join()


@dataclass(frozen=True)
class Occasion:
    """When a set is saved.

    Attributes:
        step: local steps of this rank.
        run: which training.
        steps_agree: all ranks have to be at the same step.
    """

    step: int
    run: str
    steps_agree: bool = True


def save_set(
    path: Path,
    everyone: Everyone,
    check: Callable[[], Occasion],
    state: Callable[[], Any],
    leaves: Leaves | None = None,
    *,
    keep: int | None = None,
    background: bool = False,
) -> Saving:
    """Save a file of every rank; collective. A set is complete once its manifest is there, which is written last.

    In the background, the thread of each rank tells those of the others that its file is on the disk by collectives
    with names of their own: a set is complete seconds after its last file, not at the next call of all ranks, before
    which a job may be stopped. A rank that dies fails them, and leaves files without a manifest, which the next save
    removes; Python does not end, nor Horovod with it, before the threads of all ranks are done.

    Args:
        path: folder of the sets.
        everyone: the ranks.
        check: says when this is; raises where this rank cannot be saved now.
        state: returns what is to be saved; communicates, if at all, before anything in it can fail.
        leaves: knows the tensors of a framework.
        keep: complete sets that are left, this one included. Default: all.
        background: let a thread write a copy while training goes on.

    Raises:
        TypeError, ValueError: a wrong argument, or a value that no file can hold; on all ranks.
        RuntimeError: as ``check``; this save, or the one before that a thread has written, has failed on one of them.
    """
    global _last
    failed = None if _last is None else _last.outcome()
    _last = None

    def look() -> tuple[int, Occasion]:
        if failed is not None:
            raise RuntimeError(f"The checkpoint before this one, written in the background, failed: {failed}")
        if keep is not None:
            require_int(keep, "`keep`", minimum=1)
        if background and not everyone.from_any_thread:
            raise ValueError("`background=True` needs Horovod, Gloo or NCCL, whose collectives may be those of threads")
        occasion = check()
        path.mkdir(parents=True, exist_ok=True)
        there = sets_in(path)
        remove_unfinished(there)
        return max((saved.number for saved in there), default=0), occasion

    told = everyone.attempt("place", look)
    occasion, steps = told[everyone.root][1], {rank: of_rank.step for rank, (_, of_rank) in told.items()}
    if occasion.steps_agree and len(set(steps.values())) > 1:
        at = "; ".join(f"step {step} on rank {rank}" for rank, step in steps.items())
        raise RuntimeError(f"All ranks save at the same local step. Received: {at}")
    saved = SavedSet.of(path, 1 + max(number for number, _ in told.values()), occasion.step)
    content: list[Content] = []
    with lending():  # The only copies are those that a thread writes.
        everyone.attempt("content", lambda: content.append(encode(state(), leaves, copy=background)))
    saving = Saving(lambda: _write(saved, everyone, occasion.run, content.pop(), keep), background)
    _last = saving if background else None
    return saving


def _write(saved: SavedSet, everyone: Everyone, run: str, content: Content, keep: int | None) -> None:
    """Write this rank's file, and once all are there the manifest; then remove what is not kept."""
    started, path = time.perf_counter(), saved.folder.parent

    def write_file() -> Entry:
        name = f"rank-{everyone.rank}.npz"
        with _saying_what_is_needed(path, everyone.rank, content.nbytes):
            saved.folder.mkdir(exist_ok=True)
            sync_folder(path)
            return Entry(name, *write_content(saved.folder / name, content), everyone.among)

    manifest = Manifest(saved.step, run, everyone.root, everyone.attempt("written", write_file))

    def complete(wanted: bool) -> None:
        if wanted and not saved.complete:
            saved.write_manifest(manifest)

    everyone.attempt("manifest", lambda: complete(everyone.is_root))
    everyone.attempt("manifests", lambda: complete(True))  # On disks that are not the root's.
    remove_old(path, saved, keep)
    if everyone.is_root:
        size, seconds = sum(entry.size for entry in manifest.files.values()) / 1e6, time.perf_counter() - started
        logger.info("Saved %s: %d files, %.1f MB, in %.1f s", saved.folder, len(manifest.files), size, seconds)


@contextmanager
def _saying_what_is_needed(path: Path, rank: int, nbytes: int) -> Iterator[None]:
    """Let an OSError say which rank was to write how much, and how much room there is."""
    try:
        yield
    except OSError as error:
        needed, free = nbytes / 1e6, shutil.disk_usage(path).free / 1e6
        raise OSError(
            error.errno,
            f"{error.strerror or error}. Rank {rank} has to write {needed:.1f} MB there, and {free:.1f} MB are free",
            error.filename or str(path),
        ) from error
