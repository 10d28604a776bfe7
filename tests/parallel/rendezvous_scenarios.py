"""What happens to elastic jobs over torch.distributed in the tests."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Scenario:
    """A job.

    Attributes:
        algorithm: of its exchanges.
        center: where it lives.
        workers: at the start.
        what: happens to the last rank, once: ``kill`` or ``stop``; ``raise``: an error of the user's, after which the
            process lives on; ``hang``, outside of the library;
            ``events``: whatever ``rendezvous_events.py`` does to any worker.
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
        thaws: local steps after which the second half of the parameters is trained as well; 0: from the start.
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
    thaws: int = 0


SCENARIOS = {
    "killed, and another joins": Scenario("easgd", "sharded"),
    "killed, on the root, after others were thawed": Scenario("diloco", "root", workers=2, wait_size=1, thaws=4),
    "killed, with fragments of 8 bits in flight": Scenario(
        "diloco", workers=2, wait_size=1, fragments=2, overlap=2, int8=True
    ),
    "stopped, and joins again": Scenario("agn", what="stop", workers=2, wait_size=1),
    "raises an error, and lives on": Scenario("agn", "sharded", what="raise", again=False, lost=10_000),
}

HANGING = {
    "hangs, and is ended": Scenario("easgd", "root", what="hang", again=False, timeout=25.0),
}

KERAS = {
    "averaging, in fit": Scenario("averaging", workers=2, wait_size=1, loop="fit"),
    "diloco, with fragments of 8 bits in flight, in an eager loop": Scenario(
        "diloco", workers=2, wait_size=1, fragments=2, overlap=2, int8=True, loop="eager"
    ),
}
"""Jobs of Keras."""

KERAS_COMPILED = {
    "easgd, in shards": Scenario("easgd", "sharded", workers=2, wait_size=1, loop="compiled"),
    "agn, stopped": Scenario("agn", what="stop", workers=2, wait_size=1, loop="compiled"),
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


def replace_file(file: Path, value: Any) -> None:
    """Write a value, so that readers find the value before or this one."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(json.dumps(value))
    new.replace(file)


def read_file(file: Path) -> Any:
    """Return the value in a file."""
    return json.loads(file.read_text())
