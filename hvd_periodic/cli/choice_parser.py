"""Parses typed choices such as ``easgd(moving_rate=0.2),average``, with the names and arguments of the package.

A class of ``hvd_periodic`` is typed by its name, in upper or lower case; any other class is typed with its module:
``mine.Damped(rate=0.5)``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hvd_periodic
from hvd_periodic import Algorithm, Compression, Schedule, Wire
from hvd_periodic.arguments import require_int
from hvd_periodic.cli.usage_error import UsageError, as_usage_error
from hvd_periodic.schedules.conversion import as_schedule

Choice = tuple[str, Any]
"""The typed text, and the object that it denotes."""

_SHORT = {"averaging": "average"}
"""Short names of classes, which examples and documents use."""


def algorithms(text: str) -> list[Choice]:
    """Return the algorithms in a typed list.

    Example:
        >>> algorithms("easgd(moving_rate=0.2),average")
        [('easgd(moving_rate=0.2)', EASGD(moving_rate=0.2, beta=None, rho=0.0)), ('average', Averaging())]
    """
    return _chosen(text, _offered(Algorithm), "algorithm", Algorithm)


def periods(text: str) -> list[Choice]:
    """Return the schedules in a typed list.

    Example:
        >>> periods("10,every(20)")
        [('10', Every(period=10)), ('every(20)', Every(period=20))]
    """
    return _chosen(text, _offered(Schedule), "schedule", Schedule, lambda number: as_schedule(number, "--period"))


def integers(text: str, option: str) -> list[int]:
    """Return the integers in a typed list; each is at least 1.

    Example:
        >>> integers("1,10", "--period")
        [1, 10]
    """
    with as_usage_error():
        return [require_int(_number(word, int, option), f"`{option}`", 1) for word in text.split(",")]


def rates(text: str, option: str) -> list[float]:
    """Return the positive numbers in a typed list.

    Example:
        >>> rates("0.1,1e-2", "--learning-rate")
        [0.1, 0.01]
    """
    found = [_number(word, float, option) for word in text.split(",")]
    for rate in found:
        if not 0 < rate < float("inf"):
            raise UsageError(f"`{option}` must be positive and finite. Received: {rate!r}")
    return found


def compressions(text: str) -> list[Choice]:
    """Return the compressions in a typed list.

    Example:
        >>> compressions("none,topk(0.01)")
        [('none', Plain()), ('topk(0.01)', TopK(fraction=0.01))]
    """
    known = {name: value for name, value in vars(Compression).items() if not name.startswith("_")}
    return _chosen(text, known, "compression", Wire)


def user_object(path: str, option: str) -> Any:
    """Return the object that ``module:name`` names; modules in the current folder are found, too.

    Raises:
        UsageError: there is no such module, or it has no such name.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise UsageError(f"`{option}` must be module:name. Received: {path!r}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"`{option}`: {error}. Modules are looked up in this folder and on PYTHONPATH") from error
    for part in name.split("."):
        if not hasattr(found, part):
            public = [each for each in vars(found) if not each.startswith("_")]
            raise UsageError(f"`{option}`: {module} has no {name}. It has: {', '.join(public)}")
        found = getattr(found, part)
    return found


def _offered(kind: Any) -> dict[str, Any]:
    """Return the classes of a kind that the package offers, by the names under which they are typed."""
    found = (getattr(hvd_periodic, name) for name in hvd_periodic.__all__)
    classes = [
        each for each in found if inspect.isclass(each) and issubclass(each, kind) and not inspect.isabstract(each)
    ]
    names = {each.__name__.lower(): each for each in classes}
    return names | {short: names[name] for name, short in _SHORT.items() if name in names}


def _chosen(
    text: str, known: Mapping[str, Any], what: str, kind: Any, number: Callable[[int], Any] | None = None
) -> list[Choice]:
    """Return the choices that the expressions of a list denote."""
    listed = f"[{text.strip()}]"
    try:
        # Hyphens in names, as in post-local, are not minus signs; the replacement keeps the length.
        tree = ast.parse(re.sub(r"(?<=[A-Za-z])-(?=[A-Za-z])", "_", listed), mode="eval").body
    except SyntaxError as error:
        example = ",".join(sorted(known)[:2])
        raise UsageError(f"{what}s must be a list like {example}. Received: {text!r}") from error
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    if not nodes:
        raise UsageError(f"No {what} was given. Known: {', '.join(sorted(known))}")
    return [(str(ast.get_source_segment(listed, node)), _meant(node, known, what, kind, number)) for node in nodes]


def _meant(node: ast.expr, known: Mapping[str, Any], what: str, kind: Any, number: Callable[[int], Any] | None) -> Any:
    """Return the object that one expression denotes: a number, a name, or a name with arguments."""
    typed = ast.unparse(node)
    with as_usage_error(f"{what} {typed}"):
        if number is not None:
            try:
                value = ast.literal_eval(node)
            except ValueError:
                pass
            else:
                return number(value)
        call = isinstance(node, ast.Call)
        found = _named(node.func if isinstance(node, ast.Call) else node, known, what)
        if isinstance(node, ast.Call):
            arguments = [ast.literal_eval(each) for each in node.args]
            keywords = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
            if not callable(found):
                raise TypeError("it takes no arguments")
            found = found(*arguments, **keywords)
        elif callable(found):
            found = found()
        if not isinstance(found, kind):
            raise TypeError(
                f"it must be an instance of {kind.__name__}. Received: {type(found).__name__}{'' if call else found!r}"
            )
        return found


def _named(node: ast.expr, known: Mapping[str, Any], what: str) -> Any:
    """Return the object that a name of the package, or of a user's module, denotes."""
    name = ast.unparse(node)
    plain = name.replace("_", "").lower()
    if isinstance(node, ast.Attribute):
        module, _, attribute = name.rpartition(".")
        return user_object(f"{module}:{attribute}", f"--{what}")
    if plain in known:
        return known[plain]
    near = get_close_matches(plain, known, 1)
    guess = f" Did you mean {near[0]}?" if near else ""
    raise UsageError(f"Unknown {what} {name!r}.{guess} Known: {', '.join(sorted(known))}; or your own, as module.Class")


def _number(word: str, kind: Any, option: str) -> Any:
    try:
        return kind(word)
    except ValueError:
        numbers = "an int" if kind is int else "a number"
        raise UsageError(f"`{option}` must be {numbers}, or several with commas between. Received: {word!r}") from None
