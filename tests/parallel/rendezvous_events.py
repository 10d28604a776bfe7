"""Random events that happen to the workers of elastic jobs over torch.distributed: killed, stopped, ended, started."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from tests.conftest import PATIENCE
from tests.parallel.elastic_scenarios import expected
from tests.parallel.rendezvous_job import Job, numbered, rendezvous
from tests.parallel.rendezvous_scenarios import UNDISTURBED, read_file, replace_file

LEAST, MOST = 2, 5
"""Numbers of workers between which events keep a job; of islands, three at most."""

AHEAD = 40
"""Steps that workers may take beyond those that are known."""

BETWEEN, BETWEEN_SECONDS = 20, 5
"""Steps between two events at most, and seconds after which another one comes if nobody trains."""

SIGNALS = {"kill": signal.SIGKILL, "end": signal.SIGTERM, "stop": signal.SIGSTOP}

ACCURACY = 0.95
"""Of the center of digits, at least."""

SECONDS = 60
"""Within which the workers go on after an event."""


AT_ONCE = 7
"""Jobs that run at the same time."""


class EndedError(Exception):
    """A worker has ended before it should."""


class EventfulJob(Job):
    """A job to whose workers events happen.

    Args:
        name: of the scenario.
        folder: for its files.
        address: of the rendezvous.
        seed: decides on events, and as far as possible on their moments.
    """

    def __init__(self, name: str, folder: Path, address: str, seed: int) -> None:
        super().__init__(name, folder, address, MOST)
        self._most = 3 if self.scenario.inside else MOST
        self._random = random.Random(f"{name} {seed}")
        self._lost: set[int] = set()
        self._asleep: dict[int, tuple[float, int]] = {}
        self.happened: list[str] = []
        replace_file(folder / "fence", (AHEAD, False))

    def play(self, events: int) -> Iterator[None]:
        """Let events happen, then train to the end; yields wherever it waits."""
        with suppress(EndedError):
            yield from self._play(events)

    def _play(self, events: int) -> Iterator[None]:
        for _ in range(3):
            self.start()
        yield from self._settled()
        while len(self.events) < events:
            yield from self._train(self._random.randrange(BETWEEN), BETWEEN_SECONDS)
            active = len(self.processes) - len(self._lost)
            kinds = [*SIGNALS] * (len(self._active()) > LEAST) + ["start"] * 2 * (active < self._most)
            what = self._random.choice(kinds or ["wait"])  # For workers that have been started.
            if what == "wait":
                continue
            if what == "start":
                self.start()
                self._note(f"start {len(self.processes) - 1}")
            else:
                yield from self._lose(what)
        while self._asleep:
            yield from self._pause(0.1)
        yield from self._settled()
        replace_file(self.folder / "fence", (self._step() + self.scenario.steps, True))
        while any(process.poll() is None for process in self.processes):
            yield

    def _lose(self, what: str) -> Iterator[None]:
        """Kill, end or stop a worker. A second loss before the others have gone on may only be one too many."""
        if self.scenario.center != "replicated" or self._random.random() < 0.5:
            yield from self._settled(joined=False)
            yield from self._pause(self._random.uniform(0, 0.5))
        active, trained = self._active(), self._trained()
        if len(trained) < LEAST:
            return
        number = self._random.choice(sorted(active))
        others = [int(file.read_text()) for file in self.folder.glob(f"here.{number}.*")]
        process = self._random.choice([active[number], *others])
        os.kill(process, SIGNALS[what])
        self._note(f"{what} {number}")
        if what == "stop":
            self._asleep[number] = time.monotonic() + self.scenario.lost + self._random.uniform(1, 3), process
        else:
            self._lost.add(number)

    @property
    def events(self) -> list[str]:
        """The kinds of events that have happened, in their order; a worker that is woken up had been stopped."""
        kinds = (event.split()[1] for event in self.happened)
        return [kind for kind in kinds if kind != "wake"]

    def _note(self, what: str) -> None:
        self.happened.append(f"{time.strftime('%X')} {what}")

    def _active(self) -> dict[int, int]:
        """Return the processes of the workers that are neither stopped nor lost, by number, once they have begun."""
        files = {number: self.folder / f"here.{number}" for number in range(len(self.processes))}
        known = {number: file.read_text() for number, file in files.items() if file.exists()}
        gone = self._lost | self._asleep.keys()
        return {number: int(text) for number, text in known.items() if text and number not in gone}

    def _trained(self) -> set[int]:
        """Return the active processes in the newest stretch of training."""
        stretches = self.stretches()
        return set() if not stretches else set(self._active().values()) & {process for process, _ in stretches[-1][1]}

    def _settled(self, joined: bool = True) -> Iterator[None]:
        """Wait until no worker of the newest stretch is lost, and, if asked, all that are there take part."""
        deadline = time.monotonic() + PATIENCE * SECONDS
        while True:
            stretches, active = self.stretches(), self._active()
            last = {process for process, _ in stretches[-1][1]} if stretches else set()
            everyone = len(active) == len(self.processes) - len(self._lost | self._asleep.keys())
            if last and last <= set(active.values()) and (not joined or (everyone and last == set(active.values()))):
                return
            assert time.monotonic() < deadline, f"The workers have not gone on: {self.happened}\n{self.output()}"
            yield from self._pause(0.1)

    def _step(self) -> int:
        """Return a step at which the workers have been."""
        file = self.folder / "progress"
        return int(read_file(file)) if file.exists() else 0

    def _train(self, steps: int, seconds: float) -> Iterator[None]:
        """Let the workers take steps, or wait in vain."""
        to, until = self._step() + steps, time.monotonic() + seconds
        while self._step() < to and time.monotonic() < until:
            yield from self._pause(0.05)

    def _pause(self, seconds: float) -> Iterator[None]:
        """Wait; meanwhile, let the workers train, and wake those that have been stopped for long."""
        until = time.monotonic() + seconds
        while True:
            replace_file(self.folder / "fence", (self._step() + AHEAD, False))
            for number in [number for number, (when, _) in self._asleep.items() if when <= time.monotonic()]:
                os.kill(self._asleep.pop(number)[1], signal.SIGCONT)
                self._note(f"wake {number}")
            if any(self.processes[number].poll() is not None for number in self._active()):
                raise EndedError
            if time.monotonic() >= until:
                return
            yield

    def _starved(self) -> bool:
        """Return whether more workers were excluded than had been stopped: they got no processor for long.

        Together with one that was killed, that may be one too many for a center in shards.
        """
        stopped = sum(" stop " in event for event in self.happened)
        return self.output().count("The other ranks have gone on without this process") > stopped

    def check(self) -> None:
        """Compare what the workers have in the end with the equations."""
        about = f"{self.happened}\n{self.output()}"
        stretches, scenario = self.stretches(), self.scenario
        if self._starved() and "Shards of the center were lost together with their backups" in self.output():
            return
        last = [worker for worker, _ in stretches[-1][1]]
        assert all((self.folder / f"end.{rank}.json").exists() for rank in range(len(last))), about
        ends = [self.end(rank) for rank in range(len(last))]
        assert [end["pid"] for end in ends] == last, about
        for number in set(range(len(self.processes))) - self._lost:
            if int((self.folder / f"here.{number}").read_text()) in last:
                assert self.processes[number].poll() == 0, about
            else:  # It got no processor for so long that the others have ended without it.
                assert "is over" in (self.folder / f"output.{number}").read_text(), about
        others = [json.loads(file.read_text()) for file in self.folder.glob("end.*.*.json")]  # Of islands.
        for end in [*ends, *others]:
            assert end["center"] == ends[0]["center"], about
        if scenario.digits:
            assert ends[0]["accuracy"] >= ACCURACY, about
            return
        begun: list[tuple[np.ndarray, list[np.ndarray]]] = []
        center, workers = expected(
            scenario.algorithm,
            numbered(stretches),
            overlap=scenario.overlap,
            int8=scenario.int8,
            steps=ends[0]["steps"],
            forgetting=self.forgetting(),
            begun=begun,
        )
        for (there, replicas), stretch in zip(begun, self.begun(), strict=True):
            for line, x in zip(stretch, replicas, strict=True):
                for had, wanted in ((line.get("x"), x), (line.get("center"), there)):
                    if had is not None:
                        np.testing.assert_allclose(had, wanted, rtol=0, atol=1e-9, err_msg=f"{line}\n{about}")
        for end, worker in zip(ends, workers.values(), strict=True):
            np.testing.assert_allclose(end["center"], center, rtol=0, atol=1e-9, err_msg=about)
            np.testing.assert_allclose(end["x"], worker.x, rtol=0, atol=1e-9, err_msg=about)


def play(folders: Mapping[str, Path], events: int, seed: int) -> dict[str, EventfulJob]:
    """Run jobs, some at the same time, with events in each; return them, ended.

    Raises:
        AssertionError: the workers of one have not gone on.
    """
    with rendezvous() as address:
        jobs = {name: EventfulJob(name, folder, address, seed) for name, folder in folders.items()}
        waiting = list(jobs.values())
        running: dict[EventfulJob, Iterator[None]] = {}
        deadline = time.monotonic() + PATIENCE * (SECONDS + 20 * events)
        try:
            while waiting or running:
                for job in waiting[: AT_ONCE - len(running)]:
                    waiting.remove(job)
                    running[job] = job.play(0 if job.name in UNDISTURBED else events)
                for job, events_of_job in list(running.items()):
                    if next(events_of_job, True) is True:
                        job.stop()
                        del running[job]
                assert time.monotonic() < deadline, "\n".join(job.output() for job in running)
                time.sleep(0.02)
            return jobs
        finally:
            for job in jobs.values():
                job.stop()
