"""Converts nested values to JSON and named arrays, and back: exactly, and without pickle."""

from __future__ import annotations

import enum
import itertools
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_periodic.checkpoints.strides import strides_of, with_strides
from hvd_periodic.vectors.lending import Deferred

_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "OrderedDict": OrderedDict,
    "defaultdict": lambda pairs: defaultdict(None, pairs),
}
"""Mappings that are restored with their type; the default factory of a defaultdict is lost."""

KINDS = "?biufcSUmM"
"""Kinds of numpy dtypes that files can hold."""

_SCALAR = "scalar"
"""Marks a numpy scalar, as opposed to an array without dimensions."""

TREE = "tree"
"""Reserved name: in files it is the name of the JSON."""

_LARGEST = 2**63
"""Integers from here on are written in hexadecimal, because Python limits the digits of decimal integers."""


class Leaves:
    """Converts the values that a framework has instead of arrays; this one knows none, as for numpy alone."""

    def to_array(self, value: Any, copy: bool) -> tuple[np.ndarray, str] | None:
        """Return a tensor as an array that numpy can write, and the name of its kind; None for anything else.

        Args:
            value: a value that may be a tensor.
            copy: the array must not share memory with the tensor.
        """
        return None

    def from_array(self, array: np.ndarray, kind: str) -> Any:
        """Return the value that was passed to :meth:`to_array`.

        Raises:
            ValueError: a framework that is not this one has written the array.
        """
        raise ValueError(f"it holds a {kind}")

    def to_name(self, value: Any) -> str | None:
        """Return the name of a constant of the framework, such as a dtype; None for anything else."""
        return None

    def from_name(self, name: str) -> Any:
        """Return the value that was passed to :meth:`to_name`; raise as :meth:`from_array`."""
        raise ValueError(f"it holds {name!r} of a framework")


@dataclass(frozen=True)
class Content:
    """The content of a file.

    Attributes:
        tree: values that JSON can represent; every array is ``{"array": [name, kind]}``, or if it is not row-major
            ``{"array": [name, kind, strides]}``.
        arrays: arrays by name, which is the path to the array.
        deferred: arrays that are read only while they are written, by name.
    """

    tree: Any
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    deferred: dict[str, Deferred] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values()) + sum(a.nbytes for a in self.deferred.values())

    def finish(self) -> None:
        """Read the deferred arrays that were not written: other ranks may be waiting for them.

        Raises:
            Exception: the error of a collective that sends one of them, now or while it was written.
        """
        for array in self.deferred.values():
            if array.failure is not None:
                raise array.failure
            array.discard()


def encode(tree: Any, leaves: Leaves | None = None, *, copy: bool = False) -> Content:
    """Return nested values as JSON and arrays.

    In JSON, ``null``, booleans, numbers, strings and lists stand for themselves, except for floats that are not finite
    and very large integers. Any other value is an object with one key, which names its kind::

        {"dict": [[key, value], ...]}     also "Counter", "OrderedDict", "defaultdict"
        {"tuple": [value, ...]}           {"float": "nan"}           {"int": "0x8000000000000000"}
        {"array": [name, kind]}           kind: empty for numpy, otherwise as the framework says
        {"array": [name, kind, strides]}  of an array that is not row-major; in elements
        {"deque": [[value, ...], length]} {"enum": [module, class, member]}    {"name": constant of the framework}

    Args:
        tree: dicts, lists, tuples, deques, None, bools, ints, floats, strings, members of enums, arrays and tensors,
            including deferred ones.
        leaves: handles the tensors of a framework.
        copy: no array shares memory with a value.

    Raises:
        TypeError: a value of another type; names its path.

    Example:
        >>> content = encode({"epoch": 3, 7: (1.5, float("inf")), "w": np.zeros(2)})
        >>> content.tree
        {'dict': [['epoch', 3], [7, {'tuple': [1.5, {'float': 'inf'}]}], ['w', {'array': ['w', '']}]]}
        >>> decode(content)
        {'epoch': 3, 7: (1.5, inf), 'w': array([0., 0.])}
    """
    encoder = _Encoder(leaves or Leaves(), copy)
    return Content(encoder.encode(tree, ()), encoder.arrays, encoder.deferred)


def decode(content: Content, leaves: Leaves | None = None) -> Any:
    """Return the values that were passed to :func:`encode`.

    Raises:
        ValueError: the content is invalid.
    """
    return _decode(content.tree, content.arrays, leaves or Leaves())


class _Encoder:
    def __init__(self, leaves: Leaves, copy: bool) -> None:
        self._leaves, self._copy = leaves, copy
        self.arrays: dict[str, np.ndarray] = {}
        self.deferred: dict[str, Deferred] = {}

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Return a value as JSON."""
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if abs(value) < _LARGEST else {"int": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if type(value) is list:
            return [self.encode(item, (*path, i)) for i, item in enumerate(value)]
        if type(value) is tuple:
            return {"tuple": [self.encode(item, (*path, i)) for i, item in enumerate(value)]}
        if type(value).__name__ in _MAPPINGS and isinstance(value, dict):
            pairs = [[self.encode(key, (*path, key)), self.encode(item, (*path, key))] for key, item in value.items()]
            return {type(value).__name__: pairs}
        if type(value) is deque:
            return {"deque": [self.encode(list(value), path), value.maxlen]}
        if isinstance(value, enum.Enum) and _member(*_path_of(value)) is value:
            return {"enum": _path_of(value)}
        name = self._leaves.to_name(value)
        return self._encode_array(value, path) if name is None else {"name": name}

    def _encode_array(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Deferred):
            return self._encode_deferred(value, path)
        found = self._leaves.to_array(value, self._copy)
        if found is None and isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in KINDS:
            found = np.array(value, copy=self._copy or None), _SCALAR if isinstance(value, np.generic) else ""
        if found is None:
            where = f"{path[0]}{''.join(f'[{key!r}]' for key in path[1:])}" if path else "the value"
            of = f" of {value.dtype}" if isinstance(value, (np.ndarray, np.generic)) else ""
            raise TypeError(
                "A checkpoint holds dicts, lists, tuples, deques, numbers, strings, None, members of enums that a "
                f"module has by their name, arrays and tensors, but {where} is of type {type(value).__name__}{of}: "
                f"{value!r:.80}. Save its parts instead"
            )
        array, kind = found
        name = self._name("/".join(map(str, path)))
        self.arrays[name] = array
        strides = strides_of(array)
        return {"array": [name, kind] if strides is None else [name, kind, strides]}

    def _encode_deferred(self, value: Deferred, path: tuple[Any, ...]) -> Any:
        found, name = self._leaves.to_array(value.like, copy=False), self._name("/".join(map(str, path)))
        like, kind = (value.like, "") if found is None else found
        value.dtype, self.deferred[name] = like.dtype, value
        return {"array": [name, kind]}

    def _name(self, wanted: str) -> str:
        """Return a name that no other array has: different keys may have the same text."""
        names = (wanted if i == 1 else f"{wanted}#{i}" for i in itertools.count(1))
        return next(name for name in names if name not in self.arrays and name not in self.deferred and name != TREE)


def _decode(node: Any, arrays: Mapping[str, np.ndarray], leaves: Leaves) -> Any:
    if isinstance(node, list):
        return [_decode(item, arrays, leaves) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) != 1:
        raise ValueError(f"it has an object of {len(node)} keys instead of one")
    ((what, value),) = node.items()
    if what in _MAPPINGS:
        return _MAPPINGS[what]([(_decode(key, arrays, leaves), _decode(item, arrays, leaves)) for key, item in value])
    if what == "tuple":
        return tuple(_decode(item, arrays, leaves) for item in value)
    if what in ("float", "int"):
        return float(value) if what == "float" else int(value, 16)
    if what == "deque":
        return deque(_decode(value[0], arrays, leaves), value[1])
    if what == "enum":
        return _known_member(*value)
    if what == "name":
        return leaves.from_name(value)
    if what != "array":
        raise ValueError(f"it has a value of an unknown kind, {what!r}: a later version may have written it")
    name, kind, *strides = value
    if name not in arrays:
        raise ValueError(f"it lacks the array {name!r}")
    array = with_strides(arrays[name], *strides) if strides else arrays[name]
    if kind in ("", _SCALAR):
        return array[()] if kind else array
    return leaves.from_array(array, kind)


def _path_of(member: enum.Enum) -> list[Any]:
    return [type(member).__module__, type(member).__qualname__, member.name]


def _member(module: str, owner: str, name: str | None) -> enum.Enum | None:
    """Return a member of an enum in a module that is already imported: a file must not cause imports."""
    found: Any = sys.modules.get(module)
    for part in owner.split("."):
        found = getattr(found, part, None)
    return found.__members__.get(name or "") if isinstance(found, enum.EnumMeta) else None


def _known_member(module: str, owner: str, name: str) -> enum.Enum:
    found = _member(module, owner, name)
    if found is None:
        raise ValueError(f"it holds {owner}.{name} of the module {module}, which does not have it or was not imported")
    return found
