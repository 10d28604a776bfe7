"""transformers' Trainer and accelerate: they evaluate and save the center, and average no gradients.

Needs ``transformers``, which only this module imports; accelerate is not imported.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hvd_periodic.torch.checkpoints import load, save
from hvd_periodic.torch.data_parallel import averaging_among, switch_off
from hvd_periodic.torch.gradient_averaging import innermost
from hvd_periodic.torch.optimizer import PeriodicOptimizer, levels_of
from hvd_periodic.torch.synchronizer import Synchronizer
from hvd_periodic.torch.trainers import Centers, gather, unwrap

logger = logging.getLogger("hvd_periodic")

_FOLDER, _OPTIMIZER = "ranks", "optimizer.pt"
"""Names in a checkpoint: the folder with the files of all ranks, and the file with the root's optimizer."""

_STAMP = "hvd_periodic"
"""The key in a Trainer's state that holds the run and the folder of its checkpoints."""


def prepare(accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *others: Any) -> list[Any]:
    """Prepare model, optimizer and other objects with an accelerator, so that it averages no gradients.

    Call this in place of ``accelerator.prepare``, which would wrap the model in DistributedDataParallel. The
    accelerator provides devices, mixed precision, loaders and gradient accumulation as usual. To reach ``center()``,
    pass the returned optimizer to :func:`~hvd_periodic.torch.unwrap`.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: the model, already on the device of the accelerator.
        optimizer: an optimizer of this package.
        others: loaders and schedulers.

    Returns:
        model, optimizer and all others, in this order.

    Raises:
        TypeError: an optimizer of another package.
        ValueError: accelerator and optimizer have different ranks; or the model is on another device.

    Example::

        accelerator = Accelerator()
        optimizer = hvdp.ElasticAverageOptimizer(optimizer, model.to(accelerator.device), communication_period=10)
        model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    """
    _check_ranks(
        unwrap(optimizer).synchronizer, "The Accelerator", accelerator.process_index, accelerator.num_processes
    )
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {accelerator.device.type}:
        raise ValueError(
            f"The model must be on {accelerator.device} before the optimizer is made: model.to(accelerator.device). "
            f"Received: one on {', '.join(sorted(devices))}"
        )
    # Placing the model again would replace the buffers that are exchanged.
    model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    prepared = accelerator.prepare(optimizer, *others)
    return [model, *(prepared if others else [prepared])]


Make = Callable[[torch.optim.Optimizer, torch.nn.Module], PeriodicOptimizer]


class PeriodicTrainerCallback(TrainerCallback):
    """Lets a ``Trainer`` train with periodic exchange: evaluate and save the center, and average no gradients.

    When training begins, with the model on its device, the callback wraps the Trainer's optimizer and switches off its
    DistributedDataParallel. Checkpoints hold the center as the model, and at the end of training the model holds the
    center. Only the root writes checkpoints, and training resumes from the center::

        def periodic(optimizer, model):
            return hvdp.ElasticAverageOptimizer(optimizer, model, communication_period=10)

        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[PeriodicTrainerCallback(periodic)])
        trainer.train()

    Args:
        make: a function that makes an optimizer of this package from a torch optimizer and a model.
        every_rank: also save the state of every rank, with :func:`hvd_periodic.torch.save`, in the folder ``ranks`` of
            each checkpoint: training then resumes exactly, bit for bit.

    Raises:
        TypeError: ``make`` returns something else.
        ValueError: Trainer and optimizer have different ranks, for example because Horovod alone has started them; or
            the Trainer is to save the state of an optimizer whose center is not on every rank; or the model of such an
            optimizer, for a callback that is listed after this one.
        RuntimeError: the Trainer has not saved the center for such a callback; or one rank has stopped alone.
    """

    def __init__(self, make: Make, every_rank: bool = False) -> None:
        self._make, self._every_rank = make, every_rank
        self._centers = Centers([])
        self._asked: Callable[[], bool] | None = None
        self._refuse: Callable[[], None] = lambda: None
        self._hooks = ExitStack()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Make the optimizer, and resume from a checkpoint if there is one."""
        accelerated, model = of["optimizer"], of["model"]
        local = innermost(accelerated.optimizer)  # A Trainer keeps the optimizer of an earlier train().
        optimizer = unwrap(self._make(local, model))
        synchronizer = optimizer.synchronizer
        _check_ranks(synchronizer, "The Trainer", args.process_index, args.world_size)
        if args.save_strategy != "no":
            _check_saving(args, optimizer)
        for wrapper in averaging_among(synchronizer.replica.tensors, synchronizer.membership.communicator.global_ranks):
            switch_off(wrapper)
        accelerated.__setstate__({**accelerated.__getstate__(), "optimizer": optimizer})
        self._centers = Centers([optimizer])
        self._asked, self._refuse = None, lambda: _check_asked_late(args, optimizer)
        self._hooks.close()
        self._hooks.callback(model.register_state_dict_pre_hook(self._show_what_is_saved).remove)
        folder = _saved_before(args, state)
        if folder is not None and self._every_rank and (folder / _FOLDER).is_dir():
            load(folder / _FOLDER, model, optimizer)
        elif folder is not None and (folder / _OPTIMIZER).is_file():
            optimizer.load_state_dict(torch.load(folder / _OPTIMIZER, map_location="cpu", weights_only=True))
        elif state.global_step:
            logger.warning(
                "%s has no exchange state; starting exchanges from the model. If the checkpoint is elsewhere, pass "
                "TrainingArguments(resume_from_checkpoint=...)",
                _folder(args, state),
            )
        state.stateful_callbacks[_STAMP] = {"folder": str(Path(args.output_dir).absolute()), "run": uuid.uuid4().hex}

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Go back to the replica."""
        self._asked = None
        self._centers.leave()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Show the center, if the Trainer is about to evaluate or save; at the end, after the last exchange."""
        self._centers.leave()
        if control.should_training_stop and state.global_step >= state.max_steps:
            self._centers.finalize()
        self._show_if_asked(args, control, unwrap(of["optimizer"]))

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """As :meth:`on_step_end`; when a rank stops early, the other ranks may have evaluated together with it."""
        self._centers.leave()
        if control.should_training_stop:
            self._centers.finalize()
        self._show_if_asked(args, control, unwrap(of["optimizer"]))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Save the state of every rank, if asked for; check that the root has saved the center."""
        self._asked, optimizer = None, unwrap(of["optimizer"])
        if not self._centers.inside:
            self._refuse()
        missed = args.should_save and not self._centers.inside
        self._centers.leave()
        if any(gather(optimizer.synchronizer.membership.communicator, missed)):
            raise RuntimeError(
                f"{_folder(args, state)} holds the replica of a rank instead of the center: a callback after "
                "PeriodicTrainerCallback has requested it without model.state_dict(). Put PeriodicTrainerCallback "
                "last: trainer.add_callback(...)"
            )
        if self._every_rank:
            save(_folder(args, state) / _FOLDER, of["model"], optimizer)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **of: Any
    ) -> None:
        """Leave training at the last line of the log, after which the Trainer loads the best model."""
        if "train_runtime" in (logs or {}):
            self._leave_training(of["model"])

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Leave training, if nothing was logged."""
        self._leave_training(of["model"])

    def _leave_training(self, model: torch.nn.Module) -> None:
        self._hooks.close()
        self._centers.leave()
        self._centers.finalize()
        self._centers.settle(model)
        self._centers = Centers([])

    def _show_if_asked(self, args: TrainingArguments, control: TrainerControl, optimizer: PeriodicOptimizer) -> None:
        if self._centers.left and not control.should_training_stop:
            failure = RuntimeError(
                "A rank has stopped training before the others, but a Trainer waits for all ranks when it logs, "
                "evaluates or ends: callbacks that stop training must decide the same on all ranks, and loaders must "
                "have equally many batches"
            )
            gather(optimizer.synchronizer.membership.communicator, None, failure)
            raise failure
        if control.should_save:
            _check_saving(args, optimizer)  # Other callbacks may ask for a checkpoint.
        if control.should_evaluate or control.should_save:
            self._centers.enter()
        self._asked = lambda: control.should_save

    def _show_what_is_saved(self, *of_model: Any) -> None:
        """Show the center when the Trainer reads the model, if a later callback has asked for a checkpoint."""
        if self._asked is not None and self._asked() and not self._centers.inside:
            self._refuse()
            self._centers.enter()


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of this step's checkpoint, whether or not it exists."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _saved_before(args: TrainingArguments, state: TrainerState) -> Path | None:
    """Return the checkpoint that a Trainer resumes from, whose folder it does not reveal; None if there is none.

    It is in the folder that the arguments name, or in the one that it was written to. A checkpoint of the same step
    with another stamp is of another run.
    """
    if not state.global_step:
        return None
    stamp = state.stateful_callbacks.get(_STAMP)
    places = [_folder(args, state)]
    if isinstance(args.resume_from_checkpoint, str):
        places.insert(0, Path(args.resume_from_checkpoint))
    if stamp is not None:
        places.append(Path(stamp["folder"]) / _folder(args, state).name)
    return next((place for place in places if _stamp_of(place, state.global_step) == [stamp]), None)


def _stamp_of(folder: Path, step: int) -> list[Any]:
    """Return the stamp of a checkpoint, which may be None, in a list; empty if there is no checkpoint of this step."""
    file = folder / "trainer_state.json"
    if not file.is_file():
        return []
    state = TrainerState.load_from_json(str(file))
    return [state.stateful_callbacks.get(_STAMP)] if state.global_step == step else []


def _check_saving(args: TrainingArguments, optimizer: PeriodicOptimizer) -> None:
    """Refuse to save if the root would wait for the other ranks, which never read the optimizer's state."""
    apart = _center_not_everywhere(optimizer)
    if apart is not None and not args.save_only_model:
        raise ValueError(
            "A Trainer saves the state of an optimizer on the root alone, so that its center must be on every "
            'rank: pass center="replicated" to the optimizer; or TrainingArguments(save_only_model=True), which '
            f'saves the center as the model, or save_strategy="no". Received: center={apart!r}'
        )


def _check_asked_late(args: TrainingArguments, optimizer: PeriodicOptimizer) -> None:
    """Refuse a checkpoint for a later callback if all ranks must read the center: only the root reads it then."""
    _check_saving(args, optimizer)
    if _center_not_everywhere(optimizer) is not None:
        raise ValueError(
            "A callback after PeriodicTrainerCallback has requested a checkpoint, but only all ranks together can "
            "read a center that is not on every rank: put PeriodicTrainerCallback last, trainer.add_callback(...)"
        )


def _center_not_everywhere(optimizer: PeriodicOptimizer) -> str | None:
    """Return the placement of a center, on any level, that only all ranks together can read; None if there is none."""
    exchangers = [level.synchronizer.exchanger for level in levels_of(optimizer)]
    return next((exchanger.placement.name for exchanger in exchangers if exchanger.reads_together), None)


def _check_ranks(synchronizer: Synchronizer, who: str, rank: int, size: int) -> None:
    ranks = synchronizer.membership.communicator
    if (rank, size) != (ranks.rank, ranks.size):
        raise ValueError(
            f"{who} knows this process as rank {rank} of {size}, but the optimizer as rank {ranks.rank} of "
            f"{ranks.size}: start the ranks with torchrun, or call hvd.init() and hvdp.init_process_group() before "
            "Accelerator() or TrainingArguments() is constructed. On CPUs: Accelerator(cpu=True), "
            "TrainingArguments(use_cpu=True)"
        )
