"""What happens to elastic jobs over torch.distributed in the tests."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.parallel.elastic_scenarios import MOMENTUM, RATE


@dataclass(frozen=True)
class Scenario:
    """A job.

    Attributes:
        algorithm: of its exchanges.
        center: where it lives.
        workers: at the start.
        what: happens to the last rank, once: ``kill`` or ``stop``; ``raise``: an error of the user's, after which the
            process lives on; ``hang``, outside of the library; ``down``: the rendezvous ends, or stops for a while or
            for ever, and the rank is killed later; ``torchrun``: it is killed, and torchrun starts it again;
            ``events``: whatever ``rendezvous_events.py`` does to any worker. To an island: ``kill`` all its ranks;
            ``in flight``: the same, after the handshake of an exchange, so that the data of the others is in flight;
            ``torchrun``: kill one rank, whereupon torchrun ends the others, and starts the island again; ``stop``, or
            ``raise`` an error in, one rank.
        step: local steps before it.
        wait_step: local steps before which ranks wait until another worker waits to take part.
        wait_size: their number, below which nobody trains.
        again: whether another worker takes part in the end, or the same one again.
        steps: local steps in all; of ``events``, after the last of them.
        overlap: steps for which exchanges are in flight.
        fragments: parts that are exchanged in turn.
        int8: whether messages are in 8 bits.
        timeout: seconds for which ranks wait for each other.
        lost: seconds without a sign of life after which a worker is lost; but see ``silence.py``.
        digits: whether they train the network of the examples, instead of descending on quadratics.
        loop: in Keras: ``fit``; or ``compiled`` or ``eager`` steps; empty: in PyTorch.
        inner: algorithm of an inner optimizer, with which all exchange more often; empty: there is one level.
        commit: ``exchange``; of islands, also ``call``, one step before every exchange.
        inside: ``ddp`` or ``fully_shard``: workers are islands of two ranks; empty: they are single ranks.
        thaws: local steps after which the second half of the parameters is trained as well; 0: from the start.
        saves: all save in the background a step before it happens, and the thread of the worker that is ``lost`` is
            held up, or those of the ``others``; or it is killed when all have written, before the ``manifest``.
    """

    algorithm: str
    center: str = "replicated"
    workers: int = 3
    what: str = "kill"
    step: int = 9
    wait_step: int = 13
    wait_size: int = 2
    again: bool = True
    steps: int = 24
    overlap: int = 0
    fragments: int = 1
    int8: bool = False
    timeout: float | None = None
    lost: float = 600.0
    digits: bool = False
    loop: str = ""
    inner: str = ""
    commit: Literal["call", "exchange"] = "exchange"
    inside: str = ""
    thaws: int = 0
    saves: Literal["", "lost", "others", "manifest"] = ""


OWN_TARGET = 0.25
"""Where every worker descends to with a parameter of its own."""


def own_after(steps: int, start: float) -> float:
    """Return a worker's own parameter after local steps with momentum."""
    own, velocity = start, 0.0
    for _ in range(steps):
        velocity = MOMENTUM * velocity - RATE * (own - OWN_TARGET)
        own += velocity
    return own


SCENARIOS = {
    "killed, and another joins, on two levels": Scenario("easgd", "sharded", inner="diloco"),
    "killed, on the root, after others were thawed": Scenario("diloco", "root", workers=2, wait_size=1, thaws=4),
    "killed, with fragments of 8 bits in flight": Scenario(
        "diloco", workers=2, wait_size=1, fragments=2, overlap=2, int8=True
    ),
    "killed, with a table, of which rows travel": Scenario("easgd", workers=2, wait_size=1),
    "stopped, and joins again": Scenario("agn", what="stop", workers=2, wait_size=1),
    "raises an error, and lives on": Scenario("agn", "sharded", what="raise", again=False, lost=10_000),
}

THOROUGH = {
    "hangs, and is ended": Scenario("easgd", "root", what="hang", again=False, timeout=25.0),
    "killed, and torchrun starts it again": Scenario("diloco", "sharded", what="torchrun", workers=2, wait_size=1),
}
"""Jobs in thorough runs."""

DOWN = {
    "without a rendezvous": Scenario("easgd", workers=2, wait_size=1, what="down", again=False),
    "at one that stops": Scenario("easgd", workers=2, wait_size=1, what="down", again=False, lost=15.0),
    "at one that stops for a while": Scenario("easgd", workers=2, wait_size=1, what="down", again=False),
}
"""Jobs whose rendezvous does not answer."""

SAVES = {
    "while it writes": Scenario("diloco", saves="lost"),
    "while the others write": Scenario("diloco", saves="others"),
    "when all have written": Scenario("diloco", saves="manifest"),
}
"""Jobs that save in the background."""

KERAS = {
    "averaging, in an eager loop": Scenario("averaging", workers=2, wait_size=1, loop="eager"),
    "diloco, with fragments of 8 bits in flight, in fit": Scenario(
        "diloco", workers=2, wait_size=1, fragments=2, overlap=2, int8=True, loop="fit"
    ),
}
"""Jobs of Keras."""

KERAS_COMPILED = {
    "easgd, in shards": Scenario("easgd", "sharded", workers=2, wait_size=1, loop="compiled"),
    "diloco, with fragments of 8 bits in flight": Scenario(
        "diloco", workers=2, wait_size=1, fragments=2, overlap=2, int8=True, loop="compiled"
    ),
    "agn, in 8 bits, stopped": Scenario("agn", what="stop", workers=2, wait_size=1, int8=True, loop="compiled"),
}
"""Jobs of Keras, in compiled steps of a loop."""

EVENTS = {
    "diloco, replicated, in flight": Scenario("diloco", overlap=2, what="events", lost=5),
    "diloco, replicated, 8 bits": Scenario("diloco", int8=True, what="events", lost=5),
    "diloco, replicated, 8 bits, in flight": Scenario("diloco", overlap=2, int8=True, what="events", lost=5),
    "diloco, root": Scenario("diloco", "root", what="events", lost=5),
    "diloco, sharded": Scenario("diloco", "sharded", what="events", lost=5),
    "easgd, replicated, in flight": Scenario("easgd", overlap=2, what="events", lost=5),
    "easgd, replicated, 8 bits": Scenario("easgd", int8=True, what="events", lost=5),
    "easgd, root": Scenario("easgd", "root", what="events", lost=5),
    "easgd, sharded": Scenario("easgd", "sharded", what="events", lost=5),
    "agn, root": Scenario("agn", "root", what="events", lost=5),
    "agn, sharded": Scenario("agn", "sharded", what="events", lost=5),
    "agn, replicated, 8 bits, in flight": Scenario("agn", overlap=2, int8=True, what="events", lost=5),
    "digits": Scenario("diloco", overlap=2, int8=True, what="events", lost=5, digits=True, steps=200),
}
"""Jobs to which random events happen."""

UNDISTURBED = {"digits, undisturbed": EVENTS["digits"]}
"""What "digits" is compared with; nothing happens to it."""

ISLAND_EVENTS = {
    "diloco, islands of DDP, in flight": Scenario("diloco", overlap=2, what="events", lost=5, inside="ddp"),
    "agn, islands of fully_shard, sharded": Scenario("agn", "sharded", what="events", lost=5, inside="fully_shard"),
}
"""Jobs of islands to which random events happen."""


def replace_file(file: Path, value: Any) -> None:
    """Write a value, so that readers find the value before or this one."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(json.dumps(value))
    new.replace(file)


def read_file(file: Path) -> Any:
    """Return the value in a file."""
    return json.loads(file.read_text())
