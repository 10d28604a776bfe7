"""Reports the exchanges of PyTorch training to TensorBoard and similar tools, and saves the best center."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hvd_periodic.checkpoints.files import write_whole
from hvd_periodic.journal import Listener, Report
from hvd_periodic.torch.center import center_state_dict
from hvd_periodic.torch.optimizer import PeriodicOptimizer, synchronizer_of
from hvd_periodic.torch.sharded_parameters import require_whole
from hvd_periodic.torch.synchronizer import Synchronizer

Values = dict[str, float]
"""Numbers by name."""

Sink = Callable[[int, Values], object]
"""Takes the number of local steps, and the values to show."""


class Reporter(Listener):
    """Shows the exchanges of this rank, in any number of places.

    Example::

        hvdp.Reporter(optimizer, SummaryWriter("runs/easgd"))       # TensorBoard
        hvdp.Reporter(optimizer, wandb.init(project="digits"))      # Weights & Biases
        hvdp.Reporter(optimizer, "exchanges.csv")                   # a CSV table, a row per exchange
        hvdp.Reporter(optimizer, progress := tqdm(loader))          # postfix of the progress bar

    The values are ``rounds``; for this exchange ``seconds``, ``waited_seconds`` and ``bytes_sent`` by this rank;
    ``step_seconds`` since the previous exchange; ``center_distance`` ‖x − c‖₂ after this one; ``loss``, if ``report()``
    was called; ``learning_rate``; asynchronously ``staleness``, the pushes of other ranks since this rank's last. Names
    begin with ``exchange/``, except in tables and progress bars. A rank shows only its own values: make a reporter on
    each rank that you want to see, with separate places.

    Args:
        optimizer: an optimizer or synchronizer of this package.
        places: a ``SummaryWriter``, a run of Weights & Biases, a progress bar of tqdm, the path of a CSV table, to
            which rows are appended; or a function of local steps and a dict of numbers.
        every: show one exchange out of this many.
        distance: whether to compute the distance, which reads replica and center once; never if the center is on other
            ranks, or with ``overlap``, when it would wait for the exchange in flight.

    Raises:
        TypeError: an unsupported kind of place or optimizer.
        ValueError: ``every`` below 1.
    """

    def __init__(
        self, optimizer: PeriodicOptimizer | Synchronizer, *places: Any, every: int = 1, distance: bool = True
    ) -> None:
        self._synchronizer = synchronizer_of(optimizer)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"`every` must be an int of at least 1. Received: every={every!r}")
        self._sinks = [_sink_of(place) for place in places]
        self._every, self._heard = every, 0
        exchanger = self._synchronizer.exchanger
        at_hand = exchanger.placement.everywhere or exchanger.worker is not None
        self._distance = distance and at_hand and not exchanger.context.overlap
        self._synchronizer.journal.listeners.append(self)

    def exchanged(self, report: Report) -> None:
        """Show this exchange, unless ``every`` skips it."""
        self._heard += 1
        if (self._heard - 1) % self._every:
            return
        shown: dict[str, float | None] = {
            "rounds": report.rounds,
            "seconds": report.seconds,
            "waited_seconds": report.waited,
            "bytes_sent": report.bytes_sent,
            "step_seconds": report.step_seconds,
            "loss": report.loss,
            "learning_rate": report.learning_rate,
            "staleness": report.missed if self._synchronizer.exchanger.worker is not None else None,
            "center_distance": self._synchronizer.distance() if self._distance else None,
        }
        values = {name: value for name, value in shown.items() if value is not None}
        for sink in self._sinks:
            sink(report.step, values)


class SaveBestCenter:
    """Saves the center when it is the best so far; on the root, with ``torch.save``, atomically.

    Args:
        path: path of the file.
        model: the model that is trained.
        optimizer: its optimizer, or its synchronizer.
        mode: ``"max"`` or ``"min"``: whether the largest or the smallest value is best.

    Attributes:
        best: the best value so far; None before the first.

    Raises:
        TypeError: an unsupported kind of model or optimizer.
        ValueError: an unknown ``mode``.

    Example::

        save_best = hvdp.SaveBestCenter("best.pt", model, optimizer)
        for epoch in range(epochs):
            ...
            with optimizer.center():
                accuracy = evaluate(model)
            save_best(accuracy)  # on all ranks
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module,
        optimizer: PeriodicOptimizer | Synchronizer,
        mode: str = "max",
    ) -> None:
        if mode not in ("max", "min"):
            raise ValueError(f"`SaveBestCenter(mode=...)` must be 'max' or 'min'. Received: mode={mode!r}")
        self._synchronizer = synchronizer_of(optimizer)
        between_islands = self._synchronizer.membership.communicator.between_islands
        require_whole(self._synchronizer.replica.sharded, between_islands)
        self._path, self._model, self._sign = Path(path), model, 1.0 if mode == "max" else -1.0
        self.best: float | None = None

    def __call__(self, value: Any) -> bool:
        """Save the center if ``value`` is better than all previous ones; return whether it is, on this rank.

        With ``center="root"`` or ``"sharded"`` all ranks call this, and the root's value decides. NaN is never best.
        """
        measured, membership = float(value), self._synchronizer.membership
        better = not math.isnan(measured) and (self.best is None or self._sign * (measured - self.best) > 0)
        found = better, measured if better else self.best
        if self._synchronizer.exchanger.reads_together:
            found = membership.communicator.broadcast_object(found, f"{membership.name}.best", membership.root)
        better, self.best = found
        if not better:
            return False
        if membership.is_root or self._synchronizer.exchanger.reads_together:
            state = center_state_dict(self._model, self._synchronizer)
            if membership.is_root:
                write_whole(self._path, lambda stream: torch.save(state, stream))
        return True

    def state_dict(self) -> dict[str, float | None]:
        """Return the best value, for ``hvdp.save`` and elastic states."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Restore the best value."""
        self.best = state["best"]


def _sink_of(place: Any) -> Sink:
    """Return a function that shows values in a place, recognized by its methods: no package is imported."""
    if isinstance(place, (str, os.PathLike)):
        return _Table(Path(place))
    if callable(getattr(place, "add_scalar", None)):
        return lambda step, values: [place.add_scalar(f"exchange/{k}", v, step) for k, v in values.items()]
    if callable(getattr(place, "set_postfix", None)):
        return lambda step, values: place.set_postfix(_short(values), refresh=False)
    if callable(getattr(place, "log", None)):
        return lambda step, values: place.log({"exchange/step": step} | {f"exchange/{k}": v for k, v in values.items()})
    if callable(place):
        sink: Sink = place
        return sink
    raise TypeError(
        "A Reporter takes a SummaryWriter, a run of Weights & Biases, a progress bar, the path of a table "
        f"or a function of step and values. Received: {type(place).__name__}"
    )


def _short(values: Values) -> dict[str, str]:
    return {name: f"{values[name]:.4g}" for name in ("rounds", "loss", "center_distance") if name in values}


class _Table:
    """Appends rows to a CSV file; the first row holds the column names."""

    _COLUMNS = (
        *("step", "rounds", "seconds", "waited_seconds", "bytes_sent", "step_seconds"),
        *("loss", "learning_rate", "staleness", "center_distance"),
    )

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or not path.stat().st_size:
            self._append(dict(zip(self._COLUMNS, self._COLUMNS, strict=True)))

    def __call__(self, step: int, values: Values) -> None:
        self._append({"step": step, **values})

    def _append(self, row: dict[str, Any]) -> None:
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._COLUMNS).writerow(row)
