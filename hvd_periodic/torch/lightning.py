"""PyTorch Lightning 2: a strategy for ranks that already run, and the center wherever Lightning reads the model.

Needs ``lightning``, which only this module imports.
"""

from __future__ import annotations

import logging
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_periodic.comm.base import Communicator
from hvd_periodic.torch.center import copied
from hvd_periodic.torch.communicator import communicator_of
from hvd_periodic.torch.reporting import Values
from hvd_periodic.torch.trainers import Centers, gather, share_average

logger = logging.getLogger("hvd_periodic")

_KEY = "hvd_periodic"
"""The key in a checkpoint that holds the save it belongs to, and its number of ranks."""

_CONSTRUCTION, _END = 1, 2
"""Further places of handshakes, numbered as in ``TRAINER_CALLS`` of :mod:`hvd_periodic.comm.handshake`."""

_SWA = callbacks.StochasticWeightAveraging
_AVERAGING: tuple[Any, ...] = (_SWA, getattr(callbacks, "WeightAveraging", _SWA))
"""Callbacks that average weights; the second is from Lightning 2.6."""

_REDUCTIONS: dict[str, Any] = {
    "mean": torch.mean,
    "avg": torch.mean,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


class PeriodicStrategy(ParallelStrategy):
    """Tells a ``Trainer`` about ranks that train on their own and exchange through the optimizer.

    Rank and world size are the job's: samplers give each rank its share, metrics with ``sync_dist=True`` and
    torchmetrics cover all ranks, early stopping ends all ranks at once, and only the root writes logs and checkpoints.
    No gradient is averaged. Use it together with a :class:`PeriodicCallback`::

        class Digits(LightningModule):
            def configure_optimizers(self):
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
                return hvdp.ElasticAverageOptimizer(optimizer, self, communication_period=10)

        hvd.init()
        trainer = Trainer(strategy=PeriodicStrategy(), callbacks=[PeriodicCallback()], max_epochs=10)
        trainer.fit(Digits(), loader, validation_loader)

    Args:
        process_set: the ranks, as in :class:`~hvd_periodic.options.Options`. Default: all of the job.
        every_rank: also save the state of every rank, each in its own file next to the root's
            (``last.ckpt.ranks/1.ckpt``): training then resumes exactly, bit for bit. Otherwise, and with another number
            of ranks, all ranks resume from the center, with the root's local optimizer.

    Raises:
        RuntimeError: neither Horovod nor torch.distributed is initialized.
    """

    strategy_name = "periodic"

    def __init__(self, process_set: Any = None, every_rank: bool = False) -> None:
        self.communicator = communicator_of(process_set)
        super().__init__(cluster_environment=_Ranks(self.communicator))
        self._every_rank, self.settled = every_rank, False

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.communicator.size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The sampler arguments that select this rank's share of the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def root_device(self) -> torch.device:
        """The device of this rank: the only one, or the one with the number of its local rank."""
        devices = self.parallel_devices or [torch.device("cpu")]
        place = self.local_rank if len(devices) > 1 else 0
        if place >= len(devices):
            raise ValueError(
                f"`Trainer(devices=...)` must have a device for every rank of a host, or one that all use. Received: "
                f"{len(devices)} devices, and local rank {place}"
            )
        device: torch.device = devices[place]
        return device

    def set_world_ranks(self) -> None:
        """Restrict logging and writing to the root."""
        rank_zero_only.rank = self.global_rank

    def setup(self, trainer: Trainer) -> None:
        """Put the model on its device and make its optimizers, as on a single device."""
        if self._layer_sync is not None:
            raise ValueError(
                "`Trainer(sync_batchnorm=True)` averages statistics at every step, for which all ranks would wait: "
                "omit it; statistics are averaged at exchanges"
            )
        if trainer.state.fn == TrainerFn.FITTING and not any(
            isinstance(c, PeriodicCallback) for c in trainer.callbacks
        ):
            raise ValueError(
                "PeriodicStrategy needs a PeriodicCallback: pass Trainer(callbacks=[PeriodicCallback(), ...]), which "
                "validates and saves the center"
            )
        self.settled = False
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Move the module to this rank's device."""
        self.model.to(self.root_device)

    def gather(self, value: Any, group: Any = None) -> list[Any]:
        """Return the values of all ranks, in rank order: tensors of any shapes, or picklable objects."""
        return gather(self.communicator, value)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all ranks, stacked."""
        if sync_grads:
            raise ValueError("all_gather(sync_grads=True): gradients of one rank do not flow to others here")
        return torch.stack(self.gather(tensor))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean of a tensor over ranks; or ``"sum"``, ``"max"``, ``"min"``."""
        operation = str(reduce_op or "mean").rpartition(".")[2].lower()
        if operation not in _REDUCTIONS:
            raise ValueError(f"`reduce_op` must be one of {', '.join(_REDUCTIONS)}. Received: {reduce_op!r}")
        values = torch.stack(self.gather(torch.as_tensor(tensor, device=self.root_device)))
        if operation in ("mean", "avg") and not values.is_floating_point():
            values = values.float()
        return _REDUCTIONS[operation](values, dim=0)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self.gather(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one rank."""
        return self.gather(obj if self.global_rank == src else None)[src]

    def teardown(self) -> None:
        """Tear down all but the module and its optimizers, which stay on their device and can be saved afterwards."""
        for part in (self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Restore after optimizers are made: these give all ranks the root's values, then each rank loads its own."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with the values of the center; after training, with the values that it has."""
        _share_averages(self)
        if not self.optimizers or self.settled:
            state: dict[str, Any] = super().lightning_module_state_dict()
            return state
        return Centers(self.optimizers).state_of(self.lightning_module)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the center on the root; before that, with ``every_rank``, write the state of each rank."""
        if self._every_rank and "optimizer_states" in checkpoint:
            stamp = {"save": self.broadcast(uuid.uuid4().hex), "ranks": self.world_size}
            # A callback that averages weights has stored the average in place of the model, and the model elsewhere.
            replica = "current_model_state" if "current_model_state" in checkpoint else "state_dict"
            own = {**checkpoint, replica: copied(self.lightning_module.state_dict()), _KEY: stamp}
            self.checkpoint_io.save_checkpoint(own, self._file_of_rank(filepath))
            self.barrier("files of ranks")
            checkpoint[_KEY] = stamp
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return this rank's own checkpoint, if training resumes and all ranks have theirs; otherwise the root's.

        If training resumes, callbacks' thawed parameters are adopted, so that the state of the optimizers fits.
        """
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            return found
        found = self._own_of(found, checkpoint_path, weights_only)
        self._thaw(found.get("callbacks", {}))
        return found

    def _own_of(self, found: dict[str, Any], checkpoint_path: Any, weights_only: bool | None) -> dict[str, Any]:
        """Return what this rank resumes from, given the root's checkpoint."""
        stamp = found.get(_KEY)
        file, own = self._file_of_rank(checkpoint_path), None
        if stamp is not None and stamp["ranks"] == self.world_size and file.is_file():
            own = self.checkpoint_io.load_checkpoint(file, weights_only=weights_only)
        exact = self.gather(own is not None and own.get(_KEY) == stamp)
        if all(exact) and own is not None:
            return dict(own)
        if stamp is not None and self.is_global_zero:
            logger.warning(
                "%s was saved by %d ranks, but not all of them have found their files: all ranks resume from its "
                "center",
                checkpoint_path,
                stamp["ranks"],
            )
        return found

    def _thaw(self, states: dict[str, Any]) -> None:
        """Add the parameter groups that finetuning callbacks had added when their states were saved; collective."""
        named, thawed = dict(self.lightning_module.named_parameters()), set[torch.nn.Parameter]()
        finetuning = _finetuning(self.lightning_module.trainer)
        for callback in finetuning:
            saved = states.get(callback.state_key, {}).get("internal_optimizer_metadata", {})
            for place, groups in saved.items():
                for group in groups[len(self.optimizers[place].param_groups) :]:
                    added = [named[name].requires_grad_() for name in group["params"]]
                    self.optimizers[place].add_param_group({**group, "params": added})
                    thawed.update(added)
        # freeze(train_bn=False) has also stopped the running statistics.
        for module in self.lightning_module.modules():
            if isinstance(module, _BatchNorm) and not thawed.isdisjoint(module.parameters(recurse=False)):
                module.track_running_stats = True
        if finetuning:
            Centers(self.optimizers).adopt(self.communicator)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, including the files of ranks."""
        super().remove_checkpoint(filepath)
        own = self._file_of_rank(filepath)
        if own.is_file():
            self.checkpoint_io.remove_checkpoint(own)
        with suppress(OSError):  # Only the last rank that sees the folder leaves it empty.
            own.parent.rmdir()

    def _file_of_rank(self, filepath: Any) -> Path:
        return Path(f"{filepath}.ranks") / f"{self.global_rank}.ckpt"


class PeriodicCallback(Callback):
    """Lets Lightning validate, test, predict with and save the center; ends training on all ranks; logs exchanges.

    In ``validation_step`` and similar hooks the module holds the center. Checkpoints hold it under ``"state_dict"``,
    which ``load_from_checkpoint`` reads. At the end of training all ranks exchange their remaining steps, and from then
    on the module holds the center. Ranks may have different numbers of batches: at the end of each epoch, a rank with
    fewer takes part in the exchanges of the others, and then all continue together. If a ``BaseFinetuning`` callback
    thaws or adds parameters at the start of an epoch, the optimizers adopt them before its first batch.

    Args:
        log_every: log one in so many exchanges with the trainer's loggers, as ``exchange/...``, see
            :class:`~hvd_periodic.torch.Reporter`; 0: none.

    Raises:
        TypeError: an optimizer of another package.
        ValueError: a trainer with another strategy than :class:`PeriodicStrategy`, a callback that replaces
            parameters, or a ``BaseFinetuning`` callback where ``adopt()`` is not available; on every rank.
    """

    def __init__(self, log_every: int = 1) -> None:
        self._log_every = log_every
        self._centers = Centers([])
        self._uneven = self._epoch_begins = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse other strategies; make torchmetrics cover all ranks."""
        strategy = trainer.strategy
        if not isinstance(strategy, PeriodicStrategy):
            raise ValueError(
                "PeriodicCallback needs Trainer(strategy=PeriodicStrategy()): other strategies average gradients at "
                f"every step, or know only one rank. Received: {type(strategy).__name__}"
            )
        if stage == TrainerFn.FITTING:
            _refuse_callbacks(trainer, pl_module)
        # Put this one first: its last exchange sends the trained values, and all other callbacks see the center.
        trainer.callbacks = [self, *(callback for callback in trainer.callbacks if callback is not self)]
        # With torch.distributed, Lightning would broadcast a signal at every batch: ranks would wait for each other at
        # every step, and ranks with more batches forever. Instead, each rank ends on its own signal. No argument turns
        # it off. Test: test_lightning.py::test_uneven_data.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        for metric in pl_module.modules():
            if getattr(metric, "dist_sync_fn", metric) is None:
                metric.dist_sync_fn, metric.distributed_available_fn = strategy.gather, lambda: strategy.is_distributed

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the optimizers; refuse those that could not adopt what callbacks will thaw."""
        self._centers = Centers(trainer.optimizers)
        _refuse_finetuning(trainer, self._centers)

        def log(values: Values, step: int) -> None:
            for place in trainer.loggers:
                place.log_metrics(values, step)

        self._centers.report(log, self._log_every)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out whether all ranks are sure to have the same number of batches."""
        batches = set(trainer.strategy.gather(trainer.num_training_batches))
        self._uneven = len(batches) > 1 or batches == {float("inf")}
        for callback in _finetuning(trainer):
            # Lightning loads callbacks after on_fit_start here, where they would have replaced the parameter groups,
            # and would do so in the next fit(). Test: test_lightning.py::test_thawed_layers_go_on_to_the_bit.
            callback._restarting = False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take note that callbacks may now change which parameters are trained."""
        self._epoch_begins = True

    def on_train_batch_start(self, trainer: Trainer, *of_batch: Any) -> None:
        """Adopt, on all ranks, what callbacks have thawed or added since the epoch began."""
        if self._epoch_begins and _finetuning(trainer):
            self._centers.adopt(trainer.strategy.communicator)
        self._epoch_begins = False

    def on_train_batch_end(self, trainer: Trainer, *of_batch: Any) -> None:
        """Wait for the other ranks at the end of an epoch, if they may have other numbers of batches."""
        if self._uneven and trainer.is_last_batch:
            self._centers.finalize()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave training together; the module holds the center from now on."""
        self._centers.finalize()
        gather(trainer.strategy.communicator, None, place=_END)
        self._centers.settle(pl_module)
        _share_averages(trainer.strategy)
        trainer.strategy.settled = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the center; make callbacks that show an average of weights show the average over all ranks."""
        _share_averages(trainer.strategy)
        self._centers.enter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go back to the replica."""
        self._centers.leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Go back to the replica."""
        self._centers.leave()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the optimizers."""
        self._centers = Centers([])


def _share_averages(strategy: Any) -> None:
    """Set the weight averages that Lightning's callbacks update on each rank to their mean over ranks; collective."""
    trainer = strategy.lightning_module.trainer
    if trainer.state.fn != TrainerFn.FITTING or strategy.settled:
        return
    for callback in trainer.callbacks:
        if isinstance(callback, _AVERAGING):
            average = callback._average_model  # It has no public name.
            if average is not None:
                # SWA's average is a copy of the module, which may itself have a submodule named ``module``.
                model, counted = (average, callback) if isinstance(callback, _SWA) else (average.module, average)
                share_average(strategy.communicator, model, int(counted.n_averaged or 0))


def _finetuning(trainer: Trainer) -> list[Any]:
    """Return the callbacks that thaw parameters, or add them, at the start of an epoch."""
    return [callback for callback in trainer.callbacks if isinstance(callback, callbacks.BaseFinetuning)]


def _refuse_callbacks(trainer: Trainer, module: LightningModule) -> None:
    """Refuse callbacks whose effects on one rank the others would not see."""
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if isinstance(callback, callbacks.ModelPruning):
            raise ValueError(
                f"{name} replaces parameters during training, by others and by masks of each rank: omit it, and prune "
                f"the module before Trainer.fit(). Received: callbacks=[{name}(), ...]"
            )
        if isinstance(callback, _SWA) and trainer.max_epochs != -1 and _SWA.pl_module_contains_batch_norm(module):
            raise ValueError(
                f"{name} recomputes the statistics of BatchNorm after training, on each rank from its own data: "
                "use EMAWeightAveraging, which averages statistics, too. "
                f"Received: callbacks=[{name}(), ...]"
            )


def _refuse_finetuning(trainer: Trainer, centers: Centers) -> None:
    """Refuse callbacks that thaw parameters if an optimizer cannot adopt them."""
    refused = next(filter(None, (synchronizer.adoption_refusal() for synchronizer in centers.synchronizers)), None)
    for callback in _finetuning(trainer) if refused else ():
        name = type(callback).__name__
        raise ValueError(
            f"{name} thaws or adds parameters during training, but adopt() is not available {refused}: omit it, and "
            f"freeze parameters before Trainer.fit(). Received: callbacks=[{name}(), ...]"
        )


class _Ranks(ClusterEnvironment):
    """The ranks of a communicator, which Lightning has not started.

    The ranks gather their hosts, which gives a rank's number on its host, and the host's number among all.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._rank, self._size = communicator.rank, communicator.size
        hosts = gather(communicator, communicator.host, place=_CONSTRUCTION)
        self._local_rank = hosts[: self._rank].count(communicator.host)
        self._node_rank = sorted(set(hosts), key=hosts.index).index(communicator.host)

    creates_processes_externally = True
    main_address = ""
    main_port = 0

    @staticmethod
    def detect() -> bool:
        """Return False: this environment is never detected."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the number of ranks is given."""

    def global_rank(self) -> int:
        """Return this rank."""
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the rank is given."""

    def local_rank(self) -> int:
        """Return this rank's number on its host."""
        return self._local_rank

    def node_rank(self) -> int:
        """Return the number of this rank's host."""
        return self._node_rank
