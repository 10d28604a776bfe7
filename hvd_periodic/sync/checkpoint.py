"""Saves and loads the exchange state of a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from hvd_periodic.centers.saved_vectors import SavedVectors
from hvd_periodic.checkpoints import Leaves, Saving, save_set
from hvd_periodic.checkpoints.saving import SavePoint
from hvd_periodic.comm.handshake import Purpose
from hvd_periodic.comm.membership import TrainingGroup
from hvd_periodic.journal.base import Counters
from hvd_periodic.sync.exchanger import Exchanger
from hvd_periodic.sync.status import ScheduleState

V = TypeVar("V")

_VERSION = 1
_KEYS = {"algorithm", "schedule", "counters", "center_optimizer", "vectors"}


class Checkpoint(Generic[V]):
    """Saves all that training needs to continue exactly, except the parameters and the local optimizer.

    Args:
        exchanger: holds the tensors, the progress and the centers.

    Attributes:
        run: identifier of this training run in saved states.
        loaded: whether a state was loaded from which training has not started yet.
        state: the loaded state if the center is not on every rank; None once training starts.
        failure: why the last load failed; empty if it did not.
    """

    def __init__(self, exchanger: Exchanger[V]) -> None:
        self._exchanger = exchanger
        self.run = ""
        self.loaded = False
        self.state: dict[str, Any] | None = None
        self.failure = ""

    def has_loaded(self) -> bool:
        """Return whether training has to start from a loaded state."""
        return self.loaded

    def save(self) -> dict[str, Any]:
        """Return copies of the whole state; collective unless the center is on every rank."""
        exchanger = self._exchanger
        exchanger.wait_and_update_centers()
        optimizer_state = exchanger.optimizer_state()
        return self.assembled({group: vectors.save() for group, vectors in self.vectors()}, optimizer_state)

    def save_files(
        self,
        path: Path,
        everyone: TrainingGroup,
        require_outside_center_block: Callable[[str], object],
        state: Callable[[], Any],
        leaves: Leaves,
        *,
        keep: int | None,
        background: bool,
    ) -> Saving:
        """Save one file per rank; collective, with an error on all ranks if some are at an exchange instead.

        Args:
            path: folder of this training run.
            everyone: all ranks that train together.
            require_outside_center_block: raises inside ``center()``.
            state: returns the state to save.
            leaves: knows the tensors of a framework.
            keep: number of complete sets to keep.
            background: whether a thread writes the file.
        """
        context, handshake = self._exchanger.context, self._exchanger.context.handshake

        def check() -> SavePoint:
            require_outside_center_block("save")
            return SavePoint(context.progress.local_steps, self.run, self._exchanger.steps_agree)

        handshake.meet(Purpose.SAVE)
        saving = save_set(
            *(path, everyone, check, state, leaves),
            keep=keep,
            background=background,
            meet=lambda: handshake.check_same_call(Purpose.COMPLETE),
            before=handshake.background_save,
        )
        handshake.background_save = saving if background else None
        return saving

    def save_own(self) -> dict[str, Any]:
        """Return copies of what this rank holds in full, so no part of a sharded center; local."""
        return self.assembled({group: vectors.save_own() for group, vectors in self.vectors()}, None)

    def save_before_training(self, begin: Callable[[], object]) -> dict[str, Any]:
        """Return the state before the first step: the loaded one, or a new one whose center equals the model.

        Args:
            begin: starts training on all ranks together; called if only shards were loaded, none of them the whole.
        """
        exchanger = self._exchanger
        if self.state is not None:
            return copy.deepcopy(self.state)
        if self.has_loaded() and exchanger.reads_together:
            begin()
            return self.save()
        if not self.has_loaded():
            exchanger.tensor_groups.reset()
        if exchanger.placement.everywhere:
            return self.save()
        return self.assembled({group: vectors.save_initial() for group, vectors in self.vectors()}, None)

    def assembled(self, vectors: dict[str, Any], optimizer_state: Any) -> dict[str, Any]:
        """Return a state dict with these vectors and this state of the center's optimizer."""
        context, in_flight = self._exchanger.context, self._exchanger.in_flight()
        return {
            "version": _VERSION,
            "run": self.run,
            "algorithm": type(context.exchanged.algorithm).__name__,
            "schedule": repr(context.planner.schedule),
            "counters": asdict(context.progress.counters),
            "notes": asdict(context.progress.notes),
            "center_optimizer": optimizer_state,
            "outer": context.exchanged.center_optimizer.name,
            "vectors": vectors,
            "under_way": in_flight,
            "pushes": self._exchanger.pushes(),
            "fragments": len(context.fragments),
            "complex": list(context.exchanged.replica.complex_names),
        }

    def check(self, state: dict[str, Any], begun: bool) -> None:
        """Check that a state can be loaded; change nothing.

        Args:
            state: the result of :meth:`save`.
            begun: training has begun.

        Raises:
            ValueError: the state belongs to another algorithm, another model or another version.
            RuntimeError: the other ranks would not notice.
        """
        exchanged = self._exchanger.context.exchanged
        algorithm, outer = type(exchanged.algorithm).__name__, exchanged.center_optimizer.name
        if not isinstance(state, dict) or state.get("version") != _VERSION:
            found = state.get("version") if isinstance(state, dict) else type(state)
            raise ValueError(f"Not a synchronizer state of version {_VERSION}. Received: {found!r}")
        missing = sorted(_KEYS - state.keys())
        if missing:
            raise ValueError(f"The synchronizer state is incomplete. It lacks {', '.join(missing)}")
        if state["algorithm"] != algorithm:
            raise ValueError(f"The state was saved by {state['algorithm']}, this optimizer runs {algorithm}")
        if state.get("outer", outer) != outer:
            raise ValueError(f"The state was saved with the outer optimizer {state['outer']}, and this one has {outer}")
        self.check_fragments(state)
        self._check_complex(state)
        for group, vectors in self.vectors():
            vectors.check(state["vectors"].get(group, {}))
        self._exchanger.check_load(state, begun)

    def check_fragments(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError if a state was saved with another number of fragments."""
        fragments, saved = len(self._exchanger.context.fragments), state.get("fragments", 1)
        if saved != fragments:
            raise ValueError(
                f"The state was saved with fragments={saved}, and this optimizer has fragments={fragments}: load it "
                "with the same number, or start from the saved center"
            )

    def _check_complex(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError if a parameter is complex in a state and real here, or the other way round."""
        here, saved = set(self._exchanger.context.exchanged.replica.complex_names), set(state.get("complex", ()))
        if here != saved:
            name = min(here ^ saved)
            then, now = ("complex", "real") if name in saved else ("real", "complex")
            raise ValueError(
                f"The state was saved with {name!r} as a {then} parameter, and it is a {now} one here: load a state "
                "into parameters like those that were saved"
            )

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`check` has accepted; training that has begun has to start again."""
        exchanger, progress = self._exchanger, self._exchanger.context.progress
        exchanger.load(state)
        for group, vectors in self.vectors():
            vectors.load(state["vectors"][group])
        exchanger.has_loaded(state)
        self.state = None if exchanger.placement.everywhere else state
        self.loaded, self.failure = True, ""
        self.run = state.get("run", "")
        progress.get_ready()
        progress.counters = Counters(**state["counters"])
        counters = progress.counters
        # Version 0.1 has no notes, and none before weights by work has the updates until the last exchange.
        before = {"updates": max(counters.last_exchange - counters.skipped_updates, 0)}
        progress.notes = ScheduleState(**before | state.get("notes", {}))

    def vectors(self) -> Iterator[tuple[str, SavedVectors[V]]]:
        """Yield the name of every tensor group with the object that saves its vectors."""
        replica = self._exchanger.context.exchanged.replica
        return ((group.name, SavedVectors(group, replica)) for group in self._exchanger.tensor_groups)

    def forget(self) -> None:
        """Forget the loaded state, from which training has started."""
        self.state, self.loaded = None, False
