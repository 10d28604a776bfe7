"""Fits the costs of a machine to measurements on it."""

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
"""Maximum iterations of a fit, which determines whether own work or wire takes longer; three or four suffice."""

_GAIN = 0.02
"""Minimum decrease of the sum of squared relative errors that justifies a cache: an error of 14 % in one measurement,
or of 5 % in eight."""


@dataclass(frozen=True)
class Measurement:
    """A measured exchange, without overlap and fragments.

    Args:
        method: name of the method.
        workers: n.
        nbytes: P.
        seconds: duration of the exchange.
        wire: compression of the messages.
        sharing: k, workers on each core, at least 1: they take turns, so that their work takes k times as long.
        bucket: bytes of a bucket, which the worker processes while other buckets travel.
        tensors: m.
        asleep: u, seconds of the exchange in which workers sleep; workers that share a core sleep at the same time.

    Raises:
        TypeError, ValueError: a number is of the wrong type or out of range.
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
        """Bytes to which each worker decodes the messages of the others, if they grow with the number of workers."""
        return self.wire.decoded(self.workers, self.nbytes)


@dataclass(frozen=True)
class Costs:
    """Costs fitted to measurements.

    Attributes:
        network: costs of the network of the measured machine.
        methods: costs of the methods, by name.
    """

    network: Network
    methods: Mapping[str, Method]

    def predicted(self, measurement: Measurement) -> float:
        """Return the seconds that the model predicts for a measurement."""
        method = self.methods[measurement.method]
        wire = self.network.seconds(measurement.workers, measurement.nbytes, measurement.wire)
        alone = method.seconds(measurement.nbytes, wire, measurement.decoded, measurement.tensors)
        return measurement.asleep + measurement.sharing * max(0.0, alone - measurement.asleep)


def fit(measurements: Sequence[Measurement]) -> Costs:
    """Return the costs that minimize the sum of squared relative errors; none is negative.

    The fit must know whether own work or wire takes longer in each measurement. It takes this from the costs of the
    previous iteration, and repeats until nothing changes. The cache of a method holds the measured sizes up to the one
    with which the fit is best.

    Args:
        measurements: of at least two sizes and two numbers of workers, or some costs cannot be told apart; of three
            sizes for a cache.

    Raises:
        ImportError: SciPy, which solves this, is not installed.
        ValueError: there are no measurements.

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
        raise ValueError("`measurements` must not be empty: run the benchmark of exchanges on several numbers of ranks")
    caches = dict.fromkeys((measured.method for measured in measurements), inf)
    found = _fitted(nnls, measurements, caches)
    while True:
        better = [(_fitted(nnls, measurements, tried), tried) for tried in _other_caches(measurements, caches)]
        best, tried = min(better, key=lambda each: each[0][1], default=(found, caches))
        if best[1] >= found[1] - _GAIN:
            return found[0]
        found, caches = best, tried


def fit_network(workers: int, allreduces: Sequence[tuple[float, float]]) -> Network:
    """Return the network that minimizes the sum of squared relative errors; no cost is negative.

    The overhead of Horovod and Python in every allreduce is part of the cost of messages: with a single number of
    workers they cannot be told apart.

    Args:
        workers: n, at least 2.
        allreduces: bytes and seconds of each; of at least two sizes.

    Raises:
        TypeError, ValueError: these do not determine the costs.

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
    """Return the costs of workers' own work, from exchanges of at most one bucket minus their time on the network.

    These costs minimize the sum of squared relative errors, and none is negative.

    Args:
        network: the network on which the exchanges were measured.
        workers: n.
        exchanges: bytes and seconds of each; of at least two sizes.
        wire: compression of the messages.

    Raises:
        TypeError, ValueError: these do not determine the costs.

    Example:
        >>> network, method = Network(1e-4, 8e-9), Method(begin=1e-3, work=4e-10)
        >>> made = [(size, method.seconds(size, network.seconds(4, size))) for size in (4e4, 4e6)]
        >>> fit_method(network, 4, made) == method
        True
    """
    seconds = _seconds(exchanges, "exchanges")
    if max(nbytes for nbytes, _ in exchanges) > DEFAULT_BUCKET_BYTES:
        raise ValueError(f"`exchanges` must have at most {DEFAULT_BUCKET_BYTES} bytes. Received: {exchanges!r}")
    left = [taken - network.seconds(workers, nbytes, wire) for nbytes, taken in exchanges]
    rows = np.array([[1.0, nbytes] for nbytes, _ in exchanges])
    return Method(*_pair(rows / seconds[:, None], np.array(left) / seconds))


def _seconds(measured: Sequence[tuple[float, float]], argument: str) -> Any:
    if len({nbytes for nbytes, _ in measured}) < 2:
        raise ValueError(f"`{argument}` must have at least two sizes. Received: {measured!r}")
    return np.array([require_real(seconds, "`seconds`", positive=True) for _, seconds in measured])


def _pair(rows: Any, right: Any) -> tuple[float, float]:
    """Return the two nonnegative numbers that solve this best: both positive, or one of them, or neither."""
    scale = np.linalg.norm(rows, axis=0)
    scaled = rows / scale
    both = np.linalg.lstsq(scaled, right, rcond=None)[0]
    alone = [np.eye(2)[i] * max(0.0, scaled[:, i] @ right) for i in range(2)]
    found = min([both] if (both >= 0).all() else alone, key=lambda each: float(((scaled @ each - right) ** 2).sum()))
    # Rounded, so that exact values are exact again.
    first, second = (float(f"{value:.12g}") for value in found / scale)
    return first, second


def _other_caches(measurements: Sequence[Measurement], caches: Mapping[str, float]) -> list[dict[str, float]]:
    """Return the caches with one size changed, in every possible way: to another measured size, or to infinity."""
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
    """Return the costs that fit best if own work and wire count with these weights."""
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
    """Return the weights of own work and wire: 1 for the one that takes longer, 1/B for the other."""
    own = costs.methods[measured.method].own(measured.nbytes, measured.decoded)
    part = 1.0 / buckets(measured.nbytes, measured.bucket)
    wire = costs.network.seconds(measured.workers, measured.nbytes, measured.wire)
    return (1.0, part) if own >= wire else (part, 1.0)
