"""Parameters that are sharded over the ranks of an island: DTensors, of which each rank has a shard.

Each rank exchanges its shards with its peers, which have the same shards in other islands. No full tensor is assembled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch


def is_sharded(value: object) -> bool:
    """Return whether this is a DTensor, without importing ``torch.distributed.tensor``."""
    return isinstance(value, torch.Tensor) and hasattr(type(value), "device_mesh")


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, in the same memory; the tensor itself unless it is sharded."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        shard: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return shard


def as_sharded(shard: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a shard as part of a tensor that is sharded like another one, on whichever device the shard is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def facts_of_shards(sharded: Mapping[str, Any]) -> dict[str, object]:
    """Return the facts on which exchanging ranks must agree: their positions in their islands, and their shards."""
    places = sorted({str(list(tensor.device_mesh.get_coordinate())) for tensor in sharded.values()})
    if not places:
        return {}
    facts: dict[str, object] = {
        "their positions in islands, which hold different shards (`process_set` must be the ranks with the same "
        "position in all islands)": " and ".join(places)
    }
    for name, tensor in sharded.items():
        placements, mesh = ", ".join(map(repr, tensor.placements)), list(tensor.device_mesh.shape)
        facts[f"the shards of {name!r}, an uneven sharding across islands"] = (
            f"{list(shard_of(tensor).shape)} of {list(tensor.shape)} by {placements} over a mesh of {mesh}"
        )
    return facts


def check_sharded(sharded: Mapping[str, Any], exchanged: Sequence[torch.Tensor], tables: Sequence[str] = ()) -> None:
    """Raise a ValueError for parameters whose shards cannot be exchanged.

    Args:
        sharded: the sharded parameters, by name.
        exchanged: all exchanged parameters, sharded or not.
        tables: names of the parameters of which only touched rows travel.
    """
    if not sharded.keys().isdisjoint(tables):
        raise ValueError(
            "`parameters` can be 'rows' for tables that are whole on every rank: leave them out of fully_shard(). "
            f"Received: sharded {', '.join(name for name in tables if name in sharded)}"
        )
    for name, tensor in sharded.items():
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"{name!r} is a sum that ranks have not formed yet: {tensor.placements}. Redistribute it")
        if tensor.is_complex():
            raise ValueError(
                f"{name!r} is complex and sharded: complex parameters must be whole. Received: {tensor.dtype}"
            )
        if not shard_of(tensor).is_contiguous():
            raise ValueError(f"The shard of {name!r} must be contiguous. Received: strides {shard_of(tensor).stride()}")

    if not any(shard_of(tensor).numel() for tensor in exchanged):
        raise ValueError(
            "This rank owns no parameter elements: shard the model over fewer ranks. Received: "
            f"{len(exchanged)} parameters, the largest of {max(tensor.numel() for tensor in exchanged)} elements"
        )


def require_whole(sharded: Mapping[str, Any], between_islands: bool) -> None:
    """Raise a ValueError for a sharded model, since the file of one rank would hold only a part of it, or for islands.

    Args:
        sharded: the sharded parameters, by name.
        between_islands: whether the ranks are those of islands of an elastic job, which exchange in several sets of
            ranks: each of these would write a checkpoint of its own to the same place.
    """
    if sharded:
        raise ValueError(
            "save(), load() and SaveBestCenter need the whole model on every rank, but this one is sharded: use "
            "torch.distributed.checkpoint within each island, for model, optimizer.inner and "
            "optimizer.synchronizer.state_dict(); or for center_state_dict()"
        )
    if between_islands:
        raise ValueError(
            "save(), load() and SaveBestCenter do not work in islands of an elastic job, whose ranks exchange in "
            "several sets: on the first rank of the first island, save center_state_dict() with torch.save"
        )


def reshard(modules: Iterable[Any]) -> None:
    """Reshard modules of ``fully_shard()``, and free the parameters that a forward pass has gathered."""
    for module in modules:
        if gathers(module):
            module.reshard()


def gathers(module: object) -> bool:
    """Return whether a module has ``fully_shard()``, which gathers its parameters for forward passes."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
