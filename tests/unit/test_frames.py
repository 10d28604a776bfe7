"""What the package reads of the frames of Python."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from types import GeneratorType

from hvd_periodic.frames import arguments_of, calling_module, position, running_methods


class Caller:
    def ask(self) -> list[tuple[object, str, str]]:
        return list(running_methods())


def test_methods_are_told_from_the_innermost_outward() -> None:
    caller = Caller()
    methods = caller.ask()
    places = [
        i for i, (owner, name, module) in enumerate(methods) if (owner, name, module) == (caller, "ask", __name__)
    ]
    assert len(places) == 1
    assert methods[places[0] + 1][1:] == ("test_methods_are_told_from_the_innermost_outward", __name__)


def test_the_calling_module_is_the_one_before_those_between() -> None:
    assert calling_module(("hvd_periodic.",)) == __name__
    assert json.loads("{}", object_hook=lambda _: calling_module(("hvd_periodic.", __name__))).startswith("json.")


def test_the_arguments_of_a_generator() -> None:
    def generate(first: int, second: str = "x") -> Iterator[int]:
        yield first

    generator = generate(3)
    assert isinstance(generator, GeneratorType)
    assert arguments_of(generator) == {"first": 3, "second": "x"}
    assert list(generator) == [3]
    assert arguments_of(generator) == {}


def test_the_position_is_in_the_users_code() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(position()))
    thread.start()
    thread.join()
    assert found[0].startswith(f"test_the_position_is_in_the_users_code(), {__file__}:")
