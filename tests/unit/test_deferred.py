"""A center of which each rank holds a part travels while it is written, and is nowhere as a whole."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_periodic import AGN, EASGD, Algorithm, Communicator, DiLoCo, Every
from hvd_periodic.centers import Placement, placement_of, saved_states, saved_vectors
from hvd_periodic.checkpoints import decode, encode, files, save_set
from hvd_periodic.checkpoints.files import read_content
from hvd_periodic.checkpoints.saving import SavePoint
from hvd_periodic.comm.membership import TrainingGroup
from hvd_periodic.numpy import SGD
from hvd_periodic.vectors.lending import Deferred
from tests.covering import covering
from tests.helpers import NumpyTrainer, errors, random_arrays, run_ranks


def trained(communicator: Communicator, algorithm: Algorithm, center: str, **options: Any) -> NumpyTrainer:
    """Return a trainer that has exchanged, and has stepped since."""
    arrays = [*random_arrays(0), *random_arrays(1, "float32")]
    trainer = NumpyTrainer(communicator, arrays, algorithm, Every(2), center=center, **options)
    for step in range(3):
        generator = np.random.default_rng([step, communicator.rank])
        trainer.step([generator.standard_normal(array.shape) for array in arrays])
    return trainer


def save(trainer: NumpyTrainer, communicator: Communicator, path: Path, **options: Any) -> Path:
    """Save what the synchronizer has; return the file of this rank."""
    state, everyone = trainer.synchronizer.state_dict, TrainingGroup([(communicator, communicator.handshake_name)])
    saving = save_set(path, everyone, lambda: SavePoint(3, ""), lambda: {"w": trainer.arrays, **state()}, **options)
    saving.wait()
    return saving.folder / f"rank-{communicator.rank}.npz"


def plain(value: Any) -> Any:
    """Return a state with the bits of arrays in their place."""
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value, key=repr)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize(
    ("size", "center", "algorithm", "background"),
    covering((3, 1), ("root", "sharded"), (EASGD(0.25), AGN(), DiLoCo()), (False, True)),
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else str(value),
)
def test_files_hold_what_states_hold(
    size: int, center: str, algorithm: Algorithm, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_states, "_SMALL_BYTES", 16)
    monkeypatch.setattr(saved_states, "_PART_BYTES", 24)
    made: list[Deferred] = []

    class Noted(Deferred):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    for module in (saved_vectors, saved_states):
        monkeypatch.setattr(module, "Deferred", Noted)

    def work(communicator: Communicator) -> tuple[Any, Any]:
        trainer = trained(communicator, algorithm, center, outer_optimizer=SGD(0.5, 0.9))
        state = {"w": trainer.arrays, **trainer.synchronizer.state_dict()}
        return plain(decode(read_content(save(trainer, communicator, tmp_path, background=background)))), plain(state)

    for saved, state in run_ranks(size, work):
        saved["counters"].pop("exchange_seconds"), state["counters"].pop("exchange_seconds")
        assert saved == state
    assert bool(made) == (not background)


@pytest.mark.parametrize("center", ["root", "sharded"])
@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_rank_whose_disk_is_full_gives_the_others_its_part(
    center: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails before it has read any part, or after the first: nobody waits for it."""
    write = files._Digesting.write

    def full(stream: Any, data: Any) -> int:
        name = Path(f"/proc/self/fd/{stream.file.fileno()}").readlink().name
        if "rank-1" in name and stream.size > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(stream, data)

    monkeypatch.setattr(files._Digesting, "write", full)

    def work(communicator: Communicator) -> None:
        trainer = trained(communicator, DiLoCo(), center)
        path = tmp_path / str(communicator.rank)
        if what == "folder" and communicator.rank == 1:
            path.mkdir()
            (path / "000001-step3").touch()
        save(trainer, communicator, path)

    first, second = errors(2, work)
    assert first[1].startswith("The checkpoint failed on rank 1 (1 of 2 ranks): ")
    assert second[0] is OSError
    assert "Rank 1 needs" in second[1]


@pytest.mark.parametrize("center", ["root", "sharded"])
@pytest.mark.parametrize(
    "error", [RuntimeError("rank 3 has ended"), TimeoutError("This rank has waited for rank 3")], ids=str
)
def test_errors_of_collectives_stay_what_they_are(
    center: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hvd.elastic.run knows them by their type; they are not of the disk."""
    fetched = []

    def fetch(self: Placement, *arguments: Any) -> Any:
        fetched.append(arguments)
        if len(fetched) > 2:
            raise error
        return original(self, *arguments)

    def work(communicator: Communicator) -> None:
        trainer = trained(communicator, EASGD(0.25), center)
        monkeypatch.setattr(placement_of(center), "fetch", fetch)
        save(trainer, communicator, tmp_path)

    original = placement_of(center).fetch
    ((kind, text),) = errors(1, work)
    assert (kind, text) == (type(error), str(error))
    assert len(fetched) == 3


def test_what_cannot_be_saved_is_an_error_before_anything_travels(tmp_path: Path) -> None:
    def work(communicator: Communicator) -> None:
        trainer = trained(communicator, EASGD(0.25), "sharded")
        state, everyone = trainer.synchronizer.state_dict, TrainingGroup([(communicator, communicator.handshake_name)])
        bad = {"bad": len} if communicator.rank == 1 else {}
        save_set(tmp_path, everyone, lambda: SavePoint(3, ""), lambda: {**bad, **state()})

    first, second = errors(2, work)
    assert "rank 1 (1 of 2 ranks): TypeError: A checkpoint holds" in first[1]
    assert second[0] is TypeError


def test_deferred_arrays_are_named_like_others() -> None:
    deferred = Deferred((2,), np.empty(0, "f4"), iter([np.ones(2, "f4")]))
    content = encode({"a": np.zeros(1), "b": [deferred]})
    assert content.tree == {"dict": [["a", {"array": ["a", ""]}], ["b", [{"array": ["b/0", ""]}]]]}
    assert list(content.deferred) == ["b/0"]
    assert content.nbytes == 16
