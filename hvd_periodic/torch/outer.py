"""A torch optimizer that moves the center."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hvd_periodic.arguments import outer_name
from hvd_periodic.outer.elementwise import require_elementwise
from hvd_periodic.outer.per_fragment import PerFragmentOptimizer
from hvd_periodic.torch.center_optimizer import CenterOptimizer, CenterOptimizerLike, EntryKey
from hvd_periodic.torch.sharded_parameters import is_sharded
from hvd_periodic.vectors.fragments import Fragment
from hvd_periodic.vectors.layout import Layout
from hvd_periodic.vectors.store import FlatStore, Store


class TorchOuterOptimizer:
    """A torch optimizer over the tensors of the center, made when the center is bound.

    Args:
        source: an optimizer of the same parameters to be copied, or a function from parameter groups to an optimizer.
        local: the local optimizer, if there is one.
        parameters: the model's exchanged parameters, in layout order.
    """

    def __init__(
        self, source: CenterOptimizerLike, local: torch.optim.Optimizer | None, parameters: Sequence[torch.Tensor]
    ) -> None:
        self.source = source
        self._local = local
        self._parameters = parameters
        self._optimizer: CenterOptimizer | None = None
        self._keys: dict[EntryKey, type] = {}

    def clone(self) -> TorchOuterOptimizer:
        """Return an optimizer like this one, without a center yet."""
        return TorchOuterOptimizer(self.source, self._local, self._parameters)

    def per_fragment(self, fragments: Sequence[Fragment]) -> PerFragmentOptimizer:
        """Return a :class:`PerFragmentOptimizer` with an optimizer for each fragment."""
        return PerFragmentOptimizer(self, fragments)

    def grouping(self) -> list[list[int]]:
        """Return the exchanged parameters, by number, of every parameter group that has any."""
        template = self.source if isinstance(self.source, torch.optim.Optimizer) else self._local
        if template is None:
            return [list(range(len(self._parameters)))]
        numbers = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        groups = [[numbers[id(p)] for p in group["params"] if id(p) in numbers] for group in template.param_groups]
        return [group for group in groups if group]

    @property
    def name(self) -> str:
        """The class of the optimizer; before :meth:`bind`, of its source."""
        return type(self.source if self._optimizer is None else self._optimizer.optimizer).__name__

    @property
    def optimizer(self) -> CenterOptimizer:
        """The optimizer.

        Raises:
            RuntimeError: there is no center yet.
        """
        if self._optimizer is None:
            raise RuntimeError("The outer optimizer has no center yet: bind() comes first")
        return self._optimizer

    def bind(self, center: Store[torch.Tensor], gradient: Store[torch.Tensor], whole: Layout) -> None:
        """Make the optimizer."""
        owners = [tensor for tensor, _, _ in center.layout.sources]
        made = CenterOptimizer(self.source, self._local, self._parameters, center.tensors(), gradient.tensors(), owners)
        made.keys = self._keys
        self._require_all(made, center.layout, whole)
        require_elementwise(type(made.optimizer).__name__, center.layout, whole, made.steps)
        self._optimizer = made

    def _require_all(self, made: CenterOptimizer, share: Layout, whole: Layout) -> None:
        """Raise a ValueError if an optimizer that learns from all parameters would have only some of them."""
        elements = [sum(layout.arenas.values()) for layout in (share, whole)]
        divided = any(map(is_sharded, self._parameters))
        if made.learned and (divided or 0 < elements[0] < elements[1]):
            raise ValueError(
                f"{type(made.optimizer).__name__} learns {', '.join(map(repr, made.learned))} of its parameter groups "
                "from the gradients of all parameters, and would learn other values on each part of the center, "
                f"which is divided here (by {'islands' if divided else share.cut or 'fragments'}). Pass another "
                f"`{outer_name()}`, such as lambda groups: torch.optim.SGD(groups, lr=1.0)"
            )

    def step(self) -> None:
        """Apply one step."""
        self.optimizer.step()

    def settings(self) -> dict[str, object]:
        """Return the hyper-parameters of the next step."""
        return {} if self._optimizer is None else self._optimizer.settings()

    def hyperparameters(self) -> Any:
        """Return the hyper-parameters of every group."""
        return self.optimizer.hyperparameters()

    def follow(self, settings: Any) -> None:
        """Use these hyper-parameters of all groups for the next step."""
        self.optimizer.followed = settings

    def state(self) -> Any:
        """Return a copy of the state dict; None if the center is not in this process."""
        return None if self._optimizer is None else self._optimizer.state_dict()

    def load(self, state: Any) -> None:
        """Load a state dict."""
        self.optimizer.load_state_dict(state)

    def bind_host(self, center: FlatStore[Any], gradient: FlatStore[Any], whole: Layout) -> None:
        """Make the optimizer on tensors that are views of the arrays."""
        views = [
            FlatStore(store.layout, lambda kind, size, store=store: torch.from_numpy(store.arena(kind)))  # type: ignore[misc]
            for store in (center, gradient)
        ]
        self.bind(views[0], views[1], whole)

    def shapes(self, layout: Layout) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of the state's tensors, as found with a center of zeros in host memory."""

        def zeros(kind: str, size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=getattr(torch, kind.split()[0]))

        self.bind(FlatStore(layout, zeros), FlatStore(layout, zeros), layout)
        shapes = self.optimizer.shapes()
        self._keys = self.optimizer.keys
        return shapes

    def reset(self) -> None:
        """Reset the state."""
        self.optimizer.reset()

    def pull(self, arrays: Sequence[np.ndarray]) -> None:
        """Read the state from these arrays."""
        self.optimizer.pull(arrays)

    def push(self, arrays: Sequence[np.ndarray]) -> None:
        """Write the state into these arrays."""
        self.optimizer.push(arrays)
