"""The state of an outer optimizer by stretches of parameters, so that it can be cut and joined in other places."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_periodic.vectors.fragments import Fragment
from hvd_periodic.vectors.layout import Layout, chunk

Stretch = tuple[int, int, int]
"""A part of a parameter: the parameter's index, and the first and the past-the-last element."""

Entries = Mapping[Any, Any]
"""State of a stretch, by key: tensors in its shape, or values for the whole parameter."""


class Form(ABC):
    """The format in which a framework's optimizers save the state of parts of parameters."""

    @abstractmethod
    def entries(self, state: Any, stretches: Sequence[Stretch]) -> Iterable[tuple[Stretch, Entries]]:
        """Return the entries of each stretch in the saved state of an optimizer over these stretches."""

    @abstractmethod
    def state(
        self, kept: Mapping[Stretch, Entries], stretches: Sequence[Stretch], example: Any, of: Sequence[Stretch]
    ) -> Any:
        """Return the saved state of an optimizer over these stretches.

        Args:
            kept: the entries of the stretches; stretches without state may be missing.
            stretches: the stretches, in the order of the layout.
            example: one of the saved states, of an optimizer with stretches if there is one.
            of: the stretches of that optimizer.
        """

    def begun(self, fresh: Any, stretches: Sequence[Stretch], former: Any, of: Sequence[Stretch]) -> Any:
        """Return the state of a new optimizer over other parameters, with what belongs to none from a former one.

        Args:
            fresh: the state of the new optimizer.
            stretches: the stretches of the new one.
            former: the state of the former one.
            of: the stretches of the former one.
        """
        return fresh

    @abstractmethod
    def zeros(self, like: Any, size: int) -> Any:
        """Return a flat vector of zeros with the type of ``like``."""


@dataclass(frozen=True)
class Division:
    """The places of an optimizer's state: the tensors to which it belongs, and the optimizers over parts of them.

    Attributes:
        layout: the parameters.
        fragments: the fragments, each with an optimizer of its own; None: one optimizer has all.
        form: the format of the states.
    """

    layout: Layout
    fragments: Sequence[Fragment] | None
    form: Form

    def stretches(self, rank: int, size: int) -> list[list[Stretch]]:
        """Return what each optimizer of a rank holds, of ``size`` ranks among which the center is divided."""
        fragments: Sequence[Fragment | None] = self.fragments or [None]
        return [stretches_of(self.layout, rank, size, fragment) for fragment in fragments]

    def states(self, state: Any) -> list[Any]:
        """Return the state of each optimizer of a rank."""
        return [state] if self.fragments is None else list(state["fragments"])


def carried(saved: Any, then: Division, fresh: Any, now: Division, rank: int, stays: Mapping[int, int]) -> Any:
    """Return a rank's state of new optimizers over other parameters; those that stay keep their state.

    Args:
        saved: the state of all former optimizers: of all ranks if the center is sharded.
        then: its places.
        fresh: the state of this rank's new optimizers.
        now: its places.
        rank: the rank, if the center is sharded.
        stays: of the parameters that stay, the number among the new ones, with that among the former ones.
    """
    shares = saved["sharded"] if isinstance(saved, dict) and "sharded" in saved else [saved]
    mine = rank if len(shares) > 1 else 0
    whole: dict[int, dict[Any, Any]] = {}
    for of_rank, share in enumerate(shares):
        for state, stretches in zip(then.states(share), then.stretches(of_rank, len(shares)), strict=True):
            for stretch, entries in then.form.entries(state, stretches):
                put(whole.setdefault(stretch[0], {}), stretch, entries, then.layout, then.form)
    parts = []
    places = zip(then.states(shares[mine]), then.stretches(mine, len(shares)), strict=True)
    held = zip(now.states(fresh), now.stretches(mine, len(shares)), strict=True)
    for (former, of), (new, stretches) in zip(places, held, strict=True):
        kept = {
            part: cut(whole[stays[part[0]]], part, now.layout, now.form)
            for part in stretches
            if stays.get(part[0]) in whole
        }
        parts.append(now.form.state(kept, stretches, then.form.begun(new, stretches, former, of), stretches))
    return parts[0] if now.fragments is None else {"fragments": parts}


def stretches_of(layout: Layout, rank: int, size: int, fragment: Fragment | None) -> list[Stretch]:
    """Return the stretches of parameters that a rank holds, of one fragment or of all."""
    share = layout.share(lambda bucket: chunk(bucket.size, rank, size))
    if fragment is None:
        return list(share.sources)
    indices = {bucket.index for bucket in fragment.buckets}
    part = share.restrict(lambda bucket: (0, bucket.size if bucket.index in indices else 0))
    of_share = [(share.sources[tensor], start, stop) for tensor, start, stop in part.sources]
    return [(owner, first + start, first + stop) for (owner, first, _), start, stop in of_share]


def put(whole: dict[Any, Any], stretch: Stretch, entries: Entries, layout: Layout, form: Form) -> None:
    """Write the entries of a stretch into those of the parameter: flat vectors, or values for the whole parameter."""
    owner, start, stop = stretch
    for key, value in entries.items():
        if _shape_of(value) == shape(stretch, layout):
            if key not in whole:
                whole[key] = form.zeros(value, layout.specs[owner].size)
            whole[key][start:stop] = value.reshape(-1)
        else:
            whole.setdefault(key, value)


def cut(whole: Mapping[Any, Any], stretch: Stretch, layout: Layout, form: Form) -> dict[Any, Any]:
    """Return the entries of a stretch, given those of the parameter."""
    owner, start, stop = stretch
    kept = {}
    for key, value in whole.items():
        if _shape_of(value) == (layout.specs[owner].size,):
            part = form.zeros(value, stop - start)
            part[:] = value[start:stop]
            kept[key] = part.reshape(shape(stretch, layout))
        else:
            kept[key] = copy.deepcopy(value)  # Each stretch counts its own steps.
    return kept


def shape(stretch: Stretch, layout: Layout) -> tuple[int, ...]:
    """Return the shape of the tensor that holds a stretch: that of the parameter if it is whole."""
    owner, start, stop = stretch
    spec = layout.specs[owner]
    return spec.shape if stop - start == spec.size else (stop - start,)


def _shape_of(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if hasattr(value, "shape") else None
