"""A model as users pass it: its tensors by name."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import GeneratorType
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import UninitializedParameter

from hvd_periodic.frames import arguments_of
from hvd_periodic.participation import Local, Policies, participation_of
from hvd_periodic.participation.buffers import BUFFERS, LOCAL
from hvd_periodic.participation.named import unique_pairs
from hvd_periodic.torch.buffers import Buffers, policies, policy_of
from hvd_periodic.torch.sharded_parameters import gathers, is_sharded, reshard

Model: TypeAlias = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]
"""A module or its ``named_parameters()``, whose buffers can be exchanged, too; or other (name, parameter) pairs."""

_COMPILED = "_orig_mod."
"""The string that ``torch.compile`` inserts into the names of a module that it wraps."""


_LISTS = {
    name: getattr(torch.nn.Module, name)
    for name in ("named_parameters", "named_buffers", "named_modules", "_named_members")
}
"""The methods by which a module lists its tensors."""


@dataclass(frozen=True)
class NamedTensors:
    """The tensors of a model, by name; tied tensors appear once.

    Attributes:
        parameters: all parameters, including frozen ones.
        buffers: all buffers; empty if the model was given as other (name, parameter) pairs.
        policies: the policy of each buffer, by name.
        module: weak reference to the module that holds the tensors, if one was given.
        given: the ``buffers`` argument, which decides the policy of buffers that appear later.
        participation: the policy of each parameter, by name.
        asked: the ``parameters`` argument, which decides the policy of parameters that come later.
        former: names of parameters before ``adopt()``.
        members: the :func:`members_of` the module, whose tensors exist as long as they are held here.
        gathers: whether parts of the module have ``fully_shard()``, which gathers parameters for forward passes.
    """

    parameters: list[tuple[str, torch.Tensor]]
    buffers: list[tuple[str, torch.Tensor]]
    policies: dict[str, str]
    module: weakref.ref[torch.nn.Module] | None = None
    given: Buffers = None
    participation: Mapping[str, str] = field(default_factory=dict)
    asked: Policies = None
    former: frozenset[str] = frozenset()
    members: Sequence[object] | None = None
    gathers: bool = False

    @classmethod
    def of(
        cls, model: Model, buffers: Buffers, parameters: Policies = None, former: Iterable[str] = ()
    ) -> NamedTensors:
        """Collect the tensors of a module, or of (name, parameter) pairs, with their policies.

        Patterns may match ``former`` names as well, of parameters before ``adopt()``.

        Raises:
            TypeError: neither a module nor pairs.
            ValueError: duplicate names, or unknown or impossible ``buffers`` or ``parameters``.
        """
        found = cls._of(model, buffers)
        participation = participation_of(parameters, found.parameters, former)
        return replace(found, participation=participation, asked=parameters, former=frozenset(former))

    @classmethod
    def _of(cls, model: Model, buffers: Buffers) -> NamedTensors:
        model = _module_behind(model) or model
        if isinstance(model, torch.nn.Module):
            for part in model.modules():
                _refuse_flattened(part)
            reshard(model.modules())
            pairs = named_parameters_of(model)
            for _, parameter in pairs:
                _refuse_flattened(parameter)
            if any(isinstance(parameter, UninitializedParameter) for _, parameter in pairs):
                raise ValueError("The model has uninitialized lazy parameters: run one forward pass first")
            named = _originals(model.named_buffers())
            found = cls(pairs, named, policies(buffers, named), weakref.ref(model), buffers)
            return replace(found, members=members_of(model), gathers=any(map(gathers, model.modules())))
        if buffers not in (None, LOCAL):
            raise ValueError(
                f"`buffers={buffers!r}` needs the model: pass `model`, or `model.named_parameters()` itself"
            )
        if isinstance(model, torch.Tensor) or not isinstance(model, Iterable):
            raise TypeError(
                f"`model` must be a torch.nn.Module or (name, parameter) pairs. Received: {type(model).__name__}"
            )
        pairs = _originals(unique_pairs(model))
        for name, parameter in pairs:
            if not isinstance(parameter, torch.Tensor):
                raise TypeError(f"Parameter {name!r} must be a torch.Tensor. Received: {type(parameter).__name__}")
            _refuse_flattened(parameter)
            if is_sharded(parameter):
                raise TypeError(
                    f"`model`: {name!r} is a DTensor, which its module may have gathered for a forward "
                    "pass: pass the module"
                )
        return cls(pairs, [], {})

    def behind(self) -> torch.nn.Module | None:
        """Return the module that holds the tensors, if one was given and still exists."""
        return None if self.module is None else self.module()

    def changed(self) -> str | None:
        """Return the name of a parameter or exchanged buffer that was added, removed or replaced, or None."""
        module = self.behind()
        if module is None or (self.members is not None and members_of(module) == self.members):
            return None
        current, original = _ids(module.named_parameters()), _ids(self.parameters)
        current |= _ids(pair for pair in _originals(module.named_buffers()) if self._exchanges(*pair))
        original |= _ids(pair for pair in self.buffers if self._exchanges(*pair))
        names = (name for name in current.keys() | original.keys() if self.participation.get(name) != Local.name)
        changed = [name for name in names if current.get(name) != original.get(name)]
        return min(changed, default=None)

    def renormalizes(self, tables: Collection[int]) -> str | None:
        """Return, in words, a table whose rows a forward pass changes without gradients; or None if none is known.

        An embedding with ``max_norm`` renormalizes each row that it looks up, such as that of ``padding_idx``, and also
        where no gradients are computed.

        Args:
            tables: the ids of the tables.
        """
        module = self.behind()
        for name, part in () if module is None else module.named_modules():
            bounded = isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.max_norm is not None
            if bounded and id(part.weight) in tables:
                weight = original_name(f"{name}.weight").removeprefix(".")
                return f"{weight!r} of {type(part).__name__}(max_norm={part.max_norm!r})"
        return None

    def reshard(self) -> None:
        """Reshard the modules of ``fully_shard()``."""
        module = self.behind() if self.gathers else None
        if module is not None:
            reshard(module.modules())

    def _exchanges(self, name: str, buffer: torch.Tensor) -> bool:
        return (self.policies.get(name) or policy_of(self.given, name, buffer)) != LOCAL

    def of_policy(self, policy: str) -> list[tuple[str, torch.Tensor]]:
        """Return the buffers with this policy."""
        return [(name, tensor) for name, tensor in self.buffers if self.policies[name] == policy]

    def local_by_default(self) -> dict[str, torch.Tensor]:
        """Return the buffers that are local by default, not at the user's request."""
        return {n: t for n, t in self.of_policy(LOCAL) if BUFFERS.policy_of(self.given, n, t) is None}

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedTensors, (self.parameters, self.buffers, self.policies, None, None, self.participation)


def original_name(name: str) -> str:
    """Return the name that a tensor has without ``torch.compile``."""
    return name.replace(_COMPILED, "")


def original_module_name(name: str) -> str:
    """Return the name that a module has without ``torch.compile``."""
    return original_name(f"{name}.")[:-1]


def named_parameters_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of a module, by the names that they have without ``torch.compile``."""
    return _originals(module.named_parameters())


def members_of(module: torch.nn.Module) -> list[object] | None:
    """Return the classes of a module and of its submodules, and the names and identities of all their members.

    While these are the same, and the tensors exist, the names and identities of all parameters and buffers are the
    same. None if that is not known, since a class or a module lists its tensors in its own way.
    """
    parts, found, seen = [module], list[object](), {id(module)}
    for part in parts:
        kind = type(part)
        lists = tuple(getattr(kind, name) for name in _LISTS)
        if lists != tuple(_LISTS.values()) or not _LISTS.keys().isdisjoint(part.__dict__):
            return None
        found.append(kind)
        for members in (part._parameters, part._buffers, part._modules):
            found.append(len(members))
            found += members.keys()
            found += map(id, members.values())
        for each in part._modules.values():
            if each is not None and id(each) not in seen:
                seen.add(id(each))
                parts.append(each)
    return found


def _originals(pairs: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(original_name(name), tensor) for name, tensor in pairs]


def _ids(pairs: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    return {original_name(name): id(tensor) for name, tensor in pairs}


def _module_behind(model: Model) -> torch.nn.Module | None:
    """Return the module if ``model`` is the result of its ``named_parameters()``, called without arguments.

    Scripts pass ``model.named_parameters()``, as to ``hvd.DistributedOptimizer``. Treated as plain pairs, it would
    silently leave the batch-norm statistics of each rank out of exchanges.
    """
    arguments = arguments_of(model) if isinstance(model, GeneratorType) else {}
    module = arguments.pop("self", None)
    _refuse_flattened(module)
    if not isinstance(model, GeneratorType) or model.gi_code is not torch.nn.Module.named_parameters.__code__:
        return None
    plain = arguments == {"prefix": "", "recurse": True, "remove_duplicate": True}
    return module if plain and isinstance(module, torch.nn.Module) else None


def _refuse_flattened(value: object) -> None:
    """Raise a TypeError for FullyShardedDataParallel, recognized without an import, and for its parameters."""
    kinds = [base.__name__ for base in type(value).__mro__ if base.__module__.startswith("torch.")]
    if "FullyShardedDataParallel" in kinds or getattr(value, "_is_flat_param", False):
        raise TypeError(
            "`model`: FullyShardedDataParallel flattens many parameters into one: use fully_shard() instead"
        )
