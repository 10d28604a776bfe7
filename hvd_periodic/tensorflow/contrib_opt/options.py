"""Options of the optimizers for TensorFlow 1 graphs, in addition to the arguments of ``tf.contrib.opt``."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from hvd_periodic.options import PathLike, WeightLike
from hvd_periodic.participation.patterns import Policies
from hvd_periodic.wires.compression import Compression


class SessionOptions(TypedDict, total=False):
    """Options of the optimizers for sessions; they mean the same as in :class:`~hvd_periodic.options.ExchangeOptions`.

    Attributes:
        parameters: policies for the trained variables, by patterns of their names (``variable.op.name``), or a function
            (name, variable). ``"average"``, the default: the algorithm exchanges them; ``"broadcast"``: at every
            exchange all ranks take the values of rank 0; ``"local"``: every rank trains its own, which has no center,
            and which no initialization sets; ``hvd.broadcast_global_variables(0)`` of a script does; ``"present"``: the
            algorithm exchanges what the ranks contribute for which the pairs of :meth:`apply_gradients` hold a gradient
            that is not None, and divides by their number; all ranks pass a pair; ``"rows"``, for embedding tables: as
            ``"average"``, but only the rows travel that some rank has changed since the last exchange (in AGN and
            elastic averaging, that had gradients; the latter needs ``rho=0.0`` and a local optimizer that leaves other
            rows alone: ``GradientDescentOptimizer``, ``AdagradOptimizer``).
        buffers: policies for non-trainable variables, by patterns of their names, or one for all. ``"average"``, the
            default: every exchange sets those of the getter that are real, such as the moving averages of batch
            normalization, to their mean over ranks; ``"local"``: exchanges do not change them, and they may differ.
        process_set: the Horovod process set that exchanges. Default: all ranks.
        center: where the centers live: ``"replicated"``, on every rank, or ``"root"``, on rank 0 only, with the state
            that moves them. The center variables of other ranks then keep the values with which the session started:
            evaluate and save on rank 0.
        compression: encoding of messages: ``hvdp.Compression.none``, ``fp16``, ``bf16``, ``int8``, ``int4``, ``e3m0``,
            ``int2``, ``topk(0.01)`` or ``topk(chunk=4096, keep=64)``.
        error_decay: part of what a message did not send that is added to the next one, with a lossy ``compression``:
            from 0 to 1; 1 in elastic averaging.
        overlap: number of local steps during which an exchange may be in flight while training continues, or
            ``"period"``: until the next exchange. A checkpoint does not hold an exchange in flight: all ranks run
            ``get_land_op()`` before they save. Needs ``center="replicated"``.
        fragments: number of parts of the parameters that are exchanged one after another within every period.
        weight: weight of this rank in the mean over ranks: a number, or a function that Python calls once per
            exchange; for algorithms that take a mean. None: all ranks have the same weight.
        audit_every: number of exchanges after which ranks compare their centers bit by bit. 0: never.
        timeout_seconds: longest time that a rank waits for others in Python, for example at an exchange; after it,
            training ends with an error that names the missing ranks. None: forever.
        center_file: in asynchronous exchange, the path of a safetensors file that holds the center, however the job
            ends. None: in memory only.
    """

    parameters: Annotated[Policies, None]
    buffers: Annotated[Policies, "average"]
    process_set: Annotated[Any, None]
    center: Annotated[str, "replicated"]
    compression: Annotated[Any, Compression.none]
    error_decay: Annotated[float, 1.0]
    overlap: Annotated[int | str, 0]
    fragments: Annotated[int, 1]
    weight: Annotated[WeightLike, None]
    audit_every: Annotated[int, 0]
    timeout_seconds: Annotated[float | None, None]
    center_file: Annotated[PathLike | None, None]
