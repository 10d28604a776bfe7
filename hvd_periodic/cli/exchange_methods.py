"""Compares exchange methods with the cost model, and recommends one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hvd_periodic import EASGD, Algorithm, Wire
from hvd_periodic.algorithms import Exchange
from hvd_periodic.cli.choice_parser import Choice
from hvd_periodic.cost_model import (
    Job,
    Method,
    Network,
    seconds_per_step,
    sent_per_step,
    share_of_exchanges,
    shortest_period,
    typical_allreduce,
)

EXCHANGES = 100
"""Minimum number of exchanges that a run should have."""

LONG = 100
"""Local steps above which a period is long, if the length of the run is not known."""


@dataclass(frozen=True)
class ExchangeMethod:
    """An exchange method: an algorithm, by its name in the output, with a compression and the costs of own work.

    If it overlaps, exchanges are in flight until just before the next one.
    """

    name: str
    wire: Wire
    overlaps: bool
    costs: Method

    def of(self, job: Job, period: int) -> Job:
        """Return a job that exchanges by this method."""
        return replace(job, period=period, overlap=period - 1 if self.overlaps else 0, wire=self.wire)


def every_method(
    algorithms: Sequence[Choice], wires: Sequence[Choice], method: Callable[[Algorithm, Wire], Method]
) -> Iterator[ExchangeMethod]:
    """Yield all methods; for each algorithm, those that change training least come first."""
    for algorithm, made in algorithms:
        for name, wire in wires:
            label = f"{algorithm}, {name}" if wire.lossy else algorithm
            found = method(made, wire)
            yield ExchangeMethod(label, wire, False, found)
            yield ExchangeMethod(f"{label}, overlap", wire, True, found)


@dataclass(frozen=True)
class Row:
    """An exchange method, by its name, at a period: bytes sent per step and rank, share of the time, steps/s."""

    exchange: str
    period: int
    sent: float
    share: float
    rate: float


def rows(job: Job, network: Network, methods: Sequence[ExchangeMethod], periods: Sequence[int]) -> list[Row]:
    """Return rows for an allreduce at every step, and for all methods at all periods."""
    found = [_row("allreduce of gradients", replace(job, period=1), typical_allreduce(), network)]
    for method in methods:
        for period in periods:
            if period > 1 or not method.overlaps:
                found.append(_row(method.name, method.of(job, period), method.costs, network))
    return found


@dataclass(frozen=True)
class Advice:
    """A recommendation.

    Attributes:
        exchange: name of the exchange method.
        period: period in local steps.
        share: share of time that exchanges then take.
        wanted: largest share that they should take.
        blocking: the period that this would require without overlap and compression; None: unreasonably long.
        limit: the longest period that leaves a run enough exchanges.
        steps: steps of the run, if known.
        sufficient: the shortest period at which this exchange takes no more than wanted; None: unreasonably long.
    """

    exchange: str
    period: int
    share: float
    wanted: float
    blocking: int | None
    limit: int
    steps: int | None
    sufficient: int | None

    def moving_rate(self, job: Job) -> float:
        """Return the default moving rate of elastic averaging."""
        return EASGD().default_rate(Exchange(job.workers, self.period))

    def lines(self, job: Job, learning_rate: float | None) -> dict[str, str]:
        """Return the recommendations and their reasons, by topic."""
        n = job.workers
        given = "" if learning_rate is None else f"{learning_rate:g}, not {n * learning_rate:g}: "
        return {
            "Period": f"{self.period}, {self.exchange}. {self._why()}",
            "Moving rate": "omit it. The default of elastic averaging is min(0.9/n, 1/(n+1)), the paper's rate unless "
            f"that overshoots: {self.moving_rate(job):.4g} for {n} ranks. Averaging and DiLoCo have none.",
            "Learning rate": f"{given}that of a single-worker run. A local step uses the batch of one rank: remove "
            "the factor hvd.size().",
        }

    def _why(self) -> str:
        share, wanted = f"Exchanges then take {100 * self.share:.3g} % of the time", f"{100 * self.wanted:g} %"
        if self.share > self.wanted:
            long = f"the longest period that leaves a run of {self.steps} steps {EXCHANGES} exchanges is {self.limit}"
            limit = long if self.steps else f"periods above {self.limit} are long"
            reaches = "No period" if self.sufficient is None else f"Only a period of {self.sufficient:,}"
            reached = f"{share}. {reaches} would reduce that to {wanted}, and {limit}"
            return f"{reached}: use larger batches or fewer ranks, or accept the longer period or the larger share."
        if self.period == 1:
            return f"{share}: the network can carry an exchange at every step, so Horovod's own optimizer does as well."
        if self.blocking == self.period:
            return (
                f"{share}. Shorter periods cost more; longer ones cost accuracy, first where learning rates are high."
            )
        blocking = "no period" if self.blocking is None else f"only a period of {self.blocking}"
        long = f"more than {self.limit} leaves a run of {self.steps} steps fewer than {EXCHANGES} exchanges"
        reason = long if self.steps else f"more than {self.limit} is long"
        return f"{share}. Without overlap and compression, {blocking} would reduce that to {wanted}, and {reason}."


def advise(job: Job, network: Network, methods: Sequence[ExchangeMethod], share: float, steps: int | None) -> Advice:
    """Return the exchange method that costs least accuracy, and its shortest period within a share of the time.

    This is the first method that fits; those that change training least come first. If none fits, it is the first of
    those with the least share, to three digits, at the longest period that the run allows.
    """
    limit = LONG if steps is None else max(1, steps // EXCHANGES)
    periods = [shortest_period(method.of(job, 2), method.costs, network, share) for method in methods]
    fitting = [i for i, period in enumerate(periods) if period is not None and period <= limit]
    if fitting:
        best = fitting[0]
        period = periods[best] or 1
    else:
        possible = [i for i, method in enumerate(methods) if limit > 1 or not method.overlaps]
        shares = {i: share_of_exchanges(methods[i].of(job, limit), methods[i].costs, network) for i in possible}
        best, period = min(possible, key=lambda i: float(f"{shares[i]:.3g}")), limit
    method = methods[best]
    taken = share_of_exchanges(method.of(job, period), method.costs, network)
    return Advice(method.name, period, taken, share, periods[0], limit, steps, periods[best])


def _row(name: str, job: Job, method: Method, network: Network) -> Row:
    seconds = seconds_per_step(job, method, network)
    return Row(name, job.period, sent_per_step(job), share_of_exchanges(job, method, network), 1 / seconds)
