r"""Cost model of training: seconds per step by algorithm, period, workers, compression, fragments and overlap.

A job of n workers takes local steps of t seconds with standard deviation s, and exchanges P bytes of float32 every
τ steps.

**Collectives** of b bytes on each worker, with α seconds per message and β per byte:

- all-reduce: 2 (n − 1) α + 2 (n − 1) / n · b β; no algorithm moves fewer bytes (Patarasuk and Yuan, Bandwidth optimal
  all-reduce algorithms for clusters of workstations, 2009);
- all-to-all, or all-gather of pieces of b / n bytes: (n − 1) α + (n − 1) / n · b β, half of that;
- all-gather of b bytes from each worker: (n − 1) α + (n − 1) b β.

**An exchange** of P bytes in m tensors takes W(P) seconds on the network, given by the collectives of its wire and by
the b bytes to which the wire encodes the message. The worker's own work takes o + θ m + V(P) seconds: o for Python,
Horovod's cycle and the handshake of the ranks, θ per tensor, as Horovod's own methods announce and copy tensors one by
one; and

    V(P) = γ P + φ P [P > C] + δ D(P),

γ for passes over memory and for encoding; φ for parameters that no longer fit into the processor's cache (repeated
passes over more than the cache find nothing there); δ for the messages of other workers, if all must be decoded whole:
to D = n P bytes if they are gathered in one hop, as the messages of top-k are. All depend on the method; so does C,
because of the state that a method keeps in addition to the parameters. While one bucket travels, the worker processes
another: in B buckets an exchange takes

    T(P) = o + θ m + max(V(P), W(P)) + min(V(P), W(P)) / B.

If k workers share a core, everything takes k times as long, except for the u seconds of o in which they sleep: Horovod
looks for work once per cycle, of a millisecond since version 0.21, and sleeps until then.

**A period** has F exchanges of P / F bytes. Every worker waits for the slowest one, which is behind by

    w = s √(τ / F) · E_n,

where E_n is the expected largest of n normal numbers (Blom, Statistical estimates and transformed beta variables,
1958). With overlap an exchange is in flight while the worker takes d steps; if these last long enough, only the
worker's own work remains:

    seconds per step = t + F / τ · (T(P / F) + w),                                  without overlap,
    seconds per step = t + F / τ · (o + θ m / F + V(P / F) + max(0, W(P / F) + w − d t)),      with it.

The costs of a machine are fitted to measurements, see :mod:`hvd_periodic.cost_model.fits`. The costs of a network that
is not available can be stated, and :func:`typical` has those of a processor.

**The period** that leaves exchanges a share σ of the time is the shortest τ with 1 − t / (seconds per step) ≤ σ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf, sqrt
from statistics import NormalDist

from hvd_periodic.arguments import require_int, require_real
from hvd_periodic.vectors.layout import DEFAULT_BUCKET_BYTES
from hvd_periodic.wires import Compression, Wire


@dataclass(frozen=True)
class Method:
    """Costs of a worker's own work in an exchange.

    Args:
        begin: o, seconds, independent of the size.
        work: γ, seconds per byte of parameters.
        bucket: bytes of a bucket, which the worker processes while others travel; infinite, if it waits for all.
        tensor: θ, seconds per tensor.
        decode: δ, seconds per byte of float32 to which a message of another worker is decoded.
        uncached: φ, additional seconds per byte of parameters that are too large for the cache.
        cache: C, the most bytes of parameters that fit into the cache.

    Raises:
        TypeError, ValueError: a cost is not a number of at least 0, or a size is not positive.
    """

    begin: float
    work: float
    bucket: float = DEFAULT_BUCKET_BYTES
    tensor: float = 0.0
    decode: float = 0.0
    uncached: float = 0.0
    cache: float = inf

    def __post_init__(self) -> None:
        require_costs(begin=self.begin, work=self.work, tensor=self.tensor, decode=self.decode, uncached=self.uncached)
        require_positive(bucket=self.bucket, cache=self.cache)

    def seconds(
        self, nbytes: float, wire: float, decoded: float = 0.0, tensors: float = 1, fragments: int = 1
    ) -> float:
        """Return T of an exchange of ``nbytes`` that takes ``wire`` (W) seconds on the network; ``decoded`` is D."""
        own = self.own(nbytes, decoded, fragments)
        pipelined = max(own, wire) + min(own, wire) / buckets(nbytes, self.bucket)
        return self.begin + self.tensor * tensors + pipelined

    def own(self, nbytes: float, decoded: float = 0.0, fragments: int = 1) -> float:
        """Return V, the seconds of own work while other buckets travel, for one of ``fragments`` fragments."""
        uncached = self.uncached if nbytes > self.cache / fragments else 0.0
        return (self.work + uncached) * nbytes + self.decode * decoded


@dataclass(frozen=True)
class Network:
    """Costs of collectives.

    Args:
        message: α, seconds per message.
        byte: β, seconds per byte; 8e-9 is 1 Gbit/s.

    Raises:
        TypeError, ValueError: a cost is not a number of at least 0.

    Example:
        >>> round(Network(message=1e-4, byte=8e-9).seconds(2, 25e6), 3)
        0.2
    """

    message: float
    byte: float

    def __post_init__(self) -> None:
        require_costs(message=self.message, byte=self.byte)

    def seconds(self, workers: int, nbytes: float, wire: Wire = Compression.none, lasting: bool = False) -> float:
        """Return W: the seconds until all workers have the sums of ``nbytes`` bytes of float32."""
        messages, sent = wire.traffic(workers, nbytes, lasting)
        return messages * self.message + sent * self.byte


@dataclass(frozen=True)
class Job:
    """A training job.

    Args:
        workers: n.
        nbytes: P, bytes of the parameters in float32.
        step: t, seconds of a local step.
        period: τ, local steps between exchanges of the same parameters.
        overlap: d, local steps during which an exchange is in flight.
        fragments: F.
        wire: compression of the messages.
        spread: s, the standard deviation of a local step in seconds.
        tensors: m, the number of parameter tensors.

    Raises:
        TypeError, ValueError: a number is of the wrong type or out of range.
    """

    workers: int
    nbytes: float
    step: float
    period: int
    overlap: int = 0
    fragments: int = 1
    wire: Wire = Compression.none
    spread: float = 0.0
    tensors: int = 1

    def __post_init__(self) -> None:
        for name in ("workers", "period", "fragments", "tensors"):
            require_int(getattr(self, name), f"`{name}`", 1)
        require_int(self.overlap, "`overlap`", 0)
        require_costs(nbytes=self.nbytes, step=self.step, spread=self.spread)
        if max(self.fragments, self.overlap) > self.period:
            raise ValueError(
                "`fragments` and `overlap` must be at most `period`. Received: "
                f"fragments={self.fragments}, overlap={self.overlap}, period={self.period}"
            )


def seconds_per_step(job: Job, method: Method, network: Network) -> float:
    """Return the mean duration of a step, including its share of the exchanges; the module has the equation.

    Example:
        25 MB over 1 Gbit/s, every 10 steps of 48 ms; overlap hides the wire, but not the worker's own 10 ms:

        >>> job = Job(workers=2, nbytes=25e6, step=0.048, period=10)
        >>> method, network = Method(begin=0.0, work=4e-10), Network(message=1e-4, byte=8e-9)
        >>> round(seconds_per_step(job, method, network), 4)
        0.0685
        >>> round(seconds_per_step(replace(job, overlap=9), method, network), 4)
        0.049
    """
    nbytes, tensors, lasting = job.nbytes / job.fragments, job.tensors / job.fragments, job.overlap > 0
    wire = network.seconds(job.workers, nbytes, job.wire, lasting)
    decoded = job.wire.decoded(job.workers, nbytes, lasting)
    waiting = job.spread * sqrt(job.period / job.fragments) * expected_largest(job.workers)
    if job.overlap:
        hidden = max(0.0, wire + waiting - job.overlap * job.step)
        exchange = method.begin + method.tensor * tensors + method.own(nbytes, decoded, job.fragments) + hidden
    else:
        exchange = method.seconds(nbytes, wire, decoded, tensors, job.fragments) + waiting
    return job.step + job.fragments / job.period * exchange


def share_of_exchanges(job: Job, method: Method, network: Network) -> float:
    """Return the share of time spent in exchanges, including waiting for the slowest: 1 − t / seconds per step.

    Example:
        >>> job = Job(workers=2, nbytes=25e6, step=0.048, period=10)
        >>> round(share_of_exchanges(job, Method(begin=0.0, work=4e-10), Network(message=1e-4, byte=8e-9)), 2)
        0.3
    """
    seconds = seconds_per_step(job, method, network)
    return 1 - job.step / seconds if seconds else 0.0


def sent_per_step(job: Job) -> float:
    """Return the bytes that a worker sends per step, as :meth:`Wire.traffic` counts them.

    Example:
        >>> sent_per_step(Job(workers=4, nbytes=100e6, step=0.1, period=10))
        15000000.0
    """
    _, sent = job.wire.traffic(job.workers, job.nbytes / job.fragments, job.overlap > 0)
    return job.fragments * sent / job.period


def with_period(job: Job, period: int) -> Job:
    """Return the job with another period; overlapped exchanges are in flight until just before the next one."""
    return replace(job, period=period, overlap=period - 1 if job.overlap else 0)


def shortest_period(job: Job, method: Method, network: Network, share: float, longest: int = 10**6) -> int | None:
    """Return the shortest period at which exchanges take at most this share of the time; None: longer than ``longest``.

    The share falls as the period grows, so bisection finds the period.

    Args:
        job: the job; its period is ignored. With an overlap above 0, exchanges are in flight during the whole period.
        method: costs of workers' own work in an exchange.
        network: costs of collectives.
        share: σ, in (0, 1).
        longest: upper bound of the search.

    Example:
        >>> job = Job(workers=2, nbytes=25e6, step=0.048, period=10)
        >>> method, network = Method(begin=0.0, work=4e-10), Network(message=1e-4, byte=8e-9)
        >>> shortest_period(job, method, network, 0.1), shortest_period(replace(job, overlap=9), method, network, 0.1)
        (39, 5)
    """

    def fits(period: int) -> bool:
        return share_of_exchanges(with_period(job, period), method, network) <= share

    low, high = job.fragments + (1 if job.overlap else 0), longest
    if not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def typical(wire: Wire = Compression.none) -> Method:
    """Return typical costs of a worker's own work, without measurements: on one core that copies 7 GB/s.

    They are from the measurements in docs/performance; fits determine the costs of a given machine.

    Example:
        >>> typical()
        Method(begin=0.0015, work=8e-10, bucket=16777216, tensor=0.0, decode=0.0, uncached=0.0, cache=inf)
    """
    return Method(begin=1.5e-3, work=8e-10 + wire.coding_seconds, decode=wire.adding_seconds)


def typical_allreduce() -> Method:
    """Return the costs of an allreduce of gradients in addition to the network: Horovod's cycle.

    Overlap with the backward pass, and copies that fuse tensors, are not included.
    """
    return Method(begin=1e-3, work=0.0, bucket=inf)


def buckets(nbytes: float, bucket: float) -> int:
    """Return B, the number of buckets into which ``nbytes`` bytes are divided.

    Example:
        >>> buckets(100e6, 16e6), buckets(100e6, float("inf"))
        (7, 1)
    """
    return max(1, ceil(nbytes / bucket))


def expected_largest(count: int) -> float:
    """Return E_n, the approximate expected value of the largest of ``count`` standard normal numbers.

    Example:
        >>> [round(expected_largest(n), 2) for n in (1, 2, 8, 1024)]
        [0.0, 0.59, 1.43, 3.23]
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def require_costs(**values: float) -> None:
    """Refuse values that are not numbers of at least 0."""
    for name, value in values.items():
        require_real(value, f"`{name}`", positive=False)


def require_positive(**sizes: float) -> None:
    """Refuse sizes that are not positive; infinity is allowed."""
    for name, size in sizes.items():
        if not size > 0:
            raise ValueError(f"`{name}` must be positive. Received: {size!r}")
