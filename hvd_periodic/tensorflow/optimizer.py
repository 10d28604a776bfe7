"""Keras optimizers whose ranks exchange now and then."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_periodic.algorithms import AGN, EASGD, Algorithm, Averaging
from hvd_periodic.averaged import schedule_around
from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.local import LocalCommunicator
from hvd_periodic.comm.together import Together
from hvd_periodic.consistency import build_on_all, raise_on_all
from hvd_periodic.placement import placement_of
from hvd_periodic.schedules import Schedule, as_schedule
from hvd_periodic.startup import Moment
from hvd_periodic.tensorflow.center_optimizer import CenterOptimizer
from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator, communicator_of
from hvd_periodic.tensorflow.config import decode, encode
from hvd_periodic.tensorflow.distributed import GradientAverage, is_distributed, taken_apart
from hvd_periodic.tensorflow.graph import VariableSynchronizer, refuse_xla
from hvd_periodic.tensorflow.model import check_policy, named_variables, native
from hvd_periodic.tensorflow.outer import KerasLearningRate, VariableOuterOptimizer
from hvd_periodic.tensorflow.replica import VariableReplica
from hvd_periodic.tensorflow.saved import SavedVariables
from hvd_periodic.tensorflow.settings import ForwardedSettings
from hvd_periodic.tensorflow.space import in_form_of, scaled
from hvd_periodic.tensorflow.store import accumulation_dtype

_PACKAGE = "hvd_periodic"

_CENTER = "asynchronous_center"
"""Begins the names under which an asynchronous center is saved."""


class _Later(LocalCommunicator):
    """Stands in for the ranks of a loaded optimizer until it is trained: loading and evaluating do not communicate."""


@keras.saving.register_keras_serializable(_PACKAGE)
class PeriodicOptimizer(ForwardedSettings):
    """Any Keras optimizer, with periodic exchange by any algorithm and schedule.

    It is an optimizer itself: ``model.compile`` takes it, and ``apply_gradients`` works in an eager loop and in a
    ``tf.function``, where counters are variables and an exchange is a branch of the graph. Learning rate, iterations,
    loss scale, clipping, weight decay and moving averages are those of the wrapped one, also where they are set here.

    Args:
        optimizer: the local optimizer; also an ``hvd.DistributedOptimizer``, whose averaging of gradients is then done
            before each local step, or another optimizer of this package.
        model: the model, for its batch-norm statistics and frozen weights; without it, ranks exchange the variables
            that the optimizer is built on, and nothing else.
        algorithm: an :class:`~hvd_periodic.Algorithm`, or a function that makes one.
        period: local steps between exchanges, or a schedule.
        center_optimizer: for algorithms that optimize the center: an unused Keras optimizer. Default: a copy of
            ``optimizer``, with its learning rate at the time of the exchange.
        asynchronous: exchange without waiting for other ranks, as in :class:`~hvd_periodic.tensorflow.Synchronizer`.
        argument: what the caller calls ``period``, for its error messages.
        buffers, center, root_rank, process_set: as in :class:`~hvd_periodic.tensorflow.Synchronizer`.
        name: of the optimizer.

    Attributes:
        inner_optimizer: the wrapped optimizer; of an ``hvd.DistributedOptimizer``, the one that it was made of.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range, or ranks that disagree; on every rank.
        RuntimeError: Horovod is not initialized.
    """

    _constructed = False
    _saved_process_set: list[int] | None = None
    _saved_averaged: list[int] | None = None

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        model: keras.Model | None,
        algorithm: Algorithm | Callable[[], Algorithm],
        period: int | Schedule,
        *,
        center_optimizer: keras.optimizers.Optimizer | None = None,
        asynchronous: bool = False,
        argument: str = "period",
        buffers: str | None = None,
        center: str = "replicated",
        root_rank: int | None = None,
        process_set: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate=0.0, name=name)
        loaded = isinstance(process_set, _Later)
        communicator = communicator_of(process_set)
        prefix = communicator.unique_name()

        plain, average = optimizer, None

        def check() -> tuple[Algorithm, Schedule, CenterOptimizer | None]:
            nonlocal plain, average
            _check_optimizer(optimizer)
            plain, average = taken_apart(optimizer)
            averaged = average.communicator if average is not None else averaged_inside(plain)
            check_policy(buffers, model, loaded)
            placement_of(center)
            made = algorithm if isinstance(algorithm, Algorithm) else algorithm()
            if not loaded:
                communicator.rank_of(root_rank)
                (made.one_by_one if asynchronous else made.check)(communicator.size)
            local = innermost(plain)
            moving = made.outer_optimizer(local, center_optimizer)
            moved = None if moving is None else CenterOptimizer(local, center_optimizer)
            planned = as_schedule(period, argument)
            return made, planned if loaded else schedule_around(averaged, communicator, planned, asynchronous), moved

        self._algorithm, self._schedule, self._center = build_on_all(communicator, prefix, check)
        self._communicator, self._prefix = communicator, prefix
        self._process_set = None if loaded else process_set
        self._loaded = loaded
        self._root_rank = root_rank
        self._placement = center
        self._asynchronous = bool(asynchronous)
        self._buffers = buffers
        self._model: weakref.ref[keras.Model] | None = None
        self._saved = SavedVariables()
        self._center_values: dict[str, np.ndarray] = {}
        self._synchronizer: VariableSynchronizer | None = None
        self._started = self._opened = False
        self.inner_optimizer = plain
        self._average = average
        if self._center is not None:
            self._track_trackable(self._center.optimizer, "center_optimizer")
        self._constructed = self._forwards = True
        if model is not None:
            self.attach(model)
            if model.built and model.trainable_variables:
                self.build(model.trainable_variables)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_allreduce" in vars(cls):  # hvd.DistributedOptimizer makes a subclass of what it wraps.
            raise TypeError(
                "An hvd.DistributedOptimizer goes inside of an optimizer of hvd_periodic, not around it: "
                "hvdp.ElasticAverageOptimizer(hvd.DistributedOptimizer(optimizer, ...), model, ...)"
            )

    @property
    def synchronizer(self) -> VariableSynchronizer:
        """Counters, ``sync()``, ``finalize()`` and ``state_dict()`` of the exchanges.

        Raises:
            RuntimeError: the optimizer is not built yet; or was loaded, and neither attached nor used yet.
        """
        if self._synchronizer is None:
            what = "was loaded" if self._loaded else "is not built yet, so that there is no center"
            then = "optimizer.attach()" if self._loaded else "optimizer.build(model.trainable_variables) on all ranks"
            raise RuntimeError(f"{type(self).__name__} {what}: call {then}, or train")
        return self._synchronizer

    @property
    def averaged(self) -> TensorFlowCommunicator | None:
        """The ranks whose gradients an ``hvd.DistributedOptimizer`` inside averages, if there is one."""
        return averaged_inside(self.inner_optimizer) if self._average is None else self._average.communicator

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root, which saves for all."""
        return self.synchronizer.communicator.rank == self.synchronizer.root

    def center(self) -> AbstractContextManager[None]:
        """Hold the center in the model inside a ``with`` block; the local values return after it, even on an exception.

        Raises:
            RuntimeError: the optimizer is not built yet; blocks are nested.

        Example::

            with optimizer.center():
                model.evaluate(images, labels)
        """
        if self._loaded and self.built:
            self._construct()
        return self.synchronizer.center()

    def finalize(self) -> None:
        """Leave training on every level: of optimizers inside first, then here; see ``synchronizer.finalize()``."""
        self._leave_inside()
        self.synchronizer.finalize()

    def _leave_inside(self) -> None:
        if isinstance(self.inner_optimizer, PeriodicOptimizer):
            self.inner_optimizer._leave_inside()
            self.inner_optimizer.synchronizer.leave()

    def attach(
        self,
        model: keras.Model | None = None,
        process_set: Any = None,
        distributed: keras.optimizers.Optimizer | None = None,
    ) -> None:
        """Give the optimizer of a loaded model what no file holds; before its first use. Nothing is communicated.

        Args:
            model: the model, if one was given at construction, so that its statistics go on to be averaged.
            process_set: the ranks that exchange, if not all do.
            distributed: an ``hvd.DistributedOptimizer`` of any optimizer, if one was inside; its averaging of gradients
                is all that is used of it.

        Raises:
            RuntimeError: the optimizer is in use.
            TypeError: ``distributed`` is none.
            ValueError: the saved state is not that of this model.
        """
        if self._synchronizer is not None:
            raise RuntimeError("attach() has to come before the first use of the optimizer")
        if model is not None:
            check_policy(self._buffers, model)
            self._model = weakref.ref(model)
        if process_set is not None:
            self._process_set = process_set
        if distributed is not None:
            if not is_distributed(distributed):
                raise TypeError(
                    f"`distributed` must be an hvd.DistributedOptimizer. Received: {type(distributed).__name__}"
                )
            self._average = GradientAverage(distributed)
        if self._loaded and self.built:
            self._construct()

    def build(self, variables: Sequence[Any]) -> None:
        """Create all state for these variables and, on all ranks together, start from the root's values.

        The optimizer of a loaded model starts at its first step instead, from where it was saved.

        Raises:
            TypeError, ValueError, RuntimeError: variables that cannot be exchanged, or ranks that disagree.
        """
        if self.built:
            return
        with tf.init_scope():
            if not all(bool(native(variable).is_initialized()) for variable in variables):
                raise ValueError(
                    "The variables have no values yet, because the model is built inside of the compiled step: give it "
                    "its input shape by keras.Input, or call model.build(input_shape), before it is trained"
                )
            if not self.inner_optimizer.built:
                self.inner_optimizer.build(list(variables))
            self._forwards = False  # Keras would make the variables of these settings again
            super().build(list(variables))
            self._forwards = True
            if not self._loaded:
                self.start()

    def start(self) -> None:
        """Let all ranks agree and start from the root's values, or go on from where they were saved, if not yet done.

        Building a new optimizer does this, and the first step of one that was loaded. All ranks have to call it.

        Raises:
            RuntimeError: the optimizer is not built.
            ValueError: ranks disagree; on all of them.
        """
        if self._started:
            return
        if not self.built:
            raise RuntimeError("The optimizer is not built: call optimizer.build(model.trainable_variables)")
        if self._loaded:
            self._communicator = communicator_of(self._process_set)
            self._prefix = self._communicator.unique_name()
            build_on_all(self._communicator, self._prefix, lambda: None)  # where others check the arguments of new ones

        def check() -> None:
            if tf.distribute.has_strategy():
                raise ValueError("Horovod's ranks are processes of their own: train without a tf.distribute strategy")
            made = self._algorithm
            (made.one_by_one if self._asynchronous else made.check)(self._communicator.size)
            self._refuse_other_ranks()
            schedule_around(self.averaged, self._communicator, self._schedule, self._asynchronous)
            self._construct()

        build_on_all(self._communicator, self._prefix, check)
        synchronizer = self.synchronizer
        synchronizer.communicator, synchronizer.name = self._communicator, self._prefix
        synchronizer.root = self._communicator.rank_of(self._root_rank)
        synchronizer.together = Together(self._communicator)
        synchronizer.average_within(None if self._average is None else self._average.communicator)
        synchronizer.start()
        self._started = True

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Take one local step, and exchange if one is due.

        Where a ``LossScaleOptimizer`` inside skips the update, on this rank alone, the iteration counts all the same.

        Args:
            grads: gradients, as tensors or ``tf.IndexedSlices``; None for no gradient.
            trainable_variables: what they are gradients of. Default: what the optimizer was built on.

        Raises:
            RuntimeError: called inside ``center()``; or what an exchange raises, in a ``tf.function`` as a
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
        replaced = self._open(variables)
        self.synchronizer.refuse_inside_center("step")
        self._check_variables_are_known(variables)
        if replaced:
            self._count_skipped()
            return
        gradients, updated = self._prepare(self._average_gradients(gradients, variables), variables)
        self.inner_optimizer.apply(gradients, variables)
        self.synchronizer.step(updated)

    def skip(self) -> None:
        """Count an iteration without update, in place of applying gradients, in an eager loop.

        Ranks exchange at the same iterations: where one passes over a batch, and the others do not, it has to count.

        Raises:
            RuntimeError: called inside ``center()``; the optimizer is not built.
        """
        if not self.built:
            raise RuntimeError("The optimizer is not built: call optimizer.build(model.trainable_variables)")
        self._open(self._trainable_variables)
        self._count_skipped()

    def _count_skipped(self) -> None:
        """Count an iteration without update, on every level."""
        if isinstance(self.inner_optimizer, PeriodicOptimizer):
            self.inner_optimizer.skip()
        self.synchronizer.step(updated=False)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Take one local step on (gradient, variable) pairs; return the iterations of the wrapped optimizer."""
        super().apply_gradients(grads_and_vars)
        return self.iterations

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss as the wrapped optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Let the wrapped optimizer set the final values, such as its moving averages."""
        self.inner_optimizer.finalize_variable_values(var_list)

    @property
    def variables(self) -> list[Any]:
        """All variables: of the exchanges, of the wrapped optimizer, and of the center optimizer."""
        center = [] if self._center is None else self._center.optimizer.variables
        return self._variables + self.inner_optimizer.variables + center

    @property
    def learning_rate(self) -> Any:
        """Learning rate of the wrapped optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """Iterations of the wrapped optimizer; those of exchanges are ``synchronizer.local_steps``."""
        return self.inner_optimizer.iterations

    @property
    def loss_scale_factor(self) -> float:
        """1: the wrapped optimizer scales."""
        return 1.0

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        # A LossScaleOptimizer sets it to None when it is wrapped around this one.
        if self._constructed:
            raise ValueError(
                f"{type(self).__name__} must not be inside a LossScaleOptimizer, under which a rank whose gradients "
                "overflow would not count the step: the LossScaleOptimizer goes inside, "
                f"{type(self).__name__}(keras.optimizers.LossScaleOptimizer(optimizer), ...), and model.compile(..., "
                "auto_scale_loss=False) keeps Keras from adding another"
            )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain values; those that are objects of this process are not
        among them: model and process set, see :meth:`attach`.
        """
        own = {"algorithm": encode(self._algorithm), "period": encode(self._schedule)}
        return self._common_config() | own | {"asynchronous": self._asynchronous}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Return the optimizer of a loaded model; it communicates from its first step on."""
        with keras.saving.custom_object_scope(custom_objects or {}):
            own = ("process_set", "averaged")
            arguments = {key: decode(value) for key, value in config.items() if key not in own}
        made = cls(**arguments, model=None, process_set=_Later())
        made._saved_process_set, made._saved_averaged = (config.get(key) for key in own)
        return made

    def save_own_variables(self, store: Any) -> None:
        """Save the state of exchanges, by name; the wrapped optimizer is saved beside it."""
        for name, value in self._saved.values().items():
            store[name] = value
        if not self._asynchronous:
            return
        if self._synchronizer is None or not self._started:
            for name, value in self._center_values.items():
                store[name] = value
            return
        state = self._synchronizer.state_dict()
        if isinstance(state["center_optimizer"], dict):
            raise ValueError(
                "The state of a center optimizer that is sharded over ranks is not saved with the model: save "
                "optimizer.synchronizer.state_dict()"
            )
        for part in self._synchronizer.parts:
            for i, spec in enumerate(part.values.layout.specs):
                store[f"{_CENTER}.{part.name}.{i}"] = state["vectors"][part.name]["center"][spec.name]
        for i, value in enumerate(state["center_optimizer"] or []):
            store[f"{_CENTER}_optimizer.{i}"] = value

    def load_own_variables(self, store: Any) -> None:
        """Take over what :meth:`save_own_variables` wrote, now or when the variables are there.

        As in Keras, there is a warning, and nothing else, where another optimizer wrote it.
        """
        if store.keys() and "local_steps" not in store.keys():  # noqa: SIM118
            warnings.warn(f"Skipping what was saved by another optimizer than {type(self).__name__}", stacklevel=2)
            return
        values = {name: np.asarray(store[name]) for name in store.keys()}  # noqa: SIM118
        self._center_values = {name: values.pop(name) for name in list(values) if name.startswith(_CENTER)}
        self._saved.load(values)

    def _saved_center(self) -> dict[str, Any] | None:
        """Return what was loaded of an asynchronous center, in the form of ``state_dict``; None if nothing was."""
        if not self._center_values or self._synchronizer is None:
            return None
        vectors = {
            part.name: {
                "center": {
                    spec.name: self._center_values[f"{_CENTER}.{part.name}.{i}"]
                    for i, spec in enumerate(part.values.layout.specs)
                }
            }
            for part in self._synchronizer.parts
        }
        of_optimizer = [name for name in self._center_values if name.startswith(f"{_CENTER}_optimizer.")]
        state = [self._center_values[f"{_CENTER}_optimizer.{i}"] for i in range(len(of_optimizer))]
        return {"vectors": vectors, "center_optimizer": state or None}

    def _common_config(self) -> dict[str, Any]:
        ranks = None
        if self._process_set is not None and not isinstance(self._process_set, Communicator):
            ranks = list(self._process_set.ranks)
        moved = self._center.optimizer if self._center is not None and not self._center.copied else None
        return {
            "optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "buffers": self._buffers,
            "center": self._placement,
            "root_rank": self._root_rank,
            "process_set": self._saved_process_set if self._loaded and ranks is None else ranks,
            "averaged": self._saved_averaged if self._average is None else self._average.communicator.ranks,
            "name": self.name,
        } | ({} if moved is None else {"center_optimizer": keras.saving.serialize_keras_object(moved)})

    def _open(self, variables: Sequence[Any] = ()) -> bool:
        """Start at the first step, and take over what was loaded since the optimizer was built, on the root at least.

        All ranks do this together: where their first call is ``finalize()``, in it.

        Args:
            variables: of which the step is, if it is one.

        Returns:
            Whether this rank took over other values: in an eager step, its gradients are there already, and are of none
            that it holds.
        """
        if self._opened:
            return False
        eager = tf.executing_eagerly()
        with tf.init_scope():
            if not tf.executing_eagerly():
                raise RuntimeError("This is TensorFlow 2: for graphs of TensorFlow 1 use its contrib_opt")
            before = [native(variable).numpy() for variable in variables] if eager else []
            self.build(variables)
            self.start()
            synchronizer = self.synchronizer
            derived = synchronizer.replica.derived_from()
            replaced = synchronizer.begin(Moment.BEFORE_UPDATE if variables else Moment.END)
            changed = any((native(v).numpy() != old).any() for v, old in zip(variables, before, strict=False))
            replaced |= self._any_in_group(changed)
            # What layers derived from their weights before is part of a step that is being compiled.
            stale = not eager and derived != synchronizer.replica.derived_from()
            failure = ValueError(
                "Layers of this rank were adapted otherwise than those of the root, whose weights all have taken over, "
                "and the step that is being compiled has the old values: call "
                "optimizer.build(model.trainable_variables) on all ranks after layers are adapted, and before training"
            )
            raise_on_all(self._communicator, self._prefix, failure if stale else None)
        self._opened = True
        return replaced and eager

    def _any_in_group(self, value: bool) -> bool:
        """Return whether something is true on any of the ranks that average their gradients."""
        if self._average is None:
            return value
        return any(self._average.communicator.allgather_object(value, f"{self._prefix}.group"))

    def _refuse_other_ranks(self) -> None:
        if self._saved_process_set is not None and self._process_set is None:
            raise ValueError(
                f"This optimizer was trained on the process set of ranks {self._saved_process_set}: after loading, "
                "call optimizer.attach(process_set=...)"
            )

        if self._saved_averaged is not None and self.averaged is None:
            raise ValueError(
                f"This optimizer was around an hvd.DistributedOptimizer over ranks {self._saved_averaged}: after "
                "loading, call optimizer.attach(distributed=hvd.DistributedOptimizer(keras.optimizers.SGD(), ...))"
            )

    def _construct(self) -> None:
        """Make the variables of the exchanges, and give them what was saved."""
        if self._synchronizer is not None:
            return
        model = None if self._model is None else self._model()
        named = named_variables(self._trainable_variables, model, self._buffers)
        replica = VariableReplica(named, self._new_variable)
        ranks, root = self._communicator, 0
        if (
            self._asynchronous or self._placement != "replicated"
        ):  # Which share this rank holds, has to be known before it is loaded.
            ranks = communicator_of(self._process_set)
            root = ranks.rank_of(self._root_rank)
        self._synchronizer = VariableSynchronizer(
            self._new_variable,
            replica,
            self._algorithm,
            self._schedule,
            ranks,
            root,
            self._prefix,
            self._placement,
            self._asynchronous,
            True,
            None if self._center is None else VariableOuterOptimizer(self._center, named.parameters),
            KerasLearningRate(innermost(self.inner_optimizer)),
            learning_rate=lambda: native(getattr(self.inner_optimizer, "learning_rate", None)),
        )
        self._synchronizer.opening = self._open
        saved = self._synchronizer.saved_center = self._saved_center()
        if saved is not None and self._synchronizer.asynchronous is not None:
            self._synchronizer.asynchronous.show(self._synchronizer.parts, saved)
        if self._center is not None and not self._asynchronous:
            for i, variable in enumerate(self._center.optimizer.variables):
                self._saved.variables[f"center_optimizer.{i}"] = variable
        self._saved.later = set(self._synchronizer.note_variables)
        self._saved.settle()

    def _new_variable(self, name: str, shape: Sequence[int], dtype: tf.DType, initial_value: Any) -> tf.Variable:
        initializer = keras.initializers.Constant(initial_value)
        variable = self.add_variable(shape=tuple(shape), dtype=dtype.name, initializer=initializer, name=name)
        self._saved.variables[name] = variable
        return native(variable)

    def _average_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the means of gradients over the ranks of a DistributedOptimizer, as long as it averages."""
        average, synchronizer = self._average, self.synchronizer
        if average is None or (tf.executing_eagerly() and synchronizer.replicas_differ):
            return gradients
        if tf.executing_eagerly() or synchronizer.synchronous_until is None:
            return average(gradients, variables)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        shown = [gradients[i] for i in present]
        means: list[Any] = []

        def mean() -> list[Any]:
            means[:] = average(shown, [variables[i] for i in present])
            return means

        def leave() -> list[Any]:
            return [in_form_of(form, gradient) for form, gradient in zip(means, shown, strict=True)]

        averaged = list(gradients)
        for i, gradient in zip(present, tf.cond(synchronizer.steps_to_switch() > 0, mean, leave), strict=True):
            averaged[i] = gradient
        return averaged

    def _prepare(self, gradients: list[Any], variables: list[Any]) -> tuple[list[Any], Any]:
        """Return the gradients for the local update, and whether that will run."""
        inner, updated = innermost(self.inner_optimizer), True
        scale = inner.loss_scale_factor
        if isinstance(inner, keras.optimizers.LossScaleOptimizer):
            updated, scale = inner.check_finite(gradients), native(inner.dynamic_scale)
            if tf.executing_eagerly():
                updated = bool(updated)
        if not self._algorithm.uses_gradients or updated is False:
            return gradients, updated
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        position = [self._get_variable_index(variables[i]) for i in present]
        prepared: list[Any] = []

        def unscaled(gradient: Any) -> Any:
            """Return a gradient without its scale, in a dtype in which it does not vanish."""
            return scaled(1.0 / scale, tf.cast(gradient, accumulation_dtype(gradient.dtype)))

        def show() -> list[Any]:
            shown: list[Any] = [None] * len(self._trainable_variables)
            for i, index in zip(present, position, strict=True):
                shown[index] = gradients[i] if scale is None else unscaled(gradients[i])
            shown = self.synchronizer.prepare_gradients(shown)
            prepared[:] = [shown[index] if scale is None else scaled(scale, shown[index]) for index in position]
            return prepared

        def skip() -> list[Any]:
            """Return gradients that are not finite in the form that ``show``, traced before, gives to finite ones."""
            return [in_form_of(form, gradients[i]) for i, form in zip(present, prepared, strict=True)]

        for i, gradient in zip(present, show() if updated is True else tf.cond(updated, show, skip), strict=True):
            gradients[i] = gradient
        return gradients, updated


@keras.saving.register_keras_serializable(_PACKAGE)
class ElasticAverageOptimizer(PeriodicOptimizer):
    """Elastic averaging: replicas and center pull each other; see :class:`hvd_periodic.EASGD` for the equations.

    Args:
        optimizer: the local optimizer, any Keras optimizer. With momentum this is EAMSGD; its state stays local.
        model: the model, so that its batch-norm statistics are averaged; or None.
        communication_period: local steps between exchanges (τ), or a schedule.
        moving_rate: α in (0, 2/(n+1)]; default min(0.9/n, 1/(n+1)).
        beta: α = β/n instead, without division by τ.
        rho: strength ρ ≥ 0 of the elastic term in the local loss, in 1/(learning rate).
        asynchronous: exchange with one center on its own clock, without waiting for other ranks; needs MPI. The center
            is on ``root_rank``, or with ``center="sharded"`` in parts on all; the rate is in (0, 1].
        buffers: ``"average"`` or ``"local"``; default: average, where a model is given.
        center: ``"replicated"``, ``"root"`` or ``"sharded"``: where the center lives.
        root_rank: the rank, in Horovod's numbering, whose values all start from.
        process_set: the ranks that exchange; default: all.
        name: of the optimizer.

    Raises:
        TypeError, ValueError, RuntimeError: a refused argument, or ranks that disagree; on every rank.

    Example:
        >>> import keras, numpy as np
        >>> from hvd_periodic import LocalCommunicator
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> local = keras.optimizers.SGD(0.1)
        >>> optimizer = ElasticAverageOptimizer(local, model, 2, moving_rate=0.25, process_set=LocalCommunicator())
        >>> model.compile(optimizer, loss="mse")
        >>> history = model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=1, verbose=0)
        >>> optimizer.synchronizer.rounds
        2

    References:
        Zhang, Choromanska, LeCun: Deep Learning with Elastic Averaging SGD. arXiv 1412.6651 (2015).
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        model: keras.Model | None = None,
        communication_period: int | Schedule = 10,
        moving_rate: float | None = None,
        beta: float | None = None,
        rho: float = 0.0,
        asynchronous: bool = False,
        *,
        buffers: str | None = None,
        center: str = "replicated",
        root_rank: int | None = None,
        process_set: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            model,
            lambda: EASGD(moving_rate, beta, rho),
            communication_period,
            asynchronous=asynchronous,
            argument="communication_period",
            buffers=buffers,
            center=center,
            root_rank=root_rank,
            process_set=process_set,
            name=name,
        )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain values."""
        own = {"communication_period": encode(self._schedule), "asynchronous": self._asynchronous}
        return self._common_config() | own | vars(self._algorithm)


@keras.saving.register_keras_serializable(_PACKAGE)
class ModelAverageOptimizer(PeriodicOptimizer):
    """Model averaging (local SGD): replicas are replaced by their mean; see :class:`hvd_periodic.Averaging`.

    Args:
        optimizer: the local optimizer, any Keras optimizer; its state stays local.
        model: the model, so that its batch-norm statistics are averaged; or None.
        interval_steps: local steps between exchanges (τ), or a schedule.
        buffers: ``"average"`` or ``"local"``; default: average, where a model is given.
        center: ``"replicated"``, ``"root"`` or ``"sharded"``: where the center lives.
        root_rank: the rank, in Horovod's numbering, whose values all start from.
        process_set: the ranks that exchange; default: all.
        name: of the optimizer.

    Raises:
        TypeError, ValueError, RuntimeError: a refused argument, or ranks that disagree; on every rank.

    References:
        Stich: Local SGD Converges Fast and Communicates Little. arXiv 1805.09767 (2018).
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        model: keras.Model | None = None,
        interval_steps: int | Schedule = 100,
        *,
        buffers: str | None = None,
        center: str = "replicated",
        root_rank: int | None = None,
        process_set: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            model,
            Averaging,
            interval_steps,
            argument="interval_steps",
            buffers=buffers,
            center=center,
            root_rank=root_rank,
            process_set=process_set,
            name=name,
        )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain values."""
        return self._common_config() | {"interval_steps": encode(self._schedule)}


@keras.saving.register_keras_serializable(_PACKAGE)
class AGNOptimizer(PeriodicOptimizer):
    """Accumulated gradient normalization: the center takes one step per period; see :class:`hvd_periodic.AGN`.

    Args:
        optimizer: the local optimizer, any Keras optimizer; its state stays local.
        model: the model, so that its batch-norm statistics are averaged; or None.
        communication_period: local steps between exchanges (τ), or a schedule.
        center_optimizer: moves the center: an unused Keras optimizer. Default: a copy of ``optimizer`` with a state of
            its own, whose learning rate is that of ``optimizer`` at the time of the exchange.
        op: ``"sum"`` or ``"average"`` of the workers' normalized gradients.
        asynchronous: exchange with one center on its own clock, without waiting for other ranks; needs MPI. Each worker
            in turn has its gradients applied by the center's optimizer.
        buffers: ``"average"`` or ``"local"``; default: average, where a model is given.
        center: ``"replicated"``, ``"root"`` or ``"sharded"``: where the center lives.
        root_rank: the rank, in Horovod's numbering, whose values all start from.
        process_set: the ranks that exchange; default: all.
        name: of the optimizer.

    Raises:
        TypeError, ValueError, RuntimeError: a refused argument, or ranks that disagree; on every rank.

    References:
        Hermans, Spanakis, Möckel: Accumulated Gradient Normalization. arXiv 1710.02368 (2017).
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        model: keras.Model | None = None,
        communication_period: int | Schedule = 10,
        center_optimizer: keras.optimizers.Optimizer | None = None,
        op: str = "sum",
        asynchronous: bool = False,
        *,
        buffers: str | None = None,
        center: str = "replicated",
        root_rank: int | None = None,
        process_set: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            optimizer,
            model,
            lambda: AGN(op),
            communication_period,
            center_optimizer=center_optimizer,
            asynchronous=asynchronous,
            argument="communication_period",
            buffers=buffers,
            center=center,
            root_rank=root_rank,
            process_set=process_set,
            name=name,
        )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor as plain values."""
        own = {"communication_period": encode(self._schedule), "asynchronous": self._asynchronous}
        return self._common_config() | own | vars(self._algorithm)


def _check_optimizer(optimizer: object) -> None:
    """Raise a TypeError unless this is a Keras optimizer that exchanges nothing by itself."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"`optimizer` must be a keras.optimizers.Optimizer. Received: {type(optimizer).__name__}")


def innermost(optimizer: Any) -> Any:
    """Return what the optimizers of this package, one in the other, are around."""
    while isinstance(optimizer, PeriodicOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def averaged_inside(optimizer: Any) -> TensorFlowCommunicator | None:
    """Return the ranks whose gradients are averaged inside of an optimizer, if it is one of this package."""
    return optimizer.averaged if isinstance(optimizer, PeriodicOptimizer) else None
