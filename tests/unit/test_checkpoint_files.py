"""Files of checkpoints that others have changed: links, pipes, damage; full disks; memory; strides."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_periodic import LocalCommunicator
from hvd_periodic.checkpoints import Content, Leaves, files
from hvd_periodic.checkpoints.files import digest_of, read_content, write_content, write_whole
from hvd_periodic.checkpoints.resuming import resume
from hvd_periodic.checkpoints.sets import SavedSet, _digest, sets_in
from tests.helpers import outcomes
from tests.unit.test_checkpoints import everyone_of, found, save, steps


def moved_away(path: Path, name: str) -> Path:
    """Move a set to another place, and leave a link; return where it is."""
    away = path.with_name("away") / name
    away.parent.mkdir(exist_ok=True)
    (path / name).rename(away)
    (path / name).symlink_to(away)
    return away


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "saved"


def test_a_set_behind_a_link_is_loaded_and_stays_when_it_is_old(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(path, LocalCommunicator(), 1)
    away = moved_away(path, "000001-step1")
    assert found(path, LocalCommunicator()) == (1, 0, True, False)
    save(path, LocalCommunicator(), 2, keep=1)
    assert [folder.name for folder in path.iterdir()] == ["000002-step2"]
    assert sorted(file.name for file in away.iterdir()) == ["manifest.json", "rank-0.npz"]
    assert not caplog.records


def test_a_link_to_a_disk_that_is_not_there_stays(path: Path) -> None:
    save(path, LocalCommunicator(), 1)
    away = moved_away(path, "000001-step1")
    away.rename(away.with_name("elsewhere"))
    save(path, LocalCommunicator(), 2, keep=1)
    assert (path / "000001-step1").is_symlink()
    away.with_name("elsewhere").rename(away)
    assert steps(path) == [1, 2]


@pytest.mark.parametrize("kind", ["unfinished", "old"])
def test_files_that_no_save_has_written_are_not_removed(path: Path, kind: str) -> None:
    """Also where they are links to files, of which a folder of links may consist."""
    save(path, LocalCommunicator(), 1)
    folder, kept = path / "000001-step1", path.with_name("kept")
    kept.write_text("x")
    (folder / "notes.txt").write_text("of the user")
    (folder / "figures").mkdir()
    (folder / "rank-7.npz").symlink_to(kept)
    if kind == "unfinished":
        (folder / "manifest.json").unlink()
    save(path, LocalCommunicator(), 2, keep=1)
    assert sorted(file.name for file in folder.iterdir()) == ["figures", "notes.txt"]
    assert kept.read_text() == "x"


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.npz"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_refused_by_name(path: Path, name: str, kind: str) -> None:
    """A pipe that nobody writes to is opened, and read, without waiting: even one that the manifest says is empty."""
    save(path, LocalCommunicator(), 1)
    (saved,) = sets_in(path)
    manifest, file = saved.manifest(), saved.folder / name
    file.unlink()
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda where: where.symlink_to("/dev/zero")}[kind](file)  # type: ignore[operator]
    if name == "rank-0.npz":
        size = file.stat().st_size
        saved.write_manifest(replace(manifest, files={0: replace(manifest.files[0], size=size)}))
    with pytest.raises(ValueError, match=rf"{name} is damaged: it is not a regular file"):
        found(path, LocalCommunicator())


def forged(path: Path, data: bytes) -> Path:
    """Let a set have a file of these bytes, with the digest that belongs to them; return the file."""
    save(path, LocalCommunicator(), 1)
    (saved,) = sets_in(path)
    manifest, file = saved.manifest(), saved.folder / "rank-0.npz"
    file.write_bytes(data)
    size, sha256 = digest_of(file)
    saved.write_manifest(replace(manifest, files={0: replace(manifest.files[0], size=size, sha256=sha256)}))
    return file


def archive_of(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return file.getvalue()


def array_of(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header.encode() + data


def header_of(shape: tuple[int, ...], dtype: str = "'|u1'") -> str:
    return f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}\n"


BRACKETS = b"[" * 100_000
TERABYTES = array_of(header_of((2**42,)))
FORGED = {
    "brackets": archive_of({"tree.npy": array_of(header_of((len(BRACKETS),)), BRACKETS)}),
    "terabytes": archive_of({"w.npy": TERABYTES}),
    "compressed": archive_of({"w.npy": array_of(header_of((2**24,)), bytes(2**24))}, zipfile.ZIP_DEFLATED),
    "too short": archive_of({"w.npy": array_of(header_of((100,)), bytes(99))}),
    "too long": archive_of({"w.npy": array_of(header_of((1,)), bytes(2))}),
    "negative": archive_of({"w.npy": array_of(header_of((-1, -2)), bytes(2))}),
    "objects": archive_of({"w.npy": array_of(header_of((1,), "'|O'"), bytes(8))}),
    "nonsense": archive_of({"w.npy": array_of(header_of((1,), "'nonsense'"), bytes(8))}),
    "no header": archive_of({"w.npy": b"hello"}),
    "version 9": archive_of({"w.npy": b"\x93NUMPY\x09\x00" + bytes(100)}),
    "nothing": archive_of({}),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_files_are_refused_by_name(path: Path, name: str) -> None:
    forged(path, FORGED[name])
    failures: list[str] = []
    with pytest.raises(ValueError, match=r"rank-0\.npz is not a checkpoint of hvd_periodic: ") as raised:
        resume(path, everyone_of(LocalCommunicator()), None, Leaves(), [], lambda *_: None, failures.append)
    assert failures == ["", str(raised.value)]


def test_damage_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.npz"
    write_content(file, Content({"w": 1}, {"w": np.arange(3)}))
    whole = file.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        file.write_bytes(damaged)
        try:
            read_content(file)
        except ValueError as error:
            assert str(error).startswith(f"{file} is not a checkpoint of hvd_periodic: ")  # noqa: PT017


@pytest.mark.parametrize(
    "text",
    [
        BRACKETS.decode(),
        '{"a":' * 100_000,
        '{"version": 1, "manifest": ' + BRACKETS.decode() + "]" * len(BRACKETS) + ', "sha256": ""}',
        "9" * 5000,
        "",
    ],
)
def test_manifests_that_nobody_wrote_are_refused_by_name(path: Path, text: str) -> None:
    save(path, LocalCommunicator(), 1)
    (path / "000001-step1" / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: "):
        found(path, LocalCommunicator())


@pytest.mark.parametrize("changed", [{"file": "../rank-0.npz"}, {"file": 3}, {"size": "3"}])
def test_entries_that_nobody_wrote_are_refused_by_name(path: Path, changed: dict[str, Any]) -> None:
    save(path, LocalCommunicator(), 1)
    (saved,) = sets_in(path)
    text = json.loads((saved.folder / "manifest.json").read_text())
    text["manifest"]["files"]["0"].update(changed)
    text["sha256"] = _digest(text["manifest"])
    (saved.folder / "manifest.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: ValueError: a file of "):
        SavedSet.of(path, 1, 1).manifest()


def test_a_full_disk_is_told_with_folder_rank_and_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(stream: Any, data: Any) -> int:
        if "rank-1" in Path(f"/proc/self/fd/{stream.file.fileno()}").readlink().name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(stream, data)

    write = files._Digesting.write
    monkeypatch.setattr(files._Digesting, "write", full)
    of_root, of_other = outcomes(2, lambda communicator: save(path, communicator, 7))
    text = (
        r"\[Errno 28\] No space left on device\. Rank 1 needs 0\.0 MB there, and \d+\.\d MB are free: "
        rf"'{path}/000001-step7/rank-1\.npz'"
    )
    assert isinstance(of_other, OSError)
    assert (of_other.errno, of_other.filename) == (errno.ENOSPC, str(path / "000001-step7" / "rank-1.npz"))
    assert re.fullmatch(text, str(of_other))
    assert re.fullmatch(rf"The checkpoint failed on rank 1 \(1 of 2 ranks\): OSError: {text}", str(of_root))


def test_an_error_of_the_disk_comes_before_that_of_a_writer(tmp_path: Path) -> None:
    """``torch.save`` raises its own, which tells nothing of the disk."""
    file = tmp_path / "best.pt"

    def write(stream: Any) -> None:
        stream.file.close()
        stream.file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb", buffering=0)
        try:
            stream.write(b"x")
        except OSError:
            raise RuntimeError("unexpected pos 832 vs 726") from None
        finally:
            stream.file.close()

    with pytest.raises(OSError, match=rf"\[Errno 28\] No space left on device: '{file}'"):
        write_whole(file, write)
    assert not list(tmp_path.iterdir())
