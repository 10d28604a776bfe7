"""Reshards the state of a torch optimizer of the center for another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvd_periodic.elastic import resharding
from hvd_periodic.outer.per_fragment import PerFragmentOptimizer
from hvd_periodic.outer.stretches import Entries, Form, Stretch
from hvd_periodic.sync.synchronizer import ReplicaSynchronizer
from hvd_periodic.torch.outer import TorchOuterOptimizer


def resharded(saved: Any, synchronizer: ReplicaSynchronizer[Any]) -> Any:
    """Return a saved state of the center optimizer, resharded for these ranks, which exchange synchronously."""
    outer = synchronizer.exchanged.outer
    if not isinstance(outer, (TorchOuterOptimizer, PerFragmentOptimizer)):
        return saved
    first: Any = outer.parts[0] if isinstance(outer, PerFragmentOptimizer) else outer
    return resharding.resharded(saved, synchronizer, StateDicts(first.grouping()))


class StateDicts(Form):
    """State dicts of optimizers; ``grouping`` is that of :meth:`TorchOuterOptimizer.grouping`."""

    def __init__(self, grouping: Sequence[Sequence[int]]) -> None:
        self._grouping = grouping

    def entries(self, state: Any, stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, Entries]]:
        """Yield the entries of every stretch that has any."""
        for index, stretch in _numbered(state["param_groups"], self._by_group(stretches)):
            if stretch is not None and index in state["state"]:
                yield stretch, state["state"][index]

    def state(
        self, kept: Mapping[Stretch, Entries], stretches: Sequence[Stretch], example: Any, of: Sequence[Stretch]
    ) -> Any:
        """Return the state dict of a rank that holds these stretches."""
        place = self._by_group(stretches)
        groups: list[dict[str, Any]] = []
        for group, members in zip(example["param_groups"], place, strict=True):
            first = sum(len(other["params"]) for other in groups)
            groups.append({**group, "params": list(range(first, first + len(members)))})
        numbered = _numbered(groups, place)
        state = {index: kept[part] for index, part in numbered if part is not None and part in kept}
        of_no_parameter = {key: value for key, value in example["state"].items() if not isinstance(key, int)}
        return {"state": of_no_parameter | state, "param_groups": groups}

    def begun(self, fresh: Any, stretches: Sequence[Stretch], former: Any, of: Sequence[Stretch]) -> Any:
        """Return the new state dict, with the state that belongs to no parameter from the former one."""
        of_no_parameter = {key: value for key, value in former["state"].items() if not isinstance(key, int)}
        groups = fresh["param_groups"]
        if len(groups) == len(former["param_groups"]):
            pairs = zip(groups, former["param_groups"], strict=True)
            groups = [{**then, "params": now["params"]} for now, then in pairs]
        return {**fresh, "state": of_no_parameter, "param_groups": groups}

    def zeros(self, like: Any, size: int) -> Any:
        """Return a flat tensor of zeros."""
        return like.new_zeros(size)

    def _by_group(self, stretches: Sequence[Stretch]) -> list[list[Stretch | None]]:
        """Return the stretches in every parameter group; a single None for a group without any."""
        return [[s for owner in group for s in stretches if s[0] == owner] or [None] for group in self._grouping]


def _numbered(groups: Sequence[Any], place: list[list[Stretch | None]]) -> Iterator[tuple[int, Stretch | None]]:
    """Yield the number of every tensor in a state dict, and its stretch, or None."""
    if [len(group["params"]) for group in groups] != [len(stretches) for stretches in place]:
        raise ValueError(
            "The state of the center optimizer was saved with other parameter groups: start from the saved center"
        )
    for group, stretches in zip(groups, place, strict=True):
        yield from zip(group["params"], stretches, strict=True)
