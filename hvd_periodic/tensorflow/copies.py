"""Copies of an optimizer in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from hvd_periodic.tensorflow.exchanges import Exchanges


class CopiedUnused:
    """An optimizer whose copies are unused: they have the same arguments, but no model and no state.

    Copies by ``copy`` exchange with the same ranks; copies by ``pickle`` learn the ranks later, like loaded optimizers.
    Copies, and the optimizers nested in them, write none of the original's files.
    """

    _exchanges: Exchanges

    def __reduce__(self) -> tuple[Any, ...]:
        kind: Any = type(self)
        return kind.from_config, (_without_files(self.get_config()),)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made, arguments = self.__reduce__()
        copied = memo[id(self)] = made(*arguments)
        original, copy = self, copied
        while isinstance(copy, CopiedUnused):
            copy._exchanges.connection.follow(original._exchanges.connection)
            original, copy = original.inner_optimizer, copy.inner_optimizer  # type: ignore[attr-defined]
        return copied

    def __copy__(self) -> Self:
        return self.__deepcopy__({})


def _without_files(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with which neither the optimizer nor nested ones write files."""
    inside = config.get("optimizer")
    inner = {} if inside is None else {"optimizer": {**inside, "config": _without_files(inside["config"])}}
    return {**config, **inner, **{key: none for key, none in _NO_FILES.items() if key in config}}


_NO_FILES = {"run_log": False, "center_file": None}
