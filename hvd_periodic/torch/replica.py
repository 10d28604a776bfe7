"""A torch model, or part of one, as a replica."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hvd_periodic.algorithms import Algorithm
from hvd_periodic.participation import EXCHANGED, NONE_AVERAGED, Average, Broadcast, Local, by_policy, facts_of
from hvd_periodic.participation.buffers import AVERAGE, BROADCAST, LOCAL, MAXIMUM, is_of_random_generator
from hvd_periodic.replica import SOME, Replica
from hvd_periodic.torch.dtypes import COMPLEX, INTEGERS, REALS, as_real
from hvd_periodic.torch.leaves import Tensors
from hvd_periodic.torch.model import Model, NamedTensors
from hvd_periodic.torch.modes import Modes
from hvd_periodic.torch.sharded_parameters import check_sharded, facts_of_shards, is_sharded, shard_of
from hvd_periodic.torch.space import TensorListSpace, TensorSpace
from hvd_periodic.torch.stores import ComplexTensorStore, OffloadedStore, TensorStore, as_center_device
from hvd_periodic.torch.trained_set import TrainedSet
from hvd_periodic.vectors.blocks import cut_into_blocks
from hvd_periodic.vectors.layout import DEFAULT_BUCKET_BYTES, Bucket, Layout, TensorSpec
from hvd_periodic.vectors.lending import lends
from hvd_periodic.vectors.space import VectorSpace
from hvd_periodic.vectors.store import FlatStore, Store

_BLOCK_BYTES = 512 * 2**10
"""Replica, message and center of a block fit into the cache of one core."""


class TorchReplica(Replica[torch.Tensor]):
    """Parameters and buffers of one rank; the tensors stay where they are.

    Args:
        named: the tensors of the model. All trainable parameters take part.
        optimizer: if given, only its parameters take part.
        bucket_bytes: maximum bytes that one collective carries.
        center_device: ``"cpu"``, for centers that are kept in host memory; None: on the parameters' device.

    Raises:
        TypeError: a parameter that cannot be averaged.
        ValueError: no or unnamed parameters; parameters without memory.
    """

    reports_work = True
    leaves = Tensors()
    framework = f"PyTorch {torch.__version__}"
    how_to_exclude = (
        "Set requires_grad = False on them before the optimizer is made; or register them as buffers and choose a "
        "policy for them: buffers={'PATTERN': 'average'}"
    )
    how_to_exchange = (
        "Change them identically on all ranks; or, if they are buffers, choose a policy for them: "
        "buffers={'PATTERN': 'average'}, or 'local' if each rank is to keep its own"
    )

    def __init__(
        self,
        named: NamedTensors,
        optimizer: torch.optim.Optimizer | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        center_device: torch.device | str | None = None,
    ) -> None:
        self.named, self.bucket_bytes, self.center_device = named, bucket_bytes, as_center_device(center_device)
        self.optimizer, self._modes = optimizer, Modes(optimizer)
        self._held = None if optimizer is None else _held_by(optimizer)
        if self._held is not None:
            unnamed = self._held - {id(parameter) for _, parameter in named.parameters}
            if unnamed:
                raise ValueError(
                    "`model` must name every parameter of the optimizer: pass the model, or all of "
                    f"model.named_parameters(). Received: {len(named.parameters)} names, "
                    f"{len(unnamed)} of {len(self._held)} parameters without one"
                )
        self.trained_set = TrainedSet.of(named.parameters, optimizer)
        self._digests: dict[str, tuple[Any, bytes]] = {}
        local = {name for name, policy in named.participation.items() if policy == Local.name}
        common = [(n, p) for n, p in named.parameters if n not in local]
        ours = [(n, p) for n, p in common if self._held is None or id(p) in self._held]
        trained = [(n, p) for n, p in ours if p.requires_grad]
        taking_part = [(n, p) for n, p in trained if named.participation.get(n, Average.name) in EXCHANGED]
        own = [(n, p) for n, p in named.parameters if n in local]
        self.by_policy = by_policy(named.participation, own + trained)
        following = [(n, p) for n, p in trained if n in self.by_policy.get(Broadcast.name, ())]
        if not any(parameter.numel() for _, parameter in taking_part):
            raise ValueError(
                "`model` must hold at least one trainable parameter. Received: "
                f"{len(named.parameters)} parameters, none of them trainable and with elements"
                f"{NONE_AVERAGED if set(named.participation.values()) - set(EXCHANGED) else ''}"
            )
        for name, parameter in trained:
            if parameter.dtype not in REALS and parameter.dtype not in COMPLEX:
                raise TypeError(
                    f"Parameter {name!r} must be float64, float32, bfloat16, float16, complex64 or complex128. "
                    f"Received: {parameter.dtype}"
                )
        averaged, counted, followed = map(named.of_policy, (AVERAGE, MAXIMUM, BROADCAST))
        exchanged = {id(parameter) for _, parameter in trained}
        constants = [*(pair for pair in common if id(pair[1]) not in exchanged), *named.of_policy(LOCAL)]
        self.sharded = {name: tensor for name, tensor in ours if is_sharded(tensor)}
        self.may_be_left_out = not self.sharded
        check_sharded(self.sharded, [tensor for _, tensor in taking_part], self.tables)
        self.space: VectorSpace[torch.Tensor] = TensorSpace()
        self.names = [name for name, _ in taking_part]
        self.tensors = [parameter for _, parameter in taking_part]
        self.complex_names = [name for name, parameter in taking_part + following if parameter.is_complex()]
        self._ours, self._exchanged = ours, exchanged
        of_optimizer = [p for _, p in named.parameters if self._held is None or id(p) in self._held]
        self._trained = [parameter for parameter in of_optimizer if parameter.requires_grad]
        self._fixed = [("Parameter", *pair) for pair in trained]
        self._fixed += [("Buffer", *pair) for pair in averaged + counted + followed]
        self._signatures = _signatures(self._fixed)
        self._chunks, self._lists = _chunks(self.tensors, bucket_bytes), TensorListSpace()
        self._kinds: dict[str, tuple[torch.dtype, torch.device]] = {}
        self._scratch: dict[tuple[str, int], torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._staging: dict[tuple[str, int, int], torch.Tensor] = {}
        self.parameters: Store[torch.Tensor] = self.store_of(taking_part)
        self.buffers: Store[torch.Tensor] | None = self.store_of(averaged) if averaged else None
        self.integers: Store[torch.Tensor] | None = self.store_of(counted) if counted else None
        self.from_root: Store[torch.Tensor] | None = self.store_of(followed) if followed else None
        self.parameters_from_root: Store[torch.Tensor] | None = self.store_of(following) if following else None
        self.constants: Store[torch.Tensor] | None = self.store_of(constants) if constants else None
        self.in_host_memory = all(device.type == "cpu" for _, device in self._kinds.values())

    def renewed(self, model: Model) -> TorchReplica:
        """Return the replica of what the model and the optimizer train now, with the same arguments."""
        former = [*self.named.former, *(name for name, _ in self.named.parameters)]
        named = NamedTensors.of(model, self.named.given, self.named.asked, former)
        return TorchReplica(named, self.optimizer, self.bucket_bytes, self.center_device)

    def range(self, name: str) -> AbstractContextManager[object]:
        """Return a range for torch's profiler and, if GPUs are used, for profilers that read NVTX."""
        used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return _range_with_nvtx(name) if used else torch.profiler.record_function(name)

    @property
    def has_modes(self) -> bool:
        """Whether the optimizer trains and evaluates at different points, see :class:`Modes`."""
        return self._modes.any

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a block in which the parameters hold the evaluation point of a schedule-free optimizer."""
        return self._modes.evaluating(self.tensors)

    def facts(self) -> dict[str, object]:
        """Return names, shapes and dtypes."""
        stores = {
            "parameter": self.parameters,
            "parameter from the root": self.parameters_from_root,
            "buffer": self.buffers,
            "integer buffer": self.integers,
            "buffer from the root": self.from_root,
            "constant": self.constants,
        }
        facts = facts_of_shards(self.sharded) | {
            "optimizer": type(self.optimizer).__name__,
            "bucket_bytes": self.bucket_bytes,
            "center_device": self.center_device,
        }
        facts |= facts_of(self)
        for role, store in stores.items():
            tensors = [] if store is None else list(zip(store.layout.specs, store.originals(), strict=True))
            facts[f"number of {role}s"] = len(tensors)
            for i, (spec, tensor) in enumerate(tensors):
                dtype = str(tensor.dtype).removeprefix("torch.")
                facts[f"{role} {i}"] = f"{spec.name} {dtype}{list(shard_of(tensor).shape)}"
                facts[f"place of {spec.name}"] = spec.kind
        return facts

    def misfit(self) -> str | None:
        """Describe an uncounted step, or an exchanged tensor with a new dtype, shape or device; or return None."""
        if self.uncounted is not None:
            return self.uncounted
        self.named.reshard()
        signatures = _signatures(self._fixed)
        if signatures == self._signatures:
            return None
        return next(
            f"{kind} {name!r} was {_describe(*then)} at construction and is {_describe(*now)} now"
            for (kind, name, _), then, now in zip(self._fixed, self._signatures, signatures, strict=True)
            if then != now
        )

    def changes(self) -> str | None:
        """Return what has changed in the set of parameters and exchanged buffers since construction, or None."""
        misfit = self.misfit()
        if misfit is not None:
            return misfit
        for name, parameter in self._ours:
            if parameter.requires_grad != (id(parameter) in self._exchanged):
                then, now = ("frozen", "trainable") if parameter.requires_grad else ("trainable", "frozen")
                return (
                    f"Parameter {name!r} was {then} at construction and is {now} now: call adopt() on all ranks; or "
                    "finalize(), then make a new optimizer"
                )
        if self.optimizer is not None and _held_by(self.optimizer) != self._held:
            return (
                "Parameters of the optimizer were added, removed or replaced after construction: call adopt() on all "
                "ranks"
            )
        changed = self.named.changed()
        if changed is not None:
            return (
                f"{changed!r} was added to the model, removed or replaced after construction: call adopt() on all ranks"
            )
        return None

    def new_store(self, layout: Layout, name: str) -> Store[torch.Tensor]:
        """Return zeros on the devices of the tensors."""

        def zeros(kind: str, size: int) -> torch.Tensor:
            dtype, device = self._kinds[kind]
            return torch.zeros(size, dtype=dtype, device=device)

        return FlatStore(layout, zeros)

    def new_offloaded_store(self, layout: Layout, name: str) -> Store[torch.Tensor]:
        """Return zeros in the memory where centers are kept."""
        if self.center_device is None or self.in_host_memory:
            return self.new_store(layout, name)
        return OffloadedStore(layout, self._kinds)

    def offload(self, value: torch.Tensor) -> torch.Tensor:
        """Return a vector in the memory where centers are kept."""
        return value if self.center_device is None else value.to(self.center_device)

    def new_temporary_store(self, layout: Layout) -> Store[torch.Tensor]:
        """Return zeros in the memory where centers are kept."""
        return self.new_offloaded_store(layout, "temporary")

    def scratch(self, bucket: Bucket, slot: int) -> torch.Tensor:
        """Return the reusable buffer of this slot."""
        key = (bucket.kind, slot)
        if key not in self._scratch or self._scratch[key].shape[0] < bucket.size:
            self._scratch[key] = self._empty(bucket)
        return self._scratch[key][: bucket.size]

    def blocks(self, bucket: Bucket) -> Sequence[Bucket]:
        """Return parts that fit into the cache of a CPU core; on a GPU, the whole bucket."""
        if self._kinds[bucket.kind][1].type != "cpu":
            return (bucket,)
        return cut_into_blocks(bucket, _BLOCK_BYTES // bucket.itemsize)

    @torch.no_grad()
    def local(self, algorithm: Algorithm, worker: dict[str, Store[torch.Tensor]]) -> int:
        """Run the local rule on all parameters with a gradient, in few kernels; gradients change in place.

        Parameters are processed in chunks, so that temporary tensors stay small and their memory is reused.
        """
        views, found = {key: store.tensors() for key, store in worker.items()}, 0
        for chunk in self._chunks:
            parameters, vectors = self.tensors[chunk], {key: tensors[chunk] for key, tensors in views.items()}
            if self.complex_names:
                gradients = list(map(_gradient_of, parameters))
            else:
                gradients = [tensor.grad for tensor in parameters]
            there = [gradient for gradient in gradients if gradient is not None]
            if len(there) < len(gradients):
                parameters = _where_there(gradients, parameters)
                vectors = {key: _where_there(gradients, tensors) for key, tensors in vectors.items()}
            if self.sharded or self.complex_names:
                parameters, there = ([as_real(shard_of(each)) for each in tensors] for tensors in (parameters, there))
            if there:
                algorithm.local(self._lists, parameters, there, vectors)
                found = 1
        return found

    def learning_rates(self) -> list[float]:
        """Return the learning rate of every parameter, taken from its group."""
        if self.optimizer is None:
            raise ValueError("The algorithm needs the learning rate of local steps: pass `optimizer`")
        groups = self.optimizer.param_groups
        if any(group.get("lr") is None for group in groups):
            raise TypeError(
                f"The algorithm needs the learning rate of local steps, but {type(self.optimizer).__name__} has no `lr`"
            )
        of_parameter = {id(parameter): float(group["lr"]) for group in groups for parameter in group["params"]}
        return [of_parameter[id(parameter)] for parameter in self.tensors]

    def frozen(self) -> bytes:
        """Return a digest of the frozen parameters of the model."""
        frozen = [self._digest(name, parameter) for name, parameter in self._frozen().items()]
        return hashlib.sha256(b"".join(frozen)).digest() if frozen else b""

    def digests(self) -> dict[str, bytes]:
        """Return digests of frozen parameters, and of buffers that are local by default."""
        weights = self.unexchanged().items()
        return {name: self._digest(name, tensor) for name, tensor in weights if not is_of_random_generator(name)}

    def advice_on_difference(self, name: str) -> str:
        """Return the argument to write for a buffer, or for a frozen parameter, which is not exchanged."""
        if name in self.named.policies:
            return f"To exchange it, pass buffers={{{name!r}: 'average'}}; to keep each rank's own, 'local'"
        return f"Change it identically on all ranks; or, to keep each rank's own, pass parameters={{{name!r}: 'local'}}"

    def _digest(self, name: str, tensor: torch.Tensor) -> bytes:
        """Return a digest of a tensor: the last one, if it has not changed since.

        In-place operations count up its version. Those on ``.data`` do not, but change the sum of its 64-bit words,
        which takes a tenth of the time of a digest.
        """
        shard = shard_of(tensor).detach()
        if shard.is_meta:
            return b""
        state = None if shard.is_inference() else (shard._version, shard.data_ptr(), _sum_of_words(shard))
        known, digest = self._digests.get(name, (None, b""))
        if state is None or None in state or state != known:
            digest = hashlib.sha256(shard.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()
            self._digests[name] = state, digest
        return digest

    def discard_gradients(self) -> None:
        """Remove the gradients of the parameters, so that optimizers skip them."""
        for parameter in self._trained:
            parameter.grad = None

    def forget_gradients_of_frozen(self) -> None:
        """Remove the gradients of parameters that were trained and are frozen now: optimizers would step them."""
        for parameter in self._trained:
            if not parameter.requires_grad:
                parameter.grad = None

    def follow_weights(self) -> None:
        """Reshard, so that the next forward pass gathers the current shards."""
        self.named.reshard()

    def with_gradient(self, among: Set[int]) -> Set[int]:
        """Return the parameters that have a gradient now, by index."""
        return {i for i in among if self.tensors[i].grad is not None}

    @torch.no_grad()
    def mark_rows(self, marks: Store[torch.Tensor]) -> None:
        """Mark the rows in which a dense gradient is not 0, and all that a sparse one names."""
        of_name = dict(zip(self.names, self.tensors, strict=True))
        for spec, marked in zip(marks.layout.specs, marks.tensors(), strict=True):
            gradient = of_name[spec.name].grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                marked[gradient._indices()[0]] = 1
            else:
                marked.copy_(torch.maximum(marked, (gradient != 0).flatten(1).any(1).to(marked.dtype)))

    def unexchanged(self) -> dict[str, torch.Tensor]:
        """Return frozen parameters, and buffers that are local by default."""
        return self._frozen() | self.named.local_by_default()

    def _frozen(self) -> dict[str, torch.Tensor]:
        """Return the parameters that are equal on all ranks and not trained."""
        named = self.named.parameters
        return {name: tensor for name, tensor in named if not tensor.requires_grad and name not in self.local_names}

    def some_of(self, tensor: Any) -> np.ndarray:
        """Return some elements of a tensor on any device; none if it is on the meta device."""
        flat = as_real(shard_of(tensor).detach().resolve_conj()).reshape(-1)
        flat = flat[:: max(1, flat.numel() // SOME)]
        if flat.is_meta:
            return np.zeros(0)
        return flat.to("cpu", torch.float64).numpy()

    def to_host(self, value: torch.Tensor, bucket: Bucket) -> np.ndarray:
        """Return a view, or a copy in pinned memory that a separate stream makes from the device."""
        if value.device.type != "cuda":
            return value.detach().cpu().numpy()
        stream, pinned = self._stream(value.device), self._pinned(bucket)
        stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.stream(stream):
            pinned.copy_(value, non_blocking=True)
        stream.synchronize()
        return pinned.numpy()

    def from_host(self, array: np.ndarray, bucket: Bucket) -> torch.Tensor:
        """Return a view, or a copy on the device that a separate stream makes from pinned memory."""
        value, device = torch.from_numpy(array), self._kinds[bucket.kind][1]
        if device.type != "cuda":
            return value.to(device)
        stream, pinned = self._stream(device), self._pinned(bucket)
        pinned.copy_(value)
        with torch.cuda.stream(stream):
            value = pinned.to(device, non_blocking=True)
        stream.synchronize()
        value.record_stream(torch.cuda.current_stream(device))
        return value

    def to_bytes(self, value: torch.Tensor) -> bytes:
        """Return the raw memory."""
        return value.cpu().numpy().tobytes()

    def save(self, store: Store[torch.Tensor]) -> dict[str, Any]:
        """Return copies by name; or the tensors themselves, inside ``lending()``."""
        pairs = zip(store.layout.specs, store.tensors(), strict=True)
        return {spec.name: tensor if lends() else tensor.clone() for spec, tensor in pairs}

    def load(self, store: Store[torch.Tensor], tensors: dict[str, Any]) -> None:
        """Copy tensors by name, from any device."""
        for spec, tensor in zip(store.layout.specs, store.tensors(), strict=True):
            tensor.copy_(tensors[spec.name])

    def store_of(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> Store[torch.Tensor]:
        """Return named tensors as a store, which leaves them in place."""
        specs = []
        for name, tensor in pairs:
            shard = shard_of(tensor)
            dtype = _accumulation_dtype(name, shard)
            kind = self._kind(dtype, shard.device)
            specs.append(TensorSpec(name, tuple(as_real(shard).shape), kind, dtype.itemsize))
        tensors = [tensor for _, tensor in pairs]
        store = ComplexTensorStore if any(map(torch.is_complex, tensors)) else TensorStore
        return store(Layout(specs, self.bucket_bytes), tensors, self._empty)

    def _kind(self, dtype: torch.dtype, device: torch.device) -> str:
        """Return an arena's name, the same on all ranks whatever the device index on each."""
        devices = list(dict.fromkeys(d for _, d in self._kinds.values()))
        index = devices.index(device) if device in devices else len(devices)
        kind = f"{str(dtype).removeprefix('torch.')} on {device.type} {index}"
        self._kinds[kind] = (dtype, device)
        return kind

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _pinned(self, bucket: Bucket) -> torch.Tensor:
        key = (bucket.kind, bucket.index, bucket.size)
        if key not in self._staging:
            self._staging[key] = torch.empty(bucket.size, dtype=self._kinds[bucket.kind][0], pin_memory=True)
        return self._staging[key]

    def _empty(self, bucket: Bucket) -> torch.Tensor:
        dtype, device = self._kinds[bucket.kind]
        return torch.empty(bucket.size, dtype=dtype, device=device)


@contextmanager
def _range_with_nvtx(name: str) -> Iterator[None]:
    with torch.profiler.record_function(name), torch.cuda.nvtx.range(name):
        yield


def _chunks(tensors: Sequence[torch.Tensor], nbytes: int) -> list[slice]:
    """Return slices of a list of tensors, each of at most ``nbytes`` bytes, or of a single tensor."""
    starts, filled = [0], 0
    for i, tensor in enumerate(tensors):
        filled += tensor.numel() * tensor.element_size()
        if filled > nbytes and i > starts[-1]:
            starts.append(i)
            filled = tensor.numel() * tensor.element_size()
    return [slice(start, stop) for start, stop in pairwise([*starts, len(tensors)])]


def _where_there(gradients: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that have a gradient."""
    return [tensor for tensor, gradient in zip(tensors, gradients, strict=True) if gradient is not None]


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a gradient that the local rule may change in place: autograd may leave a lazy conjugate."""
    if parameter.grad is not None and parameter.grad.is_conj():
        parameter.grad = parameter.grad.resolve_conj()
    return parameter.grad


def _held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _signatures(
    named: Sequence[tuple[str, str, torch.Tensor]],
) -> list[tuple[torch.dtype, torch.Size, torch.device, bool]]:
    return [(tensor.dtype, tensor.shape, tensor.device, tensor.is_conj()) for _, _, tensor in named]


def _describe(dtype: torch.dtype, shape: torch.Size, device: torch.device, conj: bool) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}{' with the conj bit set' if conj else ''}"


def _accumulation_dtype(name: str, tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of a tensor in flat vectors."""
    if tensor.is_meta:
        raise ValueError(f"{name!r} is on the meta device and has no values: materialize the model first")
    if tensor.is_inference():
        raise ValueError(f"{name!r} was made in inference mode and cannot be written outside of it: .clone() it")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name!r} must be a dense tensor. Received: {tensor.layout}")
    if tensor.numel() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ValueError(f"{name!r} is an expanded tensor, whose elements share memory: .clone() it")
    if tensor.is_conj():
        raise ValueError(f"{name!r} is a lazy conjugate, with the conj bit set: .resolve_conj() it")
    if tensor.is_floating_point() or tensor.is_complex():
        return REALS.get(as_real(tensor).dtype, torch.float32)
    return INTEGERS.get(tensor.dtype, torch.int64)


def _sum_of_words(tensor: torch.Tensor) -> int | None:
    """Return the sum of the 64-bit words of a tensor, modulo 2⁶⁴; None if it does not consist of such words."""
    size = tensor.element_size()
    if not tensor.is_contiguous() or tensor.numel() * size % 8 or tensor.storage_offset() * size % 8:
        return None
    return int(tensor.reshape(-1).view(torch.int64).sum())
