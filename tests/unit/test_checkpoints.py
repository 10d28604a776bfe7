"""Files of a training: what they hold comes back to the bit; what is damaged is refused; crashes leave a set."""

from __future__ import annotations

import enum
import errno
import json
import logging
import math
import os
import shutil
import signal
import struct
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_periodic import Communicator, LocalCommunicator
from hvd_periodic.checkpoints import Content, Leaves, decode, encode, files, find_file, save_set
from hvd_periodic.checkpoints.files import read_content, write_content
from hvd_periodic.checkpoints.resuming import resume
from hvd_periodic.checkpoints.saving import SavePoint, require_complete
from hvd_periodic.checkpoints.sets import sets_in
from hvd_periodic.comm.membership import TrainingGroup
from hvd_periodic.comm.threads import ThreadCommunicator
from hvd_periodic.numpy import SGD, ModelAverageOptimizer
from tests.conftest import PATIENCE
from tests.helpers import errors, outcomes, run_ranks

numbers = st.integers() | st.floats() | st.integers(min_value=2**70, max_value=2**90)
plain = st.none() | st.booleans() | numbers | st.text(max_size=5)
keys = st.text(max_size=5) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False)
trees = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


def shape(value: Any) -> Any:
    """Return a value as text that tells types, signs and bits apart."""
    if isinstance(value, float):
        return f"float {struct.pack('>d', value).hex() if not math.isnan(value) else 'nan'}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} {[shape(item) for item in value]}"
    if isinstance(value, dict):
        return f"{type(value).__name__} {[(shape(key), shape(item)) for key, item in value.items()]}"
    if isinstance(value, (np.ndarray, np.generic)):
        strides = getattr(value, "strides", ())
        return f"{type(value).__name__} {value.dtype.str} {value.shape} {strides} {value.tobytes().hex()}"
    return f"{type(value).__name__} {value!r}"


@settings(deadline=None)
@given(trees)
def test_values_come_back_as_they_were(tree: Any) -> None:
    content = encode(tree)
    told = json.loads(json.dumps(content.tree, allow_nan=False))
    assert shape(decode(Content(told, content.arrays))) == shape(tree)


class Kind(enum.Enum):
    FIRST = "first"


class Number(enum.IntEnum):
    TWO = 2


ARRAYS = {
    "no dimensions": np.array(1.5),
    "empty": np.zeros((0, 4), np.int16),
    "not contiguous": np.arange(24.0).reshape(4, 6).T[::2],
    "column-major": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "permuted": np.arange(24).reshape(2, 3, 4).transpose(0, 2, 1),
    "spread": np.broadcast_to(np.arange(3.0), (2, 3)),
    "bools": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "other order of bytes": np.arange(3, dtype=">i4"),
    "text": np.array(["a", "bcd"]),
    "nan": np.frombuffer(b"\x01\0\0\0\0\0\xf8\x7f", "<f8"),
    1: np.float32(1 / 3),
    "1": np.arange(2),
    "tree": np.arange(3),
    ("in", "a"): [np.int64(2**62), (np.bool_(True),)],
    "Counter": Counter({3: 1}),
    "deque": deque([1, (2.5, None)], maxlen=3),
    "enum": [Kind.FIRST, Number.TWO],
    "OrderedDict": OrderedDict(b=np.ones(1), a=2),
}


def test_arrays_come_back_from_a_file(tmp_path: Path) -> None:
    tree = {key: value for key, value in ARRAYS.items() if not isinstance(key, tuple)} | {"last": ARRAYS["in", "a"]}
    file = tmp_path / "rank-0.npz"
    size, _ = write_content(file, encode(tree))
    assert size == file.stat().st_size
    assert list(tmp_path.iterdir()) == [file]
    assert shape(decode(read_content(file))) == shape(tree)
    with np.load(file, allow_pickle=False) as archive:  # Numpy reads it, by the paths of arrays.
        np.testing.assert_array_equal(archive["not contiguous"], ARRAYS["not contiguous"])
        assert archive["last/1/0"] == np.True_


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [1, {2: {3}}]}, r"a\[1\]\[2\] is of type set: \{3\}"),
        ({"f": {"lambda": len}}, r"f\['lambda'\] is of type builtin_function_or_method"),
        ({"o": np.array([object()])}, r"o is of type ndarray of object"),
        ({"b": b"bytes"}, r"b is of type bytes"),
    ],
)
def test_what_cannot_be_saved_is_named(tree: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode(tree)


def test_a_copy_shares_no_memory() -> None:
    array = np.zeros(3)
    content = encode([array, array[0]], copy=True)
    array[:] = 1
    assert decode(content)[0].tolist() == [0, 0, 0]


class Bomb:
    def __reduce__(self) -> Any:
        return os.abort, ()


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.npz"
    for arrays in ({"tree": np.array([Bomb()])}, {"tree": np.zeros(1, np.uint8), "w": np.array([Bomb()])}):
        np.savez(file, **arrays)
        with pytest.raises(ValueError, match=r"rank-0\.npz is not a checkpoint of hvd_periodic: .*pickle"):
            read_content(file)
    for data in (b"", b"x" * 100, b"\x80\x04\x95"):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=r"rank-0\.npz is not a checkpoint of hvd_periodic"):
            read_content(file)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"array": ["v", ""]}, "it lacks the array 'v'"),
        ({"array": ["w", "torch.float32"]}, "it holds a torch.float32"),
        ({"set": [1]}, "a value of an unknown kind, 'set'"),
        ({}, "an object of 0 keys"),
        ({"dict": [[[], 1]]}, "unhashable type: 'list'"),
        ({"tuple": 3}, "not iterable"),
        ({"int": "forty"}, "invalid literal"),
        ({"array": ["w", "", [2**60]]}, ""),
        ({"array": ["w", "", [-1]]}, r"an array of shape \(1,\) cannot have the strides \[-1\]"),
        ({"array": ["w", "", [1, 1]]}, r"an array of shape \(1,\) cannot have the strides"),
        ({"enum": ["os", "path", "join"]}, "it holds path.join of the module os, which does not have it"),
        ({"enum": ["no.such", "Enum", "A"]}, "or was not imported"),
        ({"name": "float32"}, "it holds 'float32' of a framework"),
        ({"deque": [[1], "long"]}, "an integer is required"),
    ],
)
def test_trees_that_nobody_wrote_are_refused_by_name(tmp_path: Path, tree: Any, message: str) -> None:
    """With digests that are right: somebody has made the files by hand."""
    everyone = everyone_of(LocalCommunicator())
    save(tmp_path, LocalCommunicator(), 1)
    (saved,) = sets_in(tmp_path)
    file = saved.folder / "rank-0.npz"
    size, digest = write_content(file, Content(tree, {"w": np.zeros(1)}))
    manifest = saved.manifest()
    entries = {0: replace(manifest.files[0], size=size, sha256=digest)}
    saved.write_manifest(replace(manifest, files=entries))
    failures: list[str] = []
    with pytest.raises(ValueError, match=rf"rank-0\.npz is not a checkpoint of hvd_periodic: .*{message}") as raised:
        resume(tmp_path, everyone, None, Leaves(), [], lambda *_: None, failures.append)
    assert failures == ["", str(raised.value)]


def everyone_of(communicator: Communicator) -> TrainingGroup:
    return TrainingGroup([(communicator, communicator.handshake_name)])


def save(path: Path, communicator: Communicator, step: int, **options: Any) -> Any:
    """Save the step and the rank of every rank."""
    everyone = everyone_of(communicator)
    state = {"step": step, "rank": communicator.rank, "w": np.full(1000, step + communicator.rank)}
    return save_set(path, everyone, lambda: SavePoint(step, "run"), lambda: state, **options)


def found(path: Path, communicator: Communicator, step: int | None = None) -> Any:
    """Return what a rank loads: step and rank; None for nothing."""
    everyone = everyone_of(communicator)
    source = find_file(path, everyone.global_rank, everyone.fingerprint, everyone.is_root, step)
    if source is None:
        return None
    state = decode(read_content(source.file))
    assert (state["w"] == state["step"] + state["rank"]).all()
    assert state["step"] == source.saved.step
    return state["step"], state["rank"], source.own, source.among_others


def steps(path: Path) -> list[int]:
    return [saved.step for saved in sets_in(path) if saved.complete]


def test_the_newest_set_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"

    def work(communicator: Communicator) -> list[Any]:
        seen = [found(path, communicator)]
        for step in (10, 20, 30, 20):  # Training has gone back to 10, and has come to 20 again.
            save(path, communicator, step)
        return [*seen, found(path, communicator), found(path, communicator, step=30)]

    for rank, seen in enumerate(run_ranks(2, work)):
        assert seen == [None, (20, rank, True, False), (30, rank, True, False)]
    assert sorted(folder.name for folder in path.iterdir()) == [
        *("000001-step10", "000002-step20", "000003-step30", "000004-step20")
    ]
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 15\. It has steps 10, 20, 30, 20"):
        found(path, LocalCommunicator(), step=15)


def test_the_last_k_are_kept(tmp_path: Path) -> None:
    for step, keep, expected in ((1, 2, [1]), (2, 2, [1, 2]), (3, 2, [2, 3]), (4, None, [2, 3, 4]), (5, 1, [5])):
        save(tmp_path, LocalCommunicator(), step, keep=keep)
        assert steps(tmp_path) == expected
        assert len(list(tmp_path.iterdir())) == len(expected)


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_how_many_are_kept_is_a_number(tmp_path: Path, keep: Any) -> None:
    for kind, message in errors(2, lambda communicator: save(tmp_path, communicator, 1, keep=keep)):
        assert kind in (TypeError, ValueError)
        assert "`keep` must be an int >= 1" in message


def test_other_ranks_start_from_the_file_of_the_root(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(2, lambda communicator: save(tmp_path, communicator, 10))
    for size in (1, 3):
        seen = run_ranks(size, lambda communicator: found(tmp_path, communicator))
        assert seen == [(10, 0, False, True)] * size
    # The root's file alone.
    (tmp_path / "000001-step10" / "rank-1.npz").unlink()
    seen = run_ranks(2, lambda communicator: found(tmp_path, communicator))
    assert seen == [(10, 0, True, False), (10, 0, False, False)]
    # A disk without it.
    (tmp_path / "000001-step10" / "rank-0.npz").unlink()
    with caplog.at_level(logging.WARNING):
        seen = outcomes(3, lambda communicator: found(tmp_path, communicator))
    assert seen[1:] == [None, None]
    assert "rank-0.npz is missing" in str(seen[0])
    assert "Rank 1 sees no file of the root" in caplog.text
    for _, message in errors(2, lambda communicator: found(tmp_path, communicator)):
        assert "is missing. To resume from another checkpoint, remove the folder" in message


def damaged(set_: Path, other: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is wrong with the file of rank 1, and what makes it so."""
    file, manifest = set_ / "rank-1.npz", set_ / "manifest.json"
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    yield "rank-1.npz is damaged: it has 100 bytes", lambda: file.write_bytes(whole[:100])
    yield "rank-1.npz is damaged or belongs to another checkpoint", lambda: file.write_bytes(flipped)
    yield "rank-1.npz is damaged or belongs to another checkpoint", lambda: shutil.copy(other / "rank-1.npz", file)
    yield "rank-1.npz is damaged or belongs to another checkpoint", lambda: shutil.copy(set_ / "rank-0.npz", file)
    yield (
        "rank-1.npz is damaged or belongs to another checkpoint",
        lambda: shutil.copy(other / "manifest.json", manifest),
    )
    text = manifest.read_text()
    yield (
        "manifest.json is damaged: it was altered",
        lambda: manifest.write_text(text.replace('"step": 2', '"step": 3')),
    )
    yield "manifest.json is damaged", lambda: manifest.write_text(text[:100])
    yield "manifest.json is damaged", lambda: manifest.write_text("[]")
    yield (
        "has version 99, but this hvd_periodic reads version 1",
        lambda: manifest.write_text(text.replace('"version": 1', '"version": 99')),
    )


@pytest.mark.parametrize("number", range(9))
def test_damaged_sets_are_refused_by_name(tmp_path: Path, number: int) -> None:
    for step in (1, 2):
        run_ranks(2, lambda communicator, step=step: save(tmp_path, communicator, step))
    message, damage = list(damaged(tmp_path / "000002-step2", tmp_path / "000001-step1"))[number]
    damage()
    seen = outcomes(2, lambda communicator: found(tmp_path, communicator))
    assert message in str(seen[1])
    assert "or pass at_step=...: there are steps 1" in str(seen[1])
    assert isinstance(seen[1], ValueError)
    if "rank-1.npz is damaged or belongs" not in message:  # Every rank that sees it says so.
        assert message in str(seen[0])
    assert run_ranks(2, lambda communicator: found(tmp_path, communicator, step=1)) == [
        *((1, rank, True, False) for rank in range(2))
    ]


class Events:
    """Counts what changes a disk, and kills the process before one of these events; or notes their names."""

    def __init__(self, patch: pytest.MonkeyPatch, fatal: int = 0) -> None:
        self.names: list[str] = []
        self._fatal = fatal
        for owner, name in (
            *((Path, name) for name in ("replace", "unlink", "rmdir", "mkdir")),
            (os, "fsync"),
            (files._Digesting, "write"),
        ):
            patch.setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(first: Any, *args: Any, **options: Any) -> Any:
            what = Path(f"/proc/self/fd/{first}").readlink().name if isinstance(first, int) else ""
            self.names.append(f"{name} {first.name if isinstance(first, Path) else what}".strip())
            if len(self.names) == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(first, *args, **options)

        return watched


def test_files_are_on_the_disk_before_they_have_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, LocalCommunicator(), 1)
    with monkeypatch.context() as patch:
        events = Events(patch)
        save(tmp_path, LocalCommunicator(), 2, keep=1)
    names = [name for name in events.names if name != "write"]
    pid = os.getpid()
    assert names == [
        f"mkdir {tmp_path.name}",
        "mkdir 000002-step2",
        f"fsync {tmp_path.name}",
        f"fsync .rank-0.npz.{pid}.partial",
        f"replace .rank-0.npz.{pid}.partial",
        "fsync 000002-step2",
        f"fsync .manifest.json.{pid}.partial",
        f"replace .manifest.json.{pid}.partial",
        "fsync 000002-step2",
        "unlink manifest.json",
        "unlink rank-0.npz",
        "rmdir 000001-step1",
    ]


def killed_at(path: Path, event: int) -> bool:
    """Let two ranks, in a process of their own, save step 30, and kill it before an event; return whether it was."""
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as patch:
            Events(patch, event)
            run_ranks(2, lambda communicator: save(path, communicator, 30, keep=2))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_is_killed_anywhere_leaves_the_last_complete_set(tmp_path: Path) -> None:
    outcomes_seen, event, before = set(), 0, tmp_path / "before"
    for step in (10, 20):
        run_ranks(2, lambda communicator, step=step: save(before, communicator, step))  # type: ignore[misc]
    while True:
        event += 1
        path = tmp_path / str(event)
        shutil.copytree(before, path, symlinks=True)
        killed = killed_at(path, event)
        seen = run_ranks(2, lambda communicator, path=path: found(path, communicator))
        assert seen[0][0] in ((20, 30) if killed else (30,))
        assert seen == [(seen[0][0], rank, True, False) for rank in range(2)], event
        outcomes_seen.add((killed, seen[0][0], tuple(steps(path))))
        # What was left is cleaned by the next save, of which nothing is missing.
        run_ranks(2, lambda communicator, path=path: save(path, communicator, 40, keep=2))
        assert steps(path) == [seen[0][0], 40]
        assert len(list(path.iterdir())) == 2
        if not killed:
            break
    assert outcomes_seen == {
        (True, 20, (10, 20)),  # while it was writing
        (True, 30, (10, 20, 30)),  # before the old one was removed
        (True, 30, (20, 30)),  # while it was
        (False, 30, (20, 30)),
    }
    assert event > 20


def test_a_rank_that_cannot_write_is_an_error_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(2, lambda communicator: save(tmp_path, communicator, 1))

    def work(communicator: Communicator) -> None:
        everyone = everyone_of(communicator)
        state = [len] if communicator.rank == 1 else [1]
        save_set(tmp_path, everyone, lambda: SavePoint(2, ""), lambda: state)

    first, second = errors(2, work)
    assert first[0] is RuntimeError
    assert first[1].startswith("The checkpoint failed on rank 1 (1 of 2 ranks): TypeError: A checkpoint holds")
    assert second[0] is TypeError

    def full(stream: Any, data: Any) -> int:
        if "rank-1" in Path(f"/proc/self/fd/{stream.file.fileno()}").readlink().name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(stream, data)

    write = files._Digesting.write
    with monkeypatch.context() as patch:
        patch.setattr(files._Digesting, "write", full)
        first, second = errors(2, lambda communicator: save(tmp_path, communicator, 2))
    assert first[1].startswith("The checkpoint failed on rank 1 (1 of 2 ranks): OSError: [Errno 28] No space left")
    assert second[0] is OSError
    assert steps(tmp_path) == [1]
    assert [file.name for file in (tmp_path / "000002-step2").iterdir()] == ["rank-0.npz"]
    run_ranks(2, lambda communicator: save(tmp_path, communicator, 2))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["000001-step1", "000003-step2"]


def test_a_set_in_the_background_is_complete_once_all_ranks_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), files.write_content

    def held(path: Path, content: Content) -> tuple[int, str]:
        if path.parent.name == "000002-step2" and path.name == "rank-1.npz":
            assert go.wait(60 * PATIENCE)
        return write(path, content)

    monkeypatch.setattr("hvd_periodic.checkpoints.saving.write_content", held)

    def work(communicator: Communicator) -> list[Any]:
        save(tmp_path, communicator, 1)
        saving = save(tmp_path, communicator, 2, background=True)
        saving.complete(wait=False)
        seen = [saving.over, steps(tmp_path)]
        communicator.allgather_object(None, "seen")
        go.set()
        saving.join()
        communicator.allgather_object(None, "written")
        seen += [steps(tmp_path)]
        saving.complete(wait=False)
        return [*seen, saving.over, steps(tmp_path), saving.take_error()]

    assert run_ranks(2, work) == [[False, [1], [1], True, [1, 2], None]] * 2


def test_another_training_leaves_a_set_that_is_not_complete_yet(tmp_path: Path) -> None:
    def work(communicator: Communicator) -> list[int]:
        first = save(tmp_path, communicator, 1, background=True)
        save(tmp_path, communicator, 2)
        before = steps(tmp_path)
        first.wait()
        return [*before, *steps(tmp_path)]

    assert run_ranks(2, work) == [[2, 1, 2]] * 2


def test_all_ranks_write_in_the_background_or_none(tmp_path: Path) -> None:
    found = errors(2, lambda communicator: save(tmp_path, communicator, 1, background=communicator.rank == 1))
    text = "`background` must be the same on all ranks. Received: background=False on rank 0; background=True on rank 1"
    assert found == [(ValueError, text)] * 2


class Observed(ThreadCommunicator):
    """Notes the threads that communicate."""

    threads: ClassVar[set[str]] = set()

    def allgather_object(self, value: object, name: str) -> list[Any]:
        self.threads.add(threading.current_thread().name)
        return super().allgather_object(value, name)


def test_the_thread_that_writes_communicates_nothing(tmp_path: Path) -> None:
    """Horovod confuses eager operations of two threads in TensorFlow, and numbers the collectives without a name."""

    def work(communicator: ThreadCommunicator) -> None:
        communicator.__class__ = Observed
        for step in (1, 2, 3):
            saving = save(tmp_path, communicator, step, background=True, keep=2)
            saving.wait()

    run_ranks(2, work)
    assert steps(tmp_path) == [2, 3]
    assert Observed.threads
    assert "hvd_periodic.checkpoint" not in Observed.threads


def test_an_error_of_the_thread_is_one_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = files.write_content

    def full(path: Path, content: Content) -> tuple[int, str]:
        if path.name == "rank-1.npz":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr("hvd_periodic.checkpoints.saving.write_content", full)

    def work(communicator: Communicator) -> list[str]:
        saving = save(tmp_path, communicator, 1, background=True)
        seen = []
        for _ in range(2):
            try:
                saving.wait()
                seen.append("")
            except RuntimeError as error:
                seen.append(str(error))
        return seen

    first, second = run_ranks(2, work)
    assert first[0].startswith(
        "A checkpoint that was written in the background failed: The checkpoint failed on rank 1"
    )
    assert "No space left" in first[0]
    assert "failed: [Errno 28] No space left on device. Rank 1 needs 0.0 MB there" in second[0]
    assert first[1] == second[1] == ""  # An error is raised once.
    assert steps(tmp_path) == []


def test_a_set_that_is_being_written_is_not_loaded(tmp_path: Path) -> None:
    saving = save(tmp_path, LocalCommunicator(), 1, background=True)
    with pytest.raises(
        RuntimeError, match=r"000001-step1 is being written in the background: before load\(\), call wait\(\)"
    ):
        require_complete(tmp_path)
    require_complete(tmp_path / "another")
    saving.wait()
    require_complete(tmp_path)


def test_a_set_whose_ranks_are_lost_stays_incomplete(tmp_path: Path) -> None:
    """As under elastic Horovod."""
    meeting = ModelAverageOptimizer(SGD(0.1), {"x": np.zeros(1)}, 2).synchronizer.handshake
    saving = meeting.background_save = save(tmp_path, LocalCommunicator(), 1, background=True)
    meeting.rejoin()
    assert meeting.background_save is None
    with pytest.raises(RuntimeError, match="000001-step1 is not complete: the ranks of the job have changed"):
        saving.wait()
    saving.wait()
    assert steps(tmp_path) == []
    save(tmp_path, LocalCommunicator(), 2)
    assert [folder.name for folder in tmp_path.iterdir()] == ["000002-step2"]
