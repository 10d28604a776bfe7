"""The exchanges of a Keras optimizer, from its construction to its first step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_periodic.comm.agreement import build_on_all
from hvd_periodic.keras.model import check_policy
from hvd_periodic.options import of_exchange
from hvd_periodic.sync.adoption import Successor
from hvd_periodic.sync.startup import CallPoint
from hvd_periodic.tensorflow.center_optimizer import CenterOptimizer
from hvd_periodic.tensorflow.gradients import GradientPreparation
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.host import outside
from hvd_periodic.tensorflow.model import named_variables, native, with_rest_of
from hvd_periodic.tensorflow.optimizer_state import KerasOptimizerState
from hvd_periodic.tensorflow.outer import KerasLearningRate, VariableOuterOptimizer
from hvd_periodic.tensorflow.private import build_again, know, list_variables
from hvd_periodic.tensorflow.progress import ADDED
from hvd_periodic.tensorflow.rank_binding import RankBinding
from hvd_periodic.tensorflow.replica import VariableReplica
from hvd_periodic.tensorflow.resharding import SlotValues
from hvd_periodic.tensorflow.saved import PLACES, ROWS_OF, SUMS_OF, SavedExchanges, depends_on_wire
from hvd_periodic.tensorflow.settings import innermost
from hvd_periodic.tensorflow.spec import OptimizerSpec
from hvd_periodic.tensorflow.stage import Stage
from hvd_periodic.wires import as_wire

_CENTER_OPTIMIZER = "center_optimizer."
"""Prefix of the names under which the variables of the center's optimizer are saved."""


class _OptimizerSynchronizer(VariableSynchronizer):
    """The synchronizer of an optimizer; it advances the stage of the optimizer."""

    def __init__(self, lifecycle: ExchangeLifecycle, *arguments: Any, **options: Any) -> None:
        self._lifecycle = lifecycle
        super().__init__(*arguments, **options)

    def on_arrival(self) -> None:
        """Open the optimizer, unless a step has."""
        self._lifecycle.open()

    def on_joined(self) -> None:
        """List the present variables in the optimizer."""
        self._lifecycle.on_joined()

    def rejoin(self, name: str) -> None:
        """Join the present ranks of an elastic job; these start without the optimizer."""
        super().rejoin(name)
        self._lifecycle.optimizer.stage = Stage.OPEN


class ExchangeLifecycle:
    """Leads the exchanges of an optimizer through the stages from its construction to its first step.

    Args:
        optimizer: a ``PeriodicOptimizer``; it gets as far as ``BUILDING`` by itself.

    Attributes:
        model: returns the model, or None.
        prepare: prepares gradients for the local update; set together with the synchronizer.
        saved: the exchange state in the file of the model.
    """

    prepare: GradientPreparation
    _synchronizer: VariableSynchronizer

    def __init__(self, optimizer: Any, binding: RankBinding, spec: OptimizerSpec) -> None:
        self.optimizer, self.binding, self.spec = optimizer, binding, spec
        self.saved = SavedExchanges()
        self.model: Callable[[], keras.Model | None] = lambda: None
        self._made: list[Any] = []
        self._misfit = ""

    @property
    def synchronizer(self) -> VariableSynchronizer:
        """Counts, asks the schedule and exchanges."""
        if self.optimizer.stage < Stage.CREATED:
            what, then = "is not built yet, so that there is no center", "build(model.trainable_variables) on all ranks"
            if self.binding.loaded:
                what, then = "was loaded", "attach()"
            raise RuntimeError(f"The optimizer {what}: call optimizer.{then}, or train")
        return self._synchronizer

    def attach(self, model: keras.Model | None, process_set: Any, distributed: Any) -> None:
        """Accept objects that no file holds, see ``PeriodicOptimizer.attach``."""
        if self.optimizer.stage >= Stage.CREATED:
            raise RuntimeError("attach() has to come before the first use of the optimizer")
        if model is not None:
            check_policy(self.spec.options["buffers"], model)
            self.model = weakref.ref(model)
        self.binding.attach(process_set, distributed)
        self.create_loaded()

    def on_built(self) -> None:
        """Continue with an optimizer that is built: start it, unless its ranks meet at the first step."""
        self.optimizer.stage = Stage.BUILT
        if not self.binding.waits:
            self.optimizer.start()
        elif not self.binding.loaded:  # A loaded optimizer does not know its model yet.
            self.create()

    def create_loaded(self) -> None:
        """Create the synchronizer of a loaded optimizer, if the optimizer is built."""
        if self.binding.loaded and self.optimizer.built:
            self.create()

    def create(self) -> None:
        """Create the synchronizer and its variables, unless they exist, and restore saved values.

        Raises:
            ValueError: the saved values belong to other variables; also at every later call.
        """
        if self._misfit:
            raise ValueError(self._misfit)
        if self.optimizer.stage >= Stage.CREATED:
            return
        spec, options, binding = self.spec, self.spec.options, self.binding
        trained = self.optimizer._trainable_variables
        replica = self._replica(trained)
        ranks, root = binding.communicator, 0
        sums = as_wire(options["compression"]).forms_sums(ranks, False)
        if spec.asynchronous or options["quorum"] is not None or options["center"] != "replicated" or sums:
            ranks = binding.ranks_of_file()  # This rank's part of the center or sums has to be known.
            root = ranks.rank_of(options["root_rank"])
        self._synchronizer = synchronizer = _OptimizerSynchronizer(
            self,
            self._new_variable,
            replica,
            spec.algorithm,
            spec.schedule,
            ranks,
            root,
            binding.name,
            asynchronous=spec.asynchronous,
            learning_rate=lambda: native(getattr(spec.optimizer, "learning_rate", None)),
            **self._of_replica(replica, spec.center),
            **of_exchange(options),
        )
        self.optimizer.stage = Stage.CREATED
        local = innermost(spec.optimizer)
        self.prepare = GradientPreparation(local, binding.average, synchronizer, self.optimizer._get_variable_index)
        self.saved.formerly = replica.named.formerly
        saved = synchronizer.checkpoint.saved_center = self.saved.center(synchronizer.tensor_groups)
        if saved is not None:
            synchronizer.exchanger.has_loaded(saved)
        self._name_center_optimizer()
        feedback = synchronizer.tensor_groups.parameters.error_feedback
        for name, kept in ((SUMS_OF, feedback.second_hop_residual), (ROWS_OF, feedback.untouched)):
            if kept is not None:
                self._new_variable(name, (2,), tf.int64, np.array(synchronizer.place))
        self._note_later()
        try:
            self.saved.settle(synchronizer)
        except ValueError as error:
            self._misfit = str(error)
            raise

    def _replica(self, trained: Sequence[Any], former: Mapping[int, str] = MappingProxyType({})) -> VariableReplica:
        """Return the replica of trained variables, given names that some have already."""
        options = self.spec.options
        named = named_variables(trained, self.model(), options["buffers"], options["parameters"], former)
        return VariableReplica(named, self._new_variable, forget_variable=self.saved.variables.pop)

    def _of_replica(self, replica: VariableReplica, center: CenterOptimizer | None) -> dict[str, Any]:
        """Return the arguments of the synchronizer that depend on the replica."""
        local, parameters = innermost(self.spec.optimizer), replica.named.parameters
        return {
            "outer": None if center is None else VariableOuterOptimizer(center, parameters, replica.values),
            "rates": KerasLearningRate(local),
            "local_optimizer": KerasOptimizerState(local, replica, nested=local is not self.spec.optimizer),
        }

    def _note_later(self) -> None:
        """List the variables that files of earlier versions lack."""
        varying = {name for name in self.saved.variables if depends_on_wire(name)}
        self.saved.later = varying | set(self._synchronizer.progress.note_variables) | ADDED

    def adopt(self, variables: Sequence[Any] | None) -> None:
        """Go on with other trained variables, see ``PeriodicOptimizer.adopt``."""
        optimizer, local, synchronizer = self.optimizer, innermost(self.spec.optimizer), self.synchronizer
        refused = {
            "for several levels of optimizers": local is not self.spec.optimizer,
            "for an optimizer that consists of several": hasattr(optimizer.plain_optimizer, "optimizers"),
            "where gradients are averaged": self.binding.average is not None,
        }
        asked = next((what for what, here in refused.items() if here), None)
        if asked is not None:
            raise RuntimeError(f"adopt() is not available {asked}: finalize(), then make a new optimizer")
        if variables is None and self.model() is None:
            raise ValueError(
                "adopt() needs the variables, as the optimizer was not made with a model: adopt(trainable_variables)"
            )
        with outside():
            self.open(optimizer._trainable_variables)
            trained = with_rest_of(self.model(), []) if variables is None else list(variables)
            center = None if self.spec.center is None else self.spec.center.successor()
            self._carry_over(synchronizer, lambda: self._successor(trained, center))
            self.spec = replace(self.spec, center=center)
            if center is not None:
                optimizer.follow_center(center)
            build_again(local, trained)
            know(optimizer, trained)
            self.on_joined()
            self._note_later()
            self.saved.formerly = synchronizer.replica.named.formerly

    def _carry_over(self, synchronizer: VariableSynchronizer, successor: Callable[[], Successor[Any]]) -> None:
        """Let the synchronizer adopt; if that fails, list the former variables again."""
        saved, made = self.saved, list(self._made)
        former = saved.variables
        saved.variables = {name: variable for name, variable in former.items() if name in PLACES}
        try:
            synchronizer.adopt(successor)
        except BaseException:
            list_variables(self.optimizer, self._made, made)
            saved.variables, self._made = former, made
            raise

    def _successor(self, trained: Sequence[Any], center: CenterOptimizer | None) -> Successor[Any]:
        """Return the replica of other trained variables, and what depends on it."""
        replica = self._replica(trained, self._synchronizer.replica.named.names())
        return Successor(replica, self._of_replica(replica, center), lambda outer, _: SlotValues(outer.slots))

    def start(self) -> None:
        """Check that all ranks agree, and start from the root's values or from the saved state."""
        binding = self.binding
        if binding.waits:
            binding.connect()
            build_on_all(binding.communicator, binding.name, lambda: None)  # as new optimizers check arguments
        ranks = binding.communicator

        def check() -> None:
            if tf.distribute.has_strategy():
                raise ValueError("Horovod's ranks are processes of their own: train without a tf.distribute strategy")
            self.spec.check(binding, self.optimizer.gradient_group)
            self.create()

        build_on_all(ranks, binding.name, check)
        synchronizer = self.synchronizer
        synchronizer.join(ranks, ranks.rank_of(self.spec.options["root_rank"]), binding.name)
        synchronizer.average_within(binding.gradient_group)
        synchronizer.start()
        self.optimizer.stage = Stage.STARTED

    def open(self, variables: Sequence[Any] = ()) -> bool:
        """Start, and take over states loaded since; collective, at the first step or in ``finalize()``.

        Args:
            variables: the variables of the step; empty in ``finalize()``.

        Returns:
            Whether the gradients of an eager step, computed before this call, belong to replaced values of this rank or
            of a rank that averages gradients with it.

        Raises:
            ValueError: the step being compiled holds values that layers derived from replaced weights; other ranks
                report this at their next exchange.
        """
        if self.optimizer.stage is Stage.OPEN:
            return False
        eager = tf.executing_eagerly()
        with outside():
            if not tf.executing_eagerly():
                raise RuntimeError("This is TensorFlow 2: for graphs of TensorFlow 1 use its contrib_opt")
            before = [native(variable).numpy() for variable in variables] if eager else []
            self.optimizer.build(with_rest_of(self.model(), variables))
            self.optimizer.start()
            synchronizer = self.synchronizer
            derived = synchronizer.replica.derived_from()
            replaced = synchronizer.begin(CallPoint.BEFORE_UPDATE if variables else CallPoint.END)
            changed = any((native(v).numpy() != old).any() for v, old in zip(variables, before, strict=False))
            replaced |= self.binding.any_in_group(changed)
            stale = not eager and derived != synchronizer.replica.derived_from()
            if stale:  # The next handshake reports it to the other ranks.
                synchronizer.handshake.fatal_error = (
                    "Layers of this rank were adapted differently from the root's, whose weights all ranks have taken "
                    "over, and the step that is being compiled has the old values: call optimizer.build("
                    "model.trainable_variables) on all ranks after layers are adapted, and before training"
                )
                raise ValueError(synchronizer.handshake.fatal_error)
            self._forget_sums_of_others()
            self.optimizer.stage = Stage.OPEN
            return replaced and eager

    def _forget_sums_of_others(self) -> None:
        """Reset the residual of sums, and let all rows travel, if a file or a broadcast brought another rank's."""
        feedback = self.synchronizer.tensor_groups.parameters.error_feedback
        for name, forget in ((SUMS_OF, feedback.reset_second_hop), (ROWS_OF, feedback.touch)):
            marked = self.saved.variables.get(name)
            if marked is not None and native(marked).numpy().tolist() != self.synchronizer.place:
                forget()
                marked.assign(self.synchronizer.place)

    def write(self, store: Any) -> None:
        """Save the state of the exchanges with the model, see :meth:`SavedExchanges.write`."""
        stage = self.optimizer.stage
        for name in PLACES if stage is Stage.OPEN else ():
            if (marked := self.saved.variables.get(name)) is not None:
                marked.assign(self.synchronizer.place)  # A broadcast after the first step may have overwritten it.
        synchronizer = self._synchronizer if stage >= Stage.CREATED else None
        self.saved.write(store, synchronizer, stage >= Stage.STARTED)

    def read(self, store: Any, reader: str) -> None:
        """Restore what :meth:`write` saved, now or once the variables exist, see :meth:`SavedExchanges.read`."""
        if self.saved.read(store, reader) and self.optimizer.stage >= Stage.CREATED:
            self.synchronizer.exchanger.discard()  # It would move the loaded center.
            self.saved.settle(self.synchronizer)

    def _new_variable(self, name: str, shape: Sequence[int], dtype: tf.DType, initial_value: Any) -> tf.Variable:
        """Create a variable of the optimizer, which is saved under ``name``."""
        options = {"shape": tuple(shape), "dtype": dtype.name, "name": name}
        variable = self.optimizer.add_variable(initializer=keras.initializers.Constant(initial_value), **options)
        self._made.append(variable)
        self.saved.variables[name] = variable
        return native(variable)

    def on_joined(self) -> None:
        """List the present variables in the optimizer, in the order that a new optimizer would have."""
        self._name_center_optimizer()
        saved = self.saved
        saved.later |= {name for name in saved.variables if depends_on_wire(name)}
        own = {id(variable) for variable in saved.variables.values()}
        order = {id(variable): i for i, variable in enumerate(self.synchronizer.held())}
        left = [variable for variable in self._made if id(variable) in own]
        left.sort(key=lambda variable: order.get(id(native(variable)), len(order)))
        if list(map(id, left)) != list(map(id, self._made)):
            list_variables(self.optimizer, self._made, left)
            self._made = left

    def _name_center_optimizer(self) -> None:
        """Register the variables of the center's optimizer to be saved, each under its name."""
        center, saved = self.spec.center, self.saved.variables
        if center is None or self._synchronizer.exchanger.worker is not None:
            return
        for name in [name for name in saved if name.startswith(_CENTER_OPTIMIZER)]:
            del saved[name]
        saved.update({f"{_CENTER_OPTIMIZER}{i}": variable for i, variable in enumerate(center.variables)})
