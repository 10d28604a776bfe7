"""Copies of an optimizer in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from hvd_periodic.tensorflow.lifecycle import ExchangeLifecycle


class CopiedUnused:
    """An optimizer whose copies have not been used: of the same arguments, but of no model, and without any state.

    Those of ``copy`` exchange with the same ranks; those of ``pickle`` are told of them, as loaded ones are. The files
    that the original writes, and those inside of it, are not theirs: they write none.
    """

    _lifecycle: ExchangeLifecycle

    def __reduce__(self) -> tuple[Any, ...]:
        kind: Any = type(self)
        return kind.from_config, (_without_files(self.get_config()),)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made, arguments = self.__reduce__()
        copied = memo[id(self)] = made(*arguments)
        original, copy = self, copied
        while isinstance(copy, CopiedUnused):
            copy._lifecycle.binding.follow(original._lifecycle.binding)
            original, copy = original.inner_optimizer, copy.inner_optimizer  # type: ignore[attr-defined]
        return copied

    def __copy__(self) -> Self:
        return self.__deepcopy__({})


def _without_files(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of which no optimizer writes a file, nor one inside of it."""
    inside = config.get("optimizer")
    inner = {} if inside is None else {"optimizer": {**inside, "config": _without_files(inside["config"])}}
    return {**config, **inner, **{key: none for key, none in _NO_FILES.items() if key in config}}


_NO_FILES = {"run_log": False, "center_file": None}
