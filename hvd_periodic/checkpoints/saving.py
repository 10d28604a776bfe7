"""Saving by all ranks together, immediately or in a background thread."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hvd_periodic.arguments import require_int
from hvd_periodic.checkpoints.files import sync_folder, write_content
from hvd_periodic.checkpoints.sets import Entry, Manifest, SavedSet, remove_old, remove_unfinished, sets_in
from hvd_periodic.checkpoints.tree import Content, Leaves, encode
from hvd_periodic.comm.membership import TrainingGroup
from hvd_periodic.logs import logger
from hvd_periodic.ranks import by_value
from hvd_periodic.vectors.lending import lending

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The outcome of some work on this rank, which all ranks must know: its result, or the error."""

    done: T | None
    failure: Exception | None

    @classmethod
    def of(cls, work: Callable[[], T]) -> Outcome[T]:
        """Return the outcome of some work."""
        try:
            return cls(work(), None)
        except Exception as error:
            return cls(None, error)

    @property
    def told(self) -> tuple[T | None, str | None]:
        """The message to the other ranks: the result, and the error in words."""
        return self.done, None if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"

    def on_all(self, told: Mapping[int, Any]) -> dict[int, T]:
        """Return the results of all ranks by rank, given the messages of all.

        Raises:
            Exception: the work failed on this rank; the error itself.
            RuntimeError: it succeeded here but failed elsewhere; cites the first error.
        """
        if self.failure is not None:
            raise self.failure
        failed = {rank: report for rank, (_, report) in told.items() if report}
        if failed:
            rank, report = next(iter(failed.items()))
            raise RuntimeError(f"The checkpoint failed on rank {rank} ({len(failed)} of {len(told)} ranks): {report}")
        return {rank: value for rank, (value, _) in told.items()}


def attempt(everyone: TrainingGroup, name: str, work: Callable[[], T]) -> dict[int, T]:
    """Return the results of some work on all ranks; if it fails on one, raise on all. Collective.

    Raises:
        Exception: as :meth:`Outcome.on_all`.
    """
    outcome = Outcome.of(work)
    return outcome.on_all(everyone.gather(outcome.told, f"checkpoint.{name}"))


class Saving:
    """A save, in which each rank writes its file, and all ranks together make the files a set.

    In the background a thread writes but communicates nothing: Horovod numbers unnamed collectives in the order in
    which a process begins them, and confuses eager operations of TensorFlow that two threads run at once. The training
    thread tells the other ranks when all ranks are in one place: at an exchange, in :meth:`wait`, in the next save, at
    the end of training, or at the end of the process.

    Args:
        saved: the set.
        everyone: the ranks.
        run: identifies the training.
        content: content of this rank's file.
        keep: number of complete sets to keep, including this one. Default: all.
        meet: checks that all ranks are in one place; called where they may not be.
        background: a thread writes.

    Attributes:
        everyone: as given.
        over: the set is complete, or will never be.
    """

    def __init__(
        self,
        saved: SavedSet,
        everyone: TrainingGroup,
        run: str,
        content: Content,
        keep: int | None,
        meet: Callable[[], object],
        background: bool,
    ) -> None:
        self._saved, self.everyone, self._run, self._keep, self._meet = saved, everyone, run, keep, meet
        self._background = background
        self._started = time.perf_counter()
        self._outcome: Outcome[Entry] | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self.over = False
        self._run_or_start(lambda: self._write(content))

    def wait(self) -> None:
        """Wait until all ranks have written, complete the set, and wait until old sets are removed; on all ranks.

        Raises:
            RuntimeError: one rank could not write its file, or ranks wait in different places; on all ranks.
        """
        if not self.over:
            self._meet()
        self.complete()
        self.join()
        error = self.take_error()
        if error is not None:
            raise RuntimeError(f"A checkpoint that was written in the background failed: {error}") from error

    def complete(self, wait: bool = True) -> None:
        """Complete the set once all ranks have written. Collective; an error is kept.

        Args:
            wait: wait for files that are still being written; otherwise do nothing while there are any.
        """
        if self.over:
            return
        if wait:
            self.join()
        outcome = self._outcome  # The thread may set it meanwhile.
        told = self.everyone.gather(None if outcome is None else outcome.told, "checkpoint.written")
        if outcome is None or None in told.values():
            return
        self.over = True
        try:
            self._write_manifests(outcome.on_all(told))
        except Exception as error:
            self._error = error
            if self._background and outcome.failure is None:
                logger.error(_FAILED, error)

    def abandon(self, why: str) -> None:
        """Leave the set incomplete, because its ranks can no longer complete it together."""
        if not self.over:
            self.over, self._error = True, RuntimeError(f"{self._saved.folder} is not complete: {why}")
            logger.warning("%s", self._error)

    @property
    def folder(self) -> Path:
        """The folder of the set."""
        return self._saved.folder

    def take_error(self) -> Exception | None:
        """Return the error, if there is one, and forget it."""
        error, self._error = self._error, None
        return error

    def join(self) -> None:
        """Wait for the thread of this rank, without communication."""
        if self._thread is not None:
            self._thread.join()

    def complete_at_exit(self) -> None:
        """Complete the set when the process ends, unless an error ends it or its ranks cannot reach each other."""
        if self.over or getattr(sys, "last_value", None) is not None:
            return
        if not self.everyone.alive():
            self.abandon(
                "the ranks were shut down first. Call wait() or finalize() on all of them before shutting down"
            )
        else:
            self.join()
            self._background = False  # At the end of a process no thread can start.
            self._meet()
            self.complete()
            if (error := self.take_error()) is not None:
                logger.error(_FAILED, error)

    def _run_or_start(self, work: Callable[[], None]) -> None:
        """Run some work; in the background, start a thread for it."""
        if not self._background:
            work()
            return
        thread = threading.Thread(target=work, name="hvd_periodic.checkpoint", daemon=False)
        thread.start()
        self._thread = thread

    def _write(self, content: Content) -> None:
        """Write the file of this rank; in the background, where nothing is deferred, without communication."""

        def write() -> Entry:
            folder, rank = self._saved.folder, self.everyone.global_rank
            with _naming_disk_space(folder.parent, rank, content.nbytes):
                folder.mkdir(exist_ok=True)
                sync_folder(folder.parent)
                name = f"rank-{rank}.npz"
                return Entry(name, *write_content(folder / name, content), self.everyone.fingerprint)

        outcome = Outcome.of(write)
        content.finish()  # A rank whose disk is full reads to the end: the others need its parts.
        if self._background and outcome.failure is not None:
            logger.error(_FAILED, outcome.failure)
        self._outcome = outcome

    def _write_manifests(self, files: dict[int, Entry]) -> None:
        """Write the manifest, on the disk of the root first; then remove the sets that are not kept."""
        saved, everyone = self._saved, self.everyone
        manifest = Manifest(saved.step, self._run, everyone.root, files)

        def write(wanted: bool) -> None:
            if wanted and not saved.complete:
                saved.write_manifest(manifest)

        attempt(everyone, "manifest", lambda: write(everyone.is_root))
        attempt(everyone, "manifests", lambda: write(True))  # On disks that are not the root's.
        if everyone.is_root:
            size, seconds = sum(entry.size for entry in files.values()) / 1e6, time.perf_counter() - self._started
            logger.info("Saved %s: %d files, %.1f MB, in %.1f s", saved.folder, len(files), size, seconds)
        self._run_or_start(lambda: remove_old(saved.folder.parent, saved, self._keep))


_FAILED = "A checkpoint that was written in the background failed: %s"

_unfinished: list[Saving] = []
"""The last background save, and those that were not over when it began; in the same order on all ranks."""


def require_complete(path: Path) -> None:
    """Raise a RuntimeError if a save into a folder is in flight: this rank alone cannot know when it ends."""
    for saving in _unfinished:
        if not saving.over and saving.folder.parent.resolve() == path.resolve():
            raise RuntimeError(
                f"{saving.folder} is being written in the background: before load(), call wait() on the object that "
                "save() returned, on all ranks"
            )


def _complete_at_exit(process: int) -> None:
    """Complete the remaining saves when the process ends, but not when a forked child ends."""
    for saving in _unfinished if os.getpid() == process else []:
        saving.complete_at_exit()


@dataclass(frozen=True)
class SavePoint:
    """The point in training at which a set is saved.

    Attributes:
        step: local steps of this rank.
        run: identifies the training.
        steps_agree: all ranks must be at the same step.
    """

    step: int
    run: str
    steps_agree: bool = True


def save_set(
    path: Path,
    everyone: TrainingGroup,
    check: Callable[[], SavePoint],
    state: Callable[[], Any],
    leaves: Leaves | None = None,
    *,
    keep: int | None = None,
    background: bool = False,
    meet: Callable[[], object] = lambda: None,
    before: Saving | None = None,
) -> Saving:
    """Save a file of every rank; collective. A set is complete once its manifest exists, which is written last.

    In the background, a rank that dies leaves files without a manifest, which the next save removes.

    Args:
        path: folder of the sets.
        everyone: the ranks.
        check: returns the point in training; raises if this rank cannot be saved now.
        state: returns the state to save; communicates, if at all, before anything in it can fail.
        leaves: handles the tensors of a framework.
        keep: number of complete sets to keep, including this one. Default: all.
        background: write a copy in a thread while training continues.
        meet: as in :class:`Saving`.
        before: the last background save of the same ranks.

    Raises:
        TypeError, ValueError: a wrong argument, or a value that no file can hold; on all ranks.
        RuntimeError: as ``check``; this save, or the previous one, has failed on one of the ranks.
    """
    for saving in _unfinished:
        saving.join()  # A process writes one save at a time, so that memory holds one copy of the state.
    failed = None
    if before is not None:
        before.complete()
        before.join()  # Its thread may still remove older sets, for which this save looks.
        failed = before.take_error()

    saved, run = _next_set(path, everyone, check, keep, bool(background), failed)
    content: list[Content] = []
    with lending(defer=not background):  # Only a background thread needs copies.
        attempt(everyone, "content", lambda: content.append(encode(state(), leaves, copy=background)))
    saving = Saving(saved, everyone, run, content.pop(), keep, meet, background)
    if background:
        if not _unfinished:
            atexit.register(_complete_at_exit, os.getpid())
        _unfinished[:] = [*(other for other in _unfinished if not other.over), saving]
    else:
        saving.complete()
        error = saving.take_error()
        if error is not None:
            raise error
    return saving


def _next_set(
    path: Path,
    everyone: TrainingGroup,
    check: Callable[[], SavePoint],
    keep: int | None,
    background: bool,
    failed: Exception | None,
) -> tuple[SavedSet, str]:
    """Return the set for a save, and the run of its training, if all ranks can save at this step. Collective.

    The arguments are as in :func:`save_set`; ``failed`` is the error of the previous save.
    """

    def look() -> tuple[int, SavePoint, bool]:
        if failed is not None:
            raise RuntimeError(f"The previous checkpoint, written in the background, failed: {failed}")
        if keep is not None:
            require_int(keep, "`keep`", minimum=1)
        point = check()
        path.mkdir(parents=True, exist_ok=True)
        there = sets_in(path)
        pending = {saving.folder.resolve() for saving in _unfinished if not saving.over}  # of other optimizers
        remove_unfinished([saved for saved in there if saved.folder.resolve() not in pending])
        return max((saved.number for saved in there), default=0), point, background

    told = attempt(everyone, "place", look)
    point, steps = told[everyone.root][1], {rank: of_rank.step for rank, (_, of_rank, _) in told.items()}
    modes = {rank: f"background={mode}" for rank, (_, _, mode) in told.items()}
    if len(set(modes.values())) > 1:
        raise ValueError(f"`background` must be the same on all ranks. Received: {by_value(modes)}")
    if point.steps_agree and len(set(steps.values())) > 1:
        at = by_value({rank: f"step {step}" for rank, step in steps.items()})
        raise RuntimeError(f"All ranks must save at the same local step. Received: {at}")
    return SavedSet.of(path, 1 + max(number for number, *_ in told.values()), point.step), point.run


@contextmanager
def _naming_disk_space(path: Path, rank: int, nbytes: int) -> Iterator[None]:
    """Add to an OSError the rank, the space that it needs, and the free space."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # Not from the disk, for example the TimeoutError of a rank that has waited for others.
            raise
        needed, free = nbytes / 1e6, shutil.disk_usage(path).free / 1e6
        raise OSError(
            error.errno,
            f"{error.strerror or error}. Rank {rank} needs {needed:.1f} MB there, and {free:.1f} MB are free",
            error.filename or str(path),
        ) from error
