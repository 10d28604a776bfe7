"""Custom getters: they create, beside every trainable variable, what the optimizer needs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import tensorflow as tf

from hvd_periodic.tensorflow.contrib_opt.branches import is_resource
from hvd_periodic.tensorflow.contrib_opt.devices import ignore_jobs, place_locally
from hvd_periodic.tensorflow.store import accumulation_dtype

GLOBAL_VARIABLE_NAME = "global_center_variable"
LOCAL_VARIABLE_NAME = "local_center_variable"
GRAD_VARIABLE_NAME = "grad_variable"

_COLLECTIONS = tf.compat.v1.GraphKeys
_OF_OPTIMIZERS = "hvd_periodic_of_optimizers"
_REPLICAS = "hvd_periodic_replicas"


class CustomGetter:
    """Creates trainable variables as local replicas ``w``, and their center variables ``global_center_variable/w``.

    Pass it as ``custom_getter`` to the ``tf.compat.v1.variable_scope`` of the model, and to the optimizer.

    Args:
        worker_device: accepted and ignored; every rank trains in its own process.
        collection: of the second variables.

    Raises:
        TypeError: ``worker_device`` is not a string.
    """

    companion: ClassVar[str | None] = None
    """Name of the second variable that the algorithm keeps per trainable variable, in LOCAL_VARIABLES."""

    def __init__(self, worker_device: str, collection: str = _COLLECTIONS.LOCAL_VARIABLES) -> None:
        if not isinstance(worker_device, str):
            raise TypeError(f"`worker_device` must be a string. Received: {worker_device!r}")
        ignore_jobs(worker_device)
        self._paused = False
        self.collection = collection
        self.centers: dict[Any, tf.Variable] = {}
        self.companions: dict[Any, tf.Variable] = {}
        self.vectors: dict[tuple[Any, str], tf.Variable] = {}
        self.statistics: list[Any] = []

    def __call__(
        self, getter: Callable[..., Any], name: str, trainable: bool, collections: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the local replica, or what else was asked for.

        Raises:
            RuntimeError: eager execution.
        """
        if tf.executing_eagerly():
            raise RuntimeError(
                "contrib_opt works in TensorFlow 1 graphs: call tf.compat.v1.disable_v2_behavior() at the start of the "
                "script. For eager execution there is hvd_periodic.tensorflow"
            )
        place_locally(tf.compat.v1.get_default_graph())
        if self._paused or not trainable:
            variable = getter(name, *args, trainable=trainable, collections=collections, **kwargs)
            if not self._paused and (collections is None or _COLLECTIONS.GLOBAL_VARIABLES in collections):
                known = {statistic.ref() for statistic in self.statistics}
                self.statistics += [v for v in parts(variable) if _can_be_averaged(v) and v.ref() not in known]
            return variable
        kept = [key for key in collections or [] if key != _COLLECTIONS.GLOBAL_VARIABLES]
        local = getter(name, *args, trainable=True, collections=[*kept, _COLLECTIONS.LOCAL_VARIABLES], **kwargs)
        for part in parts(local):
            self.accompany(part)
        return local

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave alone what optimizers create inside."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def adopt(self, variables: Iterable[Any]) -> None:
        """Take variables that no getter created, and stay in GLOBAL_VARIABLES, as what accompanies them then should.

        Statistics are the other global variables of this moment, unless they belong to an optimizer.
        """
        known = {variable.ref() for variable in (*self.statistics, *tf.compat.v1.trainable_variables())}
        self.statistics += [v for v in self.found() if v.ref() not in known and _can_be_averaged(v)]
        for variable in variables:
            self.accompany(variable)

    def found(self) -> list[Any]:
        """Return the global variables that belong to no optimizer."""
        graph = tf.compat.v1.get_default_graph()
        of_optimizers = {variable.ref() for variable in graph.get_collection(_OF_OPTIMIZERS)}
        return [v for v in graph.get_collection(_COLLECTIONS.GLOBAL_VARIABLES) if v.ref() not in of_optimizers]

    def is_anothers(self, variable: Any) -> bool:
        """Return whether a variable is the replica of another optimizer, as far as is known now."""
        replicas = variable.graph.get_collection(_REPLICAS)
        return variable.ref() not in self.centers and any(variable is replica for replica in replicas)

    def made(self) -> list[tf.Variable]:
        """Return what accompanies local replicas."""
        return [*self.centers.values(), *self.companions.values(), *self.vectors.values()]

    def vector(self, local: Any, key: str) -> tf.Variable:
        """Return what an algorithm keeps with the center of a local replica, beside the center itself."""
        if key == "center":
            return self.centers[local.ref()]
        if (local.ref(), key) not in self.vectors:
            self.vectors[local.ref(), key] = self._create(
                local, f"{GLOBAL_VARIABLE_NAME}/{{}}/{key}", tf.zeros_like, _COLLECTIONS.GLOBAL_VARIABLES
            )
        return self.vectors[local.ref(), key]

    def accompany(self, local: Any) -> None:
        """Create what the optimizer needs of a local replica, if it is not there yet."""
        if local.ref() in self.centers:
            return
        tf.compat.v1.add_to_collection(_REPLICAS, local)
        name = f"{GLOBAL_VARIABLE_NAME}/{{}}"
        self.centers[local.ref()] = self._create(local, name, tf.identity, _COLLECTIONS.GLOBAL_VARIABLES)
        if self.companion is not None:
            first = tf.zeros_like if self.companion == GRAD_VARIABLE_NAME else tf.identity
            self.companions[local.ref()] = self._create(local, f"{self.companion}/{{}}", first, self.collection)

    def _create(self, local: Any, name: str, first: Callable[[tf.Tensor], tf.Tensor], collection: str) -> tf.Variable:
        """Create a variable like a local replica, whose initial value ``first`` is given; ``name`` has a place for its.

        It is of the same kind, resource or reference: where the replica is, scripts may get their values by name.
        """
        dtype = accumulation_dtype(local.dtype.base_dtype)
        with tf.device(None), tf.compat.v1.name_scope(None):
            variable = tf.compat.v1.Variable(
                lambda: first(tf.cast(local.initial_value, dtype)),
                trainable=False,
                collections=[collection],
                name=name.format(local.op.name),
                dtype=dtype,
                use_resource=is_resource(local),
            )
        belongs_to_optimizer(variable)
        if local._save_slice_info is not None:
            whole = local._save_slice_info
            variable._set_save_slice_info(
                tf.Variable.SaveSliceInfo(
                    name.format(whole.full_name), whole.full_shape, whole.var_offset, whole.var_shape
                )
            )
        return variable


class ElasticAverageCustomGetter(CustomGetter):
    """Creates ``w``, its center ``global_center_variable/w`` and, as it was last read, ``local_center_variable/w``.

    Args:
        worker_device: accepted and ignored.
    """

    companion = LOCAL_VARIABLE_NAME


class ModelAverageCustomGetter(CustomGetter):
    """Creates ``w`` and its center ``global_center_variable/w``.

    Args:
        worker_device: accepted and ignored.
    """


class PeriodicCustomGetter(CustomGetter):
    """Creates ``w`` and its center ``global_center_variable/w``, for any algorithm whose workers keep no vectors.

    Args:
        worker_device: accepted and ignored.
    """


class AGNCustomGetter(CustomGetter):
    """Creates ``w``, its center ``global_center_variable/w`` and the accumulator of its gradients ``grad_variable/w``.

    Args:
        worker_device: accepted and ignored.
    """

    companion = GRAD_VARIABLE_NAME


def parts(variable: Any) -> list[Any]:
    """Return the parts of a partitioned variable, or the variable alone."""
    return list(variable) if hasattr(variable, "_get_variable_list") else [variable]


def belongs_to_optimizer(*variables: Any) -> None:
    """Remember that variables are an optimizer's, and no statistics of a model."""
    for variable in variables:
        tf.compat.v1.add_to_collection(_OF_OPTIMIZERS, variable)


def can_be_sent(variable: Any) -> bool:
    """Return whether a variable holds numbers, and equally many on all ranks."""
    dtype = variable.dtype.base_dtype
    numbers = dtype.is_floating or dtype.is_integer or dtype.is_bool
    return bool(numbers and variable.shape.is_fully_defined())


def _can_be_averaged(variable: Any) -> bool:
    """Return whether a variable holds real numbers, as moving averages do, and always equally many."""
    return bool(variable.dtype.base_dtype.is_floating and variable.shape.is_fully_defined())
