"""Copies between host and device, on streams of a device that runs nothing before somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from hvd_periodic.torch.model import NamedTensors  # noqa: E402
from hvd_periodic.torch.replica import TorchReplica  # noqa: E402

DEVICE = torch.device("cuda", 0)


class Stream:
    """A queue of work, which runs in order, as late as possible."""

    def __init__(self, device: Any = None) -> None:
        self.queue: list[Callable[[], object]] = []

    def synchronize(self) -> None:
        """Run all work."""
        while self.queue:
            self.queue.pop(0)()

    def wait_stream(self, other: Stream) -> None:
        """Have later work wait for the work that the other stream has now."""
        earlier = list(other.queue)

        def run() -> None:
            for work in earlier:
                if work in other.queue:
                    other.queue.remove(work)
                    work()

        self.queue.append(run)


class OnDevice(torch.Tensor):
    """A tensor on the device, with its values in ``held``."""

    held: Any
    recorded: list[Stream]

    @staticmethod
    def __new__(cls, held: Any) -> OnDevice:
        """Return a tensor like this one."""
        return torch.Tensor._make_wrapper_subclass(cls, held.size(), dtype=held.dtype, device=DEVICE)

    def __init__(self, held: Any) -> None:
        self.held, self.recorded = held, []

    def record_stream(self, stream: Any) -> None:
        """Note that this stream uses the memory as well."""
        self.recorded.append(stream)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse whatever the device below does not know."""
        raise NotImplementedError(f"{function} on the host")


class Device(TorchDispatchMode):
    """Queues copies that do not block on the current stream; there is no pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.default = self.current = Stream()

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the host, or queue it."""
        kwargs = dict(kwargs or {})
        name = function._schema.name
        if name == "aten::copy_" and isinstance(args[1], OnDevice):
            target, source = args[0], args[1].held
            assert args[2:] == (True,) or kwargs.get("non_blocking"), "a copy that blocks stops the training stream"
            self.current.queue.append(lambda: target.numpy().__setitem__(..., source.numpy()))
            return target
        if name == "aten::_to_copy" and kwargs.get("device") == DEVICE:
            assert kwargs["non_blocking"]
            source, made = args[0], OnDevice(torch.full_like(args[0], float("nan")))
            self.current.queue.append(lambda: made.held.numpy().__setitem__(..., source.numpy()))
            return made
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.using)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)  # There is nothing to initialize.
    return made


def replica() -> tuple[TorchReplica, Any]:
    """Return a replica whose vectors belong on the device, and the only bucket of it."""
    made = TorchReplica(NamedTensors.of([("x", torch.nn.Parameter(torch.zeros(3)))], None))
    (bucket,) = made.parameters.layout.buckets
    made._kinds[bucket.kind] = (torch.float32, DEVICE)
    return made, bucket


def test_a_copy_to_the_host_waits_for_the_training_stream_and_the_host_for_the_copy(device: Device) -> None:
    of_rank, bucket = replica()
    value = OnDevice(torch.zeros(3))
    device.default.queue.append(lambda: value.held.fill_(7.0))  # A kernel of the last local step.
    with device:
        found = of_rank.to_host(value, bucket)
    assert found.tolist() == [7.0] * 3
    assert not device.default.queue


def test_a_copy_to_the_device_is_complete_before_its_memory_is_used_again(device: Device) -> None:
    of_rank, bucket = replica()
    with device:
        first: Any = of_rank.from_host(np.full(3, 1.0, np.float32), bucket)
        second: Any = of_rank.from_host(np.full(3, 2.0, np.float32), bucket)
    assert (first.held.tolist(), second.held.tolist()) == ([1.0] * 3, [2.0] * 3)
    assert first.recorded == second.recorded == [device.default], "the allocator must not give it away too early"


def test_copies_leave_the_training_stream_alone(device: Device) -> None:
    """Work that it gets after a copy to the device does not run before somebody waits for it."""
    of_rank, bucket = replica()
    ran: list[bool] = []
    device.default.queue.append(lambda: ran.append(True))
    with device:
        of_rank.from_host(np.zeros(3, np.float32), bucket)
    assert not ran
