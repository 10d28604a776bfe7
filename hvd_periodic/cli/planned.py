"""What the cost model says of ways to exchange, and which of them it recommends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hvd_periodic import EASGD, Wire
from hvd_periodic.algorithms import Exchange
from hvd_periodic.cli.chosen import Choice
from hvd_periodic.cost_model import (
    Job,
    Method,
    Network,
    seconds_per_step,
    sent_per_step,
    share_of_exchanges,
    shortest_period,
    typical,
    typical_allreduce,
    with_period,
)

EXCHANGES = 100
"""That a run should have, at least."""

LONG = 100
"""Local steps from which on a period is long, where the length of the run is not known."""


@dataclass(frozen=True)
class Row:
    """A way to exchange, at a period.

    Attributes:
        exchange: its name.
        period: in local steps.
        sent: bytes of a rank, per step.
        share: of time in exchanges.
        rate: steps per second.
    """

    exchange: str
    period: int
    sent: float
    share: float
    rate: float


def rows(job: Job, network: Network, wires: Sequence[Choice], periods: Sequence[int]) -> list[Row]:
    """Return an allreduce at every step, and all ways to exchange at all periods."""
    found = [_row("allreduce of gradients", replace(job, period=1), typical_allreduce(), network)]
    for name, each, method in _ways(job, wires):
        for period in periods:
            if period > 1 or not each.overlap:
                found.append(_row(name, with_period(each, period), method, network))
    return found


@dataclass(frozen=True)
class Advice:
    """What is recommended.

    Attributes:
        exchange: how.
        period: how often.
        share: of time that exchanges take then.
        wanted: that they should take at most.
        blocking: the period that it would take without overlap and compression; None: more than anyone would wait.
        limit: the longest period that leaves a run exchanges enough.
        steps: of the run, if it is known.
    """

    exchange: str
    period: int
    share: float
    wanted: float
    blocking: int | None
    limit: int
    steps: int | None

    def moving_rate(self, job: Job) -> float:
        """Return the rate of elastic averaging: its default."""
        return EASGD().default_rate(Exchange(job.workers, self.period))

    def lines(self, job: Job, learning_rate: float | None) -> dict[str, str]:
        """Return what is recommended, and why, by what it is about."""
        n = job.workers
        given = "" if learning_rate is None else f"{learning_rate:g}, not {n * learning_rate:g}: "
        return {
            "Period": f"{self.period}, {self.exchange}. {self._why()}",
            "Moving rate": "leave it out. Elastic averaging takes min(0.9/n, 1/(n+1)) then, the paper's where that "
            f"does not overshoot: {self.moving_rate(job):.4g} for {n} ranks. Averaging and DiLoCo have none.",
            "Learning rate": f"{given}that with which one worker trains alone. A local step sees the batch of one "
            "rank: take the factor hvd.size() out again.",
        }

    def _why(self) -> str:
        share, wanted = f"Exchanges take {100 * self.share:.2g} % of the time then", f"{100 * self.wanted:g} %"
        if self.share > self.wanted:
            reached = f"{share}, and no period up to {self.limit} brings that to {wanted}"
            return f"{reached}: compress more, take larger batches or fewer ranks, or allow longer periods."
        if self.period == 1:
            return f"{share}: the network carries an exchange at every step, and Horovod's own optimizer does as well."
        if self.blocking == self.period:
            return (
                f"{share}. Shorter periods cost more; longer ones cost accuracy, first where learning rates are high."
            )
        blocking = "no period" if self.blocking is None else f"only a period of {self.blocking}"
        long = f"more than {self.limit} leaves a run of {self.steps} steps less than {EXCHANGES} exchanges"
        reason = long if self.steps else f"more than {self.limit} is long"
        return f"{share}. Without overlap and compression {blocking} would bring that to {wanted}, and {reason}."


def advise(job: Job, network: Network, wires: Sequence[Choice], share: float, steps: int | None) -> Advice:
    """Return the way to exchange that costs least accuracy, and its shortest period that costs at most a share of time.

    The first way that fits is taken; the ways begin with blocking and uncompressed, which change least. Where none
    fits, it is the one with the least share at the longest period that the run allows.
    """
    limit = LONG if steps is None else max(1, steps // EXCHANGES)
    ways = list(_ways(job, wires))
    periods = [shortest_period(each, method, network, share) for _, each, method in ways]
    fitting = [i for i, period in enumerate(periods) if period is not None and period <= limit]
    if fitting:
        best = fitting[0]
        period = periods[best] or 1
    else:
        shares = [share_of_exchanges(with_period(each, max(limit, 2)), method, network) for _, each, method in ways]
        best, period = min(range(len(ways)), key=shares.__getitem__), max(limit, 2)
    name, each, method = ways[best]
    taken = share_of_exchanges(with_period(each, period), method, network)
    return Advice(name, period, taken, share, periods[0], limit, steps)


def _ways(job: Job, wires: Sequence[Choice]) -> Iterator[tuple[str, Job, Method]]:
    """Yield ways to exchange, those first that change training least: with overlap, a job's overlap is above 0."""
    for name, wire in wires:
        compressed: Wire = wire
        label = "periodic" if not compressed.lossy else f"periodic, {name}"
        for overlap in (0, 1):
            each = replace(job, period=2, overlap=overlap, wire=compressed)
            yield f"{label}, overlap" if overlap else label, each, typical(compressed)


def _row(name: str, job: Job, method: Method, network: Network) -> Row:
    seconds = seconds_per_step(job, method, network)
    return Row(name, job.period, sent_per_step(job), share_of_exchanges(job, method, network), 1 / seconds)
