"""Generated programs on real ranks, in rounds: one call of every rank, then all compare what has become of it.

mpirun -np 2 python -m tests.parallel.fuzz_program FOLDER SEED PROGRAMS
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvd_periodic.torch.communicator import communicator_of
from tests.fuzz.player import (
    ALGORITHMS,
    COMPRESSIONS,
    MODES,
    OF_STEPS,
    OPTIMIZERS,
    PERIODS,
    STATES,
    Setup,
    require_equal,
)
from tests.fuzz.ranks import Outcome
from tests.fuzz.torch_player import TorchPlayer
from tests.parallel.torch_job import hvd

ROUNDS = 12
ALIKE = ["sync", "audit", "distance", "broadcast", "enter", "save", "resume", "finalize"]
"""Calls that all ranks make, in any mode."""
CROSSED = [("sync", "audit"), ("sync", "broadcast"), ("audit", "broadcast"), ("finalize", "audit")]
"""Calls of which one rank makes another than the others: they find out."""

Call = tuple[Any, ...]


def setup(chance: random.Random) -> Setup:
    """Return how an optimizer is constructed."""
    made = Setup(
        chance.choice(list(ALGORITHMS)),
        chance.choice([period for period in PERIODS if period != "fails later"]),
        chance.choice(list(OPTIMIZERS)),
        center=chance.choice(["replicated", "root", "sharded"]),
        overlap=chance.choice([0, 0, 1, "period"]),
        fragments=chance.choice([1, 1, 2]),
        compression=chance.choice(["none", *COMPRESSIONS]),
        optimizer_state=chance.choice(list(STATES)),
        audit_every=chance.choice([0, 1]),
        root_rank=chance.choice([0, 1]),
    )
    return made if made.center == "replicated" else replace(made, overlap=0, compression="none")


def calls(chance: random.Random, size: int) -> list[Call]:
    """Return what every rank calls in one round."""
    if chance.random() < 0.1 and size > 1:
        one, most = (call(chance, name) for name in chance.choice(CROSSED))
        odd = chance.randrange(size)
        return [one if rank == odd else most for rank in range(size)]
    kind = chance.random()
    if kind < 0.5:
        return [call(chance, "step")] * size
    if kind < 0.6:
        name, arguments = chance.choice([("leave", [True]), ("leave", [False]), ("load", [0]), ("closure", [False])])
        return [call(chance, name, *arguments)] * size
    if kind < 0.65:
        return [("replaced", chance.choice(list(MODES)), 0, chance.choice(["deepcopy", "pickle"]))] * size
    if kind < 0.7:
        return [("change", "plain", 0, chance.choice(["freeze", "replace", "data", "resize", "rate", "nan"]))] * size
    return [call(chance, chance.choice(ALIKE))] * size


def call(chance: random.Random, name: str, *arguments: Any) -> Call:
    """Return a call in some mode."""
    return name, chance.choice(OF_STEPS if name in ("step", "closure") else list(MODES)), 0, *arguments


def program(number: int, player: TorchPlayer) -> tuple[int, str]:
    """Run one program; return how many rounds worked, and what is wrong."""
    chance, communicator = random.Random(number), player.communicator
    made = setup(chance)
    given: list[list[Call]] = [[("construct", chance.choice(list(MODES)), 0, made)] * communicator.size]
    given += [calls(chance, communicator.size) for _ in range(ROUNDS)]
    given += [[("finalize", "plain", 0)] * communicator.size]
    for rounds, of_ranks in enumerate(given):
        if len(set(of_ranks)) > 1 and player.all[0].block:
            continue  # Inside of a block one of two calls may be refused by the rank alone that makes it.
        outcome = made_call(player, of_ranks[communicator.rank])
        found = communicator.allgather_object((outcome.worked, outcome.complaint()), "fuzz.outcome")
        wrong = next(filter(None, (complaint for _, complaint in found)), "")
        if len({worked for worked, _ in found}) > 1:
            wrong = wrong or f"worked on some ranks only: {found}; here {outcome.error}"
        if wrong or not outcome.worked:
            return rounds, wrong and f"program {number}, round {rounds}, {made}, {of_ranks}: {wrong}"
        standings = communicator.allgather_object(player.standing(player.all[0]), "fuzz.standing")
        for standing in standings:
            for key in ("counters", "begun", "inside", "centers"):
                require_equal(standing[key], standings[0][key], f"program {number}, round {rounds}, {of_ranks}: {key}")
    return len(given), ""


def made_call(player: TorchPlayer, given: Call) -> Outcome:
    """Make a call."""
    try:
        return Outcome(("call", given), player.call(*given))
    except Exception as error:
        return Outcome(("call", given), error=error)


def main(folder: Path, seed: int, programs: int) -> None:
    """Write what this rank saw."""
    hvd.init()
    seed = communicator_of(None).allgather_object(seed, "fuzz.seed")[0]
    found = []
    for number in range(seed, seed + programs):
        (folder / f"{hvd.rank()}.now").write_text(f"program {number}")
        player = TorchPlayer(communicator_of(None))
        found.append(program(number, player))
        for trained in player.all:
            trained.abandon()
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
