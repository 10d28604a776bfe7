"""The costs of a machine, from measurements on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from hvd_periodic.arguments import require_int, require_real
from hvd_periodic.cost_model.model import Method, Network, buckets, require_costs, require_positive
from hvd_periodic.vectors.layout import DEFAULT_BUCKET_BYTES
from hvd_periodic.wires import Compression, Wire

_ROUNDS = 20
"""In which a fit finds what takes longer; it takes three or four."""

_GAIN = 0.02
"""By which the sum of squared relative errors has to fall for a cache to be believed in: an error of 14 % in one
measurement, or of 5 % in eight."""


@dataclass(frozen=True)
class Measurement:
    """An exchange that was measured, without overlap and fragments.

    Args:
        method: its name.
        workers: n.
        nbytes: P.
        seconds: it took.
        wire: how it travelled.
        sharing: k, workers on each core, at least 1: they take turns, and what they do takes as many times as long.
        bucket: bytes that the worker is at while others travel.
        tensors: m.
        asleep: u, seconds of it in which workers sleep, so that those that share a core do at the same time.

    Raises:
        TypeError, ValueError: a number that cannot be.
    """

    method: str
    workers: int
    nbytes: float
    seconds: float
    wire: Wire = Compression.none
    sharing: float = 1.0
    bucket: float = DEFAULT_BUCKET_BYTES
    tensors: int = 1
    asleep: float = 0.0

    def __post_init__(self) -> None:
        for name in ("workers", "tensors"):
            require_int(getattr(self, name), f"`{name}`", 1)
        require_real(self.seconds, "`seconds`", positive=True)
        require_costs(nbytes=self.nbytes, asleep=self.asleep)
        if not self.sharing >= 1:
            raise ValueError(f"`sharing` must be at least 1. Received: {self.sharing!r}")
        require_positive(bucket=self.bucket)

    @property
    def decoded(self) -> float:
        """Bytes that each worker decodes the messages of others to, where more come from more."""
        return self.wire.decoded(self.workers, self.nbytes)


@dataclass(frozen=True)
class Costs:
    """What was found from measurements.

    Attributes:
        network: of the machine they were taken on.
        methods: by name.
    """

    network: Network
    methods: Mapping[str, Method]

    def predicted(self, measurement: Measurement) -> float:
        """Return the seconds that the model has for what was measured."""
        method = self.methods[measurement.method]
        wire = self.network.seconds(measurement.workers, measurement.nbytes, measurement.wire)
        alone = method.seconds(measurement.nbytes, wire, measurement.decoded, measurement.tensors)
        return measurement.asleep + measurement.sharing * max(0.0, alone - measurement.asleep)


def fit(measurements: Sequence[Measurement]) -> Costs:
    """Return the costs for which the sum of squared relative errors is least; none is negative.

    Which of own work and wire takes longer has to be known for that: it is what the costs say that were found before,
    until they say the same again. Of the sizes that were measured, a method's cache holds all up to the one with which
    the fit is best.

    Args:
        measurements: of two sizes and of two numbers of workers at least, or some costs cannot be told from each other;
            of three sizes for a cache.

    Raises:
        ImportError: there is no SciPy, which solves this.
        ValueError: no measurements.

    Example:
        >>> network, method = Network(1e-5, 1e-9), Method(1e-3, 1e-10)
        >>> made = [
        ...     Measurement("averaging", n, size, method.seconds(size, network.seconds(n, size)))
        ...     for n in (2, 4)
        ...     for size in (1e4, 1e8)
        ... ]
        >>> found = fit(made)
        >>> f"{found.network.byte:.2e}", f"{found.methods['averaging'].begin:.2e}"
        ('1.00e-09', '1.00e-03')
    """
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise ImportError("`fit` needs SciPy: pip install 'hvd_periodic[costs]', or pip install scipy") from error
    if not measurements:
        raise ValueError("`measurements` must not be empty: run the benchmark of exchanges on some numbers of ranks")
    caches = dict.fromkeys((measured.method for measured in measurements), inf)
    found = _fitted(nnls, measurements, caches)
    while True:
        better = [(_fitted(nnls, measurements, tried), tried) for tried in _other_caches(measurements, caches)]
        best, tried = min(better, key=lambda each: each[0][1], default=(found, caches))
        if best[1] >= found[1] - _GAIN:
            return found[0]
        found, caches = best, tried


def fit_network(workers: int, allreduces: Sequence[tuple[float, float]]) -> Network:
    """Return the network for which the sum of squared relative errors is least; no cost is negative.

    What Horovod and Python add to every allreduce is in the cost of messages: one number of workers cannot tell them
    from each other.

    Args:
        workers: n, at least 2.
        allreduces: bytes and seconds of each; of two sizes at least.

    Raises:
        TypeError, ValueError: nothing can be told from these.

    Example:
        >>> network = Network(message=1e-4, byte=8e-9)
        >>> fit_network(4, [(size, network.seconds(4, size)) for size in (4e3, 4e6)])
        Network(message=0.0001, byte=8e-09)
    """
    require_int(workers, "`workers`", 2)
    seconds = _seconds(allreduces, "allreduces")
    rows = np.array([Compression.none.traffic(workers, nbytes) for nbytes, _ in allreduces])
    return Network(*_pair(rows / seconds[:, None], np.ones(len(seconds))))


def fit_method(
    network: Network, workers: int, exchanges: Sequence[tuple[float, float]], wire: Wire = Compression.none
) -> Method:
    """Return what workers do themselves in exchanges, of at most one bucket each, by what the network leaves of them.

    The sum of squared relative errors is least, and no cost is negative.

    Args:
        network: on which they were measured.
        workers: n.
        exchanges: bytes and seconds of each; of two sizes at least.
        wire: how they travelled.

    Raises:
        TypeError, ValueError: nothing can be told from these.

    Example:
        >>> network, method = Network(1e-4, 8e-9), Method(begin=1e-3, work=4e-10)
        >>> made = [(size, method.seconds(size, network.seconds(4, size))) for size in (4e4, 4e6)]
        >>> fit_method(network, 4, made) == method
        True
    """
    seconds = _seconds(exchanges, "exchanges")
    if max(nbytes for nbytes, _ in exchanges) > DEFAULT_BUCKET_BYTES:
        raise ValueError(f"`exchanges` must be of {DEFAULT_BUCKET_BYTES} bytes at most. Received: {exchanges!r}")
    left = [taken - network.seconds(workers, nbytes, wire) for nbytes, taken in exchanges]
    rows = np.array([[1.0, nbytes] for nbytes, _ in exchanges])
    return Method(*_pair(rows / seconds[:, None], np.array(left) / seconds))


def _seconds(measured: Sequence[tuple[float, float]], argument: str) -> Any:
    if len({nbytes for nbytes, _ in measured}) < 2:
        raise ValueError(f"`{argument}` must be of two sizes at least. Received: {measured!r}")
    return np.array([require_real(seconds, "`seconds`", positive=True) for _, seconds in measured])


def _pair(rows: Any, right: Any) -> tuple[float, float]:
    """Return the two numbers of at least 0 that solve this best: both positive, or one of them, or none."""
    scale = np.linalg.norm(rows, axis=0)
    scaled = rows / scale
    both = np.linalg.lstsq(scaled, right, rcond=None)[0]
    alone = [np.eye(2)[i] * max(0.0, scaled[:, i] @ right) for i in range(2)]
    found = min([both] if (both >= 0).all() else alone, key=lambda each: float(((scaled @ each - right) ** 2).sum()))
    # Rounded, so that what was exact is exact again.
    first, second = (float(f"{value:.12g}") for value in found / scale)
    return first, second


def _other_caches(measurements: Sequence[Measurement], caches: Mapping[str, float]) -> list[dict[str, float]]:
    """Return caches of which one has another size: one that was measured, or infinity."""
    sizes = {
        name: {inf, *(each.nbytes for each in measurements if each.method == name and each.nbytes)} for name in caches
    }
    return [dict(caches) | {name: size} for name in caches for size in sorted(sizes[name]) if size != caches[name]]


def _fitted(nnls: Any, measurements: Sequence[Measurement], caches: Mapping[str, float]) -> tuple[Costs, float]:
    """Return the best costs with these caches, and their sum of squared relative errors."""
    parts = [(1.0, 1.0)] * len(measurements)
    found: list[tuple[Costs, float]] = []
    for _ in range(_ROUNDS):
        costs = _solved(nnls, measurements, parts, caches)
        found.append((costs, sum((costs.predicted(each) / each.seconds - 1) ** 2 for each in measurements)))
        before, parts = parts, [_parts(costs, measured) for measured in measurements]
        if parts == before:
            break
    return min(found, key=lambda pair: pair[1])


def _solved(
    nnls: Any, measurements: Sequence[Measurement], parts: Sequence[tuple[float, float]], caches: Mapping[str, float]
) -> Costs:
    """Return the costs that fit best where these parts of own work and wire count."""
    names, unknown = list(caches), 5
    rows, right = np.zeros((len(measurements), 2 + unknown * len(names))), np.ones(len(measurements))
    for i, (measured, (own_part, wire_part)) in enumerate(zip(measurements, parts, strict=True)):
        rows[i, :2] = measured.wire.traffic(measured.workers, measured.nbytes)
        rows[i, :2] *= wire_part
        place = 2 + unknown * names.index(measured.method)
        uncached = measured.nbytes if measured.nbytes > caches[measured.method] else 0.0
        own = own_part * measured.nbytes, own_part * measured.decoded, own_part * uncached
        rows[i, place : place + unknown] = 1.0, measured.tensors, *own
        rows[i] *= measured.sharing / measured.seconds
        right[i] += (measured.sharing - 1) * measured.asleep / measured.seconds
    scale = np.maximum(np.linalg.norm(rows, axis=0), np.finfo(float).tiny)
    message, byte, *costs = (nnls(rows / scale, right)[0] / scale).tolist()
    bucket = {measured.method: measured.bucket for measured in measurements}
    methods = {}
    for i, (name, cache) in enumerate(caches.items()):
        begin, tensor, work, decode, uncached = costs[unknown * i : unknown * (i + 1)]
        methods[name] = Method(begin, work, bucket[name], tensor, decode, uncached, cache)
    return Costs(Network(message, byte), methods)


def _parts(costs: Costs, measured: Measurement) -> tuple[float, float]:
    """Return which parts of own work and wire count: all of the one that takes longer, a B-th of the other one."""
    own = costs.methods[measured.method].own(measured.nbytes, measured.decoded)
    part = 1.0 / buckets(measured.nbytes, measured.bucket)
    wire = costs.network.seconds(measured.workers, measured.nbytes, measured.wire)
    return (1.0, part) if own >= wire else (part, 1.0)
