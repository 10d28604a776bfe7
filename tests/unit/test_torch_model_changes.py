"""Changes of a model after construction are noticed: the quick comparison of its members agrees with the full one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvd_periodic.torch.model import NamedTensors  # noqa: E402

Change = Callable[[Any], object]


class Network(torch.nn.Module):
    """Two children are the same module; a tensor has two names; there are buffers, and a child is None."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = torch.nn.Linear(2, 2)
        self.c = torch.nn.Linear(2, 2)
        self.d = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        self.tied = self.c.weight
        self.none = None
        self.register_module("later", None)
        self.register_buffer("count", torch.zeros(1))


def unshared(network: Network) -> None:
    """``b`` becomes another module, of the same tensors."""
    other = torch.nn.Linear(2, 2)
    other.weight, other.bias = network.a.weight, network.a.bias
    network.b = other


def shared_otherwise(network: Network) -> None:
    """In place of ``a`` and ``b``, ``b`` and ``c`` are one module, with other names for the same members."""
    network.b = network.c


def renamed(network: Network) -> None:
    network.e = network.c
    del network.c


def renamed_in_place(network: Network) -> None:
    """The order stays the same."""
    network.d.add_module("last", network.d._modules.pop("1"))


def moved(network: Network) -> None:
    """The same names in the same order of another module."""
    network.d[0], network.d[1] = network.d[1], network.d[0]


def in_place_of_a_parameter(network: Network) -> None:
    part, tensor = network.d[0], network.d[0].bias
    del part.bias
    part.register_buffer("bias", tensor)


CHANGES: dict[str, tuple[Change, str | None]] = {
    "nothing": (lambda n: None, None),
    "a value": (lambda n: n.c.weight.data.zero_(), None),
    "the memory": (lambda n: setattr(n.c.weight, "data", torch.ones(2, 2)), None),
    "a parameter": (lambda n: setattr(n.c, "bias", torch.nn.Parameter(torch.zeros(2))), "c.bias"),
    "a parameter of a child": (lambda n: setattr(n.d[1], "bias", torch.nn.Parameter(torch.zeros(3))), "d.1.bias"),
    "no parameter": (lambda n: setattr(n.c, "bias", None), "c.bias"),
    "a new parameter": (lambda n: n.register_parameter("z", torch.nn.Parameter(torch.zeros(1))), "z"),
    "no tie": (lambda n: setattr(n.c, "weight", torch.nn.Parameter(torch.zeros(2, 2))), "c.weight"),
    "a tie": (lambda n: setattr(n.a, "bias", n.c.bias), "a.bias"),
    "a child": (lambda n: setattr(n, "later", torch.nn.Linear(1, 1)), "later.bias"),
    "a child without tensors": (lambda n: setattr(n, "later", torch.nn.ReLU()), None),
    "no child": (lambda n: delattr(n, "c"), "c.bias"),
    "another name": (renamed, "c.bias"),
    "another name in the same order": (renamed_in_place, "d.1.bias"),
    "a copy of a shared child": (unshared, None),
    "another shared child": (shared_otherwise, "b.bias"),
    "another order": (moved, "d.0.bias"),
    "an exchanged buffer": (lambda n: setattr(n, "count", torch.zeros(1)), "count"),
    "a new buffer": (lambda n: n.register_buffer("other", torch.zeros(1)), "other"),
    "a new local buffer": (lambda n: n.d.register_buffer("own", torch.zeros(1)), None),
    "a local buffer": (lambda n: setattr(n.d[1], "running_mean", torch.zeros(3)), None),
    "a local buffer in place of a parameter": (in_place_of_a_parameter, "d.0.bias"),
    "a local parameter": (lambda n: setattr(n.d[0], "weight", torch.nn.Parameter(torch.zeros(3, 2))), None),
}
"""Changes, with the name that is reported."""


def full(named: NamedTensors) -> NamedTensors:
    """The same tensors, whose names are always compared."""
    return replace(named, members=None)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str) -> None:
    network = Network()
    buffers = {"d.*": "local", "*": "average"}
    named = NamedTensors.of(network, buffers, {"d.0.weight": "local"})
    assert named.members is not None
    assert named.changed() is None
    change, found = CHANGES[name]
    change(network)
    assert full(named).changed() == found
    assert named.changed() == found


def test_a_change_is_noticed_until_it_is_undone() -> None:
    network = Network()
    named, kept = NamedTensors.of(network, None), network.c.bias
    network.c.bias = torch.nn.Parameter(torch.zeros(2))
    assert [named.changed(), named.changed()] == ["c.bias", "c.bias"]
    network.c.bias = kept
    assert named.changed() is None


class Listing(torch.nn.Module):
    """Lists a tensor that is no member of any module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.more = {"extra": torch.nn.Parameter(torch.zeros(2))}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield from super().named_parameters(*args, **kwargs)
        yield from self.more.items()


def test_a_change_that_only_its_class_knows_of_is_noticed() -> None:
    network = Listing()
    named = NamedTensors.of(network, None)
    assert named.members is None
    assert named.changed() is None
    network.more["extra"] = torch.nn.Parameter(torch.zeros(2))
    assert named.changed() == "extra"


def test_a_class_that_lists_its_tensors_from_now_on_is_noticed() -> None:
    class Later(Network):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            yield from super().named_parameters(*args, **kwargs)
            yield "extra", torch.nn.Parameter(torch.zeros(2))

    network = Network()
    named = NamedTensors.of(network, None)
    network.__class__ = Later
    assert named.changed() == "extra"


def test_names_are_compared_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the exchange of a small model does not spend its time on names."""
    network, compared = Network(), list[object]()
    named = NamedTensors.of(network, None)
    monkeypatch.setattr("hvd_periodic.torch.model._ids", lambda pairs: compared.append(pairs) or {})
    named.changed()
    assert not compared
    network.c.bias = torch.nn.Parameter(torch.zeros(2))
    named.changed()
    assert compared


def test_a_change_that_only_the_module_itself_knows_of_is_noticed() -> None:
    network = Network()
    named = NamedTensors.of(network, None)
    own, extra = network.named_parameters, ("extra", torch.nn.Parameter(torch.zeros(2)))
    network.named_parameters = lambda *args, **kwargs: [*own(*args, **kwargs), extra]
    assert named.changed() == "extra"
