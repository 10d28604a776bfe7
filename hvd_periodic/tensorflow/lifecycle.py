"""The exchanges of a Keras optimizer, from its construction to its first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.comm.agreement import build_on_all
from hvd_periodic.options import of_exchange
from hvd_periodic.sync.startup import CallPoint
from hvd_periodic.tensorflow.communicator import TensorFlowCommunicator
from hvd_periodic.tensorflow.graph import VariableSynchronizer
from hvd_periodic.tensorflow.model import native
from hvd_periodic.tensorflow.optimizer_state import KerasOptimizerState
from hvd_periodic.tensorflow.outer import KerasLearningRate, VariableOuterOptimizer
from hvd_periodic.tensorflow.progress import ADDED, NewVariable
from hvd_periodic.tensorflow.rank_binding import RankBinding
from hvd_periodic.tensorflow.replica import NamedVariables, VariableReplica
from hvd_periodic.tensorflow.saved import SUMS_OF, SavedExchanges, depends_on_wire
from hvd_periodic.tensorflow.settings import innermost
from hvd_periodic.tensorflow.spec import OptimizerSpec
from hvd_periodic.wires import as_wire

_CENTER_OPTIMIZER = "center_optimizer."
"""Begins the names under which its variables are saved."""


class ExchangeLifecycle:
    """Makes the synchronizer of an optimizer once its variables are known, and begins together with all ranks.

    Args:
        binding: the ranks of the optimizer.
        spec: what was asked for.
        new_variable: makes a variable of the optimizer.
        list_variables: lets other variables be among those of the optimizer, in place of those that it has made.

    Attributes:
        saved: what the file of the model holds of them.
    """

    def __init__(
        self,
        binding: RankBinding,
        spec: OptimizerSpec,
        new_variable: NewVariable,
        list_variables: Callable[[Sequence[Any], Sequence[Any]], object],
    ) -> None:
        self.binding = binding
        self.spec = spec
        self.saved = SavedExchanges(spec.asynchronous)
        self._make_variable, self._list_variables = new_variable, list_variables
        self._made: list[Any] = []
        self._synchronizer: VariableSynchronizer | None = None

    @property
    def constructed(self) -> bool:
        """Whether there is a synchronizer."""
        return self._synchronizer is not None

    @property
    def started(self) -> bool:
        """Whether the ranks have agreed, and started from the same values."""
        return self._synchronizer is not None and self._synchronizer.started

    @property
    def opened(self) -> bool:
        """Whether the first step has found out who had loaded what."""
        return self._synchronizer is not None and self._synchronizer.opened

    @property
    def synchronizer(self) -> VariableSynchronizer:
        """Counts, asks the schedule and exchanges.

        Raises:
            RuntimeError: the variables are not known yet.
        """
        if self._synchronizer is None:
            what, then = "is not built yet, so that there is no center", "build(model.trainable_variables) on all ranks"
            if self.binding.loaded:
                what, then = "was loaded", "attach()"
            raise RuntimeError(f"The optimizer {what}: call optimizer.{then}, or train")
        return self._synchronizer

    def construct(self, named: NamedVariables, opening: Callable[[], object]) -> None:
        """Make the variables of the exchanges, and give them what was saved.

        Args:
            named: what is exchanged.
            opening: what a rank without any step still has to do with the others before it leaves.
        """
        spec, options, binding = self.spec, self.spec.options, self.binding
        replica = VariableReplica(named, self._new_variable, forget_variable=self._forget_variable)
        ranks, root = binding.communicator, 0
        sums = as_wire(options["compression"]).forms_sums(ranks, False)
        if spec.asynchronous or options["center"] != "replicated" or sums:
            ranks = binding.ranks_of_file()  # What this rank holds of the center or sums has to be known.
            root = ranks.rank_of(options["root_rank"])
        center, values = spec.center, replica.values
        moving = None if center is None else VariableOuterOptimizer(center, named.parameters, values)
        self._synchronizer = synchronizer = VariableSynchronizer(
            self._new_variable,
            replica,
            spec.algorithm,
            spec.schedule,
            ranks,
            root,
            binding.name,
            asynchronous=spec.asynchronous,
            outer=moving,
            rates=KerasLearningRate(innermost(spec.optimizer)),
            local_optimizer=KerasOptimizerState(innermost(spec.optimizer), replica),
            learning_rate=lambda: native(getattr(spec.optimizer, "learning_rate", None)),
            **of_exchange(options),
        )
        synchronizer.opening = opening
        self.saved.variables.formerly = named.formerly
        saved = synchronizer.checkpoint.saved_center = self.saved.center(synchronizer.tensor_groups)
        if saved is not None:
            synchronizer.exchanger.has_loaded(saved)
        self._name_center_optimizer()
        synchronizer.after_join = self._after_join
        if synchronizer.tensor_groups.parameters.error_feedback.second_hop_residual is not None:
            self._new_variable(SUMS_OF, (2,), tf.int64, np.array([ranks.rank, ranks.size]))
        varying = {name for name in self.saved.variables.variables if depends_on_wire(name)}
        self.saved.variables.later = varying | set(synchronizer.progress.note_variables) | ADDED
        self.saved.variables.settle()
        self.saved.load_in_flight(synchronizer)

    def built(self, start: Callable[[], object], construct: Callable[[], object]) -> None:
        """Go on with an optimizer whose variables are there: start, if all ranks are about to."""
        if not self.binding.waits:
            start()
        elif not self.binding.loaded:  # That of a file does not know its model yet.
            construct()

    def start(self, construct: Callable[[], object], gradient_group: TensorFlowCommunicator | None) -> None:
        """Let all ranks agree and start from the root's values, or go on from where they were saved.

        Args:
            construct: makes the synchronizer, if there is none; its errors reach all ranks.
            gradient_group: the ranks whose gradients are averaged, here or in an optimizer inside.

        Raises:
            ValueError: ranks disagree; on all of them.
        """
        binding = self.binding
        if binding.waits:
            binding.connect()
            build_on_all(binding.communicator, binding.name, lambda: None)  # where new ones check arguments
        ranks = binding.communicator

        def check() -> None:
            if tf.distribute.has_strategy():
                raise ValueError("Horovod's ranks are processes of their own: train without a tf.distribute strategy")
            self.spec.check(binding, gradient_group)
            construct()

        build_on_all(ranks, binding.name, check)
        synchronizer = self.synchronizer
        synchronizer.join(ranks, ranks.rank_of(self.spec.options["root_rank"]), binding.name)
        synchronizer.average_within(binding.gradient_group)
        synchronizer.start()
        synchronizer.started = True

    def open(self, variables: Sequence[Any], before: Sequence[np.ndarray] | None) -> bool:
        """Take over what was loaded since the optimizer was built, on the root at least; all ranks together.

        Args:
            variables: of which the first step is; none where ranks leave without any.
            before: their values when its gradients were made; None where the step is being compiled.

        Returns:
            Whether this rank, or one that averages gradients with it, has other values than before.

        Raises:
            ValueError: a step that is being compiled holds what layers derived from other weights; on the others their
                next exchange says so.
        """
        binding, synchronizer = self.binding, self.synchronizer
        derived = synchronizer.replica.derived_from()
        replaced = synchronizer.begin(CallPoint.BEFORE_UPDATE if variables else CallPoint.END)
        changed = any((native(v).numpy() != old).any() for v, old in zip(variables, before or [], strict=False))
        replaced |= binding.any_in_group(changed)
        stale = before is None and derived != synchronizer.replica.derived_from()
        if stale:  # The others hear of it where they meet next.
            synchronizer.handshake.failure = (
                "Layers of this rank were adapted otherwise than those of the root, whose weights all have taken over, "
                "and the step that is being compiled has the old values: call "
                "optimizer.build(model.trainable_variables) on all ranks after layers are adapted, and before training"
            )
            raise ValueError(synchronizer.handshake.failure)
        self._forget_sums_of_others()
        synchronizer.opened = True
        return replaced

    def _forget_sums_of_others(self) -> None:
        """Forget what is left of sums where another rank has left it, and a file or a broadcast has brought it here."""
        marked = self.saved.variables.variables.get(SUMS_OF)
        if marked is None or (native(marked).numpy() == self._place).all():
            return
        self.synchronizer.tensor_groups.parameters.error_feedback.reset_second_hop()
        marked.assign(self._place)

    @property
    def _place(self) -> np.ndarray:
        """Which rank this is, of how many that exchange."""
        communicator = self.synchronizer.membership.communicator
        return np.array([communicator.rank, communicator.size])

    def write(self, store: Any) -> None:
        """Save the state of the exchanges with the model, see :meth:`SavedExchanges.write`."""
        marked = self.saved.variables.variables.get(SUMS_OF)
        if marked is not None and self.opened:
            marked.assign(self._place)  # A broadcast after the first step has brought that of another rank.
        self.saved.write(store, self._synchronizer, self.started)

    def read(self, store: Any, reader: str) -> None:
        """Take over what :meth:`write` wrote, now or when the variables are there, see :meth:`SavedExchanges.read`."""
        self.saved.read(store, reader, self._synchronizer)

    def _new_variable(self, name: str, shape: Sequence[int], dtype: tf.DType, initial_value: Any) -> tf.Variable:
        """Make a variable of the optimizer that is saved under its name."""
        variable = self._make_variable(name, shape, dtype, initial_value)
        self._made.append(variable)
        self.saved.variables.variables[name] = variable
        return native(variable)

    def _forget_variable(self, name: str) -> None:
        """Forget a variable, in whose place there will be another for another number of ranks, or none."""
        del self.saved.variables.variables[name]

    def _after_join(self) -> None:
        """Let the optimizer have the variables that there are now, in the order of one that is new."""
        self._name_center_optimizer()
        named = self.saved.variables
        named.later |= {name for name in named.variables if depends_on_wire(name)}
        own = {id(variable) for variable in named.variables.values()}
        order = {id(variable): i for i, variable in enumerate(self.synchronizer.held())}
        left = [variable for variable in self._made if id(variable) in own]
        left.sort(key=lambda variable: order.get(id(native(variable)), len(order)))
        if list(map(id, left)) != list(map(id, self._made)):
            self._list_variables(self._made, left)
            self._made = left

    def _name_center_optimizer(self) -> None:
        """Let the variables of the center's optimizer be saved under their names."""
        center, saved = self.spec.center, self.saved.variables.variables
        if center is None or self.spec.asynchronous:
            return
        for name in [name for name in saved if name.startswith(_CENTER_OPTIMIZER)]:
            del saved[name]
        saved.update({f"{_CENTER_OPTIMIZER}{i}": variable for i, variable in enumerate(center.variables)})
