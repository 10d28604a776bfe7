r"""What training will cost: seconds per step by algorithm, period, workers, compression, fragments and overlap.

A job of n workers takes local steps of t seconds, whose standard deviation is s, and exchanges P bytes of float32 every
τ steps.

**Collectives**, with α seconds for a message and β for a byte, of b bytes on each worker:

- all-reduce: 2 (n − 1) α + 2 (n − 1) / n · b β, which no algorithm moves fewer bytes than (Patarasuk and Yuan,
  Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009);
- all-to-all, or all-gather of pieces of b / n bytes: (n − 1) α + (n − 1) / n · b β, half of it;
- all-gather of b bytes from each: (n − 1) α + (n − 1) b β.

**An exchange** of P bytes in m tensors takes W(P) seconds on the way, by the collectives of its wire and the bytes b
that it makes of them. What the worker does itself takes o + θ m + V(P) seconds: o for Python, Horovod's cycle and what
ranks tell each other, θ for a tensor, which Horovod's own ways announce and copy one by one; and

    V(P) = γ P + φ P [P > C] + δ D(P),

γ for passes over memory and for encoding, φ for what no longer finds its parameters in the cache of the processor (of
one pass after another over more than that nothing is found there), δ for messages of others, where all have to be
decoded whole: into D = n P bytes, if they are gathered in one hop, as those of top-k are. All depend on the method; so
does C, by what a method keeps beside the parameters. While a bucket travels the
worker is at another one: in B buckets an exchange takes

    T(P) = o + θ m + max(V(P), W(P)) + min(V(P), W(P)) / B.

Where k workers share a core all takes k times as long, but for the u seconds of o in which they sleep: Horovod looks
for what to do once in a cycle, of a millisecond since version 0.21, and sleeps until then.

**A period** has F exchanges of P / F bytes. Every worker waits for the slowest one, which is behind by

    w = s √(τ / F) · E_n,

E_n the expected largest of n normal numbers (by Blom, Statistical estimates and transformed beta variables, 1958). With
overlap an exchange is under way while the worker takes d steps, and only its own work is left of it where that is long:

    seconds per step = t + F / τ · (T(P / F) + w),                                  without overlap,
    seconds per step = t + F / τ · (o + θ m / F + V(P / F) + max(0, W(P / F) + w − d t)),      with it.

Costs of a machine are found from measurements, see the module of fits; those of a network that is not there can be
stated, and of a processor there are :func:`typical` ones.

**A period** that leaves the exchanges a share σ of the time is the shortest τ with 1 − t / (seconds per step) ≤ σ.
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
    """What a worker does itself in an exchange.

    Args:
        begin: o, seconds, whatever the size.
        work: γ, seconds for a byte of parameters.
        bucket: bytes that the worker is at while others travel; infinite, if it waits for all of them.
        tensor: θ, seconds for each tensor.
        decode: δ, seconds for a byte of float32 that a message of another worker is decoded to.
        uncached: φ, more seconds for a byte of parameters that are too large for the cache.
        cache: C, the most bytes of parameters that are not.

    Raises:
        TypeError, ValueError: not a number of at least 0.
    """

    begin: float
    work: float
    bucket: float = DEFAULT_BUCKET_BYTES
    tensor: float = 0.0
    decode: float = 0.0
    uncached: float = 0.0
    cache: float = inf

    def __post_init__(self) -> None:
        costs = {"begin": self.begin, "work": self.work, "tensor": self.tensor, "decode": self.decode}
        require_costs(**costs, uncached=self.uncached)
        require_positive(bucket=self.bucket, cache=self.cache)

    def seconds(
        self, nbytes: float, wire: float, decoded: float = 0.0, tensors: float = 1, fragments: int = 1
    ) -> float:
        """Return T, of an exchange of so many bytes that takes W seconds on the way; D of them are decoded."""
        own = self.own(nbytes, decoded, fragments)
        pipelined = max(own, wire) + min(own, wire) / buckets(nbytes, self.bucket)
        return self.begin + self.tensor * tensors + pipelined

    def own(self, nbytes: float, decoded: float = 0.0, fragments: int = 1) -> float:
        """Return V, what a worker does itself while other buckets travel, of one of so many fragments."""
        uncached = self.uncached if nbytes > self.cache / fragments else 0.0
        return (self.work + uncached) * nbytes + self.decode * decoded


@dataclass(frozen=True)
class Network:
    """What a collective costs.

    Args:
        message: α, seconds for a message.
        byte: β, seconds for a byte; 8e-9 is 1 Gbit/s.

    Raises:
        TypeError, ValueError: not a number of at least 0.

    Example:
        >>> round(Network(message=1e-4, byte=8e-9).seconds(2, 25e6), 3)
        0.2
    """

    message: float
    byte: float

    def __post_init__(self) -> None:
        require_costs(message=self.message, byte=self.byte)

    def seconds(self, workers: int, nbytes: float, wire: Wire = Compression.none, lasting: bool = False) -> float:
        """Return W: what it takes until the sums of so many bytes of float32 are on all workers."""
        messages, sent = wire.traffic(workers, nbytes, lasting)
        return messages * self.message + sent * self.byte


@dataclass(frozen=True)
class Job:
    """A training.

    Args:
        workers: n.
        nbytes: P, of its parameters in float32.
        step: t, seconds of a local step.
        period: τ, local steps between exchanges of the same parameters.
        overlap: d, local steps that an exchange has.
        fragments: F.
        wire: how parameters travel.
        spread: s, the standard deviation of a local step in seconds.
        tensors: m, in which its parameters are.

    Raises:
        TypeError, ValueError: a number that cannot be.
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
    """Return the mean duration of a step, with its share of the exchanges; the module gives the equation.

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
    """Return the part of the time that exchanges take, waiting for the slowest included: 1 − t / seconds per step.

    Example:
        >>> job = Job(workers=2, nbytes=25e6, step=0.048, period=10)
        >>> round(share_of_exchanges(job, Method(begin=0.0, work=4e-10), Network(message=1e-4, byte=8e-9)), 2)
        0.3
    """
    seconds = seconds_per_step(job, method, network)
    return 1 - job.step / seconds if seconds else 0.0


def sent_per_step(job: Job) -> float:
    """Return the bytes that a worker sends for each of its steps, as :meth:`Wire.traffic` counts them.

    Example:
        >>> sent_per_step(Job(workers=4, nbytes=100e6, step=0.1, period=10))
        15000000.0
    """
    _, sent = job.wire.traffic(job.workers, job.nbytes / job.fragments, job.overlap > 0)
    return job.fragments * sent / job.period


def with_period(job: Job, period: int) -> Job:
    """Return the job with another period; where exchanges are overlapped, they are until just before the next one."""
    return replace(job, period=period, overlap=period - 1 if job.overlap else 0)


def shortest_period(job: Job, method: Method, network: Network, share: float, longest: int = 10**6) -> int | None:
    """Return the shortest period at which exchanges take at most this share of the time; None: longer than ``longest``.

    The share falls as the period grows, so that the period is found by bisection.

    Args:
        job: whose period counts for nothing; with an overlap above 0, exchanges travel during the whole period.
        method: what workers do in an exchange.
        network: what collectives cost.
        share: σ, in (0, 1).
        longest: beyond which nobody looks.

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
    """Return what a worker does itself in an exchange where nobody has measured: on one core that copies 7 GB/s.

    docs/performance has the measurements that these are from; fits find those of a machine.

    Example:
        >>> typical()
        Method(begin=0.0015, work=8e-10, bucket=16777216, tensor=0.0, decode=0.0, uncached=0.0, cache=inf)
    """
    return Method(begin=1.5e-3, work=8e-10 + wire.coding_seconds, decode=wire.adding_seconds)


def typical_allreduce() -> Method:
    """Return what an allreduce of gradients takes besides the network: Horovod's cycle.

    That it may begin during the backward pass, and that tensors are fused by copying, is not in it.
    """
    return Method(begin=1e-3, work=0.0, bucket=inf)


def buckets(nbytes: float, bucket: float) -> int:
    """Return B: into how many buckets so many bytes are cut.

    Example:
        >>> buckets(100e6, 16e6), buckets(100e6, float("inf"))
        (7, 1)
    """
    return max(1, ceil(nbytes / bucket))


def expected_largest(count: int) -> float:
    """Return E_n: about what the largest of so many standard normal numbers is expected to be.

    Example:
        >>> [round(expected_largest(n), 2) for n in (1, 2, 8, 1024)]
        [0.0, 0.59, 1.43, 3.23]
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def require_costs(**values: float) -> None:
    """Refuse what is no number of at least 0."""
    for name, value in values.items():
        require_real(value, f"`{name}`", positive=False)


def require_positive(**sizes: float) -> None:
    """Refuse what is no positive number of bytes; infinity is one."""
    for name, size in sizes.items():
        if not size > 0:
            raise ValueError(f"`{name}` must be positive. Received: {size!r}")
