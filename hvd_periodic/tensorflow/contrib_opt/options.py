"""What constructors of optimizers for graphs of TensorFlow 1 take besides the arguments of ``tf.contrib.opt``."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from hvd_periodic.options import PathLike, WeightLike
from hvd_periodic.wires.compression import Compression


class SessionOptions(TypedDict, total=False):
    """Options of the optimizers for sessions; those of :class:`~hvd_periodic.options.ExchangeOptions` mean the same.

    Attributes:
        buffers: ``"average"``: variables of the getter that are not trainable, such as moving averages of batch
            normalization, become their mean over ranks at every exchange; ``"local"``: they are left alone.
        process_set: the Horovod process set that exchanges. Default: all ranks.
        center: where the centers live: ``"replicated"`` on every rank, or ``"root"``, on rank 0 alone, with the state
            of what moves them. The center variables of other ranks then keep the values that the session started with:
            evaluate and save on rank 0.
        compression: encoding of messages: ``hvdp.Compression.none``, ``fp16``, ``bf16``, ``int8`` or ``topk(0.01)``.
        overlap: number of local steps during which an exchange may be in flight while training continues, or
            ``"period"``: until the next exchange. A checkpoint does not hold what is in flight: all ranks run
            ``get_land_op()`` before. Without ``center="root"``.
        fragments: number of parts of the parameters that are exchanged one after another within every period.
        weight: how much this rank counts in the mean over ranks: a number, or a function that Python calls once per
            exchange; for algorithms that take a mean. None: all ranks count equally.
        audit_every: number of exchanges after which ranks compare their centers to the bit. 0: never.
        timeout_seconds: longest time that a rank waits for others in Python, as at exchanges: then training ends with
            an error that names the missing ranks. None: forever.
        center_file: of asynchronous exchange: a path, in whose pages the center lies, so that whatever ends the job
            leaves it there, as a safetensors file. None: in memory only.
    """

    buffers: Annotated[str, "average"]
    process_set: Annotated[Any, None]
    center: Annotated[str, "replicated"]
    compression: Annotated[Any, Compression.none]
    overlap: Annotated[int | str, 0]
    fragments: Annotated[int, 1]
    weight: Annotated[WeightLike, None]
    audit_every: Annotated[int, 0]
    timeout_seconds: Annotated[float | None, None]
    center_file: Annotated[PathLike | None, None]
