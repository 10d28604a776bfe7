"""Checkpoints of a Keras job: one file per rank, from which any number of ranks can resume."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvd_periodic.checkpoints import Saving
from hvd_periodic.checkpoints.resuming import MORE, STATES, OwnContent, resume
from hvd_periodic.comm.membership import TrainingGroup, ranks_of_levels
from hvd_periodic.elastic.shards import start_from_saved_center
from hvd_periodic.keras.model import described
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.leaves import Tensors
from hvd_periodic.tensorflow.model import native
from hvd_periodic.tensorflow.optimizer import PeriodicOptimizer, levels_of
from hvd_periodic.tensorflow.optimizer_state import state_of
from hvd_periodic.tensorflow.resharding import resharded
from hvd_periodic.tensorflow.settings import innermost
from hvd_periodic.tensorflow.store import array_of

Trained = PeriodicOptimizer | VariableSynchronizer


def save(
    path: str | os.PathLike[str],
    model: keras.Model,
    optimizer: Trained,
    *,
    keep: int | None = None,
    background: bool = False,
    **more: Any,
) -> Saving:
    """Save the complete training state, one file per rank; collective.

    Like :func:`hvd_periodic.torch.save`, with the same files, for a Keras model: the variables of the model, including
    the states of random generators, those of the local optimizer, and the state of the exchanges. Call it eagerly,
    between steps.

    Args:
        path: folder of this training run and no other.
        model: the trained model, built.
        optimizer: a built optimizer of this package; or a synchronizer, with the optimizer of your loop in ``more``.
        keep: number of checkpoints to keep, including this one; older ones are removed when it is complete. Default:
            all.
        background: whether a thread writes, from a copy, while training continues. All ranks complete the set together
            once each has written its file: at an exchange, in the next save, which waits for this one, in
            ``finalize()``, in ``wait()``, or at the end of the program.
        more: further objects to save, by name: Keras optimizers, models and layers, and plain values: numbers, strings,
            dicts, lists, tuples, arrays, tensors.

    Returns:
        The save in progress; all ranks may ``wait()`` for it. Without ``background`` it is complete.

    Raises:
        TypeError, ValueError: an invalid argument, or a value that cannot be saved, with its path; on all ranks.
        RuntimeError, OSError: a file could not be written, now or by the last background save; on all ranks.

    Example::

        hvdp.save("checkpoints", model, optimizer, keep=3, epoch=epoch)
    """
    _check(model, optimizer)
    levels = _levels(optimizer)

    def state() -> dict[str, Any]:
        return {
            "exchanges": [level.state_dict() for level in levels],
            "local": list(map(array_of, _local_variables(optimizer))),
            "model": list(map(array_of, _variables(model))),
            STATES: {name: list(map(array_of, _variables(v))) for name, v in more.items() if _has_variables(v)},
            MORE: {name: value for name, value in more.items() if not _has_variables(value)},
        }

    ranks, check = _everyone(levels), levels[0].center_reader.require_outside_center_block
    save_files = levels[0].checkpoint.save_files
    return save_files(Path(path), ranks, check, state, Tensors(), keep=keep, background=background)


def load(
    path: str | os.PathLike[str], model: keras.Model, optimizer: Trained, *, at_step: int | None = None, **more: Any
) -> dict[str, Any]:
    """Resume from the newest checkpoint in a folder, if there is one.

    Call it after construction, before the first step, on all ranks or on the root alone. As with
    :func:`hvd_periodic.torch.load`, it communicates nothing; the first step checks which ranks have loaded a state.

    Args:
        path: the folder passed to :func:`save`.
        model: the saved model, built.
        optimizer: the saved optimizer, built; its state is loaded.
        at_step: local steps of the checkpoint to load instead of the newest.
        more: Keras optimizers, models and layers, whose variables are restored; and plain values as defaults, returned
            if nothing was saved.

    Returns:
        The saved plain values, by name; the given ones if there is no checkpoint, or none for this rank.

    Raises:
        ValueError: a damaged file; or a file of another model, algorithm or optimizer.
        FileNotFoundError: there is no checkpoint of this step.
        RuntimeError: a background save into the folder is in progress: ``wait()`` for it on all ranks.

    Example::

        first = hvdp.load("checkpoints", model, optimizer, epoch=0)["epoch"]
        model.fit(data, initial_epoch=first, callbacks=[hvdp.callbacks.Checkpoint("checkpoints", keep=3)])
    """
    _check(model, optimizer)
    levels = _levels(optimizer)
    stateful = {name: value for name, value in more.items() if _has_variables(value)}

    def restore(saved: dict[str, Any], among_others: bool, own_content: OwnContent) -> None:
        def pairs_of(content: dict[str, Any]) -> list[tuple[Any, np.ndarray]]:
            found = [
                *_pairs("local optimizer", _local_variables(optimizer), content["local"]),
                *_pairs("model", _variables(model), content["model"]),
            ]
            for name, value in stateful.items():
                found += _pairs(f"`{name}`", _variables(value), content[STATES][name])
            return found

        assigned, own = pairs_of(saved), _own(levels, optimizer, stateful.values())
        mine = own_content() if own else saved
        if mine is not saved:
            assigned = _with_own(assigned, None if mine is None else pairs_of(mine), own)
        states = [
            _cut_anew(_renamed(state, level), level) for level, state in zip(levels, saved["exchanges"], strict=True)
        ]
        for level, state in zip(levels, states, strict=True):
            level.load_state_dict(state)
        for variable, value in assigned:
            variable.assign(value)
        if among_others:
            start_from_saved_center(levels, states[0])

    def failed(why: str) -> None:
        levels[0].checkpoint.failure = why

    found = resume(Path(path), _everyone(levels), at_step, Tensors(), stateful.keys(), restore, failed)
    return {name: value for name, value in more.items() if name not in stateful} | found


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received: {described(model)}")
    if not isinstance(optimizer, (PeriodicOptimizer, VariableSynchronizer)):
        raise TypeError(
            "`optimizer` must be an optimizer or synchronizer of hvd_periodic.tensorflow. Received: "
            f"{type(optimizer).__name__}"
        )


def _levels(optimizer: Trained) -> list[VariableSynchronizer]:
    """Return the synchronizers of nested optimizers, the outermost first."""
    if isinstance(optimizer, VariableSynchronizer):
        return [optimizer]
    return [level.synchronizer for level in levels_of(optimizer)]


def _everyone(levels: Sequence[VariableSynchronizer]) -> TrainingGroup:
    return ranks_of_levels([level.membership for level in levels])


def _local_variables(optimizer: Any) -> list[Any]:
    """Return the variables of the optimizer that takes the local steps; none for a synchronizer."""
    return [] if isinstance(optimizer, VariableSynchronizer) else _variables(innermost(optimizer))


def _own(levels: Sequence[VariableSynchronizer], optimizer: Trained, others: Iterable[Any]) -> set[int]:
    """Return the identities of ``"local"`` parameters, and of what local optimizers keep of them."""
    own = {id(variable) for level in levels for _, variable in level.replica.named.own}
    local = [] if isinstance(optimizer, VariableSynchronizer) else [innermost(optimizer)]
    local += [other for other in others if isinstance(other, keras.optimizers.Optimizer)]
    return own | {id(variable) for each in local for variable in state_of(each, own)} if own else own


def _with_own(
    assigned: Sequence[tuple[Any, np.ndarray]], mine: Sequence[tuple[Any, np.ndarray]] | None, own: Collection[int]
) -> list[tuple[Any, np.ndarray]]:
    """Return variables with the values to assign, of some this rank's own; if it has saved none, leave them out."""
    if mine is None:
        return [(variable, value) for variable, value in assigned if id(native(variable)) not in own]
    return [
        (variable, value if id(native(variable)) in own else given)
        for (variable, given), (_, value) in zip(assigned, mine, strict=True)
    ]


def _variables(owner: Any) -> list[Any]:
    """Return the variables of an optimizer, model or layer, without those of metrics, which Keras resets."""
    metrics = {id(variable) for variable in getattr(owner, "metrics_variables", [])}
    return [variable for variable in owner.variables if id(variable) not in metrics]


def _has_variables(value: Any) -> bool:
    return isinstance(value, (keras.optimizers.Optimizer, keras.layers.Layer))


def _renamed(state: dict[str, Any], level: VariableSynchronizer) -> dict[str, Any]:
    """Return a state with the current tensor names: Keras numbers layers across all models of a process."""
    vectors = dict(state["vectors"])
    for group in level.tensor_groups:
        others, saved = group.error_feedback.stores(), vectors.get(group.name, {})
        vectors[group.name] = {}
        for key, tensors in saved.items():
            names = [spec.name for spec in others.get(key, group.values).layout.specs]
            alike = len(names) == len(tensors)
            vectors[group.name][key] = dict(zip(names if alike else tensors, tensors.values(), strict=True))
    in_flight, now = state.get("under_way"), [spec.name for spec in level.tensor_groups.parameters.values.layout.specs]
    if in_flight is not None and len(now) == len(in_flight["snapshot"]):
        in_flight = in_flight | {"snapshot": dict(zip(now, in_flight["snapshot"].values(), strict=True))}
    return state | {"vectors": vectors, "under_way": in_flight}


def _cut_anew(state: dict[str, Any], level: VariableSynchronizer) -> dict[str, Any]:
    """Return a state in which the center optimizer's state is resharded for the current number of ranks."""
    if level.exchanger.worker is not None:
        return state
    level.checkpoint.check_fragments(state)
    return state | {"center_optimizer": resharded(state["center_optimizer"], level)}


def _pairs(what: str, variables: Sequence[Any], values: Sequence[np.ndarray]) -> list[tuple[Any, np.ndarray]]:
    """Return variables paired with their values; raise a ValueError if these are of another model or optimizer."""
    here, there = [tuple(variable.shape) for variable in variables], [value.shape for value in values]
    if here != there:
        number = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None)
        first = "" if number is None else f"; the first that differs, {variables[number].path}, has {here[number]} here"
        first += "" if number is None else f" and {there[number]} there"
        raise ValueError(f"The {what} was saved with {len(there)} variables, and has {len(here)}{first}")
    return list(zip(variables, values, strict=True))
