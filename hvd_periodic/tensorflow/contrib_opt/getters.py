"""Custom getters: they create the centers and companions of trainable variables."""

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
_DECIDED = "hvd_periodic_decided"


class CustomGetter:
    """Creates trainable variables as local replicas ``w``, and their center variables ``global_center_variable/w``.

    Pass it as ``custom_getter`` to the ``tf.compat.v1.variable_scope`` of the model, and to the optimizer.

    Args:
        worker_device: accepted and ignored; every rank trains in its own process.
        collection: collection of the companions.

    Raises:
        TypeError: ``worker_device`` is not a string.
    """

    companion: ClassVar[str | None] = None
    """Prefix of the second variable that the algorithm keeps per trainable variable, in LOCAL_VARIABLES."""

    def __init__(self, worker_device: str, collection: str = _COLLECTIONS.LOCAL_VARIABLES) -> None:
        if not isinstance(worker_device, str):
            raise TypeError(f"`worker_device` must be a string. Received: {worker_device!r}")
        ignore_jobs(worker_device)
        self._paused = False
        self.collection = collection
        self.centers: dict[Any, tf.Variable] = {}
        self.companions: dict[Any, tf.Variable] = {}
        self.vectors: dict[tuple[Any, str], tf.Variable] = {}
        self.own: set[Any] = set()
        self.statistics: list[Any] = []

    def __call__(
        self, getter: Callable[..., Any], name: str, trainable: bool, collections: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the local replica, or another requested variable.

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
        """Create no centers for variables that optimizers create inside the block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def adopt(self, variables: Iterable[Any]) -> None:
        """Create centers and companions of variables that no getter created; all of them are in GLOBAL_VARIABLES.

        The statistics are the other global variables that exist now, except the variables of optimizers.
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
        """Return whether a variable is this rank's own, or known to be the replica of another optimizer."""
        if variable.ref() in self.own:
            return True
        replicas = variable.graph.get_collection(_REPLICAS)
        return variable.ref() not in self.centers and any(variable is replica for replica in replicas)

    def made(self) -> list[tf.Variable]:
        """Return the centers, companions and vectors of local replicas."""
        return [*self.centers.values(), *self.companions.values(), *self.vectors.values()]

    def vector(self, local: Any, key: str) -> tf.Variable:
        """Return the center of a local replica, or another vector of the algorithm's center state."""
        if key == "center":
            return self.centers[local.ref()]
        if (local.ref(), key) not in self.vectors:
            self.vectors[local.ref(), key] = self._create(
                local, f"{GLOBAL_VARIABLE_NAME}/{{}}/{key}", tf.zeros_like, _COLLECTIONS.GLOBAL_VARIABLES
            )
        return self.vectors[local.ref(), key]

    def keep_out(self, own: Iterable[Any], following: Iterable[Any]) -> None:
        """Forget the centers of variables that are not exchanged, and companions where the algorithm does not act.

        They leave the collections, from which savers take what they save. A rank's own variable, which the center would
        have stood for there, joins the global ones.

        Args:
            own: variables that are this rank's own.
            following: variables that take the root's values.
        """
        own = list(own)
        self.own |= {variable.ref() for variable in own}
        for variable in own:
            if variable.ref() in self.centers:
                _leave_collections(self.centers.pop(variable.ref()))
                _leave_collections(variable, [_COLLECTIONS.LOCAL_VARIABLES])
                tf.compat.v1.add_to_collections([_COLLECTIONS.GLOBAL_VARIABLES], variable)
        for variable in (*own, *following):
            if variable.ref() in self.companions:
                _leave_collections(self.companions.pop(variable.ref()))

    def accompany(self, local: Any) -> None:
        """Create the center and companion of a local replica, unless they exist or it has none."""
        if local.ref() in self.centers or local.ref() in self.own:
            return
        tf.compat.v1.add_to_collection(_REPLICAS, local)
        name = f"{GLOBAL_VARIABLE_NAME}/{{}}"
        self.centers[local.ref()] = self._create(local, name, tf.identity, _COLLECTIONS.GLOBAL_VARIABLES)
        if self.companion is not None:
            self._accompany(local, self.companion)

    def keep_read(self, local: Any) -> tf.Variable:
        """Return the companion of a local replica that holds the center as last read; create it if there is none."""
        if local.ref() not in self.companions:
            self._accompany(local, LOCAL_VARIABLE_NAME)
        return self.companions[local.ref()]

    def _accompany(self, local: Any, prefix: str) -> None:
        name = f"{prefix}/{{}}"
        self.companions[local.ref()] = self._create(local, name, self.first_companion, self.collection)

    def first_companion(self, center: tf.Tensor) -> tf.Tensor:
        """Return the initial value of a companion."""
        return tf.zeros_like(center) if self.companion == GRAD_VARIABLE_NAME else tf.identity(center)

    def _create(self, local: Any, name: str, first: Callable[[tf.Tensor], tf.Tensor], collection: str) -> tf.Variable:
        """Create a variable like a local replica; ``first`` computes its initial value from the replica's.

        ``name`` has a placeholder for the replica's name. The variable is a resource or a reference like the replica:
        scripts may read reference variables by name.
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
    """Creates ``w``, its center ``global_center_variable/w``, and ``local_center_variable/w``, the center as last read.

    Args:
        worker_device: accepted and ignored.
    """

    companion = LOCAL_VARIABLE_NAME


class ModelAverageCustomGetter(CustomGetter):
    """Creates ``w`` and its center ``global_center_variable/w``.

    An asynchronous optimizer also creates ``local_center_variable/w``, the center as last read.

    Args:
        worker_device: accepted and ignored.
    """


class PeriodicCustomGetter(CustomGetter):
    """Creates ``w`` and its center ``global_center_variable/w``, for any algorithm whose workers keep no vectors.

    Args:
        worker_device: accepted and ignored.
    """


class AGNCustomGetter(CustomGetter):
    """Creates ``w``, its center ``global_center_variable/w`` and its accumulated gradient ``grad_variable/w``.

    Args:
        worker_device: accepted and ignored.
    """

    companion = GRAD_VARIABLE_NAME


def parts(variable: Any) -> list[Any]:
    """Return the parts of a partitioned variable, or the variable alone."""
    return list(variable) if hasattr(variable, "_get_variable_list") else [variable]


def belongs_to_optimizer(*variables: Any) -> None:
    """Mark variables as an optimizer's, so that they are not statistics of a model."""
    for variable in variables:
        tf.compat.v1.add_to_collection(_OF_OPTIMIZERS, variable)


def decide(*variables: Any) -> None:
    """Mark variables that an optimizer exchanges, or that are each rank's own by choice."""
    for variable in variables:
        tf.compat.v1.add_to_collection(_DECIDED, variable)


def is_decided(variable: Any) -> bool:
    """Return whether an optimizer of the graph exchanges a variable, or it is each rank's own by choice."""
    return any(variable is decided for decided in variable.graph.get_collection(_DECIDED))


def can_be_sent(variable: Any) -> bool:
    """Return whether a variable holds numbers, the same count on all ranks."""
    dtype = variable.dtype.base_dtype
    numbers = dtype.is_floating or dtype.is_integer or dtype.is_bool
    return bool(numbers and variable.shape.is_fully_defined())


def _can_be_averaged(variable: Any) -> bool:
    """Return whether a variable holds real numbers, as moving averages do, and has a fixed shape."""
    return bool(variable.dtype.base_dtype.is_floating and variable.shape.is_fully_defined())


def _leave_collections(variable: Any, keys: Iterable[str] | None = None) -> None:
    """Take a variable out of collections of its graph; of all by default."""
    for key in variable.graph.get_all_collection_keys() if keys is None else keys:
        found = variable.graph.get_collection_ref(key)
        found[:] = [each for each in found if each is not variable]
