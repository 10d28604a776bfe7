"""One rank of a program, on any front end: what players of all of them do alike."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvd_periodic import AGN, BMUF, EASGD, Averaging, Compression, DiLoCo, Doubling, Piecewise, PostLocal, SlowMo
from hvd_periodic.comm.base import Communicator
from tests.fuzz.ranks import InjectedError


def fail(where: str) -> int:
    """Raise what a user's code raises."""
    raise InjectedError(where)


ALGORITHMS: dict[str, Callable[[], Any]] = {
    "averaging": Averaging,
    "easgd": EASGD,
    "easgd rho": lambda: EASGD(rho=0.1),
    "agn": AGN,
    "diloco": DiLoCo,
    "slowmo": SlowMo,
    "bmuf": BMUF,
}
PERIODS: dict[str, Any] = {
    "1": 1,
    "2": 2,
    "3": 3,
    "post local": PostLocal(start=2, period=2),
    "piecewise": Piecewise({0: 1, 2: 3}),
    "doubling": Doubling(1, every_rounds=2, limit=4),
    "fails later": lambda clock: 2 if clock.step < 4 else fail("in the schedule"),
}
COMPRESSIONS: dict[str, Any] = {
    "none": Compression.none,
    "fp16": Compression.fp16,
    "bf16": Compression.bf16,
    "int8": Compression.int8,
    "int4": Compression.int4,
    "e3m0": Compression.e3m0,
    "int2": Compression.int2,
    "topk": Compression.topk(0.5),
    "topk in chunks": Compression.topk(chunk=8, keep=2),
}
OPTIMIZERS = ("sgd", "momentum", "adam")
STATES: dict[str, Any] = {"local": "local", "reset": "reset", "average": "average"}
MODES = ("plain", "no_grad", "autocast", "inference", "meta", "default device")
"""Of a framework, where it has them."""
OF_STEPS = ("plain", "no_grad", "autocast")
"""Modes for local updates too: in the others, torch's own optimizers make state that they cannot use afterwards."""


@dataclass(frozen=True)
class Setup:
    """What an optimizer is constructed with, by names."""

    algorithm: str = "averaging"
    period: str = "2"
    optimizer: str = "sgd"
    asynchronous: bool = False
    center: str = "replicated"
    overlap: int | str = 0
    fragments: int = 1
    compression: str = "none"
    optimizer_state: str = "local"
    audit_every: int = 0
    root_rank: int = 0
    width: int = 2
    levels: int = 1

    def options(self) -> dict[str, Any]:
        """Return those arguments that go to the constructor by keyword."""
        return {
            "center": self.center,
            "overlap": self.overlap,
            "fragments": self.fragments,
            "compression": COMPRESSIONS[self.compression],
            "optimizer_state": STATES[self.optimizer_state],
            "audit_every": self.audit_every,
            "root_rank": self.root_rank,
        }


@dataclass
class Trained:
    """A model, and the optimizer that trains it."""

    setup: Setup
    model: Any
    optimizer: Any
    block: list[AbstractContextManager[Any]] = field(default_factory=list)
    before: Any = None
    """The parameters where the outermost block was entered, as long as nothing but that changes them."""

    def abandon(self) -> None:
        """Leave all blocks. Python would when it collects them, in the midst of the tensors that go with them.

        PyTorch 2.13 may end the process then (``cdata.use_count() == 1``).
        """
        while self.block:
            with suppress(Exception):  # The parameters may have been changed so that nothing can be put back.
                self.block.pop().__exit__(None, None, None)


class Player(ABC):
    """One rank.

    Args:
        communicator: of this rank.
    """

    modes: ClassVar[Mapping[str, Callable[[], AbstractContextManager[Any]]]] = {}

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.batches = 0
        self.all: list[Trained] = []
        self.saved: list[tuple[Any, Any]] = []

    @abstractmethod
    def made(self, setup: Setup) -> Trained:
        """Return a new model, and an optimizer of it."""

    @abstractmethod
    def step(self, trained: Trained) -> None:
        """Take a step, as a script does."""

    @abstractmethod
    def overflow(self, trained: Trained) -> None:
        """Take a step whose gradients are not finite."""

    @abstractmethod
    def closure(self, trained: Trained, raising: bool) -> None:
        """Take a step with a closure, which may raise."""

    @abstractmethod
    def replaced(self, trained: Trained, how: str) -> None:
        """Go on with a copy."""

    @abstractmethod
    def change(self, trained: Trained, what: str) -> None:
        """Change parameters after construction."""

    @abstractmethod
    def weights(self, trained: Trained) -> Any:
        """Return a copy of the state of the model."""

    @abstractmethod
    def load_weights(self, trained: Trained, weights: Any) -> None:
        """Load weights, which may be those of another model: that is an InjectedError."""

    @abstractmethod
    def parameters(self, trained: Trained) -> list[Any]:
        """Return copies."""

    @abstractmethod
    def is_finite(self, trained: Trained) -> bool:
        """Return whether all parameters are."""

    def copied(self, state: Any) -> Any:
        """Return a copy, as what is read from a file."""
        return copy.deepcopy(state)

    def call(self, name: str, mode: str, which: int, *arguments: Any) -> Any:
        """Make a call in a mode."""
        with self.modes.get(mode, nullcontext)():
            return getattr(self, name)(*(() if name == "construct" else (self.all[which % len(self.all)],)), *arguments)

    def construct(self, *setups: Setup) -> None:
        """Construct an optimizer of a new model, perhaps not as other ranks do."""
        self.all.append(self.made(setups[self.communicator.rank % len(setups)]))

    def state(self, trained: Trained) -> Any:
        """Return the state of an optimizer."""
        return trained.optimizer.state_dict()

    def load_state(self, trained: Trained, state: Any) -> None:
        """Load the state of an optimizer."""
        trained.optimizer.load_state_dict(state)

    def skip(self, trained: Trained) -> None:
        """Pass over a batch."""
        trained.optimizer.skip()

    def sync(self, trained: Trained) -> None:
        """Exchange now."""
        trained.optimizer.synchronizer.sync()

    def finalize(self, trained: Trained) -> None:
        """Leave training."""
        trained.optimizer.synchronizer.finalize()

    def audit(self, trained: Trained) -> None:
        """Compare centers."""
        trained.optimizer.synchronizer.audit()

    def distance(self, trained: Trained) -> None:
        """Ask for the distance."""
        trained.optimizer.synchronizer.distance()

    def broadcast(self, trained: Trained) -> None:
        """Take over what the root has."""
        trained.optimizer.synchronizer.broadcast()

    def report(self, trained: Trained, loss: Any) -> None:
        """Report a loss."""
        trained.optimizer.synchronizer.report(loss)

    def enter(self, trained: Trained) -> None:
        """Enter a center() block."""
        block = trained.optimizer.center()
        before = self.parameters(trained)
        block.__enter__()
        trained.block.append(block)
        trained.before = before

    def leave(self, trained: Trained, raising: bool) -> None:
        """Leave the innermost center() block, if there is one; perhaps by an exception."""
        if not trained.block:
            return
        block, before, trained.before = trained.block.pop(), trained.before, None
        error = InjectedError("inside the block") if raising else None
        swallowed = block.__exit__(None if error is None else InjectedError, error, None)
        if before is not None:
            require_equal(self.parameters(trained), before, "parameters after the block")
        if error is not None and not swallowed:
            raise error

    def save(self, trained: Trained) -> None:
        """Take a checkpoint."""
        self.saved.append((self.weights(trained), self.copied(self.state(trained))))

    def load(self, trained: Trained, number: int) -> None:
        """Load one of the checkpoints that were taken, perhaps of another optimizer."""
        if not self.saved:
            return
        weights, state = self.saved[number % len(self.saved)]
        alone = trained.setup.center == "replicated" and not trained.setup.asynchronous
        before = self.copied(self.state(trained)) if alone else None
        try:
            self.load_state(trained, self.copied(state))
        except Exception:
            if before is not None:
                require_equal(self.state(trained), before, "the state after one that was refused")
            raise
        trained.before = None
        self.load_weights(trained, weights)

    def resume(self, trained: Trained) -> None:
        """Save, and load into what was constructed anew; the state that this then has is the same."""
        weights, state = self.weights(trained), self.state(trained)
        new = self.made(trained.setup)
        self.load_weights(new, weights)
        self.load_state(new, self.copied(state))
        trained.abandon()
        trained.model, trained.optimizer = new.model, new.optimizer
        require_equal(self.state(trained), state, "state")

    def standing(self, trained: Trained) -> dict[str, Any]:
        """Return what all ranks have alike where they have made the same calls, and what must be finite.

        Before training has begun, the center is what each rank's model holds: a forward pass moves its statistics.
        """
        counters, begun = trained.optimizer.synchronizer.counters, trained.optimizer.synchronizer.begun
        groups = trained.optimizer.synchronizer.tensor_groups if begun else ()
        return {
            "counters": (counters.local_steps, counters.rounds, counters.last_exchange, counters.next_exchange),
            "begun": begun,
            "inside": bool(trained.block),
            "centers": [self.copied(list(group.center.tensors())) for group in groups if group.placement.everywhere],
            "finite": self.is_finite(trained),
        }


def require_equal(found: Any, expected: Any, where: str) -> None:
    """Compare to the bit: tensors or arrays, in containers of any depth."""
    if hasattr(expected, "dtype"):
        same = getattr(found, "dtype", None) == expected.dtype and found.shape == expected.shape
        if not same or not bool(((found == expected) | (found != found) & (expected != expected)).all()):
            raise AssertionError(f"{where}: {found} where {expected} was saved")
    elif isinstance(expected, dict):
        if found.keys() != expected.keys():
            raise AssertionError(f"{where}: {found.keys()} where {expected.keys()} were saved")
        for key, value in expected.items():
            require_equal(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        if len(found) != len(expected):
            raise AssertionError(f"{where}: {len(found)} where {len(expected)} were saved")
        for place, pair in enumerate(zip(found, expected, strict=True)):
            require_equal(*pair, f"{where}[{place}]")
    elif found != expected:
        raise AssertionError(f"{where}: {found!r} where {expected!r} was saved")
