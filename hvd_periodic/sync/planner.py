"""Asks the schedule, at the moments of training at which it has to answer, so that all ranks hear the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hvd_periodic.comm.agreement import raise_on_all
from hvd_periodic.comm.handshake import Purpose, Record, leading
from hvd_periodic.schedules.base import Clock, Schedule
from hvd_periodic.sync.knowledge import Agreement, Standpoint
from hvd_periodic.sync.membership import Membership
from hvd_periodic.sync.planning import Plan, ask, foresee, united_clock


class Planner:
    """Asks a schedule for the next exchange.

    Args:
        schedule: when to exchange.
        membership: the ranks that have to hear the same.
    """

    def __init__(self, schedule: Schedule, membership: Membership) -> None:
        self.schedule = schedule
        self._membership = membership

    def foreseen(self, own: Standpoint, purpose: Purpose) -> int | None:
        """Return the exchange after this one, if the schedule can say so before ranks have met.

        Raises:
            Exception: what the schedule raises, unless training ends.
        """
        try:
            return foresee(self.schedule, own.clock if purpose != Purpose.START else replace(own.clock, round=0))
        except Exception:
            # Where training ends, a schedule may have nothing to say.
            if purpose in (Purpose.LEAVE, Purpose.SAVE, Purpose.COMMIT):
                return None
            raise

    def first(self, records: Sequence[Record]) -> Plan:
        """Return the first exchange of ranks that have met: by the learning rate of now, not that of construction."""
        compare = not all(record.foreseen for record in records)
        return self._same_on_all(Clock(learning_rate=leading(records).learning_rate), compare)

    def first_alone(self, learning_rate: float | None) -> Plan:
        """Return the first exchange of a rank that exchanges on its own clock."""
        return ask(self.schedule, Clock(learning_rate=learning_rate))

    def following(self, meeting: Agreement) -> Plan:
        """Return what the schedule says at an exchange, the same on all ranks.

        Where nobody trains any more, it may have nothing to say; where nothing is exchanged, it is not asked. The
        period is then the one before.

        Raises:
            RuntimeError: the schedule failed, or says different things on different ranks.
        """
        if meeting.training:
            return self._same_on_all(meeting.clock, compare=meeting.unforeseen)
        try:
            if meeting.pending:
                return ask(self.schedule, meeting.clock)
        except RuntimeError as error:
            self._membership.log.debug("Where training has ended, the period stays as it was: %s", error)
        return Plan(meeting.step + max(meeting.period, 1), meeting.clock.memory)

    def following_alone(self, own: Standpoint) -> Plan:
        """Return what the schedule says to a rank that exchanges on its own clock."""
        return ask(self.schedule, own.clock)

    def _same_on_all(self, clock: Clock, compare: bool) -> Plan:
        """Return what the schedule says; where ranks have to, they compare, those of all groups that train together.

        Raises:
            RuntimeError: it failed, or says different things on different ranks; on all of them, where they compare.
        """
        together = self._membership.together
        if compare and together.group is not None:
            clock = united_clock(clock, together.allgather_object(clock, "clock"))
        plan, failure = None, None
        try:
            plan = ask(self.schedule, clock)
        except RuntimeError as error:
            failure = error
        planned = 0 if plan is None else plan.next_exchange
        answers = together.allgather_object(planned, "plan") if compare else [planned]
        if compare and 0 in answers:
            raise_on_all(together, "plan", failure)
        if plan is None:
            raise RuntimeError("The schedule failed") if failure is None else failure
        if len(set(answers)) > 1:
            raise RuntimeError(
                f"The schedule says different things on different ranks: the next exchange at step {answers[0]} on "
                f"rank 0, and at {next(a for a in answers if a != answers[0])} elsewhere. It has to be a function of "
                "the clock alone"
            )
        return plan
