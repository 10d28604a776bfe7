"""Variants of the core's center reader, checkpoint and gradients for numbers in variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import compress
from typing import Any, cast

import numpy as np
import tensorflow as tf

from hvd_periodic.sync.center_reader import CenterReader
from hvd_periodic.sync.checkpoint import Checkpoint
from hvd_periodic.sync.exchanger import Exchanger
from hvd_periodic.sync.gradients import Gradients
from hvd_periodic.sync.startup import Startup
from hvd_periodic.tensorflow.host import in_session
from hvd_periodic.tensorflow.progress import VariableProgress
from hvd_periodic.tensorflow.replica import VariableReplica
from hvd_periodic.tensorflow.space import changed_if


class VariableCenterReader(CenterReader[Any]):
    """Reads the center; compiled steps notice when the model holds it, and when other variables are trained.

    Attributes:
        share_problem: returns a message if this rank's shard of the center is unusable, else None; None without shards.
    """

    share_problem: Callable[[], str | None] | None = None

    def __init__(self, exchanger: Exchanger[Any], checkpoint: Checkpoint[Any], startup: Startup[Any]) -> None:
        super().__init__(exchanger, checkpoint, startup)
        self._refusal: tf.Variable | None = None
        """Why a compiled step must not run; empty while it may."""
        if not in_session():
            with tf.init_scope():
                self._refusal = tf.Variable("", trainable=False)

    @contextmanager
    def center(self, begin: Callable[[], object]) -> Iterator[None]:
        """Hold the center in the variables inside the block."""
        with super().center(begin):
            self._refuse("step() inside the center() block: the model holds the center there. Leave the block first")
            try:
                yield
            finally:
                self._refuse("")

    def retire(self) -> None:
        """Make compiled steps fail from now on, since adopt() has replaced the variables that they change."""
        self._refuse(
            "This step was compiled before adopt(), for other variables: call model.compile() again, or make the "
            "tf.function again"
        )

    def misfit(self) -> str | None:
        """Return why this rank cannot read the center, or None."""
        return super().misfit() or (None if self.share_problem is None else self.share_problem())

    def checks(self) -> list[tf.Operation]:
        """Return assertions that make a compiled step fail inside the ``center()`` block, and after ``adopt()``."""
        if self._refusal is None or tf.executing_eagerly():
            return []
        refusal = tf.convert_to_tensor(self._refusal)
        return [tf.raw_ops.Assert(condition=tf.equal(refusal, ""), data=[refusal])]

    def _refuse(self, why: str) -> None:
        if self._refusal is not None:
            self._refusal.assign(why)


class VariableCheckpoint(Checkpoint[Any]):
    """A checkpoint that TensorFlow may also have restored into the variables.

    Attributes:
        saved_center: the asynchronous center from a file, in the format of :meth:`save`; None once training starts.
    """

    saved_center: dict[str, Any] | None = None

    def has_loaded(self) -> bool:
        """Return whether a state was loaded in any way."""
        return self.loaded or self._exchanger.context.progress.local_steps > 0 or self.saved_center is not None

    def adopt(self) -> None:
        """Start training from the asynchronous center of a checkpoint."""
        self.state = self.state or self.saved_center

    def save_before_training(self, begin: Callable[[], object]) -> dict[str, Any]:
        """Return the loaded state, including that of an asynchronous center."""
        saved, replica = self.saved_center, self._exchanger.context.exchanged.replica
        if saved is None:
            return super().save_before_training(begin)
        vectors = {
            group.name: saved["vectors"][group.name] | {key: replica.save(store) for key, store in group.worker.items()}
            for group in self._exchanger.tensor_groups
        }
        return self.assembled(vectors, saved["center_optimizer"]) | {"pushes": saved["pushes"]}

    def check(self, state: dict[str, Any], begun: bool) -> None:
        """Check a state as in the core, even if other statistics were averaged when it was saved."""
        super().check(self._translated(state), begun)

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state as in the core, even if other statistics were averaged when it was saved."""
        super().load(self._translated(state))

    def _translated(self, state: Any) -> Any:
        """Return a state, converted to the current tensor groups as far as possible.

        Statistics that are no longer exchanged are dropped; newly exchanged ones start from their current values.
        """
        if not isinstance(state, dict) or not isinstance(state.get("vectors"), Mapping):
            return state
        named = cast(VariableReplica, self._exchanger.context.exchanged.replica).named
        vectors = dict(state["vectors"])
        known = {name for role in (named.averaged, named.counted, named.followed, named.constants) for name, _ in role}
        for group in self._exchanger.tensor_groups.statistics:
            specs, tensors = group.values.layout.specs, group.values.tensors()
            now = {spec.name: np.asarray(tensor) for spec, tensor in zip(specs, tensors, strict=True)}
            then = dict(vectors.get(group.name, {}).get("center", {}))
            if group.name == "buffers" and then and len(then) == len(named.formerly):
                then = dict(zip(now, compress(then.values(), named.formerly), strict=True))
            kept = {name: value for name, value in then.items() if name in now or name not in known}
            vectors[group.name] = {"center": now | kept}
        return state | {"vectors": vectors}

    def forget(self) -> None:
        """Forget the loaded state, from which training has started."""
        super().forget()
        self.saved_center = None


class GraphGradients(Gradients[Any]):
    """Shows gradients to algorithms; in a graph, a condition decides whether they are still averaged."""

    def show(self) -> None:
        """Run the local rule unless the synchronous warmup is active."""
        setting = self.exchanger.context
        until, replica = setting.warmup.until, cast(VariableReplica, setting.exchanged.replica)
        if tf.executing_eagerly() or until is None:
            super().show()
            return
        gradients = replica.gradients

        def show(_: list[Any]) -> list[Any]:
            replica.gradients = list(gradients)
            self.run()
            return [gradient for gradient in replica.gradients if gradient is not None]

        begun = cast(VariableProgress, setting.progress).steps_to(until) <= 0
        replica.gradients = changed_if(begun, gradients, show)
