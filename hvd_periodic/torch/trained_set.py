"""Which parameters an optimizer trains, by name: what the ranks of an elastic job tell each other of ``adopt()``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch


@dataclass(frozen=True)
class TrainedSet:
    """The parameters of an optimizer, by the names that the model has for them.

    Attributes:
        groups: those of each parameter group, frozen ones included.
        requires_grad: whether gradients of a parameter are computed, for every parameter of the model.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    requires_grad: Mapping[str, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, named: Iterable[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer | None) -> TrainedSet:
        """Return what an optimizer trains now; nothing without an optimizer.

        Raises:
            KeyError: a parameter of the optimizer has no name.
        """
        named = list(named)
        names = {id(parameter): name for name, parameter in named}
        groups = [] if optimizer is None else [group["params"] for group in optimizer.param_groups]
        return cls(
            tuple(tuple(names[id(parameter)] for parameter in group) for group in groups),
            {name: parameter.requires_grad for name, parameter in named},
        )

    def put_into(self, optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Let an optimizer train this set: its parameter groups, and ``requires_grad`` of the model's parameters.

        Groups that come have the defaults of the optimizer. State of parameters that it no longer has is dropped, and
        so are gradients of those that are frozen now.

        Args:
            optimizer: the optimizer.
            named: the parameters of the model, by name.

        Raises:
            ValueError: the model lacks some of these parameters; nothing has changed.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD([model.weight], lr=0.1)
            >>> TrainedSet((("bias",),)).put_into(optimizer, model.named_parameters())
            >>> [tuple(group["params"]) == (model.bias,) for group in optimizer.param_groups]
            [True]
        """
        tensors: dict[str, Any] = dict(named)
        missing = sorted({name for group in self.groups for name in group} - tensors.keys())
        if missing:
            raise ValueError(
                "The other ranks train parameters that the model of this worker lacks, since they have called adopt() "
                f"after adding them: {missing}. A worker can join them only if its model has these from the start: "
                "construct it with them, frozen, in a job that you start again from a checkpoint"
            )
        groups, members = optimizer.param_groups, [[(name, tensors[name]) for name in group] for group in self.groups]
        knows_names = any("param_names" in group for group in groups)
        del groups[len(members) :]
        for group, pairs in zip(groups, members, strict=False):
            if [id(parameter) for parameter in group["params"]] != [id(parameter) for _, parameter in pairs]:
                group["params"] = [parameter for _, parameter in pairs]
                group |= {"param_names": [name for name, _ in pairs]} if knows_names else {}
        for pairs in members[len(groups) :]:
            optimizer.add_param_group({"params": pairs if knows_names else [parameter for _, parameter in pairs]})
        for name, parameter in tensors.items():
            if self.requires_grad.get(name, parameter.requires_grad) != parameter.requires_grad:
                parameter.requires_grad = self.requires_grad[name]
                parameter.grad = None
        kept = {id(parameter) for _, parameter in chain.from_iterable(members)}
        # PyTorch allows other keys than parameters.
        for parameter in [each for each in optimizer.state if isinstance(each, torch.Tensor) and id(each) not in kept]:
            del optimizer.state[parameter]
