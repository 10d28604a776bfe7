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
    ("mpirun", 2, "tensorflow"),
    ("torchrun", 2, "torch"),
    thorough(("mpirun", 2, "numpy")),
    thorough(("horovodrun --gloo", 2, "torch")),
    thorough(("mpirun", 3, "numpy")),
    thorough(("mpirun, MPI", 2, "torch")),
    thorough(("mpirun, MPI", 2, "tensorflow")),
    thorough(("horovodrun --gloo", 2, "tensorflow")),
    thorough(("horovodrun --mpi", 2, "torch")),
]

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: " ".join(map(str, job)) if isinstance(job, tuple) else job)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What each rank of one job reports; all tests of a job share it. Horovod's own warnings are off."""
    launcher, size, framework = request.param
    shared = shared_by(framework)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVD_PERIODIC_WARN_SECONDS", "0.3")
        patch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
        folder = tmp_path_factory.mktemp("job")
        return run_scenarios(launcher, size, "waiting_scenarios", folder, 200, framework, framework=shared)


def shared_by(framework: str) -> str | None:
    """Return what ranks share the imports of; skip a test whose framework is not installed."""
    pytest.importorskip("mpi4py" if framework == "numpy" else f"horovod.{framework}")
    return None if framework == "numpy" else framework


def naming_rank_1(texts: list[str]) -> str:
    """Return the first warning that names the rank which is held up: others may be of what is slow."""
    return next(text for text in texts if "rank 1" in text and ("it is in " not in text or "holding_up()" in text))


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
        assert "has not arrived" in text
        if step is not None:
            assert f"rank 1 at local step {step} has not arrived: it is in holding_up(), " in text
            assert "waiting_scenarios.py:" in text


def test_among_some_of_the_ranks(ranks: Reports) -> None:
    told = ranks[0]["some_ranks"]
    assert " s in construction of an optimizer: rank 1" in naming_rank_1(told["construction"])
    assert ": rank 1 at local step 2 has not arrived: it is in holding_up(), " in naming_rank_1(told["exchange"])
    assert [report["some_ranks"] for report in ranks[2:]] == [{}] * len(ranks[2:])


def test_nobody_is_named_who_comes(ranks: Reports) -> None:
    """Once all but one are known to wait, that one alone is named."""
    texts = [text for report in waiting(ranks) for text in report["named_while_all_waited"]]
    assert len(texts) >= 8
    for text in texts:
        assert not re.search(r"rank [02]\b", text.partition(": ")[2]), text


def test_asynchronous_starts_and_ends(ranks: Reports) -> None:
    for told in column(waiting(ranks), "asynchronous"):
        assert "it is in holding_up(), " in naming_rank_1(told["start"])
        end = "in finalize() of asynchronous exchange: rank 1 at local step 4 has not arrived"
        assert end in naming_rank_1(told["end"])


HANG = "TimeoutError: Rank 0 has waited"
EXIT = "its program is over, or has called sys.exit()"
ENDS = {
    "hang": [HANG],
    "error": ["ValueError: a bad batch"],
    "interrupt": ["KeyboardInterrupt"],
    "exit": [EXIT, "SystemExit: 3"],  # Of what a graph has called, TensorFlow makes an error of its own.
    "exit 0": [EXIT],
}


def end(launcher: str, framework: str, *arguments: str) -> tuple[int, str]:
    """Return exit code and output of a job in which rank 1 ends."""
    command = ["-m", "tests.parallel.ending_program", framework, *arguments]
    return run(launcher, 2, command, 120, shared_by(framework))


def last_told(output: str, how: str) -> str:
    """Return the last line that says what has ended rank 1; nothing but what launchers say is below."""
    told = [line for line in output.splitlines() if any(text in line for text in ENDS[how])]
    assert told, output
    after = output[output.rindex(told[-1]) + len(told[-1]) :]
    assert "Error: " not in after.replace("RuntimeError: Horovod detected", ""), output
    return told[-1]


@pytest.mark.parametrize(
    ("launcher", "framework", "place", "how"),
    [
        ("mpirun", "torch", "loader", "exit"),
        ("horovodrun --gloo", "torch", "schedule", "error"),
        ("mpirun", "tensorflow", "callback", "error"),
        ("mpirun", "numpy", "loader", "interrupt"),
        *(
            thorough(launcher, framework, place, how)
            for launcher, framework, of_ends in (
                ("mpirun", "torch", {"error": "closure", "interrupt": "exchange"}),
                ("mpirun", "tensorflow", {"interrupt": "schedule", "exit": "training"}),
                ("horovodrun --gloo", "torch", {"interrupt": "closure", "exit": "exchange"}),
                ("horovodrun --gloo", "tensorflow", {"error": "loader", "interrupt": "callback", "exit": "training"}),
                ("horovodrun --mpi", "torch", {"error": "loader", "interrupt": "callback", "exit": "closure"}),
                ("horovodrun --mpi", "tensorflow", {"error": "exchange", "interrupt": "training", "exit": "schedule"}),
            )
            for how, place in of_ends.items()
        ),
        thorough("mpirun", "numpy", "exchange", "error"),
        thorough("mpirun", "numpy", "training", "exit 0"),
    ],
)
def test_what_ends_one_rank_ends_all_and_is_told_last(
    launcher: str, framework: str, place: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every place of a program, and of every kind, at least once under each launcher."""
    monkeypatch.setenv("HVD_PERIODIC_WARN_SECONDS", "0")
    code, output = end(launcher, framework, place, how)
    assert code != 0
    if how == "exit" and EXIT not in output and "SystemExit" not in output:
        # It has said nothing itself, and the launcher was faster than the others in ending them: it says why.
        assert re.search(r"exit.* (code|status)\D+3\b", output, re.IGNORECASE), output
        return
    told = last_told(output, how)
    if how == "exit":
        assert re.search(r"rank 1 at local step \d has ended: |Rank 1 of 2 has ended at local step \d", told)


def test_many_ranks_end_with_one_traceback() -> None:
    """And with one line that says which rank has failed, below which is only what the launcher says."""
    code, output = run("mpirun", 4, ["-m", "tests.parallel.ending_program", "numpy", "loader", "error"], 120)
    assert code != 0
    assert output.count("Traceback (most recent call last)") == 1, output
    told = last_told(output, "error")
    assert told.startswith("Rank 1 of 4 has ended at local step 4, and the job with it: ValueError: a bad batch"), (
        output
    )


@pytest.mark.parametrize(
    ("launcher", "framework"),
    [
        ("mpirun", "torch"),
        ("mpirun", "numpy"),
        thorough("mpirun", "tensorflow"),
        *(thorough("horovodrun --gloo", framework) for framework in ("torch", "tensorflow")),
        *(thorough("horovodrun --mpi", framework) for framework in ("torch", "tensorflow")),
    ],
)
def test_a_rank_that_never_comes_ends_all(launcher: str, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_PERIODIC_WARN_SECONDS", "0")
    code, output = end(launcher, framework, "training", "hang")
    assert code != 0
    told = last_told(output, "hang")
    assert "rank 1 at local step 4 has not arrived: it is in end_at(), " in told
    assert "in exchange of optimizer 1 at local step 6" in told


@pytest.mark.parametrize(
    ("launcher", "framework", "place", "how"),
    [
        ("mpirun", "tensorflow", "callback", "exit"),
        ("mpirun", "numpy", "training", "exit 0"),
        thorough("mpirun", "torch", "closure", "exit 0"),
        thorough("mpirun", "tensorflow", "training", "exit 0"),
        thorough("horovodrun --mpi", "torch", "loader", "exit"),
    ],
)
def test_who_exits_in_asynchronous_training_is_done(launcher: str, framework: str, place: str, how: str) -> None:
    code, output = end(launcher, framework, place, how, "asynchronous")
    assert code == (0 if how == "exit 0" else 3), output
    assert "Rank 1 exits without finalize(), and waits for the others" in output


def test_who_exits_in_asynchronous_training_is_not_waited_for_elsewhere() -> None:
    """It comes to nothing but the end of the others."""
    code, output = end("mpirun", "torch", "loader", "exit 0", "asynchronous", "broadcast")
    assert code != 0
    place = "Rank 0 waits in broadcast() of optimizer 1 at local step 8"
    assert f"RuntimeError: {place}, and rank 1 at local step 4 has ended: {EXIT}" in output


@pytest.mark.parametrize(
    ("framework", "place"), [("numpy", "training"), thorough("torch", "closure"), thorough("tensorflow", "callback")]
)
def test_an_interrupt_in_asynchronous_training_ends_all(framework: str, place: str) -> None:
    code, output = end("mpirun", framework, place, "interrupt", "asynchronous")
    assert code != 0
    assert "KeyboardInterrupt" in output


def test_who_exits_in_an_asynchronous_exchange_ends_all() -> None:
    """A holder of the center could wait for the rest of it."""
    code, output = end("mpirun", "numpy", "exchange", "exit 0", "asynchronous")
    assert code != 0
    assert "Rank 1 failed in asynchronous training; ending the job" in output
