"""Sets of files: one file per rank, and a manifest, which makes them a set.

    path/
      000007-step1200/
        rank-0.npz
        rank-1.npz
        manifest.json       written last: without it there is no set
      000008-step1400/
        ...

The first number counts the saves in a folder, so that the newest set is the one that was saved last, even if training
has gone back to an earlier step.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvd_periodic.checkpoints.files import digest_of, open_regular, write_whole
from hvd_periodic.logs import logger

_NAME = re.compile(r"(\d{6,})-step(\d+)")
_MANIFEST = "manifest.json"
_OURS = re.compile(r"\.?(rank-\d+\.npz|manifest\.json)(\.\d+\.partial)?")
"""Names of the files that a save writes; only these are ever removed."""

_VERSION = 1
_LONGEST = 2**28
"""Number of bytes read from a manifest; a longer one is damaged."""


@dataclass(frozen=True)
class Entry:
    """A manifest's entry for the file of one rank.

    Attributes:
        file: name of the file.
        size: size in bytes.
        sha256: digest of all bytes.
        among: identifies the ranks among which this rank trained, see ``TrainingGroup.fingerprint``.
    """

    file: str
    size: int
    sha256: str
    among: str

    def __post_init__(self) -> None:
        if tuple(map(type, (self.file, self.size))) != (str, int) or Path(self.file).name != self.file:
            raise ValueError(f"a file of {self.size!r} bytes in this folder cannot have the name {self.file!r}")


@dataclass(frozen=True)
class Manifest:
    """The manifest, which makes files a set.

    Attributes:
        step: local steps of the root.
        run: identifies the training.
        root: the global rank from which all ranks started.
        files: entries by global rank.
    """

    step: int
    run: str
    root: int
    files: Mapping[int, Entry]


@dataclass(frozen=True, order=True)
class SavedSet:
    """The folder of a set, with the number of its save and the local steps of the root."""

    number: int
    step: int
    folder: Path

    @classmethod
    def of(cls, path: Path, number: int, step: int) -> SavedSet:
        """Return the set of the save with this number."""
        return cls(number, step, path / f"{number:06}-step{step}")

    @property
    def complete(self) -> bool:
        """Whether it has a manifest."""
        return (self.folder / _MANIFEST).exists()

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest, which makes the files a set."""
        said = asdict(manifest)
        text = json.dumps({"version": _VERSION, "manifest": said, "sha256": _digest(said)}, indent=1)
        write_whole(self.folder / _MANIFEST, lambda stream: stream.write(text.encode()))

    def manifest(self) -> Manifest:
        """Return the manifest.

        Raises:
            ValueError: it was altered, or written by another version; names it.
        """
        file = self.folder / _MANIFEST
        with open_regular(file) as stream:
            read = stream.read(_LONGEST)
        try:
            text = json.loads(read)
            version, said = text["version"], text["manifest"]
            if version == _VERSION and _digest(said) == text["sha256"]:
                files = {int(rank): Entry(**entry) for rank, entry in said["files"].items()}
                return Manifest(said["step"], said["run"], said["root"], files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from error
        if version != _VERSION:
            raise ValueError(f"{file} has version {version!r}, but this hvd_periodic reads version {_VERSION}")
        raise ValueError(f"{file} is damaged: it was altered after it was written")

    def remove(self) -> None:
        """Remove the files that saves have written, the manifest first; another rank may be doing the same.

        If the folder is a symbolic link, only the link is removed. A folder that contains other files remains.
        """
        with suppress(FileNotFoundError):
            if self.folder.is_symlink():
                self.folder.unlink()
                return
            (self.folder / _MANIFEST).unlink(missing_ok=True)
            for file in self.folder.iterdir():
                if _OURS.fullmatch(file.name):
                    file.unlink(missing_ok=True)
            self.folder.rmdir()


def sets_in(path: Path) -> list[SavedSet]:
    """Return the sets in a folder, oldest first, complete or not; none if there is no folder."""
    if not path.is_dir():
        return []
    found = ((_NAME.fullmatch(folder.name), folder) for folder in path.iterdir())
    return sorted(SavedSet(int(match[1]), int(match[2]), folder) for match, folder in found if match)


def remove_old(path: Path, newest: SavedSet, keep: int | None) -> None:
    """Remove all complete sets but the last ``keep``, including the newest; None: keep all."""
    if keep is not None:
        older = [saved for saved in sets_in(path) if saved.number < newest.number and saved.complete]
        _remove(older[: max(len(older) - keep + 1, 0)])


def remove_unfinished(found: Sequence[SavedSet]) -> None:
    """Remove leftovers of crashes: folders without a manifest, but not links, whose disk may only be absent."""
    _remove([saved for saved in found if not saved.complete and not saved.folder.is_symlink()])


def _remove(found: Sequence[SavedSet]) -> None:
    """Remove sets; a failed removal does not end training."""
    for saved in found:
        try:
            saved.remove()
        except OSError as error:
            logger.warning("Could not remove the old checkpoint %s: %s", saved.folder, error)


@dataclass(frozen=True)
class Source:
    """The file from which a rank resumes.

    Attributes:
        saved: the set to which it belongs.
        file: its path.
        own: this rank has written it, among the same ranks as now.
        among_others: it was saved among other ranks, so that all ranks start from the center.
        written: the file that a rank of this number has written, with its entry; None if this rank sees none.
    """

    saved: SavedSet
    file: Path
    own: bool
    among_others: bool
    written: tuple[Path, Entry] | None

    def own_file(self) -> Path | None:
        """Return the file that a rank of this number has written, also among other ranks; None if there is none here.

        Raises:
            ValueError: it is damaged.
        """
        return None if self.written is None else _undamaged(*self.written)


def find_file(path: Path, rank: int, among: str, is_root: bool, step: int | None = None) -> Source | None:
    """Return the file from which a rank resumes, among the files it sees; without communication.

    This is its own file of the newest set, or the root's file if it does not see its own or the ranks have changed.
    None if it sees no set, or not the root's file when the ranks have changed: it then takes over the root's state.

    Args:
        path: folder of the sets.
        rank: the global rank.
        among: ``TrainingGroup.fingerprint``.
        is_root: all ranks start from this one.
        step: local steps of the set from which to resume. Default: the newest set.

    Raises:
        FileNotFoundError: there is no set of that step.
        ValueError: a file is missing, truncated, altered, or of another set; names it, and the remedy.
    """
    complete = [saved for saved in sets_in(path) if saved.complete]
    chosen = [saved for saved in complete if step in (None, saved.step)]
    if not chosen:
        if step is not None:
            raise FileNotFoundError(f"{path} has no checkpoint of step {step}. It has {_steps(complete)}")
        return None
    saved = chosen[-1]
    try:
        return _source(saved, rank, among, is_root)
    except ValueError as error:
        others = _steps([other for other in complete if other != saved])
        raise ValueError(
            f"{error}. To resume from another checkpoint, remove the folder {saved.folder} or pass at_step=...: "
            f"there are {others}"
        ) from error


def _source(saved: SavedSet, rank: int, among: str, is_root: bool) -> Source | None:
    manifest = saved.manifest()
    present = {owner: saved.folder / entry.file for owner, entry in manifest.files.items()}
    present = {owner: file for owner, file in present.items() if file.exists()}
    for owner, file in present.items():  # Cheap, so that every rank that sees a truncated file reports it.
        if file.stat().st_size != manifest.files[owner].size:
            raise ValueError(
                f"{file} is damaged: it has {file.stat().st_size} bytes, and had {manifest.files[owner].size} when it "
                "was written"
            )
    own = manifest.files.get(rank)
    among_others = own is None or own.among != among
    source_rank = rank if not among_others and rank in present else manifest.root
    if source_rank not in present:
        if among_others and not is_root:
            logger.warning("Rank %d sees no file of the root in %s, and waits for the root's state", rank, saved.folder)
            return None
        missing = manifest.files[rank if not among_others else manifest.root].file
        raise ValueError(f"{saved.folder / missing} is missing")
    file = _undamaged(present[source_rank], manifest.files[source_rank])
    written = (present[rank], manifest.files[rank]) if rank in present else None
    return Source(saved, file, source_rank == rank and not among_others, among_others, written)


def _undamaged(file: Path, entry: Entry) -> Path:
    """Return a file; raise a ValueError if it is not the one of the entry."""
    if digest_of(file) != (entry.size, entry.sha256):
        raise ValueError(f"{file} is damaged or belongs to another checkpoint: its SHA-256 differs from the manifest")
    return file


def _steps(found: list[SavedSet]) -> str:
    return f"steps {', '.join(str(saved.step) for saved in found)}" if found else "none"


def _digest(said: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the content of a manifest, as JSON, in which keys are strings."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(said)), sort_keys=True).encode()).hexdigest()
