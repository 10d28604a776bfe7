"""Who does not come is named by all that wait; what ends one rank ends all, and is told last."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.parallel.launch import run, run_scenarios
from tests.parallel.program import column
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.torch")

pytestmark = pytest.mark.timeout(300)

JOBS = [
    ("mpirun", 3, "torch"),
    ("horovodrun --gloo", 2, "torch"),
    ("mpirun", 2, "tensorflow"),
    thorough(("horovodrun --gloo", 2, "tensorflow")),
    thorough(("horovodrun --mpi", 2, "torch")),
]

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: " ".join(map(str, job)) if isinstance(job, tuple) else job)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What each rank of one job reports; all tests of a job share it. Horovod's own warnings are off."""
    launcher, size, framework = request.param
    pytest.importorskip(f"horovod.{framework}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_PERIODIC_WARN_SECONDS", "0.3")
        patch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
        folder = tmp_path_factory.mktemp("job")
        return run_scenarios(launcher, size, "waiting_scenarios", folder, 200, framework, framework=framework)


def naming_rank_1(texts: list[str]) -> str:
    """Return the first warning that names the rank which is held up until then: later ones may be of what is slow."""
    return next(text for text in texts if "rank 1" in text)


def waiting(ranks: Reports) -> Reports:
    return [report for rank, report in enumerate(ranks) if rank != 1]


@pytest.mark.parametrize(
    ("when", "place", "step"),
    [
        ("construction", "construction of an optimizer", None),
        ("first step", "first step of optimizer 1", 0),
        ("exchange", "exchange of optimizer 1 at local step 3", 2),
        ("center", "center()", 3),
        ("distance", "distance()", 3),
        ("finalize", "finalize() of optimizer 1 at local step 4", 4),
    ],
)
def test_a_rank_that_does_not_come_is_named(when: str, place: str, step: int | None, ranks: Reports) -> None:
    for texts in column(waiting(ranks), "course_of_training", when):
        text = naming_rank_1(texts)
        assert f" s in {place}: rank 1" in text
        assert "does not come" in text
        if step is not None:
            assert f"rank 1 at local step {step} does not come: it is in holding_up(), " in text
            assert "waiting_scenarios.py:" in text


def test_among_some_of_the_ranks(ranks: Reports) -> None:
    told = ranks[0]["some_ranks"]
    assert " s in construction of an optimizer: rank 1" in naming_rank_1(told["construction"])
    assert ": rank 1 at local step 2 does not come: it is in holding_up(), " in naming_rank_1(told["exchange"])
    assert [report["some_ranks"] for report in ranks[2:]] == [{}] * len(ranks[2:])


def test_nobody_is_named_who_comes(ranks: Reports) -> None:
    """Once all but one are known to wait, that one alone is named."""
    texts = [text for report in waiting(ranks) for text in report["named_while_all_waited"]]
    assert len(texts) >= 8
    for text in texts:
        assert not re.search(r"rank [02]\b", text.partition(": ")[2]), text


def test_asynchronous_starts_and_ends(ranks: Reports) -> None:
    for told in column(waiting(ranks), "asynchronous"):
        if told is not None:
            assert "it is in holding_up(), " in naming_rank_1(told["start"])
            assert "in finalize() of asynchronous exchange: rank 1 at local step 4 does not come" in naming_rank_1(
                told["end"]
            )


ENDS = {
    "hang": "TimeoutError: Rank 0 has waited",
    "error": "ValueError: a bad batch",
    "interrupt": "KeyboardInterrupt",
    "exit": "its program is over, or has called sys.exit()",
}


@pytest.mark.parametrize(
    ("launcher", "framework", "end"),
    [
        ("mpirun", "torch", "hang"),
        ("mpirun", "torch", "exit"),
        ("horovodrun --gloo", "torch", "error"),
        ("mpirun", "tensorflow", "hang"),
        ("mpirun", "tensorflow", "error"),
        *(
            thorough(launcher, framework, end)
            for launcher in ("mpirun", "horovodrun --gloo", "horovodrun --mpi")
            for framework in ("torch", "tensorflow")
            for end in ENDS
        ),
    ],
)
def test_what_ends_one_rank_ends_all_and_is_told_last(
    launcher: str, framework: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(f"horovod.{framework}")
    monkeypatch.setenv("HVD_PERIODIC_WARN_SECONDS", "0")
    code, output = run(launcher, 2, ["-m", "tests.parallel.ending_program", framework, end], 120, framework)
    assert code != 0
    told = [line for line in output.splitlines() if ENDS[end] in line]
    assert told, output
    after = output[output.rindex(told[-1]) + len(told[-1]) :]
    assert "Error: " not in after.replace("RuntimeError: Horovod detected", ""), "only launchers have more to say"
    if end == "hang":
        assert "rank 1 at local step 4 does not come: it is in end(), " in told[-1]
        assert "in exchange of optimizer 1 at local step 6" in told[-1]
    else:
        assert "rank 1 at local step 4 has ended: " in told[-1]
