"""One optimizer of the center for each fragment of the parameters."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from hvd_periodic.outer.framework import OuterOptimizer
from hvd_periodic.vectors.fragments import Fragment
from hvd_periodic.vectors.layout import Bucket, Layout
from hvd_periodic.vectors.store import Store


class CloneableOptimizer(OuterOptimizer, Protocol):
    """An optimizer of the center that can be cloned, so that each fragment has its own."""

    def clone(self) -> CloneableOptimizer:
        """Return another optimizer like this one, without a center yet."""

    def per_fragment(self, fragments: Sequence[Fragment]) -> OuterOptimizer:
        """Return one such optimizer for each fragment, as a :class:`PerFragmentOptimizer`."""
        return PerFragmentOptimizer(self, fragments)


class PerFragmentOptimizer(OuterOptimizer):
    """One optimizer per fragment, each over its slice of the center and with its own state; for synchronous exchange.

    Args:
        outer: the optimizer to create for each fragment.
        fragments: fragments of the parameters; the center is cut in the same way.

    Attributes:
        parts: the optimizers, by fragment.
    """

    def __init__(self, outer: CloneableOptimizer, fragments: Sequence[Fragment]) -> None:
        self.parts: list[CloneableOptimizer] = [outer.clone() for _ in fragments]
        self._fragments = fragments

    @property
    def name(self) -> str:
        """The class of the optimizers."""
        return self.parts[0].name

    def bind(self, center: Store[Any], gradient: Store[Any], whole: Layout) -> None:
        """Create the optimizers."""
        for part, fragment in zip(self.parts, self._fragments, strict=True):
            part.bind(StoreFragment(center, fragment), StoreFragment(gradient, fragment), whole)

    def step(self, without: Set[int] = frozenset()) -> None:
        """Take one step with each optimizer."""
        for part in self.parts:
            part.step(without)

    def settings(self) -> dict[str, object]:
        """Return the hyper-parameters, which all optimizers share."""
        return self.parts[0].settings()

    def hyperparameters(self) -> Any:
        """Return the hyper-parameters, which all optimizers share."""
        return self.parts[0].hyperparameters()

    def follow(self, settings: Any) -> None:
        """Pass these settings to all optimizers."""
        for part in self.parts:
            part.follow(settings)

    def state(self) -> Any:
        """Return the states, by fragment."""
        return {"fragments": [part.state() for part in self.parts]}

    def check(self, state: Any) -> None:
        """Check the states of all fragments.

        Raises:
            ValueError: the state was saved with another number of fragments, or does not fit an optimizer.
        """
        for part, of_part in zip(self.parts, self._states(state), strict=True):
            part.check(of_part)

    def load(self, state: Any) -> None:
        """Restore the states that :meth:`state` returned.

        Raises:
            ValueError: the state was saved with another number of fragments.
        """
        for part, of_part in zip(self.parts, self._states(state), strict=True):
            part.load(of_part)

    def _states(self, state: Any) -> list[Any]:
        """Return the states by fragment."""
        states = state.get("fragments") if isinstance(state, dict) else None
        if states is None or len(states) != len(self.parts):
            found = 1 if states is None else len(states)
            raise ValueError(
                f"The state of the center optimizer was saved with fragments={found}, and this one has "
                f"{len(self.parts)}: load it with the same number, or start from the saved center"
            )
        return list(states)


@dataclass
class StoreFragment(Store[Any]):
    """A fragment of a store: views of the tensors and parts of tensors in it."""

    store: Store[Any]
    fragment: Fragment

    def __post_init__(self) -> None:
        of_store, indices = self.store.layout, {bucket.index for bucket in self.fragment.buckets}
        self.layout = of_store.restrict(lambda bucket: (0, bucket.size if bucket.index in indices else 0))
        self._stretches, specs = self.layout.sources, of_store.specs
        parts = any(stop - start < specs[i].size for i, start, stop in self._stretches)
        self.layout.cut = of_store.cut or ("fragments" if parts else "")
        owners = [(of_store.sources[tensor], start, stop) for tensor, start, stop in self._stretches]
        self.layout.sources = tuple((owner, first + start, first + stop) for (owner, first, _), start, stop in owners)

    def tensors(self) -> list[Any]:
        """Return the tensors; parts of tensors are flat."""
        tensors, specs = self.store.tensors(), self.store.layout.specs
        return [
            tensors[tensor] if stop - start == specs[tensor].size else tensors[tensor].reshape(-1)[start:stop]
            for tensor, start, stop in self._stretches
        ]

    def read(self, bucket: Bucket, out: Any = None) -> Any:
        """Return the values of a bucket of the fragment."""
        return self.store.read(self.store.layout.buckets[bucket.index], out)

    def write(self, bucket: Bucket, value: Any) -> None:
        """Set the values of a bucket of the fragment."""
        self.store.write(self.store.layout.buckets[bucket.index], value)
