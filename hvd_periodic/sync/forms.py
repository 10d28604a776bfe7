"""The parts of a synchronizer of which a front end may have a form of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hvd_periodic.algorithms.base import Algorithm
from hvd_periodic.arguments import require_int
from hvd_periodic.options import PathLike, WeightLike
from hvd_periodic.schedules.base import Schedule
from hvd_periodic.sync.asynchronous import Asynchronous
from hvd_periodic.sync.center_reader import CenterReader
from hvd_periodic.sync.checkpoint import Checkpoint
from hvd_periodic.sync.exchanger import Exchanger
from hvd_periodic.sync.gradients import Gradients
from hvd_periodic.sync.handshake import Weight
from hvd_periodic.sync.overlapped import Overlapped, as_overlap
from hvd_periodic.sync.progress import ProgressTracker
from hvd_periodic.sync.synchronous import Synchronous
from hvd_periodic.vectors.fragments import Fragment, cut_into_fragments
from hvd_periodic.vectors.store import Store
from hvd_periodic.wires import Wire, as_wire

Exchangers = tuple[type[Exchanger[Any]], type[Exchanger[Any]], type[Exchanger[Any]]]


class Forms(NamedTuple):
    """What makes the parts; by default those of the core, which know no framework.

    Attributes:
        progress: keeps counters.
        exchangers: run exchanges: of ranks that wait for each other, of ranks that do not, and in flight.
        gradients: shows gradients to algorithms.
        checkpoint: saves and loads.
        view: reads the center.
        cuts: an outer optimizer can have parts of tensors.
    """

    progress: Callable[[Schedule], ProgressTracker] = ProgressTracker
    exchangers: Exchangers = (Synchronous, Asynchronous, Overlapped)
    gradients: Callable[[Exchanger[Any]], Gradients[Any]] = Gradients
    checkpoint: Callable[[Exchanger[Any]], Checkpoint[Any]] = Checkpoint
    view: Callable[..., CenterReader[Any]] = CenterReader
    cuts: bool = True

    def exchanger(self, asynchronous: bool, overlap: int | str) -> type[Exchanger[Any]]:
        """Return what runs exchanges.

        Raises:
            TypeError, ValueError: no such overlap; or it makes no sense here.
        """
        if as_overlap(overlap) == 0:
            return self.exchangers[asynchronous]
        if asynchronous:
            _refuse("overlap", overlap, "no rank waits for another")
        return self.exchangers[2]

    def fragments(self, asynchronous: bool, fragments: int, parameters: Store[Any], outer: bool) -> list[Fragment]:
        """Return the parts in which the parameters are exchanged, after which their buckets are cut.

        Raises:
            TypeError, ValueError: not an int of at least 1; or more make no sense here.
        """
        require_int(fragments, "`fragments`", minimum=1)
        if fragments > 1 and asynchronous:
            _refuse("fragments", fragments, "no rank waits for another")
        parameters.layout, cut = cut_into_fragments(parameters.layout, fragments, whole=outer and not self.cuts)
        return cut

    def wire(self, asynchronous: bool, compression: Any) -> Wire:
        """Return how messages travel.

        Raises:
            TypeError, ValueError: no such compression; or it makes no sense here.
        """
        wire = as_wire(compression)
        if wire.lossy and asynchronous:
            _refuse("compression", compression, "ranks read and write the center itself")
        return wire

    def audits(self, asynchronous: bool, audit_every: int) -> int:
        """Return the number of exchanges after which ranks compare their centers; 0: never.

        Raises:
            TypeError, ValueError: not an int of at least 0; or it makes no sense here.
        """
        require_int(audit_every, "`audit_every`", minimum=0)
        if audit_every > 0 and asynchronous:
            _refuse("audit_every", audit_every, "there is one center")
        return audit_every

    def weight(self, asynchronous: bool, weight: WeightLike, algorithm: Algorithm) -> Weight:
        """Return how much this rank counts.

        Raises:
            TypeError, ValueError: no number of at least 0; or ranks cannot count differently here.
        """
        counts = Weight(weight)
        if weight is not None and asynchronous:
            _refuse("weight", weight, "no mean is taken")
        if weight is not None and not algorithm.takes_mean:
            raise ValueError(
                "`weight` is for algorithms that take the mean over ranks: averaging, DiLoCo, SlowMo, BMUF, and AGN "
                f"with op='average'. Received: {algorithm!r}"
            )
        return counts

    def center_file(self, asynchronous: bool, center_file: PathLike | None) -> Path | None:
        """Return the file in which the center lies, if in one.

        Raises:
            TypeError, ValueError: not a path; or it makes no sense here.
        """
        if center_file is None:
            return None
        if not isinstance(center_file, (str, os.PathLike)):
            raise TypeError(f"`center_file` must be a path, or None. Received: {center_file!r}")
        if not asynchronous:
            raise ValueError(
                "`center_file` is for asynchronous exchange, in which a center moves outside of all replicas: save "
                f"checkpoints of synchronous training. Received: center_file={str(center_file)!r}"
            )
        return Path(center_file).absolute()


def _refuse(option: str, given: object, why: str) -> NoReturn:
    """Raise a ValueError: with asynchronous exchange an option makes no sense."""
    raise ValueError(
        f"`{option}` is for synchronous exchange: with asynchronous=True {why}. Received: {option}={given!r}"
    )
