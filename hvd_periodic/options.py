"""Options shared by all constructors of all front ends: declared here once, and passed on as one value."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypedDict, cast, get_type_hints

from hvd_periodic.local_state import LocalStateLike
from hvd_periodic.participation.patterns import Policies
from hvd_periodic.wires.compression import Compression

P = ParamSpec("P")

PathLike = str | os.PathLike[str]

WeightLike = float | str | Callable[[], float] | None
"""How much a rank counts in means: a number; a function called at every exchange; its work since the last one, in
``"steps"`` or ``"examples"``; or None: all ranks count equally."""


class ExchangeOptions(TypedDict, total=False):
    """Options that are passed unchanged to the synchronizer of the core; annotated with their defaults.

    Attributes:
        center: where the center variables live: ``"replicated"`` on every rank, ``"root"`` on ``root_rank`` alone, or
            ``"sharded"``, one n-th on every rank. In the last two, ``center()`` and ``state_dict()`` are collective.
        optimizer_state: how an exchange treats the local optimizer's state: with ``"local"`` every worker keeps its
            own; with ``"reset"`` it is reset; with ``"average"`` it becomes the mean over ranks; or a dict from entries
            to multiples of the exchange period at which they are averaged, such as ``{"exp_avg": 3, "exp_avg_sq": 6}``.
            State without the shape of a parameter, such as step counters and factored moments, does not change.
        overlap: number d of local steps during which an exchange may be in flight while training continues: it begins
            at a step s and is applied at min(s + d, next exchange). ``"period"``: just before the next exchange. With a
            replicated center. Without compression, elastic averaging follows exactly the same trajectory as without
            overlap; the other algorithms lose no local progress. Synchronous training only.
        compression: encoding of messages, in Horovod's spelling: ``hvdp.Compression.none``, ``fp16``, ``bf16``,
            ``int8``, ``int4``, ``e3m0``, ``int2``, ``topk(0.01)`` or ``topk(chunk=4096, keep=64)``; also
            ``hvd.Compression.fp16``. The part that is not sent is not lost: it is kept for the next exchange, or stays
            in the replica. Statistics are sent uncompressed. All but fp16 over Horovod need a replicated center. With a
            ``quorum``, not in elastic averaging or with ``max_message_norm``.
        error_decay: β in [0, 1]: the part of what a message did not send that is added to the next one, with a lossy
            ``compression``: m = message + β e, e ← m − sent. With 1, all arrives; with less, the rest is forgotten, and
            what moves slowly beside the rest of its chunk may never travel. SparseLoCo (arXiv 2508.15706) has 0.95.
            Below 1 not for elastic averaging, which keeps what is not sent in the replica. Synchronous training only,
            with or without a ``quorum``.
        fragments: number F of parts of the parameters, of about equal size, that are exchanged one after another within
            every period of τ local steps: the f-th after ⌈f τ/F⌉ steps. The largest amount sent at once falls by a
            factor of F. Statistics and optimizer state travel with the last fragment; ``sync()`` and ``finalize()``
            exchange all fragments. F is at most τ. Synchronous training only.
        nonfinite: treatment of a rank that enters an exchange with NaN or infinity in its parameters, in the
            algorithm's state for them, in averaged statistics, or, on the root, in buffers that all ranks take from it.
            ``"raise"``: an error on all ranks that names rank and tensor. ``"skip"``: that rank is excluded, and starts
            again from the center, with a new state of its local optimizer; the others exchange. ``"ignore"``: no check,
            and NaN and infinity reach all ranks and the center. Infinities in statistics that the center has as well,
            such as in a mask, are valid.
        weight: how much this rank counts in the mean over ranks, such as the number of its examples: a number of at
            least 0; a function that is called once per exchange and returns a number; ``"steps"``, the local updates
            that ran since this rank last took part in an exchange; ``"examples"``, the sum of what ``step(...,
            examples=...)`` was given since then, in any unit, such as tokens (Keras: ``apply_gradients(...,
            examples=...)``; ``fit`` gives the size of the batch); None: all ranks count equally.
            Σ_i w_i x_i / Σ_i w_i replaces the mean, also for statistics and optimizer state. The steps of a rank of
            weight 0 do not count; a rank that is in ``finalize()`` and has taken no step since the last exchange does
            not count either. For averaging and outer optimizers. Synchronous training only.
        audit_every: number of exchanges after which ranks compare, to the bit, the parts of the center that should be
            equal on all of them: each rank sends a digest, and if digests differ, training ends on all ranks with the
            names of ranks and tensor. 0: only at the end. Synchronous training only.
        max_message_norm: R_w > 0, the largest Euclidean norm of what this rank contributes to an exchange: m_i becomes
            m_i · min(1, R_w/‖m_i‖) before it is weighted and a wire encodes it; or ``"median"``: the median of the
            norms of all ranks in this exchange (arXiv 2603.08163). In elastic averaging, m_i = x_i - c, and the
            replica is pulled by what is sent, so that the rest stays in it; elsewhere the rest is lost. In AGN,
            m_i = a_i/τ_i. The norm is over all parameters that are exchanged at once, with ``fragments`` those of
            the fragment. In asynchronous training a number only; there x_i - c is formed from c as read before the
            push. None: no bound.
        max_mean_norm: R > 0, the largest norm of the mean ḡ of these, or with ``op="sum"`` of their sum: it becomes
            ḡ · min(1, R/‖ḡ‖) before the outer step, which bounds the step of the center (EDiT, arXiv 2412.07210).
            Takes memory for one more copy of the parameters. For averaging, DiLoCo, SlowMo, BMUF, AGN. None: no
            bound. Synchronous training only.
        timeout_seconds: longest time that a rank waits for others in one place: then training ends with an error that
            names the missing ranks. None: forever. Of several optimizers of the same ranks the longest counts.
        center_file: a path; the pages of this file hold the asynchronous center. Whatever ends the job, even all ranks
            at once, the file keeps the center of the last transaction, as a safetensors file with the names of the
            tensors. It can be read while training goes on. A file that had this name is renamed to ``PATH.previous`` at
            the first exchange. The file lacks the state of the center's optimizer. None: in memory only.
        staleness_power: power p ≥ 0 of the discount of stale pushes in asynchronous averaging, DiLoCo, SlowMo and BMUF:
            the displacement that a worker pushes counts (1 + max(0, s − (n − 1)))^−p, where s is the number of pushes
            of others since this worker took the center: n − 1 if equal workers push in turn. What is discounted is
            lost. With a ``quorum``, in averaging, DiLoCo, SlowMo, BMUF and AGN with ``op="average"``: a rank that is
            in a round s rounds after it took the center has (1 + s)^−p of its weight in the mean.
        quorum: number q of ranks that a round waits for: it closes when all ranks have come to it, or ``grace_seconds``
            after the q-th came, with all that came by then, and the mean is over these. Who comes later takes part in
            the next round with all it has. The first round and ``finalize()`` wait for all. The center is on
            ``root_rank``, which may be late itself, but which has to run. None, or the number of ranks: every exchange
            waits for all.
        grace_seconds: seconds that a round stays open after the q-th rank came. 0 leaves somebody out whenever ranks
            are apart by milliseconds. None: a tenth of the time from the last close until then. In asynchronous
            averaging, DiLoCo, SlowMo and BMUF: workers that push within so many seconds after the first of a group
            wait until then, or until all workers are in the group, and take the center after its last push. None: 0.
        run_log: a folder; every rank appends one line of JSON per exchange to its own file ``rank-K.jsonl`` in it.
            None: the folder in the environment variable ``HVD_PERIODIC_RUN_LOG``, if it is set. False: no log. Copies
            of the optimizer write none.
    """

    center: Annotated[str, "replicated"]
    optimizer_state: Annotated[LocalStateLike, "local"]
    overlap: Annotated[int | str, 0]
    compression: Annotated[Any, Compression.none]
    error_decay: Annotated[float, 1.0]
    fragments: Annotated[int, 1]
    nonfinite: Annotated[str, "raise"]
    weight: Annotated[WeightLike, None]
    audit_every: Annotated[int, 0]
    max_message_norm: Annotated[float | str | None, None]
    max_mean_norm: Annotated[float | None, None]
    timeout_seconds: Annotated[float | None, None]
    center_file: Annotated[PathLike | None, None]
    staleness_power: Annotated[float, 0.0]
    quorum: Annotated[int | None, None]
    grace_seconds: Annotated[float | None, None]
    run_log: Annotated[PathLike | bool | None, None]


class Options(ExchangeOptions, total=False):
    """Options of every constructor; front ends add to them.

    To add an option, declare it here or in :class:`ExchangeOptions`; every constructor then takes it.

    Attributes:
        parameters: policies for the trainable parameters. ``"average"``: the algorithm exchanges them; ``"broadcast"``:
            at every exchange all ranks take the values of ``root_rank``; ``"local"``: every rank trains its own, which
            are neither exchanged nor started from the root's; their names and shapes may differ between ranks;
            ``"present"``: the algorithm exchanges what the ranks contribute whose local steps since the last exchange
            had a gradient, and divides by their number; ``"rows"``, for embedding tables: as ``"average"``, but only
            the rows travel that some rank has changed since the last exchange (in AGN and elastic averaging, that had
            gradients; in elastic averaging, the local optimizer must leave other rows alone).
            Pass a dict from name patterns to policies, in which the first match counts, such as ``{"experts.*":
            "local"}``; or a function (name, parameter) that returns a policy or None. Default, and for parameters that
            a dict or function leaves open: ``"average"``.
        root_rank: the rank, in the job's numbering, from whose values all ranks start. Default: the first.
        process_set: the ranks that exchange: a Horovod process set, a ``torch.distributed.ProcessGroup``, or an
            ``mpi4py.MPI.Comm``; over Horovod also a function that returns the ranks of this rank's group, such as
            :func:`hvd_periodic.torch.node_ranks` and :func:`hvd_periodic.tensorflow.node_ranks`: it is called again
            when elastic Horovod changes ranks. A ``DeviceMesh`` of one dimension stands for its process group. A
            :class:`~hvd_periodic.Communicator` is used as it is: it must carry the front end's buffers. Default: all
            ranks of the library in ``HVD_PERIODIC_COMM``; else of the first that is ready: Horovod,
            torch.distributed, MPI; else this process alone.
    """

    parameters: Annotated[Policies, None]
    root_rank: Annotated[int | None, None]
    process_set: Annotated[Any, None]


def of_exchange(options: Mapping[str, Any]) -> ExchangeOptions:
    """Return the options, out of a complete set, that the synchronizer of the core takes."""
    known = _defaults(ExchangeOptions)
    return cast(ExchangeOptions, {name: value for name, value in options.items() if name in known})


def takes(declared: type) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Pass all options, with defaults filled in, to a constructor that ends in ``**options: Unpack[declared]``.

    Its signature lists them one by one; the error about any other keyword names that keyword.

    Args:
        declared: a ``TypedDict`` whose keys are annotated with their defaults.

    Example:
        >>> class Setup:
        ...     @takes(ExchangeOptions)
        ...     def __init__(self, size, **options):
        ...         self.options = options
        >>> Setup(3).options
        {'center': 'replicated', 'optimizer_state': 'local', 'overlap': 0, 'compression': Plain(), ...}
        >>> list(inspect.signature(Setup).parameters)
        ['size', 'center', 'optimizer_state', 'overlap', 'compression', 'error_decay', 'fragments', 'nonfinite', ...]
        >>> Setup(3, centre="root")
        Traceback (most recent call last):
        TypeError: Setup() got an unexpected keyword argument 'centre'. It takes size, center, ..., run_log
    """
    hints, defaults = get_type_hints(declared), _defaults(declared)
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter(key, keyword, default=defaults[key], annotation=hints[key]) for key in defaults]

    def decorate(construct: Callable[P, None]) -> Callable[P, None]:
        plain = inspect.signature(construct)
        own = [p for p in plain.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        signature = plain.replace(parameters=[*own, *options])
        known = list(signature.parameters)[1:]

        @wraps(construct)
        def checked(*args: P.args, **kwargs: P.kwargs) -> None:
            unknown = next((name for name in kwargs if name not in known), None)
            if unknown is not None:
                raise TypeError(
                    f"{type(args[0]).__name__}() got an unexpected keyword argument {unknown!r}. "
                    f"It takes {', '.join(known)}"
                )
            complete: Any = defaults | kwargs
            construct(*args, **complete)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


def _defaults(declared: type) -> dict[str, Any]:
    """Return the defaults with which the keys of a ``TypedDict`` are annotated."""
    hints = get_type_hints(declared, include_extras=True)
    for key, hint in hints.items():
        if not hasattr(hint, "__metadata__"):
            raise TypeError(f"`{declared.__name__}.{key}` must be annotated with its default: Annotated[..., default]")
    return {key: hint.__metadata__[0] for key, hint in hints.items()}
