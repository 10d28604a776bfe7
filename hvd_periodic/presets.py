"""Published combinations of algorithm, period and options, as keywords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_periodic.algorithms.diloco import DiLoCo
from hvd_periodic.schedules.base import Clock, Schedule
from hvd_periodic.wires.chunked_topk import ChunkedTopK


def sparse_loco(period: int | Schedule | Callable[[Clock], int] = 30) -> dict[str, Any]:
    """Return the keywords with which ``PeriodicOptimizer`` trains by SparseLoCo.

    Of every 4096 elements of a message the 64 largest travel, with 2 bits for each value; what is not sent decays, and
    stands in for the momentum of DiLoCo.

        m_i = (x_i − c) + 0.95 e_i
        e_i ← m_i − sent_i
        c   ← c + 1/n Σ_i sent_i
        x_i ← c

    The local optimizer is AdamW in the paper. Replace single keywords with ``|``, as in
    ``sparse_loco() | {"algorithm": DiLoCo(0.65, 0.0)}``.

    Args:
        period: local steps between exchanges, or a schedule.

    Example:
        >>> for name, value in sparse_loco().items():
        ...     print(name, "=", value)
        algorithm = DiLoCo(outer_learning_rate=1.0, outer_momentum=0.0, nesterov=True)
        period = 30
        compression = ChunkedTopK(chunk=4096, keep=64)
        error_decay = 0.95

    References:
        Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo. arXiv 2508.15706 (2025).
        Covenant-72B. arXiv 2603.08163 (2026), equations 1 and 2, section 4.1.
    """
    return {
        "algorithm": DiLoCo(outer_learning_rate=1.0, outer_momentum=0.0),
        "period": period,
        "compression": ChunkedTopK(),
        "error_decay": 0.95,
    }
