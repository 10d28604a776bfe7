"""What happens to elastic jobs in the tests, and what has to come of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.compression_oracle import SlowWire
from tests.compression_oracle import int8 as in_8_bits

SIZE, STEPS, PERIOD, INNER_PERIOD, RATE, MOMENTUM = 4, 24, 4, 2, 0.1, 0.5


@dataclass(frozen=True)
class Event:
    """Something that happens to ranks once.

    Attributes:
        what: ``kill``; ``before``, ``in`` or ``after``: the same there in a collective, counted from this step on;
            ``hang``, for ever; ``wait`` for other ranks; ``dismiss`` the last hosts; ``forget`` the newest commit.
        step: local steps before it.
        size: of the job at that time.
        rank: to whom; None: all.
        number: of the collective; of the hosts that are dismissed.
    """

    what: str
    step: int
    size: int
    rank: int | None = None
    number: int = 1

    @property
    def name(self) -> str:
        """A file that says it has happened."""
        return f"{self.what}.{self.step}.{self.size}"


@dataclass(frozen=True)
class Scenario:
    """A job.

    Attributes:
        algorithm: of its exchanges.
        ranks: at the start.
        events: what happens.
        begun: ranks and local steps of each stretch of training; from the step before, all that went on was put back.
        collectives: an exchange takes one for the meeting, and one for data.
        overlap: of exchanges.
        center: where it lives.
        slots: ranks of each host, of which Horovod gives up all when one is lost.
        timeout: seconds for which ranks wait for each other.
        inner: algorithm of the exchanges inside of each host.
        grouped: those exchanges are inside of each host; otherwise of all ranks, more often than the others.
        loop: in Keras: ``fit``; ``compiled`` or ``eager`` steps; or ``synchronizer``, around one's own.
    """

    algorithm: str
    ranks: int
    events: Sequence[Event]
    begun: Sequence[tuple[int, int]]
    collectives: bool = False
    overlap: int = 0
    center: str = "replicated"
    slots: int = 1
    timeout: float | None = None
    inner: str = ""
    grouped: bool = True
    loop: str = ""


SCENARIOS = {
    "one of three": Scenario("easgd", 3, [Event("kill", 9, 3, rank=2)], [(3, 0), (2, 8)], center="sharded"),
    "the root, in a collective": Scenario(
        "diloco", 2, [Event("in", 7, 2, rank=0, number=2)], [(2, 0), (1, 4)], collectives=True
    ),
    "one joins": Scenario("agn", 1, [Event("wait", 5, 1)], [(1, 0), (2, 8)]),
    "a host of two": Scenario("diloco", 4, [Event("kill", 9, 4, rank=3)], [(4, 0), (2, 8)], slots=2, inner="easgd"),
    "a host joins a host of two": Scenario(
        "easgd", 2, [Event("wait", 5, 2, rank=0)], [(2, 0), (3, 8)], slots=2, inner="diloco"
    ),
    "two levels": Scenario(
        "diloco",
        2,
        [Event("kill", 9, 2, rank=0), Event("wait", 13, 1)],
        [(2, 0), (1, 8), (2, 16)],
        inner="easgd",
        grouped=False,
    ),
    "two levels, in a collective": Scenario(
        "easgd",
        3,
        [Event("in", 5, 3, rank=1, number=2)],
        [(3, 0), (2, 4)],
        collectives=True,
        inner="diloco",
        grouped=False,
    ),
    "before a collective": Scenario(
        "averaging", 3, [Event("before", 7, 3, rank=1, number=2)], [(3, 0), (2, 4)], collectives=True
    ),
    "after the last collective": Scenario(
        "agn", 3, [Event("after", 7, 3, rank=1, number=2)], [(3, 0), (2, 8)], collectives=True
    ),
    "commits apart": Scenario(
        "easgd", 3, [Event("forget", 9, 3, rank=0), Event("kill", 9, 3, rank=2)], [(3, 0), (2, 4)]
    ),
    "twice": Scenario(
        "diloco", 3, [Event("kill", 9, 3, rank=2), Event("kill", 17, 2, rank=0)], [(3, 0), (2, 8), (1, 16)]
    ),
    "overlapped": Scenario("easgd", 2, [Event("kill", 9, 2, rank=1)], [(2, 0), (1, 8)], overlap=2),
    "all replaced": Scenario(
        "diloco",
        2,
        [Event("kill", 5, 2, rank=1), Event("wait", 6, 1), Event("kill", 13, 2, rank=0), Event("wait", 14, 1)],
        [(2, 0), (1, 4), (2, 8), (1, 12), (2, 16)],
    ),
    "the center of the root": Scenario(
        "agn", 2, [Event("kill", 9, 2, rank=0), Event("wait", 13, 1)], [(2, 0), (1, 8), (2, 16)], center="root"
    ),
    "a share, in a collective": Scenario(
        "easgd", 3, [Event("in", 7, 3, rank=2, number=2)], [(3, 0), (2, 4)], collectives=True, center="sharded"
    ),
    "a share, in a commit": Scenario(
        "diloco", 3, [Event("in", 7, 3, rank=0, number=3)], [(3, 0), (2, 4)], collectives=True, center="sharded"
    ),
    "a rank that hangs is given up": Scenario(
        "averaging", 3, [Event("hang", 9, 3, rank=1)], [(3, 0), (2, 8)], timeout=10.0
    ),
    "a rank is dismissed": Scenario("easgd", 2, [Event("dismiss", 5, 2, rank=0)], [(2, 0), (1, 8)]),
    "shares of a host": Scenario("agn", 4, [Event("kill", 9, 4, rank=3)], [(4, 0), (2, 8)], center="sharded", slots=2),
    "a share is dismissed": Scenario("agn", 3, [Event("dismiss", 5, 3, rank=0)], [(3, 0), (2, 8)], center="sharded"),
    "shares are dismissed": Scenario(
        "agn", 4, [Event("dismiss", 5, 4, rank=0, number=3)], [(4, 0), (1, 8)], center="sharded"
    ),
    "shares, all replaced": Scenario(
        "agn",
        2,
        [Event("kill", 5, 2, rank=1), Event("wait", 6, 1), Event("kill", 13, 2, rank=0), Event("wait", 14, 1)],
        [(2, 0), (1, 4), (2, 8), (1, 12), (2, 16)],
        center="sharded",
    ),
}

KERAS = {
    "two levels": Scenario(
        "diloco",
        2,
        [Event("kill", 9, 2, rank=0), Event("wait", 13, 1)],
        [(2, 0), (1, 8), (2, 16)],
        inner="easgd",
        grouped=False,
        loop="fit",
    ),
    "a host of two": Scenario(
        "diloco", 4, [Event("kill", 9, 4, rank=3)], [(4, 0), (2, 8)], slots=2, inner="easgd", loop="fit"
    ),
    "a host of two, in a collective of a host": Scenario(
        "averaging",
        4,
        [Event("in", 5, 4, rank=3, number=2)],
        [(4, 0), (2, 4)],
        slots=2,
        inner="easgd",
        loop="eager",
        collectives=True,
    ),
    "a host joins a host of two": Scenario(
        "easgd", 2, [Event("wait", 5, 2, rank=0)], [(2, 0), (3, 8)], slots=2, inner="diloco", loop="compiled"
    ),
    "one of two": Scenario("easgd", 2, [Event("kill", 9, 2, rank=1)], [(2, 0), (1, 8)], loop="fit"),
    "overlapped": Scenario("easgd", 2, [Event("kill", 9, 2, rank=1)], [(2, 0), (1, 8)], overlap=2, loop="fit"),
    "overlapped, in flight": Scenario(
        "easgd",
        2,
        [Event("in", 7, 2, rank=1, number=2)],
        [(2, 0), (1, 4)],
        overlap=2,
        collectives=True,
        loop="compiled",
    ),
    "the root, before a collective": Scenario(
        "diloco", 2, [Event("before", 7, 2, rank=0, number=2)], [(2, 0), (1, 4)], collectives=True, loop="compiled"
    ),
    "one joins": Scenario("agn", 1, [Event("wait", 5, 1)], [(1, 0), (2, 8)], loop="fit"),
    "one joins an eager loop": Scenario("easgd", 1, [Event("wait", 5, 1)], [(1, 0), (2, 8)], loop="eager"),
    "after the last collective": Scenario(
        "averaging", 3, [Event("after", 7, 3, rank=1, number=3)], [(3, 0), (2, 8)], collectives=True, loop="fit"
    ),
    "commits apart": Scenario(
        "easgd", 3, [Event("forget", 9, 3, rank=0), Event("kill", 9, 3, rank=2)], [(3, 0), (2, 4)], loop="synchronizer"
    ),
    "twice": Scenario(
        "diloco",
        3,
        [Event("kill", 9, 3, rank=2), Event("kill", 17, 2, rank=0)],
        [(3, 0), (2, 8), (1, 16)],
        loop="eager",
    ),
    "all replaced": Scenario(
        "diloco",
        2,
        [Event("kill", 5, 2, rank=1), Event("wait", 6, 1), Event("kill", 13, 2, rank=0), Event("wait", 14, 1)],
        [(2, 0), (1, 4), (2, 8), (1, 12), (2, 16)],
        loop="compiled",
    ),
    "a share": Scenario("agn", 3, [Event("kill", 9, 3, rank=1)], [(3, 0), (2, 8)], center="sharded", loop="fit"),
    "the center of the root": Scenario(
        "agn",
        2,
        [Event("kill", 9, 2, rank=0), Event("wait", 13, 1)],
        [(2, 0), (1, 8), (2, 16)],
        center="root",
        loop="fit",
    ),
    "a share, in a collective": Scenario(
        "easgd",
        3,
        [Event("in", 7, 3, rank=2, number=2)],
        [(3, 0), (2, 4)],
        collectives=True,
        center="sharded",
        loop="synchronizer",
    ),
    "shares, all replaced": Scenario(
        "diloco",
        2,
        [Event("kill", 5, 2, rank=1), Event("wait", 6, 1), Event("kill", 13, 2, rank=0), Event("wait", 14, 1)],
        [(2, 0), (1, 4), (2, 8), (1, 12), (2, 16)],
        center="sharded",
        loop="compiled",
    ),
    "a share is dismissed": Scenario(
        "agn", 3, [Event("dismiss", 5, 3, rank=0)], [(3, 0), (2, 8)], center="sharded", loop="eager"
    ),
    "shares are dismissed": Scenario(
        "agn", 4, [Event("dismiss", 5, 4, rank=0, number=3)], [(4, 0), (1, 8)], center="sharded", loop="fit"
    ),
}


@dataclass
class Worker:
    """One process.

    Attributes:
        x: its replica.
        velocity: its momentum.
        accumulated: gradients since its last exchange.
        mean: what batch normalization moves.
        inner: the center of its host, with its momentum.
        unsent: what 8 bits have not sent.
        unsent_sums: what they have not sent of the sums that it forms for the others, elsewhere zeros.
        place: its rank, and the number of ranks, with which it has formed these.
        snapshot: where it was when the exchange in flight began; NaN where none is in flight.
    """

    x: np.ndarray
    velocity: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))
    accumulated: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))
    mean: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))
    inner: Sequence[np.ndarray] = ()
    unsent: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))
    unsent_sums: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))
    place: tuple[int, int] = (0, 0)
    snapshot: np.ndarray = field(default_factory=lambda: np.full(SIZE, np.nan))

    def land(self, center: np.ndarray) -> None:
        """Take the exchange that is in flight: where the center has come to, and the steps since."""
        self.x = np.where(np.isnan(self.snapshot), self.x, center + self.x - self.snapshot)
        self.snapshot = np.full(SIZE, np.nan)

    def take_place(self, rank: int, size: int, forgets: bool) -> None:
        """Form other sums than before, unless the place is the same."""
        if self.place != (rank, size) or forgets:
            self.place, self.unsent_sums = (rank, size), np.zeros(SIZE)


def target(rank: int, step: int) -> list[float]:
    """Return where a rank descends to in a step."""
    return [math.sin((i + 1) * (rank + 1) + step) for i in range(SIZE)]


def policies_of(scenario: Any) -> dict[str, str]:
    """Return the policies of further parameters in a scenario, as far as the equations below know them.

    ``led`` is the root's at every exchange. A step touches some rows of ``table``. Of ``seldom``, a step has a gradient
    on some ranks. Where the last collective matters, there are none: each takes more of them.
    """
    one_level = not (scenario.inner or scenario.overlap or getattr(scenario, "fragments", 1) > 1)
    one_level &= all(event.what != "after" for event in getattr(scenario, "events", ()))
    tables = one_level and scenario.center == "replicated" and not getattr(scenario, "int8", False)
    seldom = one_level and scenario.algorithm == "averaging" and scenario.loop in ("", "eager")
    found = ({"led": "broadcast"} if one_level else {}) | ({"table": "rows"} if tables else {})
    return found | ({"seldom": "present"} if seldom else {})


def touched(rank: int, step: int) -> np.ndarray:
    """Return which rows of a table a step of a rank touches, as 0 and 1: in some rounds nobody touches a row."""
    return np.array([float((rank + 2 * step + 3 * k) % 7 == 0) for k in range(SIZE)])


def table_momentum(algorithm: str) -> float:
    """Return the momentum with which a table is trained: elastic averaging refuses one, as it moves all rows."""
    return 0.0 if algorithm == "easgd" else MOMENTUM


def led_target(rank: int) -> float:
    """Return where a rank descends to with ``led``."""
    return 0.25 + rank


def has_seldom(rank: int, step: int) -> bool:
    """Return whether a step of a rank has a gradient of ``seldom``: in some rounds no rank has, or one, or all."""
    return (rank + 2 * step) % 5 < 2 and (step // PERIOD) % 4 != 2


def led_or_seldom_after(
    stretches: Sequence[tuple[int, Sequence[int]]],
    steps: int = STEPS,
    gives_velocity: bool = False,
    seldom: bool = False,
) -> float:
    """Return ``led``, or ``seldom`` in model averaging, on all workers at the end, by the equations.

    The arguments are as of :func:`expected`.
    """
    center, workers = 0.0, dict[int, tuple[float, float]]()
    for (begin, processes), end in zip(stretches, [*(step for step, _ in stretches[1:]), steps], strict=True):
        given = next((workers[process][1] for process in processes if process in workers), 0.0) * gives_velocity
        workers = {process: workers.get(process, (center, given)) for process in processes}
        present = set() if seldom else {processes[0]}
        for step in range(begin, end):
            for rank, (process, (x, velocity)) in enumerate(workers.items()):
                if not seldom or has_seldom(rank, step):
                    velocity = MOMENTUM * velocity + x - led_target(rank)
                    workers[process] = x - RATE * velocity, velocity
                    present |= {process} if seldom else set()
            if (step + 1) % PERIOD == 0 and present:
                center = sum(workers[process][0] for process in present) / len(present)
                workers = {process: (center, velocity) for process, (_, velocity) in workers.items()}
                present = set() if seldom else present
    return center


def check_further(
    end: dict[str, Any],
    algorithm: str,
    stretches: Sequence[tuple[int, Sequence[int]]],
    rank: int,
    steps: int = STEPS,
    gives_velocity: bool = False,
) -> None:
    """Check what a rank has of the further parameters at its end, and their center."""
    for name in {"led", "seldom"} & end.keys():
        value = led_or_seldom_after(stretches, steps, gives_velocity, seldom=name == "seldom")
        np.testing.assert_allclose(end[name], [value], rtol=0, atol=1e-12)
        assert end[f"{name}_center"] == end[name] != [0.0]
    if "table" in end:
        center, workers = expected(algorithm, stretches, gives_velocity, steps=steps, of_table=True)
        np.testing.assert_allclose(end["table_center"], center, rtol=0, atol=1e-12)
        np.testing.assert_allclose(end["table"], list(workers.values())[rank].x, rtol=0, atol=1e-12)
        assert any(end["table_center"])


def expected(
    algorithm: str,
    stretches: Sequence[tuple[int, Sequence[int]]],
    gives_velocity: bool = False,
    inner: str = "",
    slots: int | None = 1,
    overlap: int = 0,
    fragments: int = 1,
    int8: bool = False,
    steps: int = STEPS,
    forgetting: Sequence[Collection[int]] | None = None,
    of_table: bool = False,
    begun: list[tuple[np.ndarray, list[np.ndarray]]] | None = None,
) -> tuple[np.ndarray, dict[int, Worker]]:
    """Return center and workers, by the equations and one after the other.

    Args:
        algorithm: of exchanges.
        stretches: the step at which each begins, and the processes in the order of ranks. Who was not there before
            starts from the center, of two levels of all ranks that of the inner one.
        gives_velocity: those start with the momentum of the first that was there.
        inner: algorithm of exchanges inside of hosts. The center of a host is that of the first worker that was there.
        slots: ranks of each host; None: those exchanges are of all ranks.
        overlap: steps for which an exchange is in flight.
        fragments: parts of equal size, which are exchanged in turn.
        int8: messages are in 8 bits, in two hops; with overlap, in one.
        steps: in all.
        forgetting: of each stretch, the ranks that begin it without what they have not sent of sums. Between two
            stretches, the ranks may have changed more than once, before any exchange.
        of_table: the values are the rows of a table, of which a step touches some.
        begun: if given, the center and the replicas with which each stretch begins are added to it.
    """
    center, momentum, mean = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    workers: dict[int, Worker] = {}
    ends = [*(step for step, _ in stretches[1:]), steps]
    due, hops = 0, int8 * (1 if overlap else 2)
    for (begin, processes), end, forget in zip(stretches, ends, forgetting or [()] * len(stretches), strict=True):
        before, workers = workers, {process: workers.get(process) or Worker(center.copy()) for process in processes}
        for process in workers.keys() - before.keys() if before else ():
            giver = next(before[process] for process in processes if process in before)
            workers[process].mean = mean
            if gives_velocity:
                workers[process].velocity = giver.velocity
        for rank, worker in enumerate(workers.values()):
            worker.take_place(rank, len(workers), rank in forget)
        size = slots or len(workers)
        hosts = [list(workers.values())[first : first + size] for first in range(0, len(workers), size)]
        for host in hosts:
            known = next((worker.inner for worker in host if worker.inner), (center, np.zeros(SIZE)))
            for worker in host:
                worker.inner = known
        for process in workers.keys() - before.keys() if before and slots is None else ():
            workers[process].x = workers[process].inner[0].copy()
        if begun is not None:
            begun.append((center.copy(), [worker.x.copy() for worker in workers.values()]))
        for step in range(begin, end):
            for rank, worker in enumerate(workers.values()):
                g = (worker.x - target(rank, step)) * (touched(rank, step) if of_table else 1.0)
                worker.accumulated += g
                worker.velocity = (table_momentum(algorithm) if of_table else MOMENTUM) * worker.velocity + g
                worker.x = worker.x - RATE * worker.velocity
                worker.mean = (worker.mean + target(rank, step)) / 2
            for host in hosts if inner and (step + 1) % INNER_PERIOD == 0 else ():
                moved, of_host = exchanged(inner, *host[0].inner, host), sum(worker.mean for worker in host) / len(host)
                for worker in host:
                    worker.inner, worker.mean = moved, of_host
            part = exchanged_at(step + 1, fragments)
            for worker in workers.values() if part is not None or step + 1 == due else ():
                worker.land(center)
            if part is not None:
                everyone = list(workers.values())
                center, momentum = exchanged(algorithm, center, momentum, everyone, part, overlap > 0, hops)
                due = step + 1 + overlap
            if (step + 1) % PERIOD == 0:  # Statistics are exchanged with the last part.
                mean = np.sum([worker.mean for worker in workers.values()], axis=0) / len(workers)
                for worker in workers.values():
                    worker.mean = mean
    for worker in workers.values():
        worker.land(center)
    for number in range(1, fragments):  # The last exchange is of those that were exchanged before.
        part = exchanged_at(number * PERIOD // fragments, fragments)
        assert part is not None
        center, momentum = exchanged(algorithm, center, momentum, list(workers.values()), part, hops=hops)
    return center, workers


def exchanged_at(step: int, fragments: int) -> slice | None:
    """Return the part that is exchanged after a step, if one is."""
    number, rest = divmod(step % PERIOD, PERIOD // fragments)
    size = SIZE // fragments
    return None if rest else slice((number - 1) % fragments * size, (number - 1) % fragments * size + size)


def exchanged(
    algorithm: str,
    center: np.ndarray,
    momentum: np.ndarray,
    workers: Sequence[Worker],
    part: slice = slice(0, SIZE),
    in_flight: bool = False,
    hops: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the new center and its momentum; change the workers, unless it is in flight to them."""
    n, old, velocity = len(workers), center[part], momentum[part]
    messages = [
        {"agn": worker.accumulated[part] / PERIOD, "averaging": worker.x[part]}.get(algorithm, worker.x[part] - old)
        for worker in workers
    ]
    sent, total = messages, sum(messages, np.zeros(len(old)))
    if hops:
        sent, total = in_bits(workers, messages, part, hops, remembers=algorithm != "easgd")
    if algorithm == "easgd":
        rate = min(0.9 / n, 1 / (n + 1))
        new = old + rate * total
        for worker, decoded in zip(workers, sent, strict=True):
            worker.x = replaced(worker.x, part, worker.x[part] - rate * decoded)
    elif algorithm == "averaging":
        new = total / n
    elif algorithm == "agn":
        velocity = MOMENTUM * velocity + total
        new = old - RATE * velocity
    elif algorithm == "diloco":
        velocity = 0.9 * velocity - total / n
        new = old - 0.7 * (-total / n + 0.9 * velocity)
    for worker in workers if algorithm != "easgd" else ():
        worker.accumulated = replaced(worker.accumulated, part, 0)
        if in_flight:
            worker.snapshot = replaced(worker.snapshot, part, worker.x[part])
        else:
            worker.x = replaced(worker.x, part, new)
    return replaced(center, part, new), replaced(momentum, part, velocity)


def replaced(values: np.ndarray, part: slice, new: np.ndarray | float) -> np.ndarray:
    """Return a copy with a part replaced."""
    found = values.copy()
    found[part] = new
    return found


def in_bits(
    workers: Sequence[Worker], messages: Sequence[np.ndarray], part: slice, hops: int, remembers: bool
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return what others get of messages in 8 bits, and the sum; workers keep what is not sent.

    What is not sent of a message stays in the replica, unless they ``remember`` it. Sums are of float32, in the order
    of ranks: a rounding more or less may become a step of the encoding, and 1e-3 in the center.
    """
    if remembers:
        messages = [message + worker.unsent[part] for message, worker in zip(messages, workers, strict=True)]
    wire = SlowWire(in_8_bits, len(workers), len(messages[0]), hops)
    wire.unsent = sum((worker.unsent_sums[part] for worker in workers), np.zeros(len(messages[0]))).tolist()
    found, total = wire.send([message.tolist() for message in messages])
    decoded = [np.array(each) for each in found]
    for rank, (worker, message, sent) in enumerate(zip(workers, messages, decoded, strict=True)):
        if remembers:
            worker.unsent = replaced(worker.unsent, part, message - sent)
        own = wire.unsent[rank * wire.length : (rank + 1) * wire.length]
        start = part.start + rank * wire.length
        worker.unsent_sums = replaced(worker.unsent_sums, slice(start, start + len(own)), np.array(own))
    return decoded, np.array(total)
