"""The exchange state in the file of a Keras model; loaded values are kept until the variables exist."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np

from hvd_periodic.centers.error_feedback import RESIDUAL, SECOND_HOP_RESIDUAL
from hvd_periodic.participation.rows import SUMS, TOUCHED
from hvd_periodic.sync.tensor_groups import TensorGroups
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.progress import MEMORY, SEEN, SINCE, WORK

_CENTER = "asynchronous_center"
"""Prefix of the names under which a center in no variable is saved, an asynchronous one or that of rounds."""

_PUSHES = f"{_CENTER}_pushes"
"""Name under which the counts of pushes to it are saved."""

_IN_FLIGHT = "in_flight"
"""Prefix of the names under which an exchange in flight is saved."""

SUMS_OF = f"{SECOND_HOP_RESIDUAL}_of"
"""Name of the variable that holds the rank, and the number of ranks, to which the second-hop residual belongs."""

ROWS_OF = f"{TOUCHED}_of"
"""Name of the variable that holds the rank, and the number of ranks, to which the marks of touched rows belong."""

PLACES = (SUMS_OF, ROWS_OF)
"""The names of these variables."""


_OF_RANK = {SECOND_HOP_RESIDUAL, TOUCHED, SUMS}
"""Parts of names of variables whose shapes are not those of the parameters."""


def depends_on_wire(name: str) -> bool:
    """Return whether a variable exists with some ways to send only: residuals, marks of rows, or a separate total."""
    kinds = {RESIDUAL, SECOND_HOP_RESIDUAL, TOUCHED, SUMS, "total"}
    return name in PLACES or not kinds.isdisjoint(name.split("."))


def _renumbered(values: Mapping[str, Any], prefix: str, formerly: Sequence[bool]) -> dict[str, Any]:
    """Return values by name; names with ``prefix`` that version 0.1 numbered are renumbered."""
    saved = [values[name] for name in (f"{prefix}{i}" for i in range(len(values))) if name in values]
    if len(saved) != len(formerly):
        return dict(values)
    now = {f"{prefix}{i}": value for i, value in enumerate(compress(saved, formerly))}
    return {name: value for name, value in values.items() if not name.startswith(prefix)} | now


def _fragments(variables: Mapping[str, Any]) -> int:
    """Return the number of fragments, given variables or their values by name."""
    return int(variables[SINCE].shape[0]) if SINCE in variables else 1


class SavedExchanges:
    """The exchange state in the file of a model: variables, and what is in no variable.

    A loaded optimizer receives the values of its variables before it creates them. Not in variables are an
    asynchronous center or one of rounds with a quorum, and an exchange in flight.

    Attributes:
        variables: the variables by name; empty until they are created.
        later: names of variables that files of earlier versions lack.
        formerly: as in :class:`~hvd_periodic.keras.model.NamedVariables`.
    """

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {}
        self.later: set[str] = set()
        self.formerly: Sequence[bool] = ()
        self._waiting: dict[str, np.ndarray] = {}
        self._center: dict[str, np.ndarray] = {}
        self._in_flight: dict[str, np.ndarray] = {}

    def write(self, store: Any, synchronizer: VariableSynchronizer | None, started: bool) -> None:
        """Save everything by name; before the variables exist, the values that wait for them.

        Args:
            store: Keras's store for one optimizer.
            synchronizer: the synchronizer, which has the center and the exchange in flight; None before it exists.
            started: whether the synchronizer has started; before, the center is the loaded one.

        Raises:
            ValueError: the optimizer's state of an asynchronous center is sharded over ranks.
        """
        in_flight = self._in_flight if synchronizer is None else _in_flight(synchronizer)  # updates the center first
        saved = {name: variable.numpy() for name, variable in self.variables.items()} or self._waiting
        saved = saved | in_flight
        if synchronizer is None or not started:
            saved |= self._center
        elif synchronizer.exchanger.worker is not None:
            saved |= _center_of(synchronizer)
        for name, value in saved.items():
            store[name] = value

    def read(self, store: Any, reader: str) -> bool:
        """Keep the state that :meth:`write` saved for :meth:`settle`, and return True.

        As in Keras, a state that was saved by another optimizer than a ``reader`` is skipped with a warning.
        """
        names = list(store.keys())
        if names and "local_steps" not in names:
            warnings.warn(f"Skipping what was saved by another optimizer than {reader}", stacklevel=3)
            return False
        values = {name: np.asarray(store[name]) for name in names}
        self._center = {name: values.pop(name) for name in names if name.startswith(_CENTER)}
        self._in_flight = {name: values.pop(name) for name in names if name.startswith(_IN_FLIGHT)}
        self._waiting = values
        return True

    def center(self, groups: TensorGroups[Any]) -> dict[str, Any] | None:
        """Return the loaded asynchronous center in the format of ``state_dict``; None if there is none."""
        if not self._center:
            return None
        saved = _renumbered(self._center, f"{_CENTER}.buffers.", self.formerly)
        vectors = {
            group.name: {
                key: {
                    spec.name: saved[_name_of(group.name, key, i)] for i, spec in enumerate(group.values.layout.specs)
                }
                for key in group.center_state
            }
            for group in groups
        }
        of_optimizer = [name for name in self._center if name.startswith(f"{_CENTER}_optimizer.")]
        state = [self._center[f"{_CENTER}_optimizer.{i}"] for i in range(len(of_optimizer))]
        pushes = json.loads(self._center[_PUSHES].tobytes()) if _PUSHES in self._center else None
        return {"vectors": vectors, "center_optimizer": state or None, "pushes": pushes}

    def settle(self, synchronizer: VariableSynchronizer) -> None:
        """Assign the loaded values, and continue the exchange that was in flight when they were saved.

        Raises:
            ValueError: the values belong to other variables; or exchanges are never in flight here.
        """
        self._assign_waiting()
        saved, self._in_flight, in_flight = self._in_flight, {}, None
        if saved:
            specs = synchronizer.tensor_groups.parameters.values.layout.specs
            in_flight = json.loads(saved[_IN_FLIGHT].tobytes())
            in_flight["snapshot"] = {spec.name: saved[f"{_IN_FLIGHT}.{i}"] for i, spec in enumerate(specs)}
        synchronizer.exchanger.check_in_flight(in_flight)
        synchronizer.exchanger.load_in_flight_exchange(in_flight)

    def _assign_waiting(self) -> None:
        """Assign the waiting values, if any; raise a ValueError if they belong to other variables."""
        known = self.variables.keys()
        # The memory of another schedule, residuals of another compression, counts for another weight, and who had
        # gradients of parameters that take part in another way, are useless here.
        waiting = {
            name: value
            for name, value in _renumbered(self._waiting, "buffers.center.", self.formerly).items()
            if name in known or not (name.startswith(MEMORY) or name in (*WORK, SEEN) or depends_on_wire(name))
        }
        varying = [name for name in waiting if name == SEEN or not _OF_RANK.isdisjoint(name.split("."))]
        for name in [name for name in varying if name in known]:
            if waiting[name].shape != tuple(self.variables[name].shape):  # Of other parameters, or other ranks.
                del waiting[name]
        self._waiting = {}
        if not waiting:
            return
        different = (known ^ waiting.keys()) - (self.later - waiting.keys())
        different |= {
            name for name in waiting.keys() - different if waiting[name].shape != tuple(self.variables[name].shape)
        }
        if different:
            there, here = _fragments(waiting), _fragments(self.variables)
            if there != here:
                raise ValueError(
                    f"The saved state is of parameters that are exchanged in another number of fragments: {there} in "
                    f"the file, {here} here. Pass fragments={there}; weights alone are loaded before the model is "
                    "compiled"
                )
            raise ValueError(
                f"The saved state is of another optimizer or model; they differ in {min(different)!r}. If the "
                "optimizer was made with `model`, call optimizer.attach(model) after loading"
            )
        for name, variable in self.variables.items():
            if name in waiting:
                variable.assign(waiting[name])
            elif depends_on_wire(name):
                variable.assign(np.zeros(variable.shape))


def _in_flight(synchronizer: VariableSynchronizer) -> dict[str, np.ndarray]:
    """Return the exchange in flight, by the names under which it is saved; empty while the model holds the center."""
    in_flight = synchronizer.exchanger.in_flight()
    if in_flight is None or synchronizer.center_reader.in_center_block:
        return {}
    snapshot = in_flight.pop("snapshot")
    values = {_IN_FLIGHT: np.frombuffer(json.dumps(in_flight).encode(), np.uint8)}
    return values | {f"{_IN_FLIGHT}.{i}": value for i, value in enumerate(snapshot.values())}


def _name_of(group: str, key: str, index: int) -> str:
    """Return the name under which a tensor of a vector of an asynchronous center is saved."""
    return f"{_CENTER}.{group}.{index}" if key == "center" else f"{_CENTER}.{group}.{key}.{index}"


def _center_of(synchronizer: VariableSynchronizer) -> dict[str, Any]:
    """Return the asynchronous center and its optimizer's state, by the names under which they are saved."""
    state = synchronizer.state_dict()
    if isinstance(state["center_optimizer"], dict):
        raise ValueError(
            "The state of a center optimizer that is sharded over ranks is not saved with the model: save "
            "optimizer.synchronizer.state_dict()"
        )
    values = {
        _name_of(group.name, key, i): state["vectors"][group.name][key][spec.name]
        for group in synchronizer.tensor_groups
        for key in group.center_state
        for i, spec in enumerate(group.values.layout.specs)
    }
    values[_PUSHES] = np.frombuffer(json.dumps(state["pushes"]).encode(), np.uint8)
    return values | {f"{_CENTER}_optimizer.{i}": value for i, value in enumerate(state["center_optimizer"] or [])}
