"""Checkpoints of a job: a file of every rank, from which any number of ranks goes on."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvd_periodic.checkpoints import Everyone, Saving
from hvd_periodic.checkpoints.resuming import MORE, STATES, resume
from hvd_periodic.sync.other_ranks import start_from_saved_center
from hvd_periodic.torch.divided import require_whole
from hvd_periodic.torch.model import original_name
from hvd_periodic.torch.neutral import neutrally
from hvd_periodic.torch.optimizer import INSIDE_KEY, STATE_KEY, PeriodicOptimizer
from hvd_periodic.torch.resharding import resharded
from hvd_periodic.torch.saved import translated
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
    """Save what training needs to go on exactly; all ranks together, each a file of its own.

    ``path`` is a folder with a folder of every save, of which each is complete once its manifest is there: a crash at
    any moment leaves the last complete one. Ranks need not see the same disk. The files are read by numpy alone
    (``np.load(file, allow_pickle=False)``): arrays by name, and JSON.

    Args:
        path: folder of this training and no other.
        model: that is trained.
        optimizer: of this package, or a synchronizer; pass the optimizer of a loop of your own among ``more``.
        keep: checkpoints that are left, this one included; older ones are removed when it is complete. Default: all.
        background: let a thread write, from a copy in host memory, while training goes on. All ranks complete the set
            together, once each has written: at an exchange, in the next save, which waits for this one, in
            ``finalize()``, in ``wait()``, or at the end of the program.
        more: what else is saved, by name: all that has ``state_dict()`` and ``load_state_dict()`` (schedulers, a
            ``GradScaler``, samplers), and plain values: numbers, strings, dicts, lists, tuples, tensors. Of random
            generators pass the states, such as ``random=torch.get_rng_state()``.

    Returns:
        The saving, to ``wait()`` for on all ranks; it is over already without ``background``.

    Raises:
        TypeError, ValueError: a wrong argument, or a value that no file can hold, with its path; on all ranks.
        RuntimeError, OSError: a file could not be written, now or in the background by the last save; on all ranks.

    Example::

        hvdp.save("checkpoints", model, optimizer, keep=3, scheduler=scheduler, epoch=epoch)
    """
    _check(model, optimizer)

    def state() -> dict[str, Any]:
        saved: dict[str, Any] = {"optimizer": optimizer.state_dict()}
        tensors = model.state_dict()
        saved["model"] = {original_name(name): value for name, value in tensors.items()}
        metadata = getattr(tensors, "_metadata", {})
        saved["versions"] = {original_name(f"{name}.")[:-1]: dict(version) for name, version in metadata.items()}
        saved[STATES] = {name: value.state_dict() for name, value in more.items() if _has_state(value)}
        saved[MORE] = {name: value for name, value in more.items() if not _has_state(value)}
        return saved

    synchronizer, everyone = _levels(optimizer)[0], _everyone(optimizer)
    refuse_inside, save_files = synchronizer.view.refuse_inside, synchronizer.checkpoint.save_files
    return save_files(Path(path), everyone, refuse_inside, state, Tensors(), keep=keep, background=background)


@neutrally
def load(
    path: str | os.PathLike[str], model: torch.nn.Module, optimizer: Trained, *, at_step: int | None = None, **more: Any
) -> dict[str, Any]:
    """Go on from the newest checkpoint in a folder, if there is one; call it after construction, before the first step.

    Nothing is communicated: each rank reads what it sees, so that it may be called on all ranks, or on the root alone,
    with the broadcasts of a Horovod script after it or without. The first step finds out on all ranks who has what:

    - Every rank has found its own file: training goes on exactly, to the bit.
    - The root's file alone is there: all go on from it, with the root's replica and center.
    - The files are of other ranks, or of another number: all start from the center, with the counters, the state of the
      center's optimizer, and the state of the root's local optimizer; this is said in the log.
    - Ranks have found different checkpoints, as after a crash while each was writing to a disk of its own: an error on
      all, which names the steps. Pass an ``at_step`` that all have.
    - A file is missing, truncated, altered, or of another checkpoint: an error that names it, at once on the ranks that
      have found it, and at the first step on all.

    Args:
        path: the folder that :func:`save` was given.
        model: as it was saved.
        optimizer: as it was saved; its state is loaded.
        at_step: local steps of another checkpoint than the newest.
        more: what has ``load_state_dict()`` is given its state back; of plain values, those that are returned where
            nothing was saved.

    Returns:
        The plain values that were saved, by name; the ones given where there is no checkpoint, or none for this rank.

    Raises:
        ValueError: a damaged file; or one of another model, algorithm or optimizer.
        FileNotFoundError: there is no checkpoint of this step.
        RuntimeError: a save into the folder is under way in the background: ``wait()`` for it on all ranks.

    Example::

        first = hvdp.load("checkpoints", model, optimizer, scheduler=scheduler, epoch=-1)["epoch"] + 1
    """
    _check(model, optimizer)
    levels = _levels(optimizer)
    stateful = {name: value for name, value in more.items() if _has_state(value)}

    def put_back(saved: dict[str, Any], among_others: bool) -> None:
        state = saved["optimizer"]
        if among_others:
            _cut_anew(levels, state)
        optimizer.load_state_dict(state)
        model.load_state_dict(_named_as_in(model, saved["model"], saved["versions"]))
        for name, value in stateful.items():
            value.load_state_dict(saved[STATES][name])
        if among_others:
            own = translated(state.get(STATE_KEY, state), levels[0].tensor_groups, levels[0].replica.named)
            start_from_saved_center(levels, own)

    def failed(why: str) -> None:
        levels[0].checkpoint.failure = why

    found = resume(Path(path), _everyone(optimizer), at_step, Tensors(), stateful.keys(), put_back, failed)
    return {name: value for name, value in more.items() if name not in stateful} | found


class Tensors:
    """Torch's tensors as arrays: dtypes that numpy lacks as unsigned integers of the same bits."""

    def to_array(self, value: Any, copy: bool) -> tuple[np.ndarray, str] | None:
        """Return a tensor in host memory as an array; None of anything else, and of what is not dense."""
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized or value.is_meta:
            return None
        tensor = value.detach().resolve_conj().resolve_neg().to("cpu", copy=copy)
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in _KNOWN_TO_NUMPY:
            tensor = tensor.view(_OF_BYTES[tensor.element_size()])
        return tensor.numpy(), kind

    def from_array(self, array: np.ndarray, kind: str) -> Any:
        """Return the tensor."""
        dtype = getattr(torch, kind, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"it holds a tensor of {kind}, which this version of torch does not know")
        tensor = torch.from_numpy(array)
        return tensor if tensor.dtype == dtype else tensor.view(dtype)

    def to_name(self, value: Any) -> str | None:
        """Return the name of a dtype, a layout, a memory format or a device."""
        if isinstance(value, torch.device):
            return f"device {value}"
        constant = isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
        return str(value).removeprefix("torch.") if constant else None

    def from_name(self, name: str) -> Any:
        """Return it."""
        if name.startswith("device "):
            return torch.device(name.removeprefix("device "))
        value = getattr(torch, name, None)
        if not isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            raise ValueError(f"it holds torch.{name}, which this version of torch does not know")
        return value


_KNOWN_TO_NUMPY = {
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}
_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _levels(optimizer: Trained) -> list[Synchronizer]:
    """Return the synchronizers of optimizers that are in one another, the outermost first."""
    levels, level = [], optimizer
    while isinstance(level, PeriodicOptimizer):
        levels.append(level.synchronizer)
        level = level.inner  # type: ignore[assignment]
    return [*levels, level] if isinstance(level, Synchronizer) else levels


def _everyone(optimizer: Trained) -> Everyone:
    levels = [level.membership for level in _levels(optimizer)]
    return Everyone([membership.together for membership in reversed(levels)], levels[0].global_root)


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module. Received: {type(model).__name__}")
    if not isinstance(optimizer, (PeriodicOptimizer, Synchronizer)):
        raise TypeError(
            f"`optimizer` must be an optimizer or synchronizer of hvd_periodic.torch. Received: "
            f"{type(optimizer).__name__}"
        )
    require_whole(_levels(optimizer)[0].replica.divided)


def _has_state(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _named_as_in(model: torch.nn.Module, saved: dict[str, Any], versions: dict[str, Any]) -> Any:
    """Return a state dict with the names that tensors have now, where ``torch.compile`` may have put others into it."""
    now: Any = model.state_dict()
    names = {original_name(name): name for name in now}
    of_modules = {original_name(f"{name}.")[:-1]: name for name in getattr(now, "_metadata", {})}
    tensors: Any = OrderedDict((names.get(name, name), value) for name, value in saved.items())
    tensors._metadata = OrderedDict((of_modules.get(name, name), version) for name, version in versions.items())
    return tensors


def _cut_anew(levels: Sequence[Synchronizer], saved: dict[str, Any]) -> None:
    """Let what is kept of the optimizers of centers, of every level, be that of as many ranks as there are."""
    own = saved.get(STATE_KEY, saved)
    for level in levels:
        if level.course.worker is None:
            level.checkpoint.check_fragments(own)
            own["center_optimizer"] = resharded(own["center_optimizer"], level)
        own = own.get(INSIDE_KEY)
