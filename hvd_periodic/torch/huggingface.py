"""transformers' Trainer and accelerate: the center where they evaluate and save, and no gradients averaged.

Needs ``transformers``, which is imported here and nowhere else; of accelerate what is given.
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
from hvd_periodic.torch.optimizer import PeriodicOptimizer
from hvd_periodic.torch.synchronizer import Synchronizer
from hvd_periodic.torch.trainers import Centers, gather, unwrap

logger = logging.getLogger("hvd_periodic")

_FOLDER, _OPTIMIZER = "ranks", "optimizer.pt"
"""In a checkpoint, what every rank has; and where the Trainer saves the optimizer of the root."""

_STAMP = "hvd_periodic"
"""Under which the state of a Trainer says of which run it is, and where that was saved."""


def prepare(accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *others: Any) -> list[Any]:
    """Prepare model, optimizer and all else by an accelerator, which averages no gradients then.

    In place of ``accelerator.prepare``, which would wrap the model in DistributedDataParallel. Devices, mixed
    precision, loaders and gradient accumulation are those of the accelerator. :func:`~hvd_periodic.torch.unwrap` leads
    from the optimizer that is returned to ``center()``.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: the model, on the device of the accelerator already.
        optimizer: of this package.
        others: loaders and schedulers.

    Returns:
        model, optimizer and all others, in this order.

    Raises:
        TypeError: an optimizer of another package.
        ValueError: the accelerator knows of other ranks than the optimizer; or the model is on another device.

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
    # To place it again would make new buffers of those that are exchanged.
    model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    prepared = accelerator.prepare(optimizer, *others)
    return [model, *(prepared if others else [prepared])]


Make = Callable[[torch.optim.Optimizer, torch.nn.Module], PeriodicOptimizer]


class PeriodicTrainerCallback(TrainerCallback):
    """Lets a ``Trainer`` train by periodic exchange: evaluate and save the center, and average no gradients.

    The optimizer that the Trainer has made is wrapped when training begins, with the model on its device; its
    DistributedDataParallel is switched off. Checkpoints hold the center as the model, and at the end of training the
    model has it. They are written by the root alone, and training goes on from the center::

        def periodic(optimizer, model):
            return hvdp.ElasticAverageOptimizer(optimizer, model, communication_period=10)

        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[PeriodicTrainerCallback(periodic)])
        trainer.train()

    Args:
        make: what makes an optimizer of this package of one of torch and a model.
        every_rank: save also what every rank has, by :func:`hvd_periodic.torch.save`, in the folder ``ranks`` of each
            checkpoint: training goes on exactly, to the bit.

    Raises:
        TypeError: ``make`` returns something else.
        ValueError: the Trainer knows of other ranks than the optimizer, as where Horovod alone has started them; or it
            is to save the state of an optimizer whose center is not on every rank; or the model of one, for a callback
            that comes after this one.
        RuntimeError: what the Trainer has saved for such a callback is not the center; or one rank has stopped alone.
    """

    def __init__(self, make: Make, every_rank: bool = False) -> None:
        self._make, self._every_rank = make, every_rank
        self._centers = Centers([])
        self._asked: Callable[[], bool] | None = None
        self._refuse: Callable[[], None] = lambda: None
        self._hooks = ExitStack()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Make the optimizer, and go on from what was saved."""
        accelerated, model = of["optimizer"], of["model"]
        local = accelerated.optimizer
        while isinstance(local, PeriodicOptimizer):  # Of train() before: a Trainer keeps its optimizer.
            local = local.inner
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
                "%s has nothing of the exchanges of this training: they begin anew, from the model. Where the "
                "checkpoint is elsewhere, say so: TrainingArguments(resume_from_checkpoint=...)",
                _folder(args, state),
            )
        state.stateful_callbacks[_STAMP] = {"folder": str(Path(args.output_dir).absolute()), "run": uuid.uuid4().hex}

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Go back to the replica."""
        self._asked = None
        self._centers.leave()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Show the center, if the Trainer is about to look; at the end, after the last exchange."""
        self._centers.leave()
        if control.should_training_stop and state.global_step >= state.max_steps:
            self._centers.finalize()
        self._show_if_asked(args, control, unwrap(of["optimizer"]))

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Do the same; at the step at which a rank has stopped before the end, others may have looked with it."""
        self._centers.leave()
        if control.should_training_stop:
            self._centers.finalize()
        self._show_if_asked(args, control, unwrap(of["optimizer"]))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Save what every rank has, if that was asked for; make sure that the root has saved the center."""
        self._asked, optimizer = None, unwrap(of["optimizer"])
        if not self._centers.inside:
            self._refuse()
        missed = args.should_save and not self._centers.inside
        self._centers.leave()
        if any(gather(optimizer.synchronizer.membership.communicator, missed)):
            raise RuntimeError(
                f"{_folder(args, state)} has the replica of a rank, and not the center: a callback that comes after "
                "PeriodicTrainerCallback has asked for it, and not by model.state_dict(). Put PeriodicTrainerCallback "
                "last: trainer.add_callback(...)"
            )
        if self._every_rank:
            save(_folder(args, state) / _FOLDER, of["model"], optimizer)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **of: Any
    ) -> None:
        """Before the best model is loaded, which comes after the last line of the log: leave training."""
        if "train_runtime" in (logs or {}):
            self._leave_training(of["model"])

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any) -> None:
        """Leave training, where nothing has been logged."""
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
                "A rank has stopped training before the others, for which a Trainer waits wherever it logs, evaluates "
                "or ends: callbacks that stop have to decide alike on all ranks, and loaders to have as many batches"
            )
            gather(optimizer.synchronizer.membership.communicator, None, failure)
            raise failure
        if control.should_save:
            _check_saving(args, optimizer)  # Other callbacks may ask for it.
        if control.should_evaluate or control.should_save:
            self._centers.enter()
        self._asked = lambda: control.should_save

    def _show_what_is_saved(self, *of_model: Any) -> None:
        """Show the center where the Trainer reads the model, for a callback that has asked after this one."""
        if self._asked is not None and self._asked() and not self._centers.inside:
            self._refuse()
            self._centers.enter()


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return where the checkpoint of this step is, or would be."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _saved_before(args: TrainingArguments, state: TrainerState) -> Path | None:
    """Return the checkpoint that a Trainer goes on from, whose folder it tells nobody; None: there is none.

    It is where training says, or where it was written; another of the same step is not of the same run.
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
    """Return the stamp of a checkpoint, which may be None; nothing where there is none of this step."""
    file = folder / "trainer_state.json"
    if not file.is_file():
        return []
    state = TrainerState.load_from_json(str(file))
    return [state.stateful_callbacks.get(_STAMP)] if state.global_step == step else []


def _check_saving(args: TrainingArguments, optimizer: PeriodicOptimizer) -> None:
    """Refuse what would let the root wait for others, who never read the state of the optimizer."""
    level: torch.optim.Optimizer = optimizer
    while not args.save_only_model and isinstance(level, PeriodicOptimizer):
        course = level.synchronizer.course
        if course.reads_together:
            raise ValueError(
                "A Trainer saves the state of an optimizer on the root alone, for which its center has to be on every "
                'rank: pass center="replicated" to the optimizer; or TrainingArguments(save_only_model=True), which '
                f'saves the center as the model, or save_strategy="no". Received: center={course.placement.name!r}'
            )
        level = level.inner


def _check_asked_late(args: TrainingArguments, optimizer: PeriodicOptimizer) -> None:
    """Refuse what a callback has asked for that comes later: the root alone reads the model then."""
    _check_saving(args, optimizer)
    level: torch.optim.Optimizer = optimizer
    while isinstance(level, PeriodicOptimizer):
        if level.synchronizer.course.reads_together:
            raise ValueError(
                "A callback that comes after PeriodicTrainerCallback has asked for a checkpoint, and all ranks read a "
                "center together that is not on every rank: put PeriodicTrainerCallback last, trainer.add_callback(...)"
            )
        level = level.inner


def _check_ranks(synchronizer: Synchronizer, who: str, rank: int, size: int) -> None:
    ranks = synchronizer.membership.communicator
    if (rank, size) != (ranks.rank, ranks.size):
        raise ValueError(
            f"{who} knows this process as rank {rank} of {size}, and the optimizer as rank {ranks.rank} of "
            f"{ranks.size}: start them by torchrun; or call hvd.init() and hvdp.init_process_group() before "
            "Accelerator() or TrainingArguments() is constructed. On CPUs: Accelerator(cpu=True), "
            "TrainingArguments(use_cpu=True)"
        )
