"""Steps of a wrapped optimizer: steps through the wrapper, and steps that bypass it and are not counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.hooks import RemovableHandle

from hvd_periodic.frames import running_methods
from hvd_periodic.torch.neutral import eagerly
from hvd_periodic.torch.state_making import makes_state_only
from hvd_periodic.torch.synchronizer import Synchronizer


class InnerSteps:
    """Watches the steps of a wrapped optimizer, and of optimizers nested in it, with torch hooks.

    A step that bypasses the wrapper is not counted, so that ranks would never exchange. It raises an error at the next
    exchange, at the next read of the center, or at the end. A method of the wrapped optimizer that is called through
    the wrapper, and steps, counts as one step of the wrapper.

    Args:
        optimizer: the wrapped optimizer; without one, nothing is watched.
        synchronizer: counts the steps of the wrapper.
        wrapper: name of the wrapper's class.

    Attributes:
        counted: whether a step of the wrapper is in progress.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        synchronizer: Synchronizer | None = None,
        wrapper: str = "",
    ) -> None:
        self.counted, self._calling, self._stepped = optimizer is None, False, False
        self._optimizers: list[ref[torch.optim.Optimizer]] = []
        if optimizer is None or synchronizer is None:
            return
        self._synchronizer, self._wrapper, self._wrapped = ref(synchronizer), wrapper, type(optimizer).__name__
        inside = list(_with_inside(optimizer))
        levels = [getattr(each, "synchronizer", None) for each in inside]
        for each in inside:
            if synchronizer.holds_some_of(each):
                self._optimizers.append(ref(each))
                self._watch(each, levels)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a copy that watches nothing: the wrapper of a copied optimizer watches the copy."""
        return InnerSteps, ()

    def stop(self) -> None:
        """Stop watching."""
        for optimizer in filter(None, (each() for each in self._optimizers)):
            _remove(optimizer, lambda steps: steps is self)

    def as_one_step(
        self, method: Callable[..., Any], name: str, wrapper: object, count: Callable[[bool], None]
    ) -> Callable[..., Any]:
        """Return a method of the wrapped optimizer that counts as one step of the wrapper, if it steps.

        Training begins before a method whose name ends in "step": SAM's ``first_step`` moves the parameters to the
        point at which the gradients for its ``second_step`` are computed.
        """

        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            synchronizer = self._synchronizer()
            if self.counted or self._calling or synchronizer is None:
                return method(*args, **kwargs)
            if name.endswith("step"):
                synchronizer.center_reader.require_outside_center_block(name)
                synchronizer.membership.require_same_ranks()
                if synchronizer.begin():
                    synchronizer.replica.discard_gradients()
            self._calling, self._stepped = True, False
            try:
                result = method(*args, **kwargs)
            finally:
                self._calling = False
            if self._stepped:
                count(True)
            return result

        run.__self__ = wrapper  # type: ignore[attr-defined]  # As bound methods have.
        return run

    def _watch(self, optimizer: torch.optim.Optimizer, levels: Sequence[object]) -> None:
        """Watch the steps of an optimizer; its former wrappers that are not levels of this one stop watching."""
        _remove(optimizer, lambda steps: not any(steps._synchronizer() is level for level in levels if level))
        with suppress(AttributeError):  # Trainers' wrappers are optimizers without hooks.
            _watching.setdefault(optimizer, []).append((self, optimizer.register_step_pre_hook(self._before_step)))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.counted:
            self._notice(optimizer)

    @eagerly
    def _notice(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step that the wrapper's step() has not taken."""
        synchronizer = self._synchronizer()
        if synchronizer is None or makes_state_only():
            return
        if not self._calling:
            synchronizer.replica.uncounted = synchronizer.replica.uncounted or (
                f"{self._caller(optimizer)} ran after local step {synchronizer.local_steps} without the "
                f"{self._wrapper} around the {self._wrapped}, so the step was not counted and ranks would never "
                f"exchange. Call step() of the {self._wrapper}, and pass that optimizer to trainers, not the "
                f"{self._wrapped}; where one iteration takes several calls, pass a closure: step(closure)"
            )
        elif not self._stepped:
            synchronizer.prepare_gradients()
            self._stepped = True

    def _caller(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the outermost method of a watched optimizer that is running or about to run."""
        watched, found = [each() for each in self._optimizers], f"{type(optimizer).__name__}.step()"
        for owner, name, module in running_methods():
            if owner is not None and any(owner is each for each in watched) and module != "torch.optim.optimizer":
                found = f"{type(owner).__name__}.{name}()"
        return found


_watching: WeakKeyDictionary[torch.optim.Optimizer, list[tuple[InnerSteps, RemovableHandle]]] = WeakKeyDictionary()
"""The watchers of every optimizer, with their hooks."""


def _remove(optimizer: torch.optim.Optimizer, done: Callable[[InnerSteps], bool]) -> None:
    """Remove the hooks of watchers that are done with an optimizer."""
    watching = _watching.get(optimizer, [])
    for steps, hook in watching:
        if done(steps):
            hook.remove()
    watching[:] = [(steps, hook) for steps, hook in watching if not done(steps)]


def _with_inside(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield an optimizer and the optimizers among its attributes, at any depth, once each."""
    found, waiting = set(), [optimizer]
    while waiting:
        each = waiting.pop(0)
        if id(each) in found:
            continue
        found.add(id(each))
        yield each
        for value in vars(each).values():
            values = value if isinstance(value, (list, tuple)) else [value]
            waiting += [inside for inside in values if isinstance(inside, torch.optim.Optimizer)]
