"""Horovod's collectives on TensorFlow tensors, in a graph or not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from inspect import isfunction
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.comm.local import only_rank
from hvd_periodic.comm.subset import Subset
from hvd_periodic.tensorflow.host import several_threads
from hvd_periodic.tensorflow.host_values import as_array, as_tensor
from hvd_periodic.tensorflow.private import eager

_HEEDED = ("HorovodAllreduce", "HorovodAllgather", "HorovodBroadcast")
"""Collectives by whose names hvd.elastic.run recognizes that one has failed, because a rank has gone."""

_HOSTS_UPDATED = "Hosts were added or removed: all ranks begin anew, as where a HorovodAllreduce has failed"


class TensorFlowCommunicator(HorovodCommunicator):
    """The ranks of a Horovod process set, exchanging TensorFlow tensors or numpy arrays; results are of the same kind.

    ``allreduce`` and ``broadcast`` of tensors are operations of the graph that is being built, if one is.
    ``allgather_object`` is done at once, also while a graph is built, and without eager execution in a session of its
    own.

    Args:
        process_set: the ranks that exchange. Default: all.

    Raises:
        RuntimeError, ValueError: as :class:`HorovodCommunicator`.
    """

    def __init__(self, process_set: Any = None) -> None:
        super().__init__("horovod.tensorflow", process_set, tf.convert_to_tensor)
        self._compiled: dict[tuple[Any, ...], Callable[[Any], Any]] = {}

    def allreduce(self, buffer: Any, name: str, op: str = "sum") -> Callable[[], Any]:
        """Reduce; the result is a new tensor."""
        operation = {"sum": self._hvd.Sum, "max": self._hvd.Max}[op]
        return self._begin(self._hvd.allreduce, buffer, name, op=operation)

    def reducescatter(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Reduce and scatter; the result is a new tensor."""
        return self._begin(self._hvd.reducescatter, buffer, name, op=self._hvd.Sum)

    def allgather(self, buffer: Any, name: str, out: Any = None) -> Any:
        """Gather; the result is a new tensor."""
        return self._run(self._hvd.allgather, buffer, name)

    def begin_allgather(self, buffer: Any, name: str, out: Any) -> Callable[[], Any]:
        """Gather; the result is a new tensor."""
        return self._begin(self._hvd.allgather, buffer, name)

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Exchange parts; the result is a new tensor."""
        return self._begin(self._hvd.alltoall, buffer, name)

    def scatter(self, buffer: Any, counts: np.ndarray, name: str) -> Callable[[], tuple[Any, Any]]:
        """Give every rank its part, eagerly."""
        options = {"name": _label(name, "Alltoall"), "ignore_name_scope": True, "process_set": self.process_set}
        of_arrays = isinstance(buffer, np.ndarray)
        value, splits = as_tensor(buffer) if of_arrays else buffer, as_tensor(counts)

        def run() -> tuple[Any, Any]:
            with tf.device("CPU:0"):
                received, given = self._hvd.alltoall(value, splits=splits, **options)
            return as_array(received) if of_arrays else received, given

        parts = self.tracker.run_blocking(lambda: _THREAD.submit(run).result())
        return lambda: parts

    def tile(self, buffer: Any, times: int) -> Any:
        """Return a tensor or an array several times."""
        return np.tile(buffer, times) if isinstance(buffer, np.ndarray) else tf.tile(buffer, [times])

    def maximum(self, x: Any, y: Any) -> Any:
        """Return the larger of both, of every element."""
        return np.maximum(x, y) if isinstance(x, np.ndarray) else tf.maximum(x, y)

    def gather_integers(self, values: np.ndarray, name: str) -> np.ndarray:
        """Gather at once, under the name that the same has in a graph."""
        with tf.init_scope():
            if not tf.executing_eagerly():
                return super().gather_integers(values, name)
            return np.asarray(self.allgather(values, name))

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Broadcast; Horovod names the root by its global rank."""
        return self._run(self._hvd.broadcast, buffer, name, root_rank=self.ranks[root])

    def _run(self, operation: Callable[..., Any], buffer: Any, name: str, **options: Any) -> Any:
        """Return the result of one collective."""
        return self._begin(operation, buffer, name, **options)()

    def _begin(self, operation: Callable[..., Any], buffer: Any, name: str, **options: Any) -> Callable[[], Any]:
        """Start one collective; return a function that waits for its result. That of a tensor is there at once."""
        label = _label(name, operation.__name__.capitalize())

        def run(value: Any) -> Any:
            return operation(value, name=label, process_set=self.process_set, ignore_name_scope=True, **options)

        key = (operation, name, *options.values())
        if isinstance(buffer, np.ndarray):
            number, tensor = self.tracker.start_collective(), as_tensor(buffer)
            called = self._called_apart(run, tensor, key) if several_threads() else run
            future = _THREAD.submit(lambda: as_array(called(tensor)))

            def finish() -> np.ndarray:
                self.tracker.wait_for(number, future.done)
                return future.result()

            return finish
        if tf.executing_eagerly():
            result = self.tracker.run_blocking(lambda: run(buffer))
        else:
            result = self._apart(run, buffer, key)
        return lambda: result

    def _apart(self, run: Callable[[Any], Any], buffer: tf.Tensor, key: tuple[Any, ...]) -> tf.Tensor:
        """Return the result of one collective in a graph, called as a function of its own.

        Horovod's operations claim to be free of side effects. As nodes of a graph, Grappler removes those whose result
        a rank does not use, merges those of equal inputs and computes those of constants once, on that rank alone: the
        others wait for ever. A function that is not inlined keeps them apart, and keeps their names.
        """
        # Constants would be moved into the function, and the collective be computed when the graph is optimized.
        buffer = tf.raw_ops.PlaceholderWithDefault(input=buffer, shape=buffer.shape)
        return self._called_apart(run, buffer, key)(buffer)

    def _called_apart(
        self, run: Callable[[Any], Any], buffer: tf.Tensor, key: tuple[Any, ...]
    ) -> Callable[[tf.Tensor], tf.Tensor]:
        """Return one collective as a function, which keeps its name; outside of functions Horovod gives it none.

        A script could not run any of its own while one without a name is in flight.
        """
        spec = tf.TensorSpec(buffer.shape, buffer.dtype)
        if (*key, spec) not in self._compiled:

            def called_apart(value: Any) -> Any:
                result = run(value)
                tf.raw_ops.Assert(condition=True, data=[result])  # has side effects, so that the call has to run
                return result

            with tf.init_scope():
                called = tf.function(called_apart, autograph=False, experimental_attributes={"_noinline": True})
                self._compiled[*key, spec] = called.get_concrete_function(spec)
        return self._compiled[*key, spec]

    def gather(self, array: np.ndarray, name: str) -> np.ndarray:
        """Gather an array, eagerly or in a session of its own."""
        return self.tracker.run_blocking(lambda: self._gathered(array, name))

    def _gathered(self, array: np.ndarray, name: str) -> np.ndarray:
        with tf.init_scope():
            if tf.executing_eagerly():
                return np.asarray(self._hvd.allgather(tf.constant(array), name=name, process_set=self.process_set))
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            gathered = self._hvd.allgather(tf.constant(array), name=name, process_set=self.process_set)
            return np.asarray(session.run(gathered))

    def __reduce__(self) -> tuple[Any, ...]:
        process_set = None if self.process_set.process_set_id == 0 else self.process_set
        return TensorFlowCommunicator, (process_set,)


class _Thread:
    """A thread that runs functions one after another; it does not keep the process from ending."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._starting, self._started = Lock(), False

    def submit(self, run: Callable[[], Any]) -> Future[Any]:
        """Run a function after those before; return where its result or error will be."""
        with self._starting:
            if not self._started:
                Thread(target=_run_all, args=(self._queue,), name="hvd_periodic collectives", daemon=True).start()
                self._started = True
        future: Future[Any] = Future()
        self._queue.put((future, run))
        return future


def _run_all(queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
    while True:
        future, run = queue.get()
        try:
            with eager():
                future.set_result(run())
        except BaseException as error:
            future.set_exception(error)
        del future, run


_THREAD = _Thread()
"""Runs collectives on arrays: Horovod gives those outside of graphs no names, so that no two may be under way."""


def communicator_of(process_set: Any) -> Communicator:
    """Return the communicator over a set of ranks, or the communicator that was given in its place.

    Args:
        process_set: a process set of Horovod, or a function that returns the ranks of this one's group. None: all
            ranks; where Horovod is not initialized, and no launcher has started other processes, this one alone.

    Raises:
        RuntimeError, ValueError: as :class:`TensorFlowCommunicator` and :class:`~hvd_periodic.comm.subset.Subset`.
    """
    if isinstance(process_set, Communicator):
        return process_set
    if isfunction(process_set):
        return Subset(ranks_of(None), process_set)
    return ranks_of(process_set)


def ranks_of(process_set: Any) -> Communicator:
    """Return the communicator over a process set; of None, over all ranks, as :func:`communicator_of`."""
    alone = None if process_set is not None or hvd.is_initialized() else only_rank()
    return TensorFlowCommunicator(process_set) if alone is None else alone


def as_elastic_jobs_heed(run: Callable[[], object]) -> Callable[[], None]:
    """Return what Python runs for a compiled step of an elastic job, with the errors that hvd.elastic.run heeds.

    It takes errors of TensorFlow that name a collective for a rank that was lost, and begins anew. Of others that are
    ``UnknownError``, which most errors of Python become, it takes no notice, and the job would end as if it were done:
    they become ValueErrors.
    """

    def call() -> None:
        try:
            run()
        except tf.errors.OpError:
            raise
        except HostsUpdatedInterrupt as error:
            raise RuntimeError(_HOSTS_UPDATED) from error
        except HorovodInternalError as error:
            raise RuntimeError(f"HorovodAllreduce: {error}") from error
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    return call


def _label(name: str, operation: str) -> str:
    """Return the name of a collective, by which hvd.elastic.run recognizes that it has failed."""
    label = f"{name}.Horovod{operation}"
    return label if label.endswith(_HEEDED) else f"{label}.{_HEEDED[0]}"
