"""The elastic sampler: every example of an epoch goes to exactly one rank, whatever comes and goes."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler  # noqa: E402

import hvd_periodic.torch as hvdp  # noqa: E402
import hvd_periodic.torch.sampler as sampler_module  # noqa: E402
from hvd_periodic.elastic.examples import left_after  # noqa: E402


class Ranks:
    """The ranks of a job, one after the other; a sampler asks for its own by ``communicator_of``."""

    rank, size = 0, 1
    samplers: Sequence[Any] = ()

    def gather_integers(self, mine: np.ndarray, name: str) -> np.ndarray:
        """Return what the samplers would tell each other."""
        told = [sampler._stretch[rank] for rank, sampler in enumerate(self.samplers)]
        assert told[self.rank] == tuple(mine)
        return np.array(told).reshape(-1)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Return the ranks; there is one."""
    found = Ranks()
    monkeypatch.setattr(sampler_module, "communicator_of", lambda given: found)
    return found


class Job:
    """A job whose ranks change.

    Args:
        ranks: whom samplers ask.
        data: the examples.
        epochs: how many.
        size: number of ranks at the start.
        shuffle: as the sampler takes it.
    """

    def __init__(self, ranks: Ranks, data: Sequence[int], epochs: int, size: int, shuffle: bool) -> None:
        self._ranks, self._data, self._epochs, self._shuffle = ranks, data, epochs, shuffle
        self.samplers: list[Any] = []
        self.kept: Counter[tuple[int, int]] = Counter()
        self._since: list[tuple[int, int]] = []
        self.change([], size)

    def change(self, staying: Sequence[int], joining: int) -> None:
        """Go on from the last commit with some of the ranks, and new ones."""
        stayed = [self.samplers[rank] for rank in staying]
        states = [copy.deepcopy(self.commits[rank]) for rank in staying]
        self._ranks.size, self._since = len(stayed) + joining, []
        self.samplers = []
        for rank in range(self._ranks.size):
            self._ranks.rank = rank
            joins = rank >= len(stayed)
            self.samplers.append(
                hvdp.elastic.ElasticSampler(self._data, self._shuffle, seed=5) if joins else stayed[rank]
            )
            if states:
                self.samplers[rank].load_state_dict(copy.deepcopy(states[0]) if joins else states[rank])
        self._loops = [self._loop(sampler) for sampler in self.samplers]
        self.commit()

    def commit(self) -> None:
        """Let all ranks commit."""
        self._ranks.samplers = [copy.copy(sampler) for sampler in self.samplers]
        for rank, sampler in enumerate(self.samplers):
            self._ranks.rank = rank
            sampler.gather()
        self.commits = [copy.deepcopy(sampler.state_dict()) for sampler in self.samplers]
        assert all(commit == self.commits[0] for commit in self.commits)
        self.kept.update(self._since)
        self._since = []

    def step(self, rank: int) -> bool:
        """Let one rank process a batch; return whether it has ended."""
        return next(self._loops[rank], None) is None

    def _loop(self, sampler: Any) -> Iterator[bool]:
        """Train on one rank, as the documentation says."""
        loader = DataLoader(self._data, batch_size=3, sampler=sampler)  # type: ignore[arg-type]
        for epoch in range(sampler.epoch, self._epochs):
            sampler.set_epoch(epoch)
            for number, batch in enumerate(loader):
                sampler.record_batch(number, 3)
                self._since += [(epoch, example) for example in batch.tolist()]
                yield True


@pytest.mark.parametrize("seed", range(12))
def test_every_example_goes_to_exactly_one_rank(ranks: Ranks, seed: int) -> None:
    """Ranks of different speed, in different epochs, are lost and join at random moments."""
    events = random.Random(seed)
    epochs, data = 4, range(events.randrange(20, 60))
    job = Job(ranks, data, epochs, events.randrange(1, 5), shuffle=seed % 2 == 0)
    for _ in range(15):
        for _ in range(events.randrange(6)):
            for rank in range(len(job.samplers)):
                if events.random() < 0.8:
                    job.step(rank)
            if events.random() < 0.3:
                job.commit()
        size = len(job.samplers)
        staying = events.sample(range(size), events.randrange(1, size + 1))
        job.change(sorted(staying), events.randrange(3) if len(staying) < 4 else 0)
    while not all(job.step(rank) for rank in range(len(job.samplers))):
        pass
    job.commit()
    assert job.kept == Counter((epoch, example) for epoch in range(epochs) for example in data)


def test_by_hand(ranks: Ranks) -> None:
    """Ten examples, three ranks, and one is lost after a commit, with what it has done since."""
    ranks.size, samplers = 3, []
    for ranks.rank in range(3):
        samplers.append(hvdp.elastic.ElasticSampler(range(10), shuffle=False))
    assert [list(sampler) for sampler in samplers] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert [len(sampler) for sampler in samplers] == [4, 3, 3]
    for sampler in samplers:
        sampler.record_batch(0, 2)
    ranks.samplers = samplers
    for ranks.rank, sampler in enumerate(samplers):
        sampler.gather()
    state = samplers[0].state_dict()
    assert state == {"data": "10 examples, not shuffled", "epoch": 0, "stretches": [[[0, 2], [0, 2], [0, 2]]]}
    samplers[2].record_batch(1, 2)  # It is lost with this.
    ranks.size = 2
    for ranks.rank in range(2):
        samplers[ranks.rank].load_state_dict(state)
    assert [list(sampler) for sampler in samplers[:2]] == [[6, 8], [7, 9]]
    assert left_after(np.arange(10), [[(0, 2)] * 3, [(0, 1), (0, 0)]], 0).tolist() == [7, 8, 9]


def test_the_order_is_that_of_the_distributed_sampler(ranks: Ranks) -> None:
    ranks.rank, ranks.size = 1, 2
    sampler, other = hvdp.elastic.ElasticSampler(range(8), seed=3), DistributedSampler(range(8), 2, 1, seed=3)  # type: ignore[arg-type,var-annotated]
    for epoch in (0, 4, 1):
        sampler.set_epoch(epoch)
        other.set_epoch(epoch)
        assert list(sampler) == list(other)


def test_iterations_of_one_epoch(ranks: Ranks) -> None:
    """One that was left begins where it was left; set_epoch with the current epoch changes nothing."""
    sampler = hvdp.elastic.ElasticSampler(range(5), shuffle=False)
    assert list(sampler) == list(sampler) == [0, 1, 2, 3, 4]
    sampler.record_batch(0, 2)
    sampler.set_epoch(0)
    assert list(sampler) == [2, 3, 4]
    assert len(sampler) == 3
    sampler.record_batch(1, 2)
    with pytest.raises(RuntimeError, match=r"Epoch 0 is over on this rank: call set_epoch\(\)"):
        iter(sampler)
    sampler.set_epoch(1)
    assert len(list(sampler)) == 5
    sampler.set_epoch(0)
    assert list(sampler) == [0, 1, 2, 3, 4]


def test_what_makes_no_sense(ranks: Ranks) -> None:
    sampler = hvdp.elastic.ElasticSampler(range(5))
    with pytest.raises(ValueError, match="`epoch` must be an int >= 0"):
        sampler.set_epoch(-1)
    with pytest.raises(ValueError, match="`batch_size` must be an int >= 1"):
        sampler.record_batch(0, 0)
    with pytest.raises(TypeError, match="`batch_idx` must be an int >= 0"):
        sampler.record_batch(0.5, 1)  # type: ignore[arg-type]
    state = hvdp.elastic.ElasticSampler(range(6), shuffle=False).state_dict()
    message = r"is of other data: 6 examples, not shuffled\. The sampler has 5 examples, shuffled with seed 0"
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(state)


@pytest.mark.parametrize("batches", [False, True])
def test_a_loader_is_refused_in_place_of_its_sampler(monkeypatch: pytest.MonkeyPatch, batches: bool) -> None:
    """One that has a state counts what its processes have loaded ahead."""
    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "here:29400")
    data: Any = list(range(5))
    sampler = hvdp.elastic.ElasticSampler(data)
    given: Any = {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)} if batches else {"sampler": sampler}
    with pytest.raises(ValueError, match=r"`loader` is a loader whose sampler is an ElasticSampler.*put the sampler"):
        hvdp.elastic.State(loader=DataLoader(data, **given), sampler=sampler)
    hvdp.elastic.State(loader=DataLoader(data), sampler=sampler)


def test_workers_with_other_data_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_PERIODIC_RENDEZVOUS", "here:29400")
    state = hvdp.elastic.State(sampler=hvdp.elastic.ElasticSampler(range(5), seed=2))
    assert state.fingerprint["`sampler`: the data"] == "5 examples, shuffled with seed 2"
