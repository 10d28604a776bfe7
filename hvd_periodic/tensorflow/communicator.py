"""The ranks that exchange TensorFlow tensors and numpy arrays: ranks of Horovod, of torch.distributed, or of MPI."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.comm.mpi import MPICommunicator
from hvd_periodic.comm.rendezvous_settings import rendezvous_asked
from hvd_periodic.comm.selection import FrontEnd
from hvd_periodic.comm.staging import Staged
from hvd_periodic.tensorflow.host import several_threads
from hvd_periodic.tensorflow.host_values import TensorFlowMemory, as_array, as_tensor
from hvd_periodic.tensorflow.hosted import keeping_errors
from hvd_periodic.tensorflow.private import eager

_HEEDED = ("HorovodAllreduce", "HorovodAllgather", "HorovodBroadcast")
"""Names of collectives by which hvd.elastic.run recognizes a failure due to a lost rank."""

_HOSTS_UPDATED = "Hosts were added or removed: all ranks restart, as after a failed HorovodAllreduce"


class TensorFlowCommunicator(HorovodCommunicator):
    """Ranks of a Horovod process set that exchange TensorFlow tensors or numpy arrays; results have the same type.

    Collectives run immediately, also while a graph is being built. Without eager execution, ``allgather_object`` runs
    in a separate session.

    Args:
        process_set: the ranks that exchange. Default: all.
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

    def begin_allgather(self, buffer: Any, name: str, out: Any) -> Callable[[], Any]:
        """Gather; the result is a new tensor."""
        return self._begin(self._hvd.allgather, buffer, name)

    def alltoall(self, buffer: Any, name: str) -> Callable[[], Any]:
        """Exchange parts; the result is a new tensor."""
        return self._begin(self._hvd.alltoall, buffer, name)

    def scatter(self, buffer: Any, counts: np.ndarray, name: str) -> Callable[[], tuple[Any, Any]]:
        """Send every rank its part, eagerly."""
        options = {"name": _label(name, "Alltoall"), "ignore_name_scope": True, "process_set": self.process_set}
        of_arrays = isinstance(buffer, np.ndarray)
        value, splits = as_tensor(buffer) if of_arrays else buffer, as_tensor(counts)

        def run() -> tuple[Any, Any]:
            with tf.device("CPU:0"):
                received, given = self._hvd.alltoall(value, splits=splits, **options)
            return as_array(received) if of_arrays else received, given

        parts = self.tracker.run_blocking(lambda: _THREAD.submit(run).result())
        return lambda: parts

    def carries(self, kind: type) -> bool:
        """Return whether these are tensors of TensorFlow, or arrays."""
        return issubclass(kind, (tf.Tensor, np.ndarray))

    def tile(self, buffer: Any, times: int) -> Any:
        """Return a tensor or an array, repeated."""
        return np.tile(buffer, times) if isinstance(buffer, np.ndarray) else tf.tile(buffer, [times])

    def maximum(self, x: Any, y: Any) -> Any:
        """Return the elementwise maximum."""
        return np.maximum(x, y) if isinstance(x, np.ndarray) else tf.maximum(x, y)

    def gather_integers(self, values: np.ndarray, name: str) -> np.ndarray:
        """Gather immediately, under the same name as in a graph."""
        with tf.init_scope():
            if not tf.executing_eagerly():
                return super().gather_integers(values, name)
            return np.asarray(self.allgather(values, name))

    def broadcast(self, buffer: Any, name: str, root: int) -> Any:
        """Broadcast; Horovod takes the root's global rank."""
        return self._begin(self._hvd.broadcast, buffer, name, root_rank=self.ranks[root])()

    def _begin(self, operation: Callable[..., Any], buffer: Any, name: str, **options: Any) -> Callable[[], Any]:
        """Start one collective; return a function that waits for its result. A tensor's result is available at once."""
        label = _label(name, operation.__name__.capitalize())

        def run(value: Any) -> Any:
            return operation(value, name=label, process_set=self.process_set, ignore_name_scope=True, **options)

        key = (operation, name, *options.values())
        if isinstance(buffer, np.ndarray):
            number, tensor = self.tracker.start_collective(), as_tensor(buffer)
            called = self._as_function(run, tensor, key) if several_threads() else run
            future = _THREAD.submit(lambda: as_array(called(tensor)))

            def finish() -> np.ndarray:
                self.tracker.wait_for(number, future.done)
                return future.result()

            return finish
        result = self.tracker.run_blocking(lambda: run(buffer))
        return lambda: result

    def _as_function(
        self, run: Callable[[Any], Any], buffer: tf.Tensor, key: tuple[Any, ...]
    ) -> Callable[[tf.Tensor], tf.Tensor]:
        """Return one collective as a function that is not inlined, in which it keeps its name.

        Outside functions Horovod drops the name, and while an unnamed collective is in flight, a script could not run
        other collectives. In a graph, Horovod's operations are not marked as having side effects. Grappler therefore
        removes nodes whose result a rank does not use, merges nodes with equal inputs and folds nodes with constant
        inputs, on that rank alone, so that the other ranks wait forever.
        """
        spec = tf.TensorSpec(buffer.shape, buffer.dtype)
        if (*key, spec) not in self._compiled:

            def not_inlined(value: Any) -> Any:
                result = run(value)
                tf.raw_ops.Assert(condition=True, data=[result])  # a side effect, so that the call must run
                return result

            with tf.init_scope():
                called = tf.function(not_inlined, autograph=False, experimental_attributes={"_noinline": True})
                self._compiled[*key, spec] = called.get_concrete_function(spec)
        return self._compiled[*key, spec]

    def gather(self, array: np.ndarray, name: str) -> np.ndarray:
        """Gather an array, eagerly or in a separate session."""

        def gathered() -> Any:
            return self._hvd.allgather(tf.constant(array), name=name, process_set=self.process_set)

        def run() -> np.ndarray:
            with tf.init_scope():
                if tf.executing_eagerly():
                    return np.asarray(gathered())
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                return np.asarray(session.run(gathered()))

        return self.tracker.run_blocking(run)

    def __reduce__(self) -> tuple[Any, ...]:
        process_set = None if self.process_set.process_set_id == 0 else self.process_set
        return TensorFlowCommunicator, (process_set,)


class _Thread:
    """A daemon thread that runs functions one after another."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._starting, self._started = Lock(), False

    def submit(self, run: Callable[[], Any]) -> Future[Any]:
        """Queue a function; return the future of its result or error."""
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
"""Runs collectives on arrays: eager ones are unnamed in Horovod, so that only one may be in flight."""


class TensorFlowOverMPI(Staged, MPICommunicator):
    """The ranks of an mpi4py communicator, which exchange TensorFlow tensors or arrays."""

    memory = TensorFlowMemory()


def _over_torch(process_set: Any) -> Communicator:
    from hvd_periodic.tensorflow.torch_distributed import TensorFlowOverTorch

    return TensorFlowOverTorch(process_set)


FRONT_END = FrontEnd(
    buffer=np.ndarray,
    horovod_modules=("horovod.tensorflow",),
    over_horovod=lambda process_set, _: TensorFlowCommunicator(process_set),
    over_torch=_over_torch,
    over_mpi=TensorFlowOverMPI.over,
    elastic_over_torch=True,
)
communicator_of = FRONT_END.communicator_of


def as_elastic_jobs_heed(run: Callable[[], object]) -> Callable[[], None]:
    """Return a wrapper of Python code in a compiled step of an elastic job, for errors that its ``run`` handles.

    At a rendezvous, hvdp.elastic.run raises the original errors, which it keeps.

    hvd.elastic.run interprets a TensorFlow error that names a collective as a lost rank, and restarts. It ignores other
    ``UnknownError``s, which most Python errors become, so that the job would end as if it were complete. The wrapper
    therefore raises those as ValueErrors.
    """
    if rendezvous_asked():
        return keeping_errors(run)
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

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
    """Return a collective's name by which hvd.elastic.run recognizes its failure."""
    label = f"{name}.Horovod{operation}"
    return label if label.endswith(_HEEDED) else f"{label}.{_HEEDED[0]}"
