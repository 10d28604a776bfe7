"""Options that all constructors of all front ends share: declared here once, and handed on as one value."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypedDict, cast, get_type_hints

from hvd_periodic.local_state import LocalStateLike
from hvd_periodic.wires.given import Compression

P = ParamSpec("P")

PathLike = str | os.PathLike[str]

WeightLike = float | Callable[[], float] | None
"""How much a rank counts in means: a number, what a function returns at every exchange, or None: all count alike."""


class ExchangeOptions(TypedDict, total=False):
    """Options that go to the synchronizer of the core as they are; annotated with their defaults.

    Attributes:
        center: where the center variables live: ``"replicated"`` on every rank, ``"root"`` on ``root_rank`` alone, or
            ``"sharded"``, one n-th on every rank. In the last two, ``center()`` and ``state_dict()`` are collective.
        optimizer_state: what becomes of the local optimizer's state at an exchange: ``"local"``, every worker keeps its
            own; ``"reset"``, it begins anew; ``"average"``, it becomes the mean over ranks; or a dict of multiples of
            the exchange period by entry, such as ``{"exp_avg": 3, "exp_avg_sq": 6}``, at which these are averaged.
            What is not in the shape of a parameter, such as step counters and factored moments, is left alone.
        overlap: local steps d during which an exchange may travel while training goes on: it begins at a step s and is
            taken at min(s + d, next exchange). ``"period"``: just before the next one. For PyTorch and numpy, with a
            replicated center. Without compression elastic averaging goes exactly where it goes without;
            the others lose no local progress.
        compression: how messages travel, in Horovod's spelling: ``hvdp.Compression.none``, ``fp16``, ``bf16``, ``int8``
            or ``topk(0.01)``; also ``hvd.Compression.fp16``. What is not sent is not lost: it is kept for the next
            exchange, or stays in the replica. Statistics travel as they are. All but fp16 over Horovod need a
            replicated center.
        fragments: parts F of the parameters, of about equal size, that are exchanged one after another within every
            period of τ local steps: the f-th after ⌈f τ/F⌉ of them. The most that travels at once falls by F.
            Statistics and optimizer state go with the last one; ``sync()`` and ``finalize()`` exchange all. F is at
            most τ. Synchronously.
        nonfinite: what becomes of a rank that comes to an exchange with NaN or infinity in its parameters, what the
            algorithm keeps of them, its averaged statistics, or on the root in buffers that all take from it.
            ``"raise"``: an error on all ranks that names rank and tensor. ``"skip"``: that rank is left out, and starts
            again from the center, with a new state of its local optimizer; the others exchange. ``"ignore"``: nothing
            is looked at, and all ranks and the center take it. Infinities of statistics that the center has as well,
            such as those of a mask, are right.
        weight: how much this rank counts in the mean over ranks, such as the number of its examples: a number of at
            least 0; or a function that is called once at every exchange and returns one; None: all ranks count alike.
            Σ_i w_i x_i / Σ_i w_i takes the place of the mean, also of statistics and of optimizer state; the steps of a
            rank of weight 0 count nowhere, and so does a rank that is in ``finalize()`` and has taken no step since the
            last exchange. For averaging and outer optimizers. Synchronously.
        audit_every: exchanges after which ranks compare what they hold of the center alike, to the bit: a digest of
            each travels, and where they differ, training ends on all ranks with the names of ranks and tensor. 0:
            never, but at the end. Synchronously.
        timeout_seconds: for which a rank waits for others in one place, at most: then training ends with an error that
            names those that have not come. None: for ever. Of several optimizers of the same ranks the longest counts.
        center_file: a path, in whose pages an asynchronous center lies: whatever ends the job, also all ranks at once,
            leaves the center of the last transaction there, as a safetensors file with the names of the tensors. It can
            be read while training goes on. A file that had this name takes the name ``PATH.previous`` at the first
            exchange. The state of the center's optimizer is not in it. None: in memory alone.
        run_log: a folder, in which every rank appends what its exchanges were to a file ``rank-K.jsonl``: a line of
            JSON for each. None: that of the environment variable ``HVD_PERIODIC_RUN_LOG``, if there is one. False:
            none. Copies of the optimizer write none.
    """

    center: Annotated[str, "replicated"]
    optimizer_state: Annotated[LocalStateLike, "local"]
    overlap: Annotated[int | str, 0]
    compression: Annotated[Any, Compression.none]
    fragments: Annotated[int, 1]
    nonfinite: Annotated[str, "raise"]
    weight: Annotated[WeightLike, None]
    audit_every: Annotated[int, 0]
    timeout_seconds: Annotated[float | None, None]
    center_file: Annotated[PathLike | None, None]
    run_log: Annotated[PathLike | bool | None, None]


class Options(ExchangeOptions, total=False):
    """Options of every constructor; front ends add to them.

    A new one is declared here or in :class:`ExchangeOptions`, and every constructor takes it.

    Attributes:
        root_rank: the rank, as the job numbers them, whose values all start from. Default: the first.
        process_set: the Horovod process set that exchanges, default all ranks; any
            :class:`~hvd_periodic.Communicator`; in PyTorch and Keras also a function that returns the ranks of this
            one's group, such as :func:`hvd_periodic.torch.node_ranks` and :func:`hvd_periodic.tensorflow.node_ranks`:
            it is asked anew where elastic Horovod changes ranks. In PyTorch also a
            ``torch.distributed.ProcessGroup``, or a ``DeviceMesh`` of one dimension.
    """

    root_rank: Annotated[int | None, None]
    process_set: Annotated[Any, None]


def of_exchange(options: Options) -> ExchangeOptions:
    """Return those of complete options that the synchronizer of the core takes."""
    return cast(ExchangeOptions, {name: value for name, value in options.items() if name in _defaults(ExchangeOptions)})


def takes(declared: type) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let a constructor that ends in ``**options: Unpack[declared]`` receive all of them, with defaults filled in.

    Its signature lists them one by one, and another keyword is refused by its name.

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
        ['size', 'center', 'optimizer_state', 'overlap', 'compression', 'fragments', 'nonfinite', 'weight', ...]
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
    """Return the defaults that the keys of a ``TypedDict`` are annotated with."""
    hints = get_type_hints(declared, include_extras=True)
    for key, hint in hints.items():
        if not hasattr(hint, "__metadata__"):
            raise TypeError(f"`{declared.__name__}.{key}` must be annotated with its default: Annotated[..., default]")
    return {key: hint.__metadata__[0] for key, hint in hints.items()}
