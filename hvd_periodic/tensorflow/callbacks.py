"""Callbacks for ``model.fit`` with a periodic optimizer.

Several of them add to ``logs``, so list them before callbacks that read ``logs``, such as
``keras.callbacks.TensorBoard``::

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
from hvd_periodic.keras.fit import callbacks_of_fit, swaps
from hvd_periodic.keras.model import described
from hvd_periodic.tensorflow.checkpoints import save
from hvd_periodic.tensorflow.fit_end import FitEnd
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

    A new optimizer does this by itself. Use the callback for values that were loaded afterwards on the root alone. If
    every rank has loaded its own state, the callback would replace these states. All ranks must use it.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast; if the model is not built yet, the first step broadcasts the root's values instead."""
        optimizer = _optimizer_of(self)
        if optimizer.built or self.model.built:
            optimizer.build(self.model.trainable_variables)
            optimizer.start()
            optimizer.synchronizer.broadcast()


def _refuse_swapped(callback: keras.callbacks.Callback, fellows: Sequence[keras.callbacks.Callback]) -> None:
    """Raise a ValueError if the model holds moving averages when a callback reads the trained weights."""
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

    The last exchange uses the replicas as the last step left them. It takes place before Keras or any other callback
    changes the model at the end of training, wherever this one is in the list. All ranks then hold:

    - the center;
    - with ``use_ema=True``, the mean of all ranks' moving averages; ``optimizer.center()`` gives the center;
    - with ``EarlyStopping(restore_best_weights=True)``, the center of the best epoch, as chosen by the root's callback.

    Batch-norm statistics are exchanged as set in ``buffers=``. Ranks that have fewer batches than others, or stop
    early, take part in exchanges until all are done. All ranks must use it.

    Raises:
        TypeError: the model's optimizer is not a periodic one.
        ValueError: when training begins, other callbacks make this impossible.
    """

    def __init__(self) -> None:
        super().__init__()
        self._end: FitEnd | None = None
        self._epoch_is_over = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the other callbacks."""
        optimizer, fellows = _optimizer_of(self), callbacks_of_fit(self)
        for fellow in fellows:
            if isinstance(fellow, keras.callbacks.BackupAndRestore):
                _refuse_swapped(fellow, fellows)
        self._epoch_is_over = False
        self._end = optimizer.fit_end = FitEnd(optimizer, self.model, fellows)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keep the center if it is the best; by now all callbacks have handled the end of the previous epoch."""
        if self._end is not None and self._epoch_is_over:
            self._end.keep_best()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note that an epoch has ended, whose center may be kept."""
        self._epoch_is_over = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Finalize, unless Keras has already made the optimizer do so; put the best center into the model."""
        optimizer = _optimizer_of(self)
        end = self._end or FitEnd(optimizer, self.model, [])
        if self._end is None or optimizer.fit_end is end:
            end.run()
        end.restore()
        self._end = optimizer.fit_end = None


class EvaluateCenter(keras.callbacks.Callback):
    """Evaluate the center at the end of every epoch; metrics appear in ``logs`` as ``val_center_loss`` and so on.

    With a replicated center nothing is communicated, and one rank may evaluate for all; with ``center="root"`` or
    ``"sharded"`` all ranks must use the callback. If metrics drive decisions, all ranks should evaluate the same data,
    so that they decide equally. Keras needs to know which direction is better:
    ``EarlyStopping("val_center_loss", mode="min")``.

    Args:
        validation_data: ``(inputs, targets)``, ``(inputs, targets, sample_weights)``, or any other first argument of
            ``model.evaluate``.
        batch_size: samples per batch, if the data are arrays.
        every: evaluate after every so many epochs, 1 or more.

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
        """Evaluate the center and add the metrics to the logs."""
        if (epoch + 1) % self._every:
            return
        with _optimizer_of(self).center():
            metrics = self.model.evaluate(**self._data, batch_size=self._batch_size, verbose=0, return_dict=True)
        if logs is not None:
            logs.update({f"val_center_{name}": value for name, value in metrics.items()})


class SaveBestCenter(keras.callbacks.ModelCheckpoint):
    """Save the model with the values of the center when it is the best so far; on the root only.

    With ``center="root"`` or ``"sharded"`` all ranks must use it. In asynchronous exchange other workers may move the
    center between its evaluation and the save.

    Args:
        filepath: as in ``keras.callbacks.ModelCheckpoint``; ``.weights.h5`` with ``save_weights_only=True``.
        monitor: the metric that decides; :class:`EvaluateCenter` adds metrics of the center.
        mode: whether the ``"min"`` or ``"max"`` of the metric is best. Default: min of a loss, max of an accuracy.
        save_best_only: False: save after every epoch.
        options: other arguments of ``keras.callbacks.ModelCheckpoint``.

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
        """Save the center if ``save_freq`` is a number of batches."""
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
    """Save checkpoints regularly, see :func:`hvd_periodic.tensorflow.save`. All ranks must use it.

    A checkpoint includes ``epoch``, the number of completed epochs. :func:`hvd_periodic.tensorflow.load` returns it;
    pass it as ``initial_epoch`` to the ``fit`` that resumes.

    Args:
        path: folder of this training run and no other.
        every: ``"epoch"`` for the end of every epoch, or the number of local steps between saves, 1 or more; then the
            first batch that completes so many steps saves. All ranks must reach it after the same number of batches.
        keep: number of checkpoints to keep. Default: all.
        background: whether a thread writes while training continues; the end of training waits for it.
        more: further values to save, by name.

    Raises:
        TypeError: the model's optimizer is not a periodic one.
        TypeError, ValueError: ``every`` has another type or value.
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
        """Count local steps from the start of training."""
        optimizer = _optimizer_of(self)
        _refuse_swapped(self, callbacks_of_fit(self))
        self._last_steps = optimizer.synchronizer.local_steps if optimizer.built else 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the number of the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save if enough local steps were taken."""
        if self._every is not None and _optimizer_of(self).synchronizer.local_steps - self._last_steps >= self._every:
            self._save()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save if ``every`` is ``"epoch"``."""
        self._epoch = epoch + 1
        if self._every is None:
            self._save()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Wait for a background save."""
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
    ``exchange_seconds``, since the start of training; in asynchronous exchange also ``staleness_mean`` and
    ``staleness_max``. With ``center="root"`` or ``"sharded"`` all ranks must use it.

    Raises:
        TypeError: the model's optimizer is not a periodic one.
        ValueError: when training begins, ``SwapEMAWeights(swap_on_epoch=True)`` comes before this one.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the callbacks before this one."""
        _optimizer_of(self)
        _refuse_swapped(self, callbacks_of_fit(self))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the entries to the logs."""
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
    """Report the loss of every batch to schedules such as :class:`~hvd_periodic.AdaComm`, at the end of the batch.

    The last batch before an exchange therefore counts for the next round. Keras gives callbacks the mean over the epoch
    so far; the losses of single batches are computed from it as if all batches had the same size. All ranks must use
    it.

    Raises:
        TypeError: the model's optimizer is not a periodic one.
        ValueError: a loss is NaN or infinite.
    """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start a new mean."""
        self._batches, self._total = 0, 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the mean over the batches since the last call."""
        batches = batch + 1
        total = batches * float((logs or {})["loss"])
        _optimizer_of(self).synchronizer.report((total - self._total) / (batches - self._batches))
        self._batches, self._total = batches, total
