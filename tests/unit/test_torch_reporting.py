"""Where PyTorch shows exchanges, and the best center."""

from __future__ import annotations

import contextlib
import copy
import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import Communicator, LocalCommunicator  # noqa: E402
from tests.helpers import run_ranks  # noqa: E402

PERIOD = 2


def trained(steps: int, *places: Any, communicator: Any = None, report: bool = True, **options: Any) -> Any:
    """Return model and optimizer after so many steps, of which exchanges are reported."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    every = {name: options.pop(name) for name in ("every", "distance") if name in options}
    optimizer = hvdp.ElasticAverageOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.125),
        model,
        PERIOD,
        0.25,
        process_set=communicator or LocalCommunicator(),
        **options,
    )
    hvdp.Reporter(optimizer, *places, **every)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        if report:
            optimizer.synchronizer.report(1.0 + step)
        optimizer.step()
    return model, optimizer


class Writer:
    """What a SummaryWriter, a run and a progress bar are asked to do."""

    def __init__(self, *methods: str) -> None:
        self.calls: list[Any] = []
        for method in methods:
            setattr(self, method, lambda *args, **kwargs: self.calls.append((args, kwargs)))


def test_every_place_shows_the_same(tmp_path: Path) -> None:
    """Checked beside counters and distance; the table can be read, and is appended to."""
    told: list[Any] = []
    board, run, bar = Writer("add_scalar"), Writer("log"), Writer("set_postfix")
    path = tmp_path / "tables" / "exchanges.csv"
    _, optimizer = trained(4, board, run, bar, path, lambda step, values: told.append((step, values)))
    assert [step for step, _ in told] == [2, 4]
    last = told[-1][1]
    assert set(last) == {
        *("rounds", "seconds", "waited_seconds", "bytes_sent", "step_seconds"),
        *("loss", "learning_rate", "center_distance"),
    }
    assert last["rounds"] == optimizer.synchronizer.rounds == 2
    assert last["center_distance"] == optimizer.synchronizer.distance() > 0
    assert (last["loss"], last["learning_rate"]) == (3.5, 0.125)
    assert [(name, value) for (name, value, step), _ in board.calls if step == 4] == [
        (f"exchange/{name}", value) for name, value in last.items()
    ]
    assert run.calls[-1][0][0] == {"exchange/step": 4} | {f"exchange/{name}": value for name, value in last.items()}
    assert bar.calls[-1][0][0] == {"rounds": "2", "loss": "3.5", "center_distance": f"{last['center_distance']:.4g}"}
    trained(2, path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["step"] for row in rows] == ["2", "4", "2"]
    assert float(rows[1]["center_distance"]) == last["center_distance"]
    assert rows[1]["staleness"] == ""


def test_real_boards_and_bars_take_it(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    tqdm = pytest.importorskip("tqdm")
    writer = tensorboard.SummaryWriter(str(tmp_path))
    text = io.StringIO()
    with tqdm.tqdm(total=4, file=text) as bar:
        trained(4, writer, bar)
        bar.update(4)
    writer.close()
    assert "center_distance=" in text.getvalue()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("exchange/center_distance")] == [2, 4]


@pytest.mark.parametrize("center", ["root", "sharded"])
def test_a_divided_center_is_not_read_by_one_rank(center: str) -> None:
    def run(communicator: Communicator) -> list[Any]:
        told: list[Any] = []
        places = [lambda step, values: told.append(values)] if communicator.rank == 0 else []
        trained(4, *places, communicator=communicator, center=center)
        return told

    told, nothing = run_ranks(2, run)
    assert nothing == []
    assert len(told) == 2
    assert "center_distance" not in told[0]


def test_overlap_is_not_waited_for() -> None:
    """The distance would wait."""
    told: list[Any] = []
    trained(4, lambda step, values: told.append(values), overlap=1)
    assert len(told) == 2
    assert "center_distance" not in told[0]


def test_asynchronously_staleness_is_shown() -> None:
    told: list[Any] = []
    trained(4, lambda step, values: told.append(values), asynchronous=True, report=False, every=2)
    assert [values["rounds"] for values in told] == [1]
    assert told[0]["staleness"] == 0
    assert {"waited_seconds", "loss"} & set(told[0]) == set()
    assert told[0]["center_distance"] > 0


def test_a_copy_has_no_listeners() -> None:
    told: list[Any] = []
    _, optimizer = trained(2, lambda step, values: told.append(values))
    assert copy.deepcopy(optimizer.synchronizer.journal).listeners == []
    assert len(told) == 1


def test_what_makes_no_sense_is_refused() -> None:
    _, optimizer = trained(0)
    with pytest.raises(TypeError, match=r"A Reporter takes a SummaryWriter.*Received: int"):
        hvdp.Reporter(optimizer, 3)
    with pytest.raises(TypeError, match=r"`optimizer` must be an optimizer or synchronizer.*Received: SGD"):
        hvdp.Reporter(optimizer.inner, print)
    with pytest.raises(ValueError, match=r"`every` must be an int of at least 1. Received: every=0"):
        hvdp.Reporter(optimizer, print, every=0)
    with pytest.raises(ValueError, match=r"must be 'max' or 'min'. Received: mode='best'"):
        hvdp.SaveBestCenter("x", torch.nn.Linear(1, 1), optimizer, mode="best")


@pytest.mark.parametrize("center", ["replicated", "root", "sharded"])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_center_is_saved(center: str, mode: str, tmp_path: Path) -> None:
    """By the root alone; after each value, the file is the center of the best one."""
    values = [0.5, 0.25, 0.75, 0.75]

    def run(communicator: Communicator) -> Any:
        model, optimizer = trained(2, communicator=communicator, center=center)
        save_best = hvdp.SaveBestCenter(tmp_path / "best.pt", model, optimizer, mode)
        saved, centers = [], []
        for value in values:
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.synchronizer.sync()
            centers.append(hvdp.center_state_dict(model, optimizer))
            saved.append(save_best(value))
        assert save_best.best == (max(values) if mode == "max" else min(values))
        return saved, centers

    for saved, centers in run_ranks(2, run):
        assert saved == ([True, False, True, False] if mode == "max" else [True, True, False, False])
        best = torch.load(tmp_path / "best.pt", weights_only=True)
        for name, value in centers[2 if mode == "max" else 1].items():
            assert torch.equal(best[name], value)
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


def test_profilers_show_exchanges() -> None:
    with torch.profiler.profile() as profiler:
        trained(5)
    names = [event.name for event in profiler.events()]
    assert names.count("hvd_periodic.exchange") == 2


@pytest.mark.parametrize("center", ["replicated", "sharded"])
def test_what_is_best_survives_and_nan_is_not(center: str, tmp_path: Path) -> None:
    """After a resume on the root alone too: where the center is in shards its word counts on all."""

    def run(communicator: Communicator) -> list[bool]:
        model, optimizer = trained(2, communicator=communicator, center=center)
        before = hvdp.SaveBestCenter(tmp_path / "best.pt", model, optimizer)
        saved = [before(float("nan")), before(0.9)]
        resumed = hvdp.SaveBestCenter(tmp_path / "best.pt", model, optimizer)
        if communicator.rank == 0 or center == "replicated":
            resumed.load_state_dict(before.state_dict())
        return [*saved, resumed(0.5), resumed(0.95)]

    assert run_ranks(2, run) == [[False, True, False, True]] * 2


PHASES = {
    "synchronous": ({}, {"exchange", "meeting"}),
    "overlapped": ({"overlap": 1}, {"exchange", "meeting", "begin", "arrive", "land"}),
    "asynchronous": ({"asynchronous": True}, {"exchange"}),
}


@pytest.mark.parametrize("kind", PHASES)
def test_profilers_show_every_phase(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch's profiler, and in NVTX where GPUs are used; exchanges of finalize() as well."""
    options, phases = PHASES[kind]
    ranges: list[str] = []

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[None]:
        ranges.append(name)
        yield

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", noted)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _, optimizer = trained(5, **options)
        before = len(ranges)
        optimizer.finalize()
    shown = [event.name for event in profile.events() if event.name.startswith("hvd_periodic.")]
    assert sorted(shown) == sorted(ranges)
    assert set(shown) == {f"hvd_periodic.{phase}" for phase in phases}
    assert "hvd_periodic.exchange" in ranges[before:]
