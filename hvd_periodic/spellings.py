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


class RenamedMember(RenamedAttribute):
    """A member of a class, as that class or its bases have it, under its old name, which warns.

    Args:
        owner: the class, so that ``super()`` finds the member of a base.
        new: its name.
    """

    def __init__(self, owner: type, new: str) -> None:
        super().__init__(new)
        self._owner = owner

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        self._warn(instance)
        if self.new in vars(instance):
            return vars(instance)[self.new]
        found = next(vars(base)[self.new] for base in self._owner.__mro__ if self.new in vars(base))
        return found.__get__(instance, owner) if hasattr(found, "__get__") else found


def rename_members(owner: type, **names: str) -> None:
    """Give a class the new names of members that it, or a mixin, defines under their old names, with a warning.

    The old names can be read, called, set and found by ``super()``, with a warning, too.

    Args:
        owner: a subclass, in ``__init_subclass__`` of its base; or the base, once it is made.
        names: the new names, by the old ones.

    Example:
        >>> class Base:
        ...     size = 2
        ...     def __init_subclass__(cls, **kwargs):
        ...         super().__init_subclass__(**kwargs)
        ...         rename_members(cls, length="size")
        >>> rename_members(Base, length="size")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     class Setup(Base):
        ...         length = 3
        ...     print(Setup.size, caught[0].message)
        3 `Setup.length` is a spelling of version 0.1 and ends with the next version: write `size`
    """
    for old, new in names.items():
        for base in owner.__mro__:
            if old in vars(base) and not isinstance(vars(base)[old], RenamedMember):
                warn_old(f"`{base.__name__}.{old}`", f"`{new}`", 4)  # Its metaclass is a frame, too.
                setattr(owner, new, vars(base)[old])
                if old in vars(base).get("__annotations__", {}):  # of a dataclass
                    kinds = base.__annotations__
                    base.__annotations__ = {new if name == old else name: kind for name, kind in kinds.items()}
            if new in vars(base) or old in vars(base):
                break
        alias = RenamedMember(owner, new)
        alias.__set_name__(owner, old)
        setattr(owner, old, alias)
