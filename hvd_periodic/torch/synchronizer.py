"""The explicit synchronizer of torch models."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, Unpack

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.arguments import as_typed
from hvd_periodic.centers import placement_of
from hvd_periodic.centers.learning_rates import LearningRates
from hvd_periodic.comm.agreement import build_on_all
from hvd_periodic.comm.base import Communicator
from hvd_periodic.comm.job import JobCommunicator
from hvd_periodic.comm.subset import require_possible
from hvd_periodic.options import of_exchange, takes
from hvd_periodic.outer.per_fragment import PerFragmentOptimizer
from hvd_periodic.schedules import Schedule, Seconds, as_schedule
from hvd_periodic.sync.adoption import Successor, refusal, unavailable
from hvd_periodic.sync.combinations import refuse_quorum
from hvd_periodic.sync.finite import SKIP
from hvd_periodic.sync.startup import CallPoint
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer
from hvd_periodic.sync.warmup import schedule_around
from hvd_periodic.torch.communicator import communicator_of
from hvd_periodic.torch.data_parallel import island_of, refuse_averaging, remember_wrappers
from hvd_periodic.torch.gradient_averaging import gradient_group_of, innermost
from hvd_periodic.torch.model import Model, NamedTensors, named_parameters_of
from hvd_periodic.torch.neutral import eagerly, neutral, neutrally
from hvd_periodic.torch.optimizer_state import TorchOptimizerState
from hvd_periodic.torch.options import TorchOptions
from hvd_periodic.torch.outer import CenterOptimizerLike, TorchOuterOptimizer
from hvd_periodic.torch.replica import TorchReplica
from hvd_periodic.torch.resharding import StateDicts, resharded
from hvd_periodic.torch.saved import check_moving, map_tensors, translated, with_sharded_tensors
from hvd_periodic.torch.sharded_parameters import shard_of
from hvd_periodic.torch.state_making import makes_state_only
from hvd_periodic.torch.trained_set import TrainedSet

P = ParamSpec("P")
T = TypeVar("T")


def _evaluating(method: Callable[P, T]) -> Callable[P, T]:
    """Return a method that works on the evaluation point of the local optimizer, if it has one."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        synchronizer: Any = args[0]
        with synchronizer.replica.evaluating():
            return method(*args, **kwargs)

    return neutrally(run)


class Synchronizer(ReplicaSynchronizer[torch.Tensor]):
    """Exchanges the parameters of a torch model with any algorithm and schedule, in any training loop.

    Each optimizer of this package drives a synchronizer; it also works alone::

        synchronizer = Synchronizer(model, EASGD(beta=0.9), period=10)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            synchronizer.prepare_gradients()
            optimizer.step()
            synchronizer.step()                  # once per iteration, whether or not the update ran
        synchronizer.finalize()

    Args:
        model: a module or its ``named_parameters()``, or other (name, parameter) pairs, which carry no buffers. All
            parameters that are trainable at construction take part.
        algorithm: an :class:`~hvd_periodic.Algorithm`, or a function that makes one.
        period: local steps between exchanges, or a schedule.
        optimizer: the local optimizer. If given, only its parameters take part, and it can be copied for the center.
        outer_optimizer: for algorithms that optimize the center: an optimizer of the same parameters to be copied, or
            a function from parameter groups to an optimizer. Default: a copy of ``optimizer``.
        asynchronous: exchange with one center without waiting for other ranks; under MPI.
        options: the options of :class:`~hvd_periodic.options.Options` and
            :class:`~hvd_periodic.torch.options.TorchOptions`; the signature has their defaults.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of range, or ranks that disagree. On every rank: the
            rank whose argument was refused raises this error, the others a RuntimeError that quotes it.
        RuntimeError: neither Horovod nor torch.distributed is initialized; or asynchronous exchange was asked for
            without MPI.
    """

    replica: TorchReplica
    commits_hold_sets = True
    _alone = False
    """Whether construction skipped the handshake with other ranks, which may have started before."""
    gradient_group: JobCommunicator | None = None
    """The ranks whose gradients an ``hvd.DistributedOptimizer`` averages."""
    averaging: JobCommunicator | None = None
    """The gradient group, or the ranks whose gradients a ``DistributedDataParallel`` averages."""

    @takes(TorchOptions)
    @neutrally
    def __init__(
        self,
        model: Model,
        algorithm: Algorithm | Callable[[], Algorithm],
        period: int | Schedule,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        outer_optimizer: CenterOptimizerLike | None = None,
        asynchronous: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        communicator = communicator_of(options["process_set"])
        self._alone = communicator.elastic
        if self._alone:
            name = f"{communicator.handshake_name}.alone"
        else:
            name = communicator.unique_name(options["timeout_seconds"])
        remember_wrappers()

        def build() -> None:
            if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"`optimizer` must be a torch.optim.Optimizer. Received: {type(optimizer).__name__}")
            _check_levels(optimizer, options["overlap"])
            placement_of(options["center"])
            planned = as_schedule(period, as_typed("period"))
            self.gradient_group = gradient_group_of(optimizer)
            named = NamedTensors.of(model, options["buffers"], options["parameters"])
            replica = TorchReplica(named, optimizer, center_device=options["center_device"])
            self.averaging = self.gradient_group or island_of(replica.named.behind(), communicator, asynchronous)
            communicator.check_devices({tensor.device.type for tensor in replica.tensors})
            bounded = options["max_message_norm"] is not None or options["max_mean_norm"] is not None
            _check_replica(replica, communicator, planned, asynchronous, options["nonfinite"], self.averaging, bounded)
            inside = None if optimizer is None else vars(optimizer).get("synchronizer")
            _refuse_quorum(options["quorum"], replica, self.averaging, inside)
            made = algorithm if isinstance(algorithm, Algorithm) else algorithm()
            require_possible(communicator, options["center"], options["nonfinite"], asynchronous, options["overlap"])
            moving = made.outer_optimizer(optimizer, outer_optimizer)
            self._assemble(
                replica,
                moving,
                algorithm=made,
                communicator=communicator,
                root=communicator.rank_of(options["root_rank"]),
                schedule=schedule_around(self.gradient_group, communicator, planned, asynchronous),
                name=name,
                asynchronous=asynchronous,
                **of_exchange(options),
            )

        if self._alone:
            build()
        else:
            build_on_all(communicator, name, build)
        if not self._alone:
            self.average_within(self.averaging)
            self.start()
        _watch(self)

    def _assemble(self, replica: TorchReplica, moving: CenterOptimizerLike | None, **arguments: Any) -> None:
        """Initialize the base class for a torch replica, of which ``moving`` moves the center."""
        optimizer = replica.optimizer
        super().__init__(replica, **_of_replica(replica, moving), **arguments)
        self.learning_rate = None if optimizer is None else lambda: optimizer.param_groups[0].get("lr")

    def adoption_refusal(self) -> str | None:
        """Return the kind of training that cannot adopt, the same on all ranks; or None."""
        replica = self.replica
        inside = vars(replica.optimizer).get("synchronizer") if replica.optimizer is not None else None
        refused = {
            "for parameters that are sharded by fully_shard()": bool(replica.sharded),
            "with optimizers that train and evaluate at different points": replica.has_modes,
            "for several levels of optimizers": inside is not None,
            "where gradients are averaged": self.averaging is not None,
            "between islands": self.membership.communicator.between_islands,
            "in elastic jobs before training begins": self._alone,
            "in elastic jobs whose `outer_optimizer` is an optimizer (pass a function that makes one)": (
                self.membership.communicator.elastic and self.followed is not None
            ),
            "in elastic jobs for optimizers that were not made from a module": (
                self.membership.communicator.elastic and replica.named.behind() is None
            ),
        }
        return next((what for what, here in refused.items() if here), None) or refusal(self)

    @neutrally
    def adopt_model(self, model: Model | None = None) -> None:
        """Go on with the parameters of the model that are trainable now; see :meth:`.PeriodicOptimizer.adopt`.

        Args:
            model: the model, as at construction; needed if that was not a module.

        Raises:
            ValueError, TypeError, RuntimeError: as :meth:`.PeriodicOptimizer.adopt`.
        """
        replica, outer, refused = self.replica, self._moving(), self.adoption_refusal()
        if refused is not None:
            raise RuntimeError(unavailable(refused))
        if model is None and replica.named.behind() is None:
            raise ValueError("adopt() needs the model, as the optimizer was not made from a module: adopt(model)")

        def successor() -> Successor[torch.Tensor]:
            given: Any = replica.named.behind() if model is None else model
            new = replica.renewed(given)
            self.membership.communicator.check_devices({tensor.device.type for tensor in new.tensors})
            return Successor(new, _of_replica(new, outer), lambda outer, _: StateDicts(outer.grouping()))

        self.adopt(successor)
        replica.forget_gradients_of_frozen()

    def begin(self, call_point: CallPoint = CallPoint.BEFORE_UPDATE) -> bool:
        """Begin training unless it has begun, as in the base class."""
        return not self.begun and self._begin(call_point)

    @neutrally
    def _begin(self, call_point: CallPoint) -> bool:
        refuse_averaging(self.replica.tensors, self.membership.communicator.global_ranks)
        with self.replica.evaluating():
            if self._alone:
                communicator = self.membership.communicator
                self.join(communicator, communicator.unique_name())
            return not self.begun and super().begin(call_point)

    def join(self, communicator: Communicator, name: str) -> None:
        """Do the handshake that construction skips under elastic Horovod, where some ranks may have started before."""
        self._alone = False
        self.membership.join(communicator, self.membership.requested_root, name)
        self.average_within(self.averaging)
        self.start()

    @neutrally
    def rejoin(self, name: str) -> None:
        """Rebuild with the same arguments for the ranks that Horovod has now, without communication.

        Center and counters are as after construction, or from a state that was loaded before training began.

        Args:
            name: prefix of the names of collectives, the same on all ranks.

        Raises:
            TypeError: as for copies: exchange is asynchronous, or around an ``hvd.DistributedOptimizer``.
            ValueError: hyper-parameters that are invalid for this number of ranks.
        """
        loaded = self.state_dict() if self.checkpoint.has_loaded() else None
        self.handshake.rejoin()
        _, moving, arguments = self._constructed()
        communicator = self.membership.communicator.rebuild(communicator_of(None))
        changed = {"communicator": communicator, "name": name, "journal": self.journal}
        self._assemble(self.replica, moving, **arguments | changed)
        self._alone = False
        if loaded is not None:
            self.load_state_dict({**loaded, "center_optimizer": resharded(loaded["center_optimizer"], self)})

    @neutrally
    def take_set(self, trained: TrainedSet) -> bool:
        """Train another set of parameters, with a center and counters as after construction; local.

        Returns:
            Whether the set has changed.

        Raises:
            ValueError: the model lacks some of these parameters.
        """
        replica = self.replica
        given = replica.named.behind()
        self.train_locally(trained)
        if given is None or trained == replica.trained_set:
            return False
        _, moving, arguments = self._constructed()
        self._assemble(replica.renewed(given), moving, **arguments, journal=self.journal)
        return True

    @property
    def trained_locally(self) -> TrainedSet | None:
        """What the local optimizer trains now, also before ``adopt()``; None if it has parameters without a name."""
        try:
            return TrainedSet.of(self._named_now(), innermost(self.replica.optimizer))
        except KeyError:
            return None

    def train_locally(self, trained: TrainedSet) -> None:
        """Let the local optimizer train another set of parameters; local.

        Raises:
            ValueError: the model lacks some of these parameters.
        """
        trained.put_into(innermost(self.replica.optimizer), self._named_now())

    def _named_now(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the parameters of the model, by name."""
        given = self.replica.named.behind()
        return self.replica.named.parameters if given is None else named_parameters_of(given)

    @neutrally
    def broadcast_from(self, source: int) -> None:
        """Give all ranks the state of one rank; :meth:`broadcast` gives them the root's."""
        self.startup.broadcast_from(source)

    prepare_gradients = eagerly(ReplicaSynchronizer.prepare_gradients)
    step = eagerly(ReplicaSynchronizer.step)
    # Wrapped: methods that work on tensors or communicate; of step() and prepare_gradients(), only the parts that an
    # exchange adds. With a schedule-free optimizer, ranks exchange evaluation points, and the center is one as well.
    start = _evaluating(ReplicaSynchronizer.start)
    sync = _evaluating(ReplicaSynchronizer.sync)
    land = _evaluating(ReplicaSynchronizer.land)
    finalize = neutrally(ReplicaSynchronizer.finalize)
    leave = _evaluating(ReplicaSynchronizer.leave)
    audit = neutrally(ReplicaSynchronizer.audit)
    broadcast = _evaluating(ReplicaSynchronizer.broadcast)
    restart_center = _evaluating(ReplicaSynchronizer.restart_center)
    distance = _evaluating(ReplicaSynchronizer.distance)
    center_tensors = neutrally(ReplicaSynchronizer.center_tensors)
    load_state_dict = neutrally(ReplicaSynchronizer.load_state_dict)

    @neutrally
    def state_dict(self) -> dict[str, Any]:
        """Return the state as in the base class; the vectors of sharded parameters are sharded as well."""
        with self.replica.evaluating():
            saved = super().state_dict()
        return with_sharded_tensors(saved, self.replica.sharded, self.replica.names, self.exchanged.outer)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Check a state as in the base class, also the state of an outer optimizer of sharded parameters."""
        super().check_state_dict(translated(map_tensors(shard_of, state), self.tensor_groups, self.replica.named))
        if self.replica.sharded:
            check_moving(state, self.exchanged.outer)

    def load_checked(self, state: dict[str, Any]) -> None:
        """Restore a state that ``check_state_dict()`` has accepted."""
        super().load_checked(translated(map_tensors(shard_of, state), self.tensor_groups, self.replica.named))
        self.replica.uncounted = None

    @contextmanager
    def center(self) -> Iterator[None]:
        """Hold the center in the model inside a ``with`` block, which runs in the user's own mode."""
        with neutral(), ExitStack() as entering:
            entering.enter_context(self.replica.evaluating())
            entering.enter_context(super().center())
            block = entering.pop_all()
        try:
            yield
        finally:
            with neutral():
                block.close()
                self.replica.follow_weights()

    def holds_some_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer changes parameters that take part."""
        ours = set(map(id, self.replica.tensors))
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def __reduce__(self) -> tuple[Any, ...]:
        of_rank, moving, arguments = self._constructed()
        return _restore, (of_rank, moving, arguments | {"run_log": False}), self.state_dict()

    def _constructed(self) -> tuple[Any, ...]:
        """Return the arguments of ``_restore``."""
        if self.exchanger.context.quorum is not None:
            raise TypeError("A synchronizer with a quorum cannot be copied or pickled: save its state_dict()")
        if self.exchanger.worker is not None:
            raise TypeError("An asynchronous synchronizer cannot be copied or pickled: save its state_dict()")
        if self.gradient_group is not None:
            raise TypeError("An hvd.DistributedOptimizer cannot be copied or pickled: save its state_dict()")
        if self.averaging is not None:
            raise TypeError("A DistributedDataParallel's optimizer cannot be copied or pickled: save its state_dict()")
        replica = self.replica
        of_rank = (replica.named, replica.optimizer, replica.bucket_bytes, replica.center_device)
        return of_rank, self._moving(), self.arguments()

    def _moving(self) -> Any:
        """Return the source of the center optimizer, if there is one."""
        outer = self.exchanged.outer
        first = outer.parts[0] if isinstance(outer, PerFragmentOptimizer) else outer
        return first.source if isinstance(first, TorchOuterOptimizer) else None

    @property
    def followed(self) -> torch.optim.Optimizer | None:
        """The optimizer whose hyper-parameters the center optimizer follows, if it is not the local one."""
        moving = self._moving()
        return moving if isinstance(moving, torch.optim.Optimizer) and moving is not self.replica.optimizer else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state)
        # A copy made before training waits for weights, like the original.
        self.checkpoint.loaded = self.local_steps > 0


def _of_replica(replica: TorchReplica, moving: CenterOptimizerLike | None) -> dict[str, Any]:
    """Return the arguments of the base class that depend on the replica."""
    optimizer = replica.optimizer
    return {
        "outer": None if moving is None else TorchOuterOptimizer(moving, optimizer, replica.tensors),
        "rates": LearningRates(replica.learning_rates),
        "local_optimizer": None if optimizer is None else TorchOptimizerState(optimizer, replica),
    }


def _check_replica(
    replica: TorchReplica,
    communicator: Communicator,
    schedule: Schedule,
    asynchronous: bool,
    nonfinite: str,
    averaging: JobCommunicator | None,
    bounded: bool,
) -> None:
    """Refuse options that do not go with the device of the center or with sharded parameters."""
    if asynchronous and replica.center_device is not None:
        raise ValueError(
            "`center_device` is for synchronous exchange: an asynchronous center is always in host memory. "
            f"Received: center_device={str(replica.center_device)!r}, asynchronous=True"
        )
    refused = {
        "asynchronous=True": asynchronous,
        "nonfinite='skip'": nonfinite == SKIP,
        "a period in Seconds": isinstance(schedule, Seconds),
        "gradients that something else averages": averaging is not None,
        "elastic Horovod": communicator.elastic and not communicator.between_islands,
        "max_message_norm and max_mean_norm, as the norm of a replica is not that of its shards": bounded,
    }
    asked = [what for what, here in refused.items() if here]
    if replica.sharded and asked:
        raise ValueError(
            f"The parameters are sharded (DTensors, such as {next(iter(replica.sharded))!r}), so that all ranks must "
            f"exchange at the same steps and in the same way. This rules out {asked[0]}"
        )


def _refuse_quorum(quorum: int | None, replica: TorchReplica, averaging: JobCommunicator | None, inside: Any) -> None:
    """Refuse a quorum where ranks do more together than exchange, here or in an optimizer inside."""
    if isinstance(inside, Synchronizer):
        within = inside.exchanger.context.quorum
        quorum = within.size if quorum is None and within is not None else quorum
    refused = {
        "for parameters that are sharded by fully_shard()": bool(replica.sharded),
        "where gradients are averaged": averaging is not None,
        "for several levels of optimizers": isinstance(inside, Synchronizer),
        "with `center_device`: the center is in host memory": replica.center_device is not None,
    }
    for where, here in refused.items():
        if here:
            refuse_quorum(quorum, where)


def _check_levels(inner: Any, overlap: int | str) -> None:
    """Refuse exchanges in flight while another level exchanges: both would remove the same difference."""
    while inner is not None:
        level = vars(inner).get("synchronizer")
        if isinstance(level, Synchronizer) and not overlap == level.exchanger.context.overlap == 0:
            raise ValueError(
                "`overlap` needs a single level: an exchange of one would be in flight while the other moves the "
                f"replica. Received: overlap={overlap!r} around an optimizer with "
                f"overlap={level.exchanger.context.overlap!r}"
            )
        inner = vars(inner).get("inner")


_made: list[weakref.ref[Synchronizer]] = []
"""Synchronizers whose training begins with the next step of any optimizer of their parameters."""


_lock = threading.Lock()
"""Ranks may be threads."""


def _watch(synchronizer: Synchronizer) -> None:
    """Begin training when any optimizer of the synchronizer's parameters is about to step."""
    _watch_optimizers()
    with _lock:
        _made[:] = [made for made in _made if made() is not None] + [weakref.ref(synchronizer)]


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_begin_waiting)


def _begin_waiting(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Begin training of parameters that an optimizer is about to change; this package's optimizers do it themselves."""
    found = [made() for made in list(_made)]
    waiting_now = [synchronizer for synchronizer in found if synchronizer is not None and not synchronizer.begun]
    if waiting_now and not hasattr(optimizer, "synchronizer"):
        _begin_before(optimizer, waiting_now)


@eagerly
def _begin_before(optimizer: torch.optim.Optimizer, waiting_now: list[Synchronizer]) -> None:
    """Begin training of parameters that an optimizer is about to change, in the same order on all ranks."""
    for waiting in [] if makes_state_only() else sorted(waiting_now, key=_order):
        if waiting.holds_some_of(optimizer) and waiting.begin():
            waiting.replica.discard_gradients()


def _order(synchronizer: Synchronizer) -> tuple[str, int]:
    """Return a key that sorts the synchronizers of a process in the same order on all ranks."""
    return synchronizer.membership.communicator.handshake_name, synchronizer.membership.number


@neutrally
def _restore(of_rank: tuple[Any, ...], moving: CenterOptimizerLike | None, arguments: dict[str, Any]) -> Synchronizer:
    """Construct without communicating: one rank may unpickle alone."""
    restored = Synchronizer.__new__(Synchronizer)
    restored._assemble(TorchReplica(*of_rank), moving, **arguments)
    _watch(restored)
    return restored
