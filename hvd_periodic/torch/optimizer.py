"""Torch optimizers whose ranks exchange periodically."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Unpack

import torch

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.arguments import spelled
from hvd_periodic.options import takes
from hvd_periodic.schedules import Schedule
from hvd_periodic.spellings import renamed
from hvd_periodic.torch import foreach
from hvd_periodic.torch.gradient_averaging import GradientAveraging
from hvd_periodic.torch.inner_steps import InnerSteps
from hvd_periodic.torch.model import Model
from hvd_periodic.torch.neutral import eagerly, neutrally
from hvd_periodic.torch.options import TorchOptions
from hvd_periodic.torch.outer import CenterOptimizerLike
from hvd_periodic.torch.state_making import make_state, makes_state_only
from hvd_periodic.torch.synchronizer import Synchronizer
from hvd_periodic.torch.trained_set import TrainedSet

STATE_KEY, INSIDE_KEY = "hvd_periodic", "inside"
"""Keys of the exchange state in a state dict; and, in that state, of the exchange state of a wrapped optimizer."""


class PeriodicOptimizer(torch.optim.Optimizer):
    """Wraps any torch optimizer and exchanges periodically, with any algorithm and schedule.

    It is itself an optimizer, and shares parameter groups, state and hyper-parameters with the wrapped one, so that
    learning-rate schedulers, closures, hooks, ``GradScaler`` and checkpoints work as usual.

    Args:
        optimizer: the local optimizer, over parameters of the model.
        model: the model or its ``named_parameters()``, or other (name, parameter) pairs, which carry no
            buffers. All parameters of ``optimizer`` that are trainable at construction take part.
        algorithm: an :class:`~hvd_periodic.Algorithm`, or a function that makes one.
        period: local steps between exchanges, or a schedule.
        outer_optimizer: for algorithms that optimize the center, as in :class:`Synchronizer`.
        asynchronous: exchange without waiting for other ranks, as in :class:`Synchronizer`.
        options: the options of :class:`~hvd_periodic.options.Options` and
            :class:`~hvd_periodic.torch.options.TorchOptions`; the signature has their defaults.

    Attributes:
        inner: the wrapped optimizer.
        synchronizer: counters, ``sync()``, ``finalize()`` and ``state_dict()`` of the exchanges.
        after_exchange: called at the end of every step in which ranks have exchanged.

    Raises:
        TypeError: ``optimizer`` is not a torch optimizer, or exchanges by itself.
        TypeError, ValueError, RuntimeError: as :class:`Synchronizer`.
    """

    inner: torch.optim.Optimizer
    synchronizer: Synchronizer
    after_exchange: Callable[[], object] | None = None
    after_adoption: Callable[[], object] | None = None

    _spelling: ClassVar[Mapping[str, str]] = {}
    """The names that a named constructor uses for classes and arguments of the core."""

    _steps = InnerSteps()
    _step_supports_amp_scaling = True
    """Makes GradScaler call step() on every iteration, with ``found_inf``, instead of skipping it on one rank alone."""

    @renamed(named_parameters="model")
    @takes(TorchOptions)
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: Model,
        algorithm: Algorithm | Callable[[], Algorithm],
        period: int | Schedule,
        *,
        outer_optimizer: CenterOptimizerLike | None = None,
        asynchronous: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        with spelled(self._spelling):
            synchronizer = Synchronizer(
                model,
                algorithm,
                period,
                optimizer=optimizer,
                outer_optimizer=outer_optimizer,
                asynchronous=asynchronous,
                **options,
            )
        # The base class would create its own parameter groups; unpickling sets up everything else.
        self.__setstate__({"inner": optimizer, "synchronizer": synchronizer})

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "set_backward_passes_per_step" in vars(cls):  # hvd.DistributedOptimizer subclasses the class it wraps.
            raise TypeError(
                "An hvd.DistributedOptimizer goes inside of an optimizer of hvd_periodic, not around it: "
                "hvdp.ElasticAverageOptimizer(hvd.DistributedOptimizer(optimizer, ...), model, ...)"
            )

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the wrapped optimizer, such as ``train()`` of a schedule-free one.

        A method that takes a step, such as SAM's ``second_step()``, counts as one step of this optimizer.
        """
        inner = vars(self).get("inner")
        if inner is not None and not name.startswith("__") and hasattr(inner, name):
            found = getattr(inner, name)
            if getattr(found, "__self__", None) is inner and not self._averaging.present:
                return self._steps.as_one_step(found, name, self, self._count)
            return found
        of_whom = "" if inner is None else f", and neither has the {type(inner).__name__} that it wraps"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{of_whom}", name=name, obj=self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the wrapped optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """State of the wrapped optimizer."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Default hyper-parameters of the wrapped optimizer."""
        return self.inner.defaults

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register the hook with the wrapped optimizer."""
        return self.inner.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register the hook with the wrapped optimizer."""
        return self.inner.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register the hook with the wrapped optimizer."""
        return self.inner.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register the hook with the wrapped optimizer."""
        return self.inner.register_load_state_dict_post_hook(hook, prepend)

    def step(self, closure: Callable[[], Any] | None = None, *, examples: Any = None) -> Any:
        """Take one local step, and exchange if one is due.

        Under a ``GradScaler`` an iteration whose gradients overflowed on this rank counts without an update, so that
        all ranks keep exchanging at the same iterations. The first iteration also counts without an update on a rank
        that learns in it that training starts from other parameters than its own, see :meth:`Synchronizer.begin`. The
        step that ``hvd.broadcast_optimizer_state`` takes to create an optimizer's state changes and counts nothing.

        Args:
            closure: evaluates the model again and returns the loss.
            examples: number of examples in this step, or tokens, for ``weight="examples"``, also of wrapped optimizers.

        Returns:
            The loss that the wrapped optimizer returns.

        Raises:
            TypeError, ValueError: ``examples`` is not a number of at least 0.
            RuntimeError: called inside ``center()``; or as raised by an exchange.
        """
        arguments: tuple[Any, ...] = (self,) if closure is None else (self, closure)
        options: dict[str, Any] = {} if examples is None else {"examples": examples}
        hooked = type(self).step is PeriodicOptimizer.step  # The base class runs the hooks of an overriding step().
        for before in self._optimizer_step_pre_hooks.values() if hooked else ():
            arguments, options = before(self, arguments, options) or (arguments, options)
        loss = self._step(*arguments[1:], **options)
        for after in self._optimizer_step_post_hooks.values() if hooked else ():
            after(self, arguments, options)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # So the profiler records, and hooks of all see, the step inside.

    def _step(self, closure: Callable[[], Any] | None = None, *, examples: Any = None) -> Any:
        """Take one local step, and exchange if one is due."""
        loss, steps = None, self._steps
        steps.counted = True
        try:
            updated = self._get_ready(closure)
            if updated and examples is not None:
                for level in levels_of(self.inner):
                    level.synchronizer.exchanger.report_examples(examples)
            if updated and closure is not None:
                loss = self.inner.step(self._prepared(closure))
            elif updated:
                loss = self._averaging.step()
        finally:
            steps.counted = False
        if updated is not None:
            self._count(updated, examples)
        return loss

    @eagerly
    def _get_ready(self, closure: Callable[[], Any] | None) -> bool | None:
        """Prepare the update; return whether there is one, or None if a library only creates state."""
        if not self.state and makes_state_only():
            make_state(self)
            return None
        self.synchronizer.center_reader.require_outside_center_block("step")
        self.synchronizer.membership.require_same_ranks()
        stale = self.synchronizer.begin() and closure is None
        averaging = self._averaging
        if closure is not None and averaging.present:
            raise RuntimeError("step(closure): the wrapped hvd.DistributedOptimizer takes no closures")
        if averaging.in_flight and vars(self).get("found_inf") is not None:
            raise RuntimeError(
                "A GradScaler must not read gradients while an hvd.DistributedOptimizer averages them: call "
                "optimizer.synchronize(), scaler.unscale_(optimizer), and then, within optimizer.skip_synchronize(), "
                "scaler.step(optimizer)"
            )
        updated = _unscale(self) and not stale
        if (stale or (updated and closure is None)) and not averaging.done:
            averaging.wait()
        if updated and closure is None:
            self.synchronizer.gradients.prepare()
        return updated

    def skip(self) -> None:
        """Count an iteration without an update, in place of :meth:`step`.

        Ranks exchange at the same iterations, so a rank that alone skips a batch has to count it.

        Example::

            if loss.isfinite():
                loss.backward()
                optimizer.step()
            else:
                optimizer.skip()

        Raises:
            RuntimeError: as :meth:`step`.
        """
        self.synchronizer.center_reader.require_outside_center_block("skip")
        self.synchronizer.begin()
        self._count(updated=False)

    def synchronize(self) -> None:
        """Wait for the gradients that a wrapped ``hvd.DistributedOptimizer`` averages, if there is one.

        For clipping, as in Horovod: call this, change the gradients, and then call :meth:`step` within
        :meth:`skip_synchronize`.
        """
        self._averaging.wait()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Return a ``with`` block in which :meth:`step` uses the gradients as they are."""
        return self._averaging.waited()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the wrapped optimizer does."""
        self._averaging.zero_grad(set_to_none)

    def finalize(self) -> None:
        """Leave training on every level, wrapped optimizers first; see ``synchronizer.finalize()``."""
        for level in reversed(levels_of(self.inner)):
            level.synchronizer.leave()
        self.synchronizer.finalize()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; :meth:`adopt` must follow on all ranks before the next exchange.

        Raises:
            RuntimeError: the wrapped optimizer is one of ``hvd.DistributedOptimizer``; or of several levels.
            TypeError, ValueError: as ``torch.optim.Optimizer.add_param_group``.
        """
        if self._averaging.present or isinstance(self.inner, PeriodicOptimizer):
            raise RuntimeError(
                f"Parameters cannot be added to {type(self).__name__} around a {type(self.inner).__name__}, since "
                "adopt() is not available there: add the group before the optimizer is wrapped"
            )
        self.inner.add_param_group(param_group)

    def adopt(self, model: Model | None = None) -> None:
        """Go on after parameters were thawed, frozen, added or removed; on all ranks, after the same local step.

        First all ranks exchange the former set, unless they have just done so. Then, with x the parameters and c the
        center:

        - a parameter stays if name, shape, dtype and policy do: x, c, outer state, accumulators and error memory are
          kept to the bit; if the tensor itself is another one, it takes the values of the former one;
        - one that leaves takes x ← c on all ranks (BMUF: W), and is a constant from then on;
        - one that comes takes x ← x_root and c ← x_root, with outer state, accumulators and error memory of zeros.

        The state of the local optimizer is yours: PyTorch makes it empty for parameters that come. Counters go on; the
        next exchange is a period from here. In elastic jobs, it takes a commit at the end.

        Args:
            model: the model, as at construction; needed if that was not a module.

        Raises:
            RuntimeError: called inside ``center()``; this kind of training cannot adopt, or is asynchronous, or with a
                quorum, and has not just been finalized; or other ranks are in another call.
            TypeError, ValueError: the new set is refused, or differs between ranks. On all ranks; nothing has changed.

        Example::

            for parameter in model.backbone.parameters():
                parameter.requires_grad = True
            optimizer.add_param_group({"params": model.backbone.parameters(), "lr": 1e-4})
            optimizer.adopt()
        """
        self.synchronizer.adopt_model(model)
        self.__setstate__(self.__getstate__())
        if self.after_adoption is not None:
            self.after_adoption()

    def center(self) -> AbstractContextManager[None]:
        """Hold the center in the model inside a ``with`` block; the local values return after it, even on an exception.

        Example::

            with optimizer.center():
                evaluate(model)
        """
        return self.synchronizer.center()

    def rejoin(self, name: str) -> None:
        """Rebuild for the ranks that Horovod has now, see :meth:`Synchronizer.rejoin`."""
        self.synchronizer.rejoin(name)
        self.__setstate__(self.__getstate__())

    def take_set(self, trained: TrainedSet) -> None:
        """Train another set of parameters, see :meth:`Synchronizer.take_set`."""
        if self.synchronizer.take_set(trained):
            self.__setstate__(self.__getstate__())

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict with the synchronizer's state under ``"hvd_periodic"``."""
        inner, own = self.inner.state_dict(), self.synchronizer.state_dict()
        if STATE_KEY in inner:
            own[INSIDE_KEY] = inner[STATE_KEY]
        return {**inner, STATE_KEY: own}

    @neutrally
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; with the model's own state, training continues bit for bit.

        Load the model's state and this one after construction: each rank its own, or all ranks the same; or only on the
        root, from which the others then take parameters, center and counters. The first step detects which is the case.

        Raises:
            ValueError: the state comes from an optimizer that was not wrapped, or from another model or algorithm.
        """
        if STATE_KEY not in state_dict:
            raise ValueError(
                f"`state_dict` must come from an optimizer of this package. Received one without {STATE_KEY!r}: to "
                "take over a plain optimizer's state, load it into that optimizer before it is wrapped"
            )
        inner, own = dict(state_dict), dict(state_dict[STATE_KEY])
        del inner[STATE_KEY]
        if INSIDE_KEY in own:
            inner[STATE_KEY] = own.pop(INSIDE_KEY)
        self.synchronizer.check_state_dict(own)
        self.inner.load_state_dict(inner)
        self.synchronizer.load_checked(own)

    def __repr__(self) -> str:
        synchronizer = self.synchronizer
        return f"{super().__repr__()} exchanging by {synchronizer.algorithm} at {synchronizer.planner.schedule}"

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "synchronizer": self.synchronizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        owner = self.synchronizer
        self._averaging = GradientAveraging(self.inner, owner.gradient_group, owner.warmup, owner.progress)
        self._steps.stop()
        self._steps = InnerSteps(self.inner, owner, type(self).__name__)

    def _count(self, updated: bool, examples: Any = None) -> None:
        """Count an iteration; if its update was skipped, also for wrapped optimizers, which have not stepped."""
        if not updated and isinstance(self.inner, PeriodicOptimizer):
            self.inner._count(updated)
        if self.synchronizer.step(updated, examples) and self.after_exchange is not None:
            eagerly(self.after_exchange)()

    def _prepared(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that also shows the gradients of each evaluation to the algorithm."""

        def evaluate() -> Any:
            loss = closure()
            self.synchronizer.prepare_gradients()
            return loss

        return evaluate


def levels_of(optimizer: Any) -> list[PeriodicOptimizer]:
    """Return an optimizer of this package and those nested in it, the outermost first; none for other optimizers."""
    return [optimizer, *levels_of(optimizer.inner)] if isinstance(optimizer, PeriodicOptimizer) else []


def synchronizer_of(optimizer: Any) -> Synchronizer:
    """Return the synchronizer of an optimizer of this package, or the synchronizer that was passed in its place.

    Raises:
        TypeError: anything else was passed.
    """
    if not isinstance(optimizer, (PeriodicOptimizer, Synchronizer)):
        raise TypeError(
            f"`optimizer` must be an optimizer or synchronizer of hvd_periodic.torch. Received: "
            f"{type(optimizer).__name__}"
        )
    return optimizer.synchronizer if isinstance(optimizer, PeriodicOptimizer) else optimizer


def _unscale(optimizer: torch.optim.Optimizer) -> bool:
    """Divide the gradients by the scale that a GradScaler left on the optimizer; return whether they are finite."""
    found_inf: torch.Tensor | None = vars(optimizer).get("found_inf")
    if found_inf is None:
        return True
    if bool(found_inf):
        return False
    scale: torch.Tensor | None = vars(optimizer).get("grad_scale")
    if scale is not None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("Attempting to unscale FP16 gradients: GradScaler is for float32 parameters")
        with torch.no_grad():
            foreach.multiply(gradients, 1.0 / float(scale))
    return True
