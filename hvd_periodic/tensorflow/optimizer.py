"""Keras optimizers with periodic exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self, Unpack

import keras
import tensorflow as tf

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.arguments import spelled
from hvd_periodic.frames import running_with
from hvd_periodic.options import takes
from hvd_periodic.schedules import Schedule
from hvd_periodic.sync.handshake import EXAMPLES
from hvd_periodic.tensorflow.center_optimizer import CenterOptimizer
from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator
from hvd_periodic.tensorflow.config import decode, encode
from hvd_periodic.tensorflow.fit_end import FitEnd, average_among
from hvd_periodic.tensorflow.gradient_averaging import refuse_as_subclass
from hvd_periodic.tensorflow.graph import VariableSynchronizer, refuse_xla
from hvd_periodic.tensorflow.host import outside
from hvd_periodic.tensorflow.lifecycle import ExchangeLifecycle
from hvd_periodic.tensorflow.model import NO_VALUES, have_values, only_makes
from hvd_periodic.tensorflow.options import KerasOptions
from hvd_periodic.tensorflow.rank_binding import RANKS, RankBinding, UnboundRanks
from hvd_periodic.tensorflow.settings import ForwardedSettings, optimizers_inside, show_inside
from hvd_periodic.tensorflow.spec import OptimizerSpec, gradient_group_inside
from hvd_periodic.tensorflow.stage import Stage


@keras.saving.register_keras_serializable("hvd_periodic")
class PeriodicOptimizer(ForwardedSettings):
    """Any Keras optimizer with periodic exchange, with any algorithm and schedule.

    It is an optimizer itself: ``model.compile`` takes it, and ``apply_gradients`` works in an eager loop and in a
    ``tf.function``, whose steps wait for Python when an exchange is due. Learning rate, iterations, loss scale,
    clipping, weight decay and moving averages are read from the wrapped optimizer, and set on it.

    Copies are unused optimizers with the same arguments, but without a model. A ``copy`` exchanges with the same ranks;
    an unpickled optimizer gets its ranks from :meth:`attach`, like a loaded one. Copies do not write the files that the
    original writes.

    Args:
        optimizer: the local optimizer; also an ``hvd.DistributedOptimizer``, which then averages gradients before each
            local step, or another optimizer of this package.
        model: the model, for its batch-norm statistics and frozen weights; without it, ranks exchange only the
            variables that the optimizer is built on.
        algorithm: an :class:`~hvd_periodic.Algorithm`, or a function that makes one.
        period: local steps between exchanges, or a schedule.
        outer_optimizer: an unused Keras optimizer, for algorithms that optimize the center. Default: a copy of
            ``optimizer``, with its learning rate at the time of the exchange.
        asynchronous: exchange without waiting for other ranks, as in :class:`~hvd_periodic.tensorflow.Synchronizer`.
        options: those of :class:`~hvd_periodic.options.Options` and
            :class:`~hvd_periodic.tensorflow.options.KerasOptions`; the signature has their defaults.

    Attributes:
        inner: the wrapped optimizer; for an ``hvd.DistributedOptimizer``, the optimizer from which it was made. Keras
            and its files call it ``inner_optimizer``.
        fit_end: the end of ``fit`` that the callback ``FinalizeAtEnd`` has prepared; None without the callback.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range, or ranks that disagree; on every rank.
        RuntimeError: Horovod is not initialized.
    """

    _spelling: ClassVar[Mapping[str, str]] = {}
    """Names that a named constructor uses for classes and arguments of the core."""
    _outer_key: ClassVar[str] = "outer_optimizer"
    """Key of the center's optimizer in configurations, and so in files."""
    fit_end: FitEnd | None = None

    @takes(KerasOptions)
    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        model: keras.Model | None,
        algorithm: Algorithm | Callable[[], Algorithm],
        period: int | Schedule,
        *,
        outer_optimizer: keras.optimizers.Optimizer | None = None,
        asynchronous: bool = False,
        **options: Unpack[KerasOptions],
    ) -> None:
        super().__init__(learning_rate=0.0, name=options["name"])
        binding = RankBinding(options["process_set"], options["timeout_seconds"])
        arguments = (optimizer, model, algorithm, period, outer_optimizer, bool(asynchronous), options)
        with spelled(self._spelling):
            spec = binding.build(lambda: OptimizerSpec.of(binding, *arguments))
        self._algorithm, self._schedule, self._center = spec.algorithm, spec.schedule, spec.center
        self._lifecycle = ExchangeLifecycle(self, binding, spec)
        self.inner_optimizer = spec.optimizer
        show_inside(spec.optimizer)
        if self._center is not None:
            self.follow_center(self._center)
        self.stage = Stage.UNBUILT
        if model is not None:
            self.attach(model)
            if model.built and model.trainable_variables:
                self.build(model.trainable_variables)

    def follow_center(self, center: CenterOptimizer) -> None:
        """Pass settings on to the center's optimizer, and save it; for internal use."""
        self._center = center
        center.track(self, "center_optimizer")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_as_subclass(cls)

    @property
    def inner(self) -> keras.optimizers.Optimizer:
        """The wrapped optimizer."""
        return self.inner_optimizer

    def __dir__(self) -> list[str]:
        """Leave out ``inner``: Keras saves the objects that it finds here, under the first of their names."""
        return [name for name in super().__dir__() if name != "inner"]

    @property
    def synchronizer(self) -> VariableSynchronizer:
        """Counters, ``sync()``, ``finalize()`` and ``state_dict()`` of the exchanges.

        Raises:
            RuntimeError: the optimizer is not built yet; or it was loaded and not attached or used yet.
        """
        return self._lifecycle.synchronizer

    @property
    def gradient_group(self) -> TensorFlowCommunicator | None:
        """The ranks whose gradients an ``hvd.DistributedOptimizer`` inside averages; None without one."""
        return self._lifecycle.binding.gradient_group or gradient_group_inside(self.inner_optimizer)

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root, which saves for all."""
        return self.synchronizer.membership.is_root

    def center(self) -> AbstractContextManager[None]:
        """Hold the center in the model inside a ``with`` block; the local values return after it, even on an exception.

        Raises:
            RuntimeError: the optimizer is not built yet; blocks are nested.

        Example::

            with optimizer.center():
                model.evaluate(images, labels)
        """
        self._lifecycle.create_loaded()
        return self.synchronizer.center()

    def finalize(self) -> None:
        """Leave training on every level, optimizers inside first; see ``synchronizer.finalize()``."""
        for level in reversed(levels_of(self.inner_optimizer)):
            level.synchronizer.leave()
        self.synchronizer.finalize()

    def finalize_variable_values(self, var_list: Any) -> None:
        """Leave training if required, then set the variables to the final values of the wrapped optimizer.

        ``fit`` calls this after the last epoch. It leaves training with the callback ``FinalizeAtEnd``, or with
        ``use_ema=True``: then the final values are the mean of all ranks' moving averages, and all ranks must call it.
        """
        end, self.fit_end = self.fit_end, None
        averages = any(each.use_ema for each in optimizers_inside(self))
        if end is not None:
            end.run()
        elif averages:
            self.finalize()
        self.plain_optimizer.finalize_variable_values(var_list)
        if averages:
            for level in reversed(levels_of(self)):
                average_among(level.synchronizer.membership, var_list)

    def attach(
        self,
        model: keras.Model | None = None,
        process_set: Any = None,
        distributed: keras.optimizers.Optimizer | None = None,
    ) -> None:
        """Give the optimizer of a loaded model the objects that no file holds; before its first use, locally.

        Args:
            model: the model, if one was given at construction, so that exchanges continue to average its statistics.
            process_set: the ranks that exchange, if not all ranks do.
            distributed: an ``hvd.DistributedOptimizer`` around any optimizer, if one was inside; only its averaging of
                gradients is used.

        Raises:
            RuntimeError: the optimizer is in use.
            TypeError: ``distributed`` is not an ``hvd.DistributedOptimizer``.
            ValueError: the saved state belongs to another model.
        """
        self._lifecycle.attach(model, process_set, distributed)

    def build(self, variables: Sequence[Any]) -> None:
        """Create all state for these variables and, on all ranks together, start from the root's values.

        The optimizer of a loaded model starts at its first step instead, from the saved state.

        Raises:
            TypeError, ValueError, RuntimeError: variables that cannot be exchanged, or ranks that disagree.
        """
        if self.built:
            return
        with outside():
            if not have_values(variables):
                raise ValueError(NO_VALUES)
            if not self.inner_optimizer.built:
                self.inner_optimizer.build(list(variables))
            self.stage = Stage.BUILDING
            super().build(list(variables))
            self._lifecycle.on_built()

    def start(self) -> None:
        """Check that all ranks agree, and start from the root's values or the saved state, unless started already.

        Building a new optimizer calls this, as does the first step of a loaded one. All ranks have to call it.

        Raises:
            RuntimeError: the optimizer is not built.
            ValueError: ranks disagree; on all of them.
        """
        if self.stage >= Stage.STARTED:
            return
        if not self.built:
            raise RuntimeError("The optimizer is not built: call optimizer.build(model.trainable_variables)")
        with spelled(self._spelling):
            self._lifecycle.start()

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None, examples: Any = None
    ) -> None:
        """Take one local step, and exchange if one is due.

        If a ``LossScaleOptimizer`` inside skips the update on this rank only, the iteration still counts.

        Args:
            grads: gradients, as tensors or ``tf.IndexedSlices``; None for no gradient.
            trainable_variables: the variables of the gradients. Default: the variables that the optimizer was built on.
            examples: number of examples of the gradients, or tokens, for ``weight="examples"``, also of optimizers
                inside; a number or a scalar. Default: the size of the batch of ``train_step(data)``, in ``fit`` and
                ``train_on_batch``.

        Raises:
            RuntimeError: called inside ``center()``; or an error of an exchange, in a ``tf.function`` as a
                ``tf.errors.OpError``.
            ValueError: unknown variables, or XLA compilation.
        """
        gradients = list(grads)
        if not gradients:
            return
        if not self.built and trainable_variables is None:
            raise ValueError("The optimizer is not built: call optimizer.build(model.trainable_variables) first")
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if len(gradients) != len(variables):
            raise ValueError(f"{len(variables)} variables take as many gradients. Received: {len(gradients)}")
        refuse_xla()
        if not self.built and only_makes(variables):
            return
        replaced = self._lifecycle.open(variables)
        self.synchronizer.center_reader.require_outside_center_block("step")
        self._require_known(variables)
        if replaced:
            self._count_skipped()
            return
        gradients, updated = self._lifecycle.prepare(gradients, variables)
        examples = self._examples() if examples is None else examples
        more = {"examples": examples} if isinstance(self.inner_optimizer, PeriodicOptimizer) else {}
        self.inner_optimizer.apply(gradients, variables, **more)
        self.synchronizer.step(updated, examples)

    def _examples(self) -> Any:
        """Return the size of the batch in the ``train_step(data)`` that runs; None if none does, or nothing counts."""
        if not any(level._lifecycle.spec.options["weight"] == EXAMPLES for level in levels_of(self)):
            return None
        steps = running_with("train_step")
        data = next((data for model, data in steps if getattr(model, "optimizer", None) is self), None)
        batch = next(iter(tf.nest.flatten(data)), None)
        return None if batch is None else tf.shape(batch)[0]

    def _require_known(self, variables: Sequence[Any]) -> None:
        """Raise a ValueError for a variable on which the optimizer was not built."""
        known = set(map(id, self._trainable_variables))
        unknown = next((variable for variable in variables if id(variable) not in known), None)
        if unknown is not None:
            raise ValueError(
                f"Unknown variable {getattr(unknown, 'path', unknown.name)!r}: the optimizer was built on others. "
                "Where the trained variables have changed, call adopt() on all ranks"
            )

    def adopt(self, variables: Sequence[Any] | None = None) -> None:
        """Go on after variables were thawed, frozen, added or removed; on all ranks, after the same local step.

        First all ranks exchange the former set, unless they have just done so. Then, with x the variables and c the
        center:

        - a variable stays if name, shape, dtype and policy do: x, c, outer state, accumulators and error memory are
          kept to the bit, and so is the wrapped optimizer's state;
        - one that leaves takes x ← c on all ranks (BMUF: W), and is a constant from then on;
        - one that comes takes x ← x_root and c ← x_root, with outer state, accumulators and error memory of zeros, and
          the wrapped optimizer's state of a new optimizer; its moving average starts from it.

        Counters go on; the next exchange is a period from here. Compile the model again, with the same optimizer, or
        make the ``tf.function`` again: steps that were compiled before raise an error.

        Args:
            variables: the variables that are trained now. Default: the trainable variables of the model that was given
                at construction.

        Raises:
            RuntimeError: the optimizer is not built; called inside ``center()``; this kind of training cannot adopt; or
                other ranks are in another call.
            TypeError, ValueError: the new set is refused, or differs between ranks. On all ranks; nothing has changed.

        Example::

            backbone.trainable = True
            model.compile(optimizer, loss)
            optimizer.adopt()
        """
        with spelled(self._spelling):
            self._lifecycle.adopt(variables)

    def skip(self) -> None:
        """Count an iteration without an update, instead of applying gradients, in an eager loop.

        Ranks exchange at the same iterations, so a rank that skips a batch that others use has to count it.

        Raises:
            RuntimeError: called inside ``center()``; the optimizer is not built.
        """
        if not self.built:
            raise RuntimeError("The optimizer is not built: call optimizer.build(model.trainable_variables)")
        self._lifecycle.open(self._trainable_variables)
        self._count_skipped()

    def _count_skipped(self) -> None:
        """Count an iteration without an update, on every level."""
        if isinstance(self.inner_optimizer, PeriodicOptimizer):
            self.inner_optimizer.skip()
        self.synchronizer.step(updated=False)

    def apply_gradients(self, grads_and_vars: Any, examples: Any = None) -> Any:
        """Take one local step on (gradient, variable) pairs, see :meth:`apply`; return the local iterations."""
        gradients, variables = zip(*grads_and_vars, strict=True)
        self.apply(gradients, variables, examples)
        return self.iterations

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as plain values, without model and process set; see :meth:`attach`."""
        own = {"algorithm": encode(self._algorithm), "period": encode(self._schedule)}
        return self._common_config() | own | {"asynchronous": self._lifecycle.spec.asynchronous}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Return the optimizer of a loaded model, which communicates only from its first step on."""
        with keras.saving.custom_object_scope(custom_objects or {}):
            own = {key: decode(value) for key, value in config.items() if key not in RANKS}
        if "center_optimizer" in own:
            own["outer_optimizer"] = own.pop("center_optimizer")
        made = cls(**own, model=None, process_set=UnboundRanks())
        made._lifecycle.binding.remember(config)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_config, (_without_files(self.get_config()),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made, arguments = self.__reduce__()
        copied: Self = made(*arguments)
        memo[id(self)] = copied
        for copy, original in zip(levels_of(copied), levels_of(self), strict=True):
            copy._lifecycle.binding.follow(original._lifecycle.binding)
        return copied

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def save_own_variables(self, store: Any) -> None:
        """Save the exchange state by name; Keras saves the wrapped optimizer separately."""
        self._lifecycle.write(store)

    def load_own_variables(self, store: Any) -> None:
        """Restore what :meth:`save_own_variables` wrote, now or once the variables exist."""
        self._lifecycle.read(store, type(self).__name__)

    def _common_config(self) -> dict[str, Any]:
        """Return the arguments that all named constructors share."""
        return self._lifecycle.spec.config(self._outer_key) | self._lifecycle.binding.config() | {"name": self.name}


def levels_of(value: Any) -> list[PeriodicOptimizer]:
    """Return an optimizer of this package and those nested in it, the outermost first; none for other values."""
    return [value, *levels_of(value.inner_optimizer)] if isinstance(value, PeriodicOptimizer) else []


def _without_files(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in which neither the optimizer nor any inside it writes files."""
    inside = config.get("optimizer")
    inner = {} if inside is None else {"optimizer": {**inside, "config": _without_files(inside["config"])}}
    return {**config, **inner, **{key: none for key, none in _NO_FILES.items() if key in config}}


_NO_FILES = {"run_log": False, "center_file": None}
