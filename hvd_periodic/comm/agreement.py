"""Agreement between ranks: on their configuration at the start, on their variables later."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from hvd_periodic.ranks import by_value, named

T = TypeVar("T")


class Ranks(Protocol):
    """Ranks that can gather objects: a communicator, or all ranks that train together."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def global_rank(self) -> int:
        """Global rank of this process."""

    def allgather_object(self, value: object, name: str) -> list[Any]:
        """Return the values of all ranks, in rank order."""


def build_on_all(communicator: Ranks, name: str, build: Callable[[], T]) -> T:
    """Return ``build()``, or raise on every rank if it raises on any.

    Otherwise, a rank that rejects its arguments would leave the others waiting for it.

    Raises:
        Exception: the error that ``build`` raised on this rank.
        RuntimeError: ``build`` succeeded here and raised elsewhere.
    """
    failure: Exception | None = None
    result: T | None = None
    try:
        result = build()
    except Exception as error:
        failure = error
    raise_on_all(communicator, name, failure)
    return result  # type: ignore[return-value]


def raise_on_all(communicator: Ranks, name: str, failure: Exception | None) -> None:
    """Raise on every rank if any rank reports a failure: the error itself there, a RuntimeError elsewhere."""
    report = failure and f"{type(failure).__name__}: {failure}"
    reports = communicator.allgather_object((communicator.global_rank, report), f"{name}.failures")
    if failure is not None:
        raise failure
    failed = {rank: report for rank, report in reports if report}
    if failed:
        rank, report = next(iter(failed.items()))
        raise RuntimeError(f"Rank {rank} failed ({len(failed)} of {communicator.size} ranks did): {report}")


def agree(communicator: Ranks, name: str, facts: Mapping[str, object], advice: str = "") -> None:
    """Raise on all ranks unless all report the same facts, compared as text.

    Digests are compared first, so that large models cost a few bytes per rank.

    Raises:
        ValueError: names the first fact that differs, its values and the ranks that hold them.
    """
    texts = {key: str(value) for key, value in facts.items()}
    digest = hashlib.sha256("\0".join(f"{key}={value}" for key, value in texts.items()).encode()).hexdigest()
    if len(set(communicator.allgather_object(digest, f"{name}.digest"))) == 1:
        return
    by_rank = dict(communicator.allgather_object((communicator.global_rank, texts), f"{name}.facts"))
    for key in dict.fromkeys(key for rank_facts in by_rank.values() for key in rank_facts):
        values = {rank: rank_facts.get(key, "nothing") for rank, rank_facts in by_rank.items()}
        if len(set(values.values())) > 1:
            told = f"All ranks must run the same optimizer. They differ in {key}: {by_value(values)}"
            raise ValueError(f"{told}. {advice}" if advice else told)
    raise ValueError("All ranks must run the same optimizer. They report the same facts in a different order")


ADVICE = (
    "Was a state restored on some ranks only, or hvd.join() called in place of finalize()? synchronizer.broadcast() "
    "takes the root's"
)


def audit(
    communicator: Ranks,
    name: str,
    vectors: Callable[[], Iterable[tuple[str, Any]]],
    advice: str = ADVICE,
) -> None:
    """Raise on all ranks unless all hold bitwise equal vectors.

    Args:
        communicator: the ranks.
        name: prefix of the names of collectives.
        vectors: yields vectors, or parts of vectors, as named buffers; called again if ranks differ.
        advice: the remedy if ranks differ.

    Raises:
        RuntimeError: names the ranks that differ from the first rank, and the first vector that differs.
    """
    digest = hashlib.sha256()
    for _, vector in vectors():
        digest.update(vector)
    digests = communicator.allgather_object((communicator.global_rank, digest.hexdigest()), f"{name}.audit")
    (base, expected), *others = digests
    different = [rank for rank, other in others if other != expected]
    if not different:
        return
    own = [(vector_name, hashlib.sha256(vector).digest()) for vector_name, vector in vectors()]
    of_ranks = communicator.allgather_object(own, f"{name}.audit.vectors")
    first = next((alike[0][0] for alike in zip(*of_ranks, strict=False) if len(set(alike)) > 1), "their number")
    raise RuntimeError(
        f"The center variables differ between ranks: {named(different)} from rank {base}, first in {first!r}. {advice}"
    )
