"""Reads a trace back as viewers do, and says what they would show wrongly or leave out.

The rules are those of Google's "Trace Event Format", and of Perfetto where it is stricter (importers/json of its trace
processor): slices of a thread lie in each other or apart, a thread is found by its number alone, flow identifiers are
64-bit integers, a flow begins and ends at the slice that is open on its thread just then.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

Event = Mapping[str, Any]
Thread = tuple[int, int]

FIELDS = {
    "X": {"name": str, "cat": str, "ph": str, "ts": int, "dur": int, "pid": int, "tid": int, "args": dict},
    "s": {"name": str, "cat": str, "ph": str, "ts": int, "id": int, "pid": int, "tid": int},
    "f": {"name": str, "cat": str, "ph": str, "ts": int, "id": int, "pid": int, "tid": int, "bp": str},
    "M": {"name": str, "ph": str, "pid": int, "tid": int, "args": dict},
}
"""Of each phase: all that it has, and of which type. Whole microseconds: what is equal stays equal in any unit."""

METADATA = {"process_name": {"name": str}, "thread_name": {"name": str}, "process_sort_index": {"sort_index": int}}


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a trace, which viewers read without losing any of it.

    Raises:
        AssertionError: they would not; it says all that is wrong.
    """

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    trace = json.loads(text, parse_constant=refuse)
    assert trace.keys() == {"displayTimeUnit", "traceEvents"}, sorted(trace)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    problems = list(_of_fields(events))
    if not problems:
        problems = [*_of_names(events), *_of_slices(events), *_of_flows(events)]
    assert not problems, "\n".join(problems)
    return list(events)


def _of_fields(events: list[Event]) -> Iterator[str]:
    for event in events:
        known = FIELDS.get(event.get("ph", ""))
        if known is None:
            yield f"no phase that is written here: {event}"
            continue
        if event.keys() != known.keys():
            yield f"{sorted(event.keys() ^ known.keys())} are missing, or unknown: {event}"
        wrong = [name for name in event.keys() & known.keys() if type(event[name]) is not known[name]]
        wrong += [name for name, value in event.items() if type(value) is int and not 0 <= value < 2**63]
        if wrong:
            yield f"{sorted(wrong)} are no values: {event}"
        if event.get("bp", "e") != "e":
            yield f"binds to the next slice: {event}"


def _of_names(events: list[Event]) -> Iterator[str]:
    """Each process and each thread has one name, before its first event, and a thread is of one process."""
    seen: Counter[tuple[str, int]] = Counter()
    process_of: dict[int, int] = {}
    for event in events:
        process, thread = event["pid"], event["tid"]
        if process_of.setdefault(thread, process) != process:
            yield f"thread {thread} is of processes {process} and {process_of[thread]}"
        if event["ph"] == "M":
            known = METADATA.get(event["name"], {})
            if not known or {name: type(value) for name, value in event["args"].items()} != known:
                yield f"no metadata: {event}"
            seen[event["name"], thread if event["name"] == "thread_name" else process] += 1
        elif not (seen["process_name", process] and seen["thread_name", thread]):
            yield f"comes before process {process} and thread {thread} are named: {event}"
    yield from (f"{name} of {number} comes {times} times" for (name, number), times in seen.items() if times != 1)


def _of_slices(events: list[Event]) -> Iterator[str]:
    """Slices of a thread are in the order of time, the outer ones first, and lie in each other or apart."""
    open_ones: dict[Thread, list[Event]] = defaultdict(list)
    latest: dict[Thread, int] = {}
    for event in (event for event in events if event["ph"] == "X"):
        thread, begin = (event["pid"], event["tid"]), event["ts"]
        stack = open_ones[thread]
        if begin < latest.get(thread, 0):
            yield f"begins before the slice before: {event}"
        latest[thread] = begin
        # What has no length may lie at either end of another one.
        while stack and _end(stack[-1]) <= begin and not _end(event) <= _end(stack[-1]):
            stack.pop()
        if stack and _end(event) > _end(stack[-1]):
            yield f"ends after the slice that it begins in, {stack[-1]}: {event}"
        stack.append(event)


def _of_flows(events: list[Event]) -> Iterator[str]:
    """A flow has one beginning and one end, later or at once, each in a slice of its thread that is there by then."""
    slices: dict[Thread, list[Event]] = defaultdict(list)
    flows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        thread = event["pid"], event["tid"]
        if event["ph"] == "X":
            slices[thread].append(event)
        elif event["ph"] in "sf":
            flows[event["id"]].append(event)
            if not any(each["ts"] <= event["ts"] <= _end(each) for each in slices[thread]):
                yield f"is in no slice: {event}"
    for number, parts in flows.items():
        if [part["ph"] for part in parts] != ["s", "f"]:
            yield f"flow {number} is not a beginning and an end: {parts}"
        elif parts[0]["ts"] > parts[1]["ts"]:
            yield f"flow {number} ends before it begins: {parts}"
        elif len({(part["name"], part["cat"]) for part in parts}) > 1:
            yield f"flow {number} has two names: {parts}"


def _end(event: Event) -> int:
    return int(event["ts"] + event["dur"])
