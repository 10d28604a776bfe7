"""The handshake before an exchange: each rank's status, the status of all, and errors that surface on all ranks."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from hvd_periodic.arguments import require_real
from hvd_periodic.checkpoints.saving import Saving
from hvd_periodic.comm.agreement import agree
from hvd_periodic.comm.base import DifferentCallsError
from hvd_periodic.comm.handshake import Purpose, Record, leading
from hvd_periodic.comm.membership import Membership
from hvd_periodic.options import WeightLike
from hvd_periodic.outer.framework import Hyperparameters
from hvd_periodic.ranks import named
from hvd_periodic.sync.optimizer_state import OptimizerStateExchange
from hvd_periodic.sync.planner import Planner, agreed_clock
from hvd_periodic.sync.progress import ProgressTracker
from hvd_periodic.sync.status import GlobalStatus, LocalStatus

STEPS, EXAMPLES = "steps", "examples"
"""Weights by work since this rank last took part in an exchange: local updates, or the examples that were reported."""


class Weight:
    """The weight of this rank in means over ranks.

    Args:
        given: a number of at least 0, such as the number of its examples; a function that returns it, called once per
            exchange; ``"steps"`` or ``"examples"``; or None: all ranks have equal weights.

    Attributes:
        value: the weight at this exchange.
        problem: why the weight could not be determined; None if it could.

    Raises:
        TypeError, ValueError: the weight is not a number of at least 0.

    Example:
        >>> from hvd_periodic.journal.base import Counters
        >>> from hvd_periodic.sync.status import ScheduleState
        >>> weight = Weight("steps")
        >>> weight.measure(idle=False, own=LocalStatus(Counters(local_steps=5, skipped_updates=1), ScheduleState()))
        >>> weight.value
        4.0
    """

    def __init__(self, given: WeightLike) -> None:
        self.given = given
        self.value: float | None = None
        self.problem: str | None = None
        if isinstance(given, str) and not self.by_work:
            raise ValueError(
                f"`weight` must be a number of at least 0, a function, {STEPS!r} or {EXAMPLES!r}. Received: {given!r}"
            )
        if given is not None and not callable(given) and not isinstance(given, str):
            _checked(given)

    @property
    def by_work(self) -> bool:
        """Whether the weight is a count of work."""
        return self.given in (STEPS, EXAMPLES)

    def measure(self, idle: bool, own: LocalStatus) -> None:
        """Determine the weight, given the status of this rank.

        It is 0 for an ``idle`` rank, which leaves without a step since the last exchange.
        """
        self.value = self.problem = None
        if self.given is None:
            return
        try:
            self.value = 0.0 if idle else _checked(self._of(own))
        except Exception as error:
            self.problem = f"The weight of this rank cannot be used: {type(error).__name__}: {error}"

    def _of(self, own: LocalStatus) -> Any:
        if self.given == STEPS:
            return own.updates
        if self.given != EXAMPLES:
            return self.given() if callable(self.given) else self.given
        if own.updates and not own.notes.reports:
            raise ValueError(f"no examples were reported in {own.updates} local updates: pass `examples` with each")
        return own.notes.examples


def relative_weights(records: Sequence[Record]) -> list[float] | None:
    """Return the relative weight of every rank, w_i n / Σ_j w_j, which is 1 on average; None if all are equal.

    Excluded ranks have weight 0. If no rank counts, all weights are 0.

    Example:
        >>> told = [Record(2, 1, weight=3.0), Record(2, 1, weight=1.0), Record(2, 1, weight=8.0, left_out=1)]
        >>> relative_weights(told)
        [2.25, 0.75, 0.0]
        >>> relative_weights(told[:1])
    """
    weights = [0.0 if record.left_out else 1.0 if record.weight is None else record.weight for record in records]
    total = math.fsum(weights)
    if total == 0:
        return weights
    return None if len(set(weights)) == 1 else [weight * (len(weights) / total) for weight in weights]


def _checked(weight: object) -> float:
    return require_real(weight, "`weight`", positive=False)


_EXCHANGING = (Purpose.EXCHANGE, Purpose.LEAVE)

_SETTINGS_ADVICE = (
    "Schedulers and the script must set it equally on all ranks. If the local optimizer learns it from its gradients, "
    "the center needs an optimizer of its own: pass `outer_optimizer`"
)

Check = Callable[[], str | None]
"""Returns why this rank cannot continue, or None."""


class Handshake:
    """Sends this rank's record to all ranks, and evaluates the records of all.

    Args:
        membership: the ranks that take part.
        progress: the progress of this rank.
        planner: predicts exchanges.
        hyperparameters: settings of the center's optimizer, which must be equal on all ranks.
        optimizer_state: exchanges the state of local optimizers; None if nothing does.
        weight: the weight of this rank in means.

    Attributes:
        checks: additional checks of whether this rank can continue.
        followers: functions that are called when an exchange has changed the replica.
        everyone_trains: whether no rank was leaving at the last exchange.
        background_save: the last background save of these ranks, complete or not; None if there was none.
        fatal_error: why this rank can never exchange again; None while it can.
        ready_at: time of the last handshake, when this rank was ready for it, in seconds since 1970.
        wait_seconds: duration of the last handshake in seconds: waiting for all ranks and gathering their records.
    """

    def __init__(
        self,
        membership: Membership,
        progress: ProgressTracker,
        planner: Planner,
        hyperparameters: Hyperparameters,
        optimizer_state: OptimizerStateExchange[Any] | None,
        weight: Weight,
    ) -> None:
        self._membership, self._progress, self._planner = membership, progress, planner
        self._hyperparameters, self._optimizer_state = hyperparameters, optimizer_state
        self.weight = weight
        self.checks: list[Check] = []
        self.followers: list[Callable[[], object]] = []
        self.fatal_error: str | None = None
        self.everyone_trains = True
        self.background_save: Saving | None = None
        self.ready_at = self.wait_seconds = 0.0
        self._warned = False

    def meet(self, purpose: Purpose) -> list[Record]:
        """Return the records of all ranks; as :meth:`handshake_with`."""
        return self.handshake_with(purpose, self.local_status())[0]

    def local_status(self) -> LocalStatus:
        """Return the status of this rank; if its learning rate cannot be read, that is its problem."""
        try:
            return self._progress.snapshot()
        except Exception as error:
            problem = f"The learning rate of the local optimizer cannot be read: {type(error).__name__}: {error}"
            return LocalStatus(self._progress.counters, self._progress.notes, problem=problem)

    def handshake_with(
        self, purpose: Purpose, own: LocalStatus, piggyback: np.ndarray | None = None
    ) -> tuple[list[Record], list[np.ndarray]]:
        """Run a handshake in a call; return the records and the piggybacked integers of all ranks.

        Raises:
            RuntimeError: a rank cannot continue, or ranks are in different calls; raised on all ranks.
        """
        predicted, problem = None, own.problem or self.problem(own, purpose)
        try:
            predicted = self._planner.predict(own, purpose) if problem is None else None
        except Exception as error:
            problem = f"The schedule failed: {type(error).__name__}: {error}"
        failure = None if problem is None else RuntimeError(problem)
        record, communicator = self.record(own, purpose, predicted, problem), self._membership.communicator
        communicator.tracker.follow_steps(self._membership.number, self._progress)
        self.ready_at, came = time.time(), time.perf_counter()
        met = communicator.handshake(record, failure, piggyback)
        self.wait_seconds = time.perf_counter() - came
        save = self.background_save
        # With several levels, a handshake does not include all ranks, whom it takes to complete a save.
        if save is not None and save.everyone.one_level and purpose in _EXCHANGING:
            save.complete(wait=False)
        return met

    @contextmanager
    def remember_failure(self, local_steps: int) -> Iterator[None]:
        """Remember an error that interrupts an exchange: this rank cannot continue afterwards."""
        try:
            yield
        except DifferentCallsError:
            raise  # Nothing has been exchanged.
        except Exception as error:
            self.fatal_error = f"The exchange at step {local_steps} failed: {error}"
            raise

    def notify_followers(self) -> None:
        """Notify the followers that an exchange was run or applied to the replica."""
        for follow in self.followers:
            follow()

    def rejoin(self) -> None:
        """Start over with a new set of ranks; abandon a background save of the previous ones."""
        self.fatal_error, self.everyone_trains = None, True
        if self.background_save is not None:
            self.background_save.abandon("the ranks of the job have changed before all of them had written it")
            self.background_save = None

    def check_same_call(self, purpose: Purpose, problem: str | None = None) -> None:
        """Check that all ranks are in the same call, before its data travels, and that none has a problem.

        Raises:
            RuntimeError: ranks are in different calls, or one cannot continue; raised on all ranks.
        """
        steps, communicator = self._progress.local_steps, self._membership.communicator
        record = Record(purpose, self._membership.number, problem=int(problem is not None), local_steps=steps)
        communicator.tracker.follow_steps(self._membership.number, self._progress)
        communicator.handshake(record, None if problem is None else RuntimeError(problem))

    def record(
        self, own: LocalStatus, purpose: Purpose, predicted: int | None = None, problem: str | None = None
    ) -> Record:
        """Return the record that this rank sends before any data travels."""
        settings = self._hyperparameters.settings()
        rates = {key: value for key, value in settings.items() if key.startswith(("lr ", "learning_rate "))}
        others = {key: value for key, value in settings.items() if key not in rates}
        counters, state = own.counters, {}
        if self._optimizer_state is not None and problem is None and purpose in _EXCHANGING:
            state = self._optimizer_state.facts()
        return Record(
            purpose=purpose,
            optimizer=self._membership.number,
            problem=int(problem is not None),
            settings=_fingerprint(others),
            rate=_fingerprint(rates),
            local_steps=counters.local_steps,
            updates=counters.local_steps - counters.skipped_updates,
            pending=counters.local_steps - counters.last_exchange,
            period=own.clock.period,
            learning_rate=own.learning_rate,
            step_seconds=own.step_seconds,
            loss=own.notes.loss,
            optimizer_state=_fingerprint(state) if state else 0,
            weight=self.weight.value,
            left_out=int(own.excluded is not None),
            foreseen=predicted or 0,
        )

    def problem(self, own: LocalStatus, purpose: Purpose) -> str | None:
        """Return why this rank cannot continue in this call, or None; at an exchange, measure its weight."""
        if purpose in _EXCHANGING:
            idle = purpose == Purpose.LEAVE and own.counters.local_steps == own.counters.last_exchange
            self.weight.measure(idle, own)
        if not math.isfinite(own.notes.loss_sum):
            steps = own.counters.local_steps
            return f"The losses reported until step {steps} are not all finite: {own.notes.loss_sum}"
        try:
            found = self._membership.communicator.changed() or self.fatal_error or self.weight.problem
            found = found or next(filter(None, (check() for check in self.checks)), None)
            if found is None and self._optimizer_state is not None and purpose in _EXCHANGING:
                found = self._optimizer_state.problem()
            return found
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def agree(self, records: Sequence[Record], own: LocalStatus) -> GlobalStatus:
        """Return the status of all ranks, given their records.

        Raises:
            RuntimeError: ranks that train are at different steps; raised on all ranks.
            ValueError: the hyper-parameters of the center optimizer differ; or the state of local optimizers that is
                to be exchanged does; raised on all ranks.
        """
        states = {record.optimizer_state for record in records}
        if self._optimizer_state is not None and 0 not in states and len(states) > 1:
            agree(self._membership.communicator.handshake_group, self._membership.name, self._optimizer_state.facts())
        exchanging = self._membership.communicator.select(records)
        training = [record for record in records if record.training]
        deciding = training or list(records)
        self.everyone_trains = len(training) == len(records)
        steps = sorted({record.local_steps for record in training})
        if len(steps) > 1:
            raise RuntimeError(
                f"Ranks reached this exchange at different local steps, from {steps[0]} to {steps[-1]}; this rank is "
                f"at {own.counters.local_steps}. Either sync() was called on some ranks only, or a state was restored "
                "without broadcast(). A rank that runs out of data calls finalize()"
            )
        step = max(record.local_steps for record in deciding)
        period = max(record.period for record in deciding)
        predicted = {record.foreseen for record in deciding}
        return GlobalStatus(
            bool(training),
            own.counters.local_steps if training else step,
            pending=max(record.pending for record in records),
            period=period,
            clock=agreed_clock(deciding, replace(own.clock, step=step, period=period)),
            predicted=(predicted.pop() or None) if len(predicted) == 1 else None,
            settings=self._settings_of(records, deciding),
            states_are_there=len(states) == 1,
            weights=relative_weights(exchanging),
            left_out=[rank for rank, record in enumerate(exchanging) if record.left_out],
        )

    def _settings_of(self, records: Sequence[Record], deciding: Sequence[Record]) -> Any:
        """Return the hyper-parameters of the center optimizer to use if they differ between ranks; None if equal.

        They follow the local optimizers. A learning-rate scheduler falls behind on a rank that skips updates, and is
        ahead on a rank that has ended its epoch. So the ranks in ``deciding`` decide: of them the one with the most
        updates, and of several such the first.
        """
        communicator, name = self._membership.communicator.handshake_group, self._membership.name
        first = leading(deciding)
        most = first.updates
        if all((record.settings, record.rate) == (first.settings, first.rate) for record in records):
            return None
        if any(record.settings != first.settings for record in deciding if record.updates == most):
            agree(communicator, name, self._hyperparameters.settings(), _SETTINGS_ADVICE)
        of_ranks = communicator.allgather_object(self._hyperparameters.hyperparameters(), f"{name}.settings")
        decides = records.index(first)
        others = [r for r, record in enumerate(records) if record in deciding and record.rate != first.rate]
        if any(records[rank].updates == most for rank in others) and not self._warned:
            self._warned = True
            self._membership.log.warning(
                "The learning rates of the ranks differ at local step %d: the optimizer of the center takes that of "
                "rank %d, and not those of %s. A scheduler has to decide equally on all ranks",
                first.local_steps,
                communicator.global_ranks[decides],
                named(communicator.global_ranks[rank] for rank in others),
            )
        return of_ranks[decides]


def _fingerprint(settings: dict[str, object]) -> int:
    """Return a number that is equal for equal settings."""
    return int.from_bytes(hashlib.sha256(str(settings).encode()).digest()[:7], "big")
