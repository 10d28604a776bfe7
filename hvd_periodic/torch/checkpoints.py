"""Checkpoints of a job: one file per rank, from which any number of ranks can resume."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch

from hvd_periodic.checkpoints import Saving
from hvd_periodic.checkpoints.resuming import MORE, STATES, OwnContent, resume
from hvd_periodic.comm.membership import TrainingGroup, ranks_of_levels
from hvd_periodic.elastic.shards import start_from_saved_center
from hvd_periodic.torch.leaves import Tensors
from hvd_periodic.torch.model import original_module_name, original_name
from hvd_periodic.torch.neutral import neutrally
from hvd_periodic.torch.optimizer import INSIDE_KEY, STATE_KEY, PeriodicOptimizer, levels_of, synchronizer_of
from hvd_periodic.torch.resharding import resharded
from hvd_periodic.torch.saved import translated
from hvd_periodic.torch.sharded_parameters import require_whole
from hvd_periodic.torch.synchronizer import Synchronizer

Trained = PeriodicOptimizer | Synchronizer


@neutrally
def save(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Trained,
    *,
    keep: int | None = None,
    background: bool = False,
    **more: Any,
) -> Saving:
    """Save all that training needs to resume exactly; collective: each rank writes its own file.

    ``path`` is a folder that holds one folder per save. A save is complete once its manifest exists, so that a crash at
    any moment leaves the last complete one. Ranks need not see the same disk. The files hold arrays by name, and JSON;
    numpy alone can read them (``np.load(file, allow_pickle=False)``).

    Args:
        path: a folder for this training run only.
        model: the model that is trained.
        optimizer: an optimizer of this package, or a synchronizer; in your own loop around a synchronizer, also pass
            the local optimizer among ``more``.
        keep: checkpoints to keep, including this one; older ones are removed once it is complete. Default: all.
        background: let a thread write, from a copy in host memory, while training continues. Once each rank has
            written, all ranks complete the set together: at an exchange, in the next save, which waits for this one, in
            ``finalize()``, in ``wait()``, or at the end of the program.
        more: other objects to save, by name: any with ``state_dict()`` and ``load_state_dict()`` (schedulers, a
            ``GradScaler``, samplers), and plain values: numbers, strings, dicts, lists, tuples, tensors. For random
            generators pass their states, such as ``random=torch.get_rng_state()``.

    Returns:
        The save: call its ``wait()`` on all ranks. Without ``background`` it is already complete.

    Raises:
        TypeError, ValueError: a wrong argument, or a value that no file can hold, with its path; on all ranks.
        RuntimeError, OSError: a file could not be written, now or by the last background save; on all ranks.

    Example::

        hvdp.save("checkpoints", model, optimizer, keep=3, scheduler=scheduler, epoch=epoch)
    """
    _check(model, optimizer)

    def state() -> dict[str, Any]:
        saved: dict[str, Any] = {"optimizer": optimizer.state_dict()}
        tensors = model.state_dict()
        saved["model"] = {original_name(name): value for name, value in tensors.items()}
        metadata = getattr(tensors, "_metadata", {})
        saved["versions"] = {original_module_name(name): dict(version) for name, version in metadata.items()}
        saved[STATES] = {name: value.state_dict() for name, value in more.items() if has_state(value)}
        saved[MORE] = {name: value for name, value in more.items() if not has_state(value)}
        return saved

    levels = _levels(optimizer)
    check = levels[0].center_reader.require_outside_center_block
    return levels[0].checkpoint.save_files(
        Path(path), _everyone(levels), check, state, Tensors(), keep=keep, background=background
    )


@neutrally
def load(
    path: str | os.PathLike[str], model: torch.nn.Module, optimizer: Trained, *, at_step: int | None = None, **more: Any
) -> dict[str, Any]:
    """Resume from the newest checkpoint in a folder, if there is one; call it between construction and first step.

    Each rank reads the files that it sees and communicates nothing. So you may call this on all ranks or on the root
    alone, with or without the broadcasts of a Horovod script after it. At the first step, the ranks compare what each
    has loaded:

    - Every rank has found its own file: training resumes exactly, bit for bit.
    - Only the root's file exists: all ranks resume from it, with the root's replica and center; ``"local"`` parameters
      of other ranks stay those of their models.
    - Other ranks, or another number of ranks, wrote the files: all ranks start from the center, with the counters, the
      state of the center's optimizer, and the state of the root's local optimizer; the log says so. A rank that wrote
      a file keeps its own ``"local"`` parameters, and a new one has those of its model.
    - Ranks have found different checkpoints, for example after a crash while each was writing to its own disk: an error
      on all ranks that names the steps. Pass an ``at_step`` that all ranks have.
    - A file is missing, truncated, altered, or of another checkpoint: an error that names the file, at once on the
      ranks that have found this, and at the first step on all.

    Args:
        path: the folder that was passed to :func:`save`.
        model: the model, as for :func:`save`.
        optimizer: the optimizer, as for :func:`save`; its state is loaded.
        at_step: local steps of the checkpoint to load, if it is not the newest.
        more: objects with ``load_state_dict()``, which get their state back; and plain values, which are returned if
            nothing was saved.

    Returns:
        The plain values that were saved, by name; the given ones if there is no checkpoint, or none for this rank.

    Raises:
        ValueError: a damaged file, or a file of another model, algorithm or optimizer.
        FileNotFoundError: there is no checkpoint of this step.
        RuntimeError: a background save into the folder is in progress: call its ``wait()`` on all ranks.

    Example::

        first = hvdp.load("checkpoints", model, optimizer, scheduler=scheduler, epoch=-1)["epoch"] + 1
    """
    _check(model, optimizer)
    levels = _levels(optimizer)
    stateful = {name: value for name, value in more.items() if has_state(value)}

    def restore(saved: dict[str, Any], among_others: bool, own_content: OwnContent) -> None:
        local = {name for level in levels for name in level.replica.local_names}
        mine = own_content() if local else saved
        if mine is not saved:
            saved = _with_own(saved, mine, local, model, {STATE_KEY: _innermost(optimizer), **stateful})
        state = saved["optimizer"]
        if among_others:
            _reshard_saved(levels, state)
        optimizer.load_state_dict(state)
        model.load_state_dict(_named_as_in(model, saved["model"], saved["versions"]))
        for name, value in stateful.items():
            value.load_state_dict(saved[STATES][name])
        if among_others:
            own = translated(state.get(STATE_KEY, state), levels[0].tensor_groups, levels[0].replica.named)
            start_from_saved_center(levels, own)

    def failed(why: str) -> None:
        levels[0].checkpoint.failure = why

    found = resume(Path(path), _everyone(levels), at_step, Tensors(), stateful.keys(), restore, failed)
    return {name: value for name, value in more.items() if name not in stateful} | found


def _levels(optimizer: Trained) -> list[Synchronizer]:
    """Return the synchronizers of nested optimizers, the outermost first."""
    return [level.synchronizer for level in levels_of(optimizer)] or [synchronizer_of(optimizer)]


def _everyone(levels: Sequence[Synchronizer]) -> TrainingGroup:
    return ranks_of_levels([level.membership for level in levels])


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module. Received: {type(model).__name__}")
    synchronizer = synchronizer_of(optimizer)
    require_whole(synchronizer.replica.sharded, synchronizer.membership.communicator.between_islands)


def has_state(value: Any) -> bool:
    """Return whether a value has ``state_dict()`` and ``load_state_dict()``."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _named_as_in(model: torch.nn.Module, saved: dict[str, Any], versions: dict[str, Any]) -> Any:
    """Return a saved state dict under the model's current names, which ``torch.compile`` may have changed."""
    now: Any = model.state_dict()
    names = {original_name(name): name for name in now}
    of_modules = {original_module_name(name): name for name in getattr(now, "_metadata", {})}
    tensors: Any = OrderedDict((names.get(name, name), value) for name, value in saved.items())
    tensors._metadata = OrderedDict((of_modules.get(name, name), version) for name, version in versions.items())
    return tensors


def _innermost(optimizer: Trained) -> Any:
    """Return the local optimizer; None for a synchronizer."""
    levels = levels_of(optimizer)
    return levels[-1].inner if levels else None


def _with_own(
    saved: dict[str, Any], mine: dict[str, Any] | None, local: Set[str], model: torch.nn.Module, kept: dict[str, Any]
) -> dict[str, Any]:
    """Return a saved state with this rank's own ``"local"`` parameters, and the local optimizer's state of these.

    Args:
        saved: what another rank has saved.
        mine: what this rank has saved; None: its parameters stay as they are, and have no state.
        local: the names of the parameters.
        model: the model.
        kept: the local optimizer, and objects saved by name, which may be optimizers.
    """
    found = [(original_name(name), p) for name, p in model.named_parameters(remove_duplicate=False)]
    tensors = {id(p) for name, p in found if name in local}
    own = {name: p for name, p in found if id(p) in tensors}  # A tied parameter has several names in the state.
    values = own if mine is None else {name: mine["model"][name] for name in own}
    states = dict(saved[STATES])
    for name, optimizer in kept.items():
        if isinstance(optimizer, torch.optim.Optimizer):
            of_mine = None if mine is None else (mine["optimizer"] if name == STATE_KEY else mine[STATES][name])
            given = saved["optimizer"] if name == STATE_KEY else states[name]
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            places = [i for i, parameter in enumerate(parameters) if any(parameter is each for each in own.values())]
            state = {i: value for i, value in given["state"].items() if i not in places}
            state |= {} if of_mine is None else {i: v for i, v in of_mine["state"].items() if i in places}
            states[name] = {**given, "state": state}
    return {
        **saved,
        "model": {**saved["model"], **values},
        "optimizer": states.pop(STATE_KEY, saved["optimizer"]),
        STATES: states,
    }


def _reshard_saved(levels: Sequence[Synchronizer], saved: dict[str, Any]) -> None:
    """Reshard the saved state of the center optimizer of every level to the current number of ranks."""
    own = saved.get(STATE_KEY, saved)
    for level in levels:
        if level.exchanger.worker is None:
            level.checkpoint.check_fragments(own)
            own["center_optimizer"] = resharded(own["center_optimizer"], level)
        own = own.get(INSIDE_KEY)
