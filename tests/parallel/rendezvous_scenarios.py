"""What happens to elastic jobs over torch.distributed in the tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scenario:
    """A job.

    Attributes:
        algorithm: of its exchanges.
        center: where it lives.
        workers: at the start.
        what: happens to the last rank, once: ``kill`` or ``stop``.
        step: local steps before it.
        wait_step: local steps before which ranks wait until another worker waits to take part.
        wait_size: their number.
        steps: local steps in all.
    """

    algorithm: str
    center: str = "replicated"
    workers: int = 3
    what: str = "kill"
    step: int = 9
    wait_step: int = 13
    wait_size: int = 2
    steps: int = 24


SCENARIOS = {
    "killed, and another joins": Scenario("easgd", "sharded"),
    "killed, on the root": Scenario("diloco", "root"),
    "stopped, and joins again": Scenario("agn", "replicated", what="stop"),
}
