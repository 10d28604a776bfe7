"""Spellings of version 0.1, which work for one version more, with a warning that says what to write."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

from hvd_periodic.arguments import refuse_both

P = ParamSpec("P")


def warn_old(old: str, new: str, stacklevel: int = 2) -> None:
    """Warn about a spelling of version 0.1.

    Args:
        old: what was written.
        new: what to write.
        stacklevel: frames between this call and the line that the warning names; 2: who called the caller.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_old("`f(old=...)`", "`new=`")
        >>> print(caught[0].message)
        `f(old=...)` is a spelling of version 0.1 and ends with the next version: write `new=`
    """
    warnings.warn(
        f"{old} is a spelling of version 0.1 and ends with the next version: write {new}",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )


def renamed(**names: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let a constructor take keyword arguments under their old names, too, with a warning.

    Args:
        names: the new names, by the old ones.

    Raises:
        TypeError: by the constructor: an argument is given under both names.

    Example:
        >>> class Setup:
        ...     @renamed(length="size")
        ...     def __init__(self, size):
        ...         self.size = size
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     print(Setup(length=3).size, caught[0].message)
        3 `Setup(length=...)` is a spelling of version 0.1 and ends with the next version: write `size=`
    """

    def decorate(construct: Callable[P, None]) -> Callable[P, None]:
        parameters = list(inspect.signature(construct).parameters)

        @wraps(construct)
        def translated(*args: P.args, **kwargs: P.kwargs) -> None:
            given: dict[str, Any] = dict(kwargs)
            for old in [name for name in names if name in given]:
                new = names[old]
                refuse_both(old, new, [*parameters[: len(args)], *given])
                warn_old(f"`{type(args[0]).__name__}({old}=...)`", f"`{new}=`")
                given[new] = given.pop(old)
            construct(*args, **given)

        return translated

    return decorate


class RenamedAttribute:
    """An attribute under its old name, which warns.

    Args:
        new: its name.

    Example:
        >>> class Setup:
        ...     length = RenamedAttribute("size")
        ...     size = 3
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     print(Setup().length, caught[0].message)
        3 `Setup.length` is a spelling of version 0.1 and ends with the next version: write `.size`
    """

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        self._warn(instance)
        return getattr(instance, self.new)

    def __set__(self, instance: Any, value: object) -> None:
        self._warn(instance)
        setattr(instance, self.new, value)

    def _warn(self, instance: object) -> None:
        warn_old(f"`{type(instance).__name__}.{self._old}`", f"`.{self.new}`", 3)


def rename_members(cls: type, stacklevel: int = 2) -> None:
    """Give members that a class defines under old names their new names, with a warning.

    Call it in ``__init_subclass__`` of a class that has a :class:`RenamedAttribute` for each of these members.

    Args:
        cls: the class.
        stacklevel: as in :func:`warn_old`.

    Example:
        >>> class Setup:
        ...     length = RenamedAttribute("size")
        ...     def __init_subclass__(cls):
        ...         rename_members(cls)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     class Own(Setup):
        ...         length = 3
        ...     print(Own().size, caught[0].message)
        3 `Own.length` is a spelling of version 0.1 and ends with the next version: write `.size`
    """
    for old, value in list(vars(cls).items()):
        inherited = next((vars(base)[old] for base in cls.__mro__[1:] if old in vars(base)), None)
        if isinstance(inherited, RenamedAttribute):
            warn_old(f"`{cls.__name__}.{old}`", f"`.{inherited.new}`", stacklevel + 1)
            setattr(cls, inherited.new, value)
            delattr(cls, old)
