"""Callbacks for ``model.fit`` with a periodic optimizer.

They add to ``logs``, so they come before callbacks that read those, such as ``keras.callbacks.TensorBoard``::

    callbacks = [
        hvdp.callbacks.EvaluateCenter((images, labels)),
        hvdp.callbacks.ReportExchanges(),
        hvdp.callbacks.SaveBestCenter("best.keras"),
        keras.callbacks.TensorBoard(f"logs/{hvd.rank()}"),
        hvdp.callbacks.FinalizeAtEnd(),
    ]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras

from hvd_periodic.arguments import require_int
from hvd_periodic.checkpoints import Saving
from hvd_periodic.tensorflow.checkpoints import save
from hvd_periodic.tensorflow.fit_end import FitEnd, callbacks_of_fit, swaps
from hvd_periodic.tensorflow.model import described
from hvd_periodic.tensorflow.optimizer import PeriodicOptimizer


def _optimizer_of(callback: keras.callbacks.Callback) -> PeriodicOptimizer:
    optimizer = callback.model.optimizer
    if not isinstance(optimizer, PeriodicOptimizer):
        raise TypeError(
            f"{type(callback).__name__} needs a model that is compiled with an optimizer of hvd_periodic.tensorflow. "
            f"Received: {described(optimizer)}"
        )
    return optimizer


class BroadcastAtStart(keras.callbacks.Callback):
    """Give all ranks the root's variables, center and counters when training begins.

    A new optimizer does this by itself. The callback is for what was loaded since then on the root alone. Where every
    rank has loaded a state of its own, it would replace those. All ranks have to use it.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast; where the first batch is yet to build the model, its first step gives all the root's values."""
        optimizer = _optimizer_of(self)
        if optimizer.built or self.model.built:
            optimizer.build(self.model.trainable_variables)
            optimizer.start()
            optimizer.synchronizer.broadcast()


def _refuse_swapped(callback: keras.callbacks.Callback, fellows: Sequence[keras.callbacks.Callback]) -> None:
    """Raise a ValueError where moving averages are in the model when a callback reads what is trained."""
    for fellow in fellows:
        if fellow is callback:
            return
        if swaps(fellow):
            name = type(callback).__name__
            raise ValueError(
                f"{name} comes after SwapEMAWeights(swap_on_epoch=True) in `callbacks`, and would find moving averages "
                f"in place of the trained weights: put {name} before SwapEMAWeights"
            )


class FinalizeAtEnd(keras.callbacks.Callback):
    """Run ``optimizer.finalize()`` when training ends, so that all ranks leave ``fit`` with the same model.

    The last exchange is of the replicas as the last step left them. It takes place before Keras or any other callback
    changes the model at the end of training, wherever this one is in the list. All ranks then hold:

    - the center;
    - with ``use_ema=True``, the mean of all ranks' moving averages, and the center is in ``optimizer.center()``;
    - with ``EarlyStopping(restore_best_weights=True)``, the center of the epoch that is best for the callback of the
      root.

    Batch-norm statistics take part as ``buffers=`` says. Ranks that have fewer batches than others, or stop early, take
    part in exchanges until all are done. All ranks have to use it.

    Raises:
        TypeError: the model's optimizer is not a periodic one.
        ValueError: when training begins, other callbacks with which this cannot hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self._end: FitEnd | None = None
        self._epoch_is_over = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Look at the other callbacks."""
        optimizer, fellows = _optimizer_of(self), callbacks_of_fit(self)
        for fellow in fellows:
            if isinstance(fellow, keras.callbacks.BackupAndRestore):
                _refuse_swapped(fellow, fellows)
        self._epoch_is_over = False
        self._end = optimizer.fit_end = FitEnd(optimizer, self.model, fellows)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keep the center, if it is the best; by now all callbacks have seen the end of the epoch before."""
        if self._end is not None and self._epoch_is_over:
            self._end.keep_best()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note that there is a center to keep."""
        self._epoch_is_over = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Finalize, if Keras has not let the optimizer do so; let the model hold the best center."""
        optimizer = _optimizer_of(self)
        end = self._end or FitEnd(optimizer, self.model, [])
        if self._end is None or optimizer.fit_end is end:
            end.run()
        end.restore()
        self._end = optimizer.fit_end = None


class EvaluateCenter(keras.callbacks.Callback):
    """Evaluate the center at the end of every epoch; metrics appear in ``logs`` as ``val_center_loss`` and so on.

    Where every rank holds the center, nothing is communicated, and one rank may evaluate for all; with
    ``center="root"`` or ``"sharded"`` all ranks have to. With metrics that drive decisions, let all ranks evaluate the
    same data, so that they decide alike; Keras wants to be told which way is better:
    ``EarlyStopping("val_center_loss", mode="min")``.

    Args:
        validation_data: ``(inputs, targets)``, ``(inputs, targets, sample_weights)``, or what else ``model.evaluate``
            takes as its first argument.
        batch_size: samples per batch, where the data are arrays.
        every: epochs between evaluations, 1 or more.

    Raises:
        TypeError: the model's optimizer is not a periodic one.
    """

    def __init__(self, validation_data: Any, batch_size: int | None = None, every: int = 1) -> None:
        super().__init__()
        arrays = isinstance(validation_data, (tuple, list))
        names = ("x", "y", "sample_weight")
        self._data = dict(zip(names, validation_data, strict=False)) if arrays else {"x": validation_data}
        self._batch_size = batch_size
        self._every = require_int(every, "`EvaluateCenter(every=...)`", minimum=1)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Evaluate, and add to the logs."""
        if (epoch + 1) % self._every:
            return
        with _optimizer_of(self).center():
            metrics = self.model.evaluate(**self._data, batch_size=self._batch_size, verbose=0, return_dict=True)
        if logs is not None:
            logs.update({f"val_center_{name}": value for name, value in metrics.items()})


class SaveBestCenter(keras.callbacks.ModelCheckpoint):
    """Save the model with the values of the center, when it is the best so far; on the root rank only.

    With ``center="root"`` or ``"sharded"`` all ranks have to use it. In asynchronous exchange other workers may have
    moved the center between its evaluation and this.

    Args:
        filepath: as in ``keras.callbacks.ModelCheckpoint``; ``.weights.h5`` with ``save_weights_only=True``.
        monitor: what decides; metrics of the center come from :class:`EvaluateCenter`.
        mode: ``"min"`` or ``"max"`` of it is best. Default: the minimum of a loss, the maximum of an accuracy.
        save_best_only: False: save after every epoch.
        options: others of ``keras.callbacks.ModelCheckpoint``.

    Raises:
        TypeError: the model's optimizer is not a periodic one.
        ValueError: ``mode`` is needed.
    """

    def __init__(
        self,
        filepath: Any,
        monitor: str = "val_center_loss",
        mode: str = "auto",
        save_best_only: bool = True,
        **options: Any,
    ) -> None:
        if mode == "auto":
            mode = "min" if monitor.endswith("loss") else "max" if "acc" in monitor else mode
        if mode not in ("min", "max"):
            raise ValueError(
                f"`SaveBestCenter(mode=...)` must be 'min' or 'max' for monitor={monitor!r}. Received: mode={mode!r}"
            )
        super().__init__(filepath, monitor=monitor, mode=mode, save_best_only=save_best_only, **options)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save the center, if ``save_freq`` is a number of batches."""
        if self.save_freq != "epoch":
            with self._center_on_root() as saving:
                if saving:
                    super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save the center."""
        with self._center_on_root() as saving:
            if saving:
                super().on_epoch_end(epoch, logs)

    @contextmanager
    def _center_on_root(self) -> Iterator[bool]:
        optimizer = _optimizer_of(self)
        together = optimizer.synchronizer.exchanger.reads_together
        with optimizer.center() if optimizer.is_root or together else nullcontext():
            yield optimizer.is_root


class Checkpoint(keras.callbacks.Callback):
    """Save a checkpoint now and then, see :func:`hvd_periodic.tensorflow.save`. All ranks have to use it.

    With it goes ``epoch``, the number of epochs that are done: what :func:`hvd_periodic.tensorflow.load` returns of it
    is the ``initial_epoch`` of the job that goes on.

    Args:
        path: folder of this training and no other.
        every: ``"epoch"``: at the end of every epoch; or local steps from one save to the next, 1 or more: at the end
            of the first batch after so many. All ranks have to come to it after the same number of batches.
        keep: checkpoints that are left. Default: all.
        background: let a thread write while training goes on; the end of training waits for it.
        more: what else is saved, by name.

    Raises:
        TypeError: the model's optimizer is not a periodic one.
        TypeError, ValueError: ``every`` is something else.
        ValueError: when training begins, ``SwapEMAWeights(swap_on_epoch=True)`` comes before this one.
        RuntimeError: a file could not be written; on all ranks.
    """

    def __init__(
        self,
        path: Any,
        every: int | str = "epoch",
        keep: int | None = None,
        background: bool = False,
        **more: Any,
    ) -> None:
        super().__init__()
        if isinstance(every, str) and every != "epoch":
            raise ValueError(f"`Checkpoint(every=...)` must be 'epoch' or local steps. Received: {every!r}")
        self._every = None if every == "epoch" else require_int(every, "`Checkpoint(every=...)`", minimum=1)
        self._path, self._more = path, more
        self._keep, self._background = keep, background
        self._epoch, self._last_steps = 0, 0
        self._saving: Saving | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Count local steps from here."""
        optimizer = _optimizer_of(self)
        _refuse_swapped(self, callbacks_of_fit(self))
        self._last_steps = optimizer.synchronizer.local_steps if optimizer.built else 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note which epoch it is."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save, if so many local steps were taken."""
        if self._every is not None and _optimizer_of(self).synchronizer.local_steps - self._last_steps >= self._every:
            self._save()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save, if that is when."""
        self._epoch = epoch + 1
        if self._every is None:
            self._save()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Wait for what is under way."""
        if self._saving is not None:
            self._saving.wait()

    def _save(self) -> None:
        optimizer = _optimizer_of(self)
        self._last_steps = optimizer.synchronizer.local_steps
        options: dict[str, Any] = {"keep": self._keep, "background": self._background, **self._more}
        self._saving = save(self._path, self.model, optimizer, epoch=self._epoch, **options)


class ReportExchanges(keras.callbacks.Callback):
    """Add the state of the exchanges to ``logs`` at the end of every epoch, for TensorBoard and the history.

    The entries are ``rounds``, ``center_distance`` (‖x − c‖₂ on this rank), ``skipped_updates``, ``bytes_sent`` and
    ``exchange_seconds``, since the start of training; of asynchronous exchange also ``staleness_mean`` and
    ``staleness_max``. With ``center="root"`` or ``"sharded"`` all ranks have to use it.

    Raises:
        TypeError: the model's optimizer is not a periodic one.
        ValueError: when training begins, ``SwapEMAWeights(swap_on_epoch=True)`` comes before this one.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Look at the callbacks before this one."""
        _optimizer_of(self)
        _refuse_swapped(self, callbacks_of_fit(self))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add to the logs."""
        synchronizer = _optimizer_of(self).synchronizer
        counters = synchronizer.counters
        if logs is not None:
            logs["rounds"] = counters.rounds
            logs["center_distance"] = synchronizer.distance()
            logs["skipped_updates"] = counters.skipped_updates
            logs["bytes_sent"] = counters.bytes_sent
            logs["exchange_seconds"] = counters.exchange_seconds
            if synchronizer.exchanger.worker is not None:
                logs["staleness_mean"] = counters.staleness_mean
                logs["staleness_max"] = counters.staleness_max


class ReportLoss(keras.callbacks.Callback):
    """Tell schedules such as :class:`~hvd_periodic.AdaComm` the loss of every batch, at its end.

    A batch that is the last before an exchange therefore counts for the round after it. Keras tells callbacks the mean
    over the epoch so far, from which the losses of single batches are worked out as if all batches were of one size.
    All ranks have to use it.

    Raises:
        TypeError: the model's optimizer is not a periodic one.
        ValueError: a loss of NaN or infinity.
    """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin a mean."""
        self._batches, self._total = 0, 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the mean over the batches since the last call."""
        batches = batch + 1
        total = batches * float((logs or {})["loss"])
        _optimizer_of(self).synchronizer.report((total - self._total) / (batches - self._batches))
        self._batches, self._total = batches, total
