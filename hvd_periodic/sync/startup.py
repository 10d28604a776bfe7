"""The first step after construction or a load: who has what, and what all start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from hvd_periodic.ranks import by_value, named, titled


class Moment(Enum):
    """When a rank comes to begin training."""

    BEFORE_UPDATE = "the model holds what local training starts from"
    AFTER_UPDATE = "local training has changed the model already"
    END = "this rank has nothing to train with"


class Start(Enum):
    """What training starts from."""

    ANEW = "the parameters of the root"
    AS_CONSTRUCTED = "the parameters that the root had at construction"
    AS_LOADED = "what every rank has loaded"
    FROM_ROOT = "what the root has loaded"


@dataclass(frozen=True)
class Standing:
    """Where one rank stands before its first step.

    Attributes:
        loaded: a state was loaded.
        local_steps: iterations so far.
        exchanges: local steps at the last exchange and at the next.
        run: which training the state is of; empty where nothing says.
        center: digest of the center that was loaded; empty where this rank does not know all of it.
        replica: digest of the parameters.
        moment: when this rank has come.
        failure: why what was to be loaded here was not; empty where nothing went wrong.
        group: a number that is the same for ranks that have one center.
    """

    loaded: bool
    local_steps: int
    exchanges: tuple[int, int]
    run: str
    center: str
    replica: str
    moment: Moment = Moment.BEFORE_UPDATE
    failure: str = ""
    group: int = 0


def decide(standings: Mapping[int, Standing], root: int, averaging: bool = False, asynchronous: bool = False) -> Start:
    """Return what training starts from; the same on all ranks.

    Args:
        standings: of all ranks, by global rank.
        root: the global rank whose values all start from.
        averaging: gradients are averaged over ranks, so that local optimizers have to be in the same state.
        asynchronous: ranks exchange at steps of their own.

    Raises:
        RuntimeError: the ranks have loaded states that do not belong together, or one has failed to; names them.

    Example:
        >>> new = Standing(False, 0, (0, 10), "", "", "")
        >>> old = Standing(True, 40, (40, 50), "", "a digest", "")
        >>> decide({0: old, 1: new}, root=0)
        <Start.FROM_ROOT: 'what the root has loaded'>
    """
    failures = {rank: standing.failure for rank, standing in standings.items() if standing.failure}
    if failures:
        raise RuntimeError(
            f"Training cannot begin from a checkpoint that was not loaded on {named(failures)}: "
            f"{next(iter(failures.values()))}"
        )
    loaded = {rank: standing for rank, standing in standings.items() if standing.loaded}
    if not loaded:
        known = any(standing.moment is Moment.BEFORE_UPDATE for standing in standings.values())
        return Start.ANEW if known else Start.AS_CONSTRUCTED
    if len(loaded) < len(standings):
        if averaging:
            raise RuntimeError(
                "Ranks that average their gradients need local optimizers in the same state, which the root does not "
                "bring: load the state on every rank. Received: "
                + _by_rank(standings, lambda standing: f"step {standing.local_steps}")
            )
        if root not in loaded:
            raise RuntimeError(
                f"{titled(loaded)} {'has' if len(loaded) == 1 else 'have'} loaded a state, and the root, rank {root}, "
                "has none: load it on the root, from which all then start, or on every rank"
            )
        if not asynchronous and not standings[root].center:
            raise RuntimeError(
                f"Rank {root} has loaded its share of the center, and others have loaded nothing: load on every rank "
                "the file that it saved itself"
            )
        return Start.FROM_ROOT
    _require_one(loaded, lambda standing: standing.run and f"run {standing.run}")
    if not asynchronous:
        _require_one(loaded, lambda standing: f"step {standing.local_steps}")
        _require_one(loaded, lambda s: f"step {s.local_steps}, exchanging at {s.exchanges[0]} and {s.exchanges[1]}")
        for group in {standing.group for standing in loaded.values()}:
            of_group = {rank: standing for rank, standing in loaded.items() if standing.group == group}
            _require_one(of_group, lambda standing: standing.center and f"center {standing.center[:8]}")
    return Start.AS_LOADED


def replaces(start: Start, standings: Mapping[int, Standing], rank: int, root: int, averaging: bool) -> bool:
    """Return whether a rank takes over other parameters, so that gradients which it has are of none that it holds.

    Where gradients are averaged over ranks, those of one rank spoil those of all.

    Example:
        >>> old, other = (Standing(False, 0, (0, 10), "", "", digest) for digest in ("a", "b"))
        >>> [replaces(Start.ANEW, {0: old, 1: other}, rank, root=0, averaging=False) for rank in (0, 1)]
        [False, True]
    """
    if start not in (Start.ANEW, Start.FROM_ROOT):
        return False
    if averaging:
        return len({standing.replica for standing in standings.values()}) > 1
    return standings[rank].replica != standings[root].replica


def _require_one(standings: Mapping[int, Standing], text: Callable[[Standing], str]) -> None:
    if len({text(standing) for standing in standings.values()} - {""}) > 1:
        raise RuntimeError(
            f"The ranks have loaded states of different runs or steps: {_by_rank(standings, text)}. Load on every rank "
            "what it saved itself, all at the same step; or the state of one of them on the root alone"
        )


def _by_rank(standings: Mapping[int, Standing], text: Callable[[Standing], str]) -> str:
    return by_value({rank: text(standing) or "unknown" for rank, standing in sorted(standings.items())})
