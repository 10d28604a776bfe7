"""Programs: constructions and calls in any order, on all ranks or on some, and what has to hold after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

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
from tests.fuzz.ranks import Outcome, Ranks, StuckError

EVERYBODY = None
on_ranks = st.sampled_from([EVERYBODY] * 8 + [(0,), (1,), (0, 1), (2,)])
"""Who makes a call: mostly all ranks."""

any_setups = st.builds(
    Setup,
    algorithm=st.sampled_from(list(ALGORITHMS)),
    period=st.sampled_from(list(PERIODS)),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    asynchronous=st.sampled_from([False] * 5 + [True]),
    center=st.sampled_from(["replicated", "replicated", "root", "sharded"]),
    overlap=st.sampled_from([0, 0, 0, 1, "period"]),
    fragments=st.sampled_from([1, 1, 1, 2]),
    compression=st.sampled_from([*["none"] * len(COMPRESSIONS), *COMPRESSIONS]),
    optimizer_state=st.sampled_from(list(STATES)),
    audit_every=st.sampled_from([0, 1]),
    root_rank=st.sampled_from([0, 0, 1]),
    levels=st.sampled_from([1] * 6 + [2]),
)


def possible(setup: Setup) -> Setup:
    """Return the setup, without what cannot be together."""
    if setup.asynchronous:
        algorithm = "easgd" if setup.algorithm == "easgd rho" else setup.algorithm
        period = setup.period if setup.period in ("1", "2", "3") else "2"
        return Setup(algorithm, period, setup.optimizer, asynchronous=True, center=setup.center)
    if setup.center != "replicated":
        return replace(setup, overlap=0, compression="none")
    return setup


setups = st.one_of(*[any_setups.map(possible)] * 7, any_setups)


synchronous = setups.filter(lambda setup: not setup.asynchronous)
names_of_steps = st.lists(st.sampled_from(["step", "step", "step", "skip", "overflow"]), min_size=1, max_size=4)


TOGETHER = ("audit", "broadcast", "load")
"""Calls in which asynchronous ranks, which meet nowhere else, must not be alone."""


class Machine(RuleBasedStateMachine):
    """Ranks in threads.

    Attributes:
        player: makes one rank of a front end.
        aligned: all ranks have made the same calls, and none was about to fail on one rank alone.
    """

    player: ClassVar[Callable[..., Any]]

    def __init__(self) -> None:
        super().__init__()
        self.ranks: Ranks | None = None
        self.setups: list[Setup] = []
        self.aligned = True
        self.saved = 0
        self.warned: set[int] = set()
        self.ends: Counter[tuple[int, int]] = Counter()

    @initialize(size=st.sampled_from([2, 3, 1]), limit_bytes=st.sampled_from([0, 2**19]), setup=setups)
    def begin(self, size: int, limit_bytes: int, setup: Setup) -> None:
        self.ranks = Ranks(size, self.player, limit_bytes)
        self.construct(setup, "plain")

    def construct(self, setup: Setup, mode: str) -> None:
        """Construct an optimizer on all ranks."""
        found = self.call("construct", mode, EVERYBODY, setup)
        if all(outcome.worked for outcomes in found.values() for outcome in outcomes):
            self.setups.append(setup)

    @precondition(lambda self: self.aligned and self.may_have_another())
    @rule(setup=synchronous, mode=st.sampled_from(list(MODES)))
    def another(self, setup: Setup, mode: str) -> None:
        self.construct(setup, mode)

    @precondition(lambda self: self.aligned and self.may_have_another())
    @rule(setup=synchronous, other=synchronous, mode=st.sampled_from(list(MODES)))
    def different(self, setup: Setup, other: Setup, mode: str) -> None:
        """Construct an optimizer that is another one on some ranks."""
        found = self.call("construct", mode, EVERYBODY, setup, other)
        if all(outcome.worked for outcomes in found.values() for outcome in outcomes):
            self.setups.append(setup)
            self.aligned = self.aligned and setup == other

    @precondition(lambda self: self.setups)
    @rule(on=on_ranks, which=st.integers(0, 1), mode=st.sampled_from(OF_STEPS), names=names_of_steps)
    def step(self, on: Collection[int] | None, which: int, mode: str, names: list[str]) -> None:
        for name in names:
            self.call(name, mode, on, which=which)

    @precondition(lambda self: self.setups)
    @rule(on=on_ranks, which=st.integers(0, 1), mode=st.sampled_from(OF_STEPS), raising=st.booleans())
    def closure(self, on: Collection[int] | None, which: int, mode: str, raising: bool) -> None:
        self.call("closure", mode, on, raising, which=which)

    @precondition(lambda self: self.setups)
    @rule(
        on=on_ranks,
        which=st.integers(0, 1),
        mode=st.sampled_from(list(MODES)),
        name=st.sampled_from(
            [
                "finalize",
                "sync",
                "skip",
                "audit",
                "distance",
                "broadcast",
                "enter",
                "enter",
                "save",
                "resume",
            ]
        ),
    )
    def other(self, on: Collection[int] | None, which: int, mode: str, name: str) -> None:
        if name == "resume":
            on = EVERYBODY if self.aligned else on
            if on is not EVERYBODY:
                return
        self.call(name, mode, on, which=which)

    @precondition(lambda self: self.setups)
    @rule(on=on_ranks, which=st.integers(0, 1), mode=st.sampled_from(list(MODES)), raising=st.booleans())
    def leave(self, on: Collection[int] | None, which: int, mode: str, raising: bool) -> None:
        self.call("leave", mode, on, raising, which=which)

    @precondition(lambda self: self.setups)
    @rule(on=on_ranks, which=st.integers(0, 1), mode=st.sampled_from(list(MODES)), number=st.integers(0, 2))
    def load(self, on: Collection[int] | None, which: int, mode: str, number: int) -> None:
        self.call("load", mode, on, number, which=which)

    @precondition(lambda self: self.setups)
    @rule(
        on=on_ranks,
        which=st.integers(0, 1),
        mode=st.sampled_from(list(MODES)),
        how=st.sampled_from(["deepcopy", "pickle"]),
    )
    def copied(self, on: Collection[int] | None, which: int, mode: str, how: str) -> None:
        self.call("replaced", mode, on, how, which=which)

    @precondition(lambda self: self.setups)
    @rule(
        on=on_ranks,
        which=st.integers(0, 1),
        what=st.sampled_from(
            ["freeze", "replace", "data", "double", "resize", "group", "buffer", "rate", "state", "nan"]
        ),
    )
    def change(self, on: Collection[int] | None, which: int, what: str) -> None:
        self.call("change", "plain", on, what, which=which)

    @precondition(lambda self: self.setups)
    @rule(
        on=on_ranks, which=st.integers(0, 1), loss=st.sampled_from([1.0, 0.5, float("nan"), "a", None, np.float32(2)])
    )
    def report(self, on: Collection[int] | None, which: int, loss: Any) -> None:
        self.call("report", "plain", on, loss, which=which)

    def call(
        self, name: str, mode: str, on: Collection[int] | None, *arguments: Any, which: int = 0
    ) -> dict[int, list[Outcome]]:
        """Let ranks make a call, and judge what becomes of it."""
        if self.ranks is None:
            raise AssertionError("begin() comes first")
        everybody = range(self.ranks.size)
        ranks = [rank for rank in (everybody if on is EVERYBODY else on) if rank < self.ranks.size]
        which = which % len(self.setups) if self.setups else 0
        if name in TOGETHER and self.setups and self.setups[which].asynchronous:
            if not self.aligned:
                return {}
            ranks = list(everybody)
        if len(ranks) < self.ranks.size and not (name == "distance" and self.reads_alone(which)):
            self.aligned = False
        if name == "finalize":
            self.ends.update((rank, which) for rank in ranks)
        found = self.ranks.play("call", name, mode, which, *arguments, on=ranks)
        self.judge(found)
        if self.aligned and ranks == list(everybody):
            self.judge_aligned(name, found)
        return found

    def may_have_another(self) -> bool:
        """Whether there may be one more optimizer: not beside an asynchronous one, whose ranks meet nowhere else."""
        return len(self.setups) < 3 and not any(setup.asynchronous for setup in self.setups)

    def reads_alone(self, which: int) -> bool:
        """Whether a rank may look at the center of an optimizer without the others."""
        setup = self.setups[which % len(self.setups)]
        return setup.center == "replicated" or setup.asynchronous

    def judge(self, found: dict[int, list[Outcome]]) -> None:
        """Exceptions are those that are documented; nobody waits for ever who has not been warned by an error."""
        for rank, outcome in ((rank, outcome) for rank, outcomes in found.items() for outcome in outcomes):
            if isinstance(outcome.error, StuckError) and rank in self.warned:
                continue
            complaint = outcome.complaint()
            if complaint is not None:
                raise AssertionError(f"Rank {rank} {complaint}")
            if not outcome.worked:
                self.warned.add(rank)
                name, (called, _, which, *_) = outcome.call[0], outcome.call[1]
                self.ends[rank, which] -= name == "call" and called == "finalize"

    def judge_aligned(self, name: str, found: dict[int, list[Outcome]]) -> None:
        """All ranks have made the same calls: all fare alike, and have the same."""
        ranks = self.ranks
        if ranks is None:
            raise AssertionError("begin() comes first")
        if ranks.waiting:
            raise AssertionError(f"After {name} on all ranks some wait: {ranks.waiting}")
        if len({outcome.worked for [outcome] in found.values()}) > 1:
            raise AssertionError(f"{name} failed on some ranks only: {found}")
        for which, setup in enumerate(self.setups):
            standings = [outcome.value for [outcome] in ranks.play("call", "standing", "plain", which).values()]
            if setup.asynchronous:
                continue
            first = standings[0]
            for rank, other in enumerate(standings):
                for key in ("counters", "begun", "inside"):
                    if other[key] != first[key]:
                        raise AssertionError(f"After {name}, {key}: {other[key]} on rank {rank}, {first[key]} on 0")
                require_equal(other["centers"], first["centers"], f"After {name}, centers of rank {rank} and of rank 0")

    def teardown(self) -> None:
        """Let all ranks leave all blocks, and training; none is left waiting."""
        if self.ranks is None:
            return
        try:
            self.end()
        finally:
            self.ranks.end()

    def end(self) -> None:
        """End as a script does."""
        if self.ranks is None:
            return
        everybody = range(self.ranks.size)
        for which in range(len(self.setups)):
            for _ in range(8):
                self.judge(self.ranks.play("call", "leave", "plain", which, False))
            most = 1 + max(self.ends[rank, which] for rank in everybody)
            for _ in range(2 * most):
                behind = [rank for rank in everybody if self.ends[rank, which] < most]
                self.call("finalize", "plain", behind, which=which)
        # Asynchronously an error is that of one rank, whose end ends the job.
        waiting = {rank: call for rank, call in self.ranks.waiting.items() if rank not in self.warned}
        if waiting and not (self.warned and any(setup.asynchronous for setup in self.setups)):
            raise AssertionError(f"Ranks wait for ever, by rank: {waiting}")


def play(player: Callable[..., Any], number: int, programs: int) -> None:
    """Play programs that are generated from a seed, on the ranks that a player makes.

    Raises:
        AssertionError: something did not hold; the shortest program that was found is printed.
    """
    chosen = settings(
        max_examples=programs,
        stateful_step_count=12,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    try:
        run_state_machine_as_test(seed(number)(type("Programs", (Machine,), {"player": player})), settings=chosen)
    except BaseException:
        print(f"Again: python -m tests.fuzz {player.__name__} {number} {programs}", flush=True)
        raise
