"""The sampler of elastic jobs, which gives every example of an epoch to exactly one worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from hvd_periodic.arguments import require_int
from hvd_periodic.elastic.examples import Stretch, left_after, share_of, still_told
from hvd_periodic.torch.communicator import communicator_of


class ElasticSampler(Sampler[int]):
    """Gives every example of an epoch to exactly one rank, whatever ranks come and go.

    Put it into a :class:`~hvd_periodic.torch.elastic.State`, and call :meth:`record_batch` before ``optimizer.step()``.
    Every commit holds how far all ranks had come. When the ranks change, the examples that the newest commit does not
    hold are divided among the new ranks: those that a lost rank had processed since then, which are lost with it, and
    those that the others had, which repeat them. Examples that the commit holds are not given again.

    With N examples left and k ranks, rank r takes those numbered r, r + k, r + 2k, … in the order of the epoch. No
    example is repeated to make shares equal, so that they differ by up to one example: ranks may take different numbers
    of batches, and be in different epochs at an exchange, so that commits must be those of exchanges. A state that is
    loaded is in the earliest of these epochs: begin at :attr:`epoch`, as below. A rank may get no example in the rest
    of an epoch.

    Example::

        sampler = hvdp.elastic.ElasticSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)

        @hvdp.elastic.run
        def train(state):
            for epoch in range(sampler.epoch, epochs):
                sampler.set_epoch(epoch)
                for batch, (inputs, targets) in enumerate(loader):
                    optimizer.zero_grad()
                    cross_entropy(model(inputs), targets).backward()
                    sampler.record_batch(batch, loader.batch_size)
                    optimizer.step()
            optimizer.finalize()

        train(hvdp.elastic.State(model, optimizer, commit="exchange", sampler=sampler))

    Args:
        dataset: the examples, as many on all ranks.
        shuffle: whether each epoch has an order of its own, equal on all ranks: that of ``DistributedSampler``, a
            permutation drawn with ``seed + epoch``. Otherwise examples are in the order of the data.
        seed: for the order.

    References:
        Horovod's documentation, "Elastic Horovod": ``hvd.elastic.ElasticSampler``, which has the same methods, counts
        the same number of examples on all ranks, and repeats some.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self._before: list[Stretch] = []
        self._stretch: list[tuple[int, int]] = []
        self._rank = self._first = 0
        self._share = np.empty(0, np.int64)
        self._begin_stretch(0)

    def __iter__(self) -> Iterator[int]:
        """Begin after the examples that this rank has recorded.

        Raises:
            RuntimeError: this rank has recorded its whole share of the epoch.
        """
        epoch, processed = self._stretch[self._rank]
        if processed and processed == len(self._share):
            raise RuntimeError(
                f"Epoch {epoch} is over on this rank: call set_epoch() of the ElasticSampler before the next one"
            )
        self._first = processed
        return map(int, self._share[processed:])

    def __len__(self) -> int:
        """Return the number of examples that the current iteration gives to this rank."""
        return len(self._share) - self._first

    @property
    def epoch(self) -> int:
        """The epoch of this rank; after a state was loaded, the first of which examples may be left."""
        return self._stretch[self._rank][0]

    @property
    def description(self) -> str:
        """What has to be equal on all ranks, in words."""
        order = f"shuffled with seed {self.seed}" if self.shuffle else "not shuffled"
        return f"{len(self.dataset)} examples, {order}"

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, if it is not the current one; at the end of an epoch, or at the beginning of the next.

        What this rank has not recorded of its share of the epoch before is not given to others. An epoch before the
        current one begins training again: all its examples are given.

        Args:
            epoch: its number, from 0 on.

        Raises:
            TypeError, ValueError: it is no int, or negative.
        """
        epoch = require_int(epoch, "`epoch`", minimum=0)
        if epoch < self.epoch:
            self._before = []
            self._begin_stretch(epoch)
        elif epoch > self.epoch:
            self._stretch[self._rank] = epoch, 0
            self._take_share()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that this rank has processed a batch, and all before it.

        Args:
            batch_idx: number of the batch in this iteration of the loader, from 0 on.
            batch_size: number of examples in each batch; the last may have fewer.

        Raises:
            TypeError, ValueError: one of them is no int, or too small.
        """
        batches = require_int(batch_idx, "`batch_idx`", minimum=0) + 1
        come = self._first + batches * require_int(batch_size, "`batch_size`", minimum=1)
        epoch, processed = self._stretch[self._rank]
        self._stretch[self._rank] = epoch, max(processed, min(come, len(self._share)))

    def gather(self) -> None:
        """Learn how far the other ranks have come; collective. Commits of a State call it."""
        communicator, mine = communicator_of(None), np.array(self._stretch[self._rank])
        numbers = communicator.gather_integers(mine, "hvd_periodic.elastic.examples").reshape(-1, 2).tolist()
        self._stretch = [(epoch, processed) for epoch, processed in numbers]

    def state_dict(self) -> dict[str, Any]:
        """Return how far this rank has come, and the others by the last commit."""
        return {
            "data": self.description,
            "epoch": min(epoch for epoch, _ in self._stretch),
            "stretches": [[list(come) for come in stretch] for stretch in [*self._before, self._stretch]],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Divide the examples that a state leaves among the current ranks.

        Args:
            state_dict: what :meth:`state_dict` returned, on this or another rank, of any number of ranks.

        Raises:
            ValueError: it is of other data.
        """
        if state_dict["data"] != self.description:
            raise ValueError(
                f"The state of this ElasticSampler is of other data: {state_dict['data']}. The sampler has "
                f"{self.description}: construct it with the dataset, `shuffle` and `seed` of the state"
            )
        epoch = state_dict["epoch"]
        stretches = [[(at, processed) for at, processed in stretch] for stretch in state_dict["stretches"]]
        self._before = still_told(stretches, epoch)
        self._begin_stretch(epoch)

    def _begin_stretch(self, epoch: int) -> None:
        """Begin a stretch of training with the current ranks."""
        communicator = communicator_of(None)
        self._rank = communicator.rank
        self._stretch = [(epoch, 0)] * communicator.size
        self._take_share()

    def _take_share(self) -> None:
        """Take this rank's share of its epoch."""
        order = np.arange(len(self.dataset))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator, device="cpu").numpy()
        left = left_after(order, self._before, self.epoch)
        self._share, self._first = share_of(left, self._rank, len(self._stretch)), 0


def loads_by_elastic_sampler(loader: Any) -> bool:
    """Return whether a loader takes examples, or batches, in the order of an :class:`ElasticSampler`.

    A loader is recognized by the attributes of torch's, of which torchdata's is no subclass.
    """
    held = getattr(loader, "__dict__", {})
    if not {"dataset", "sampler", "batch_sampler"} <= held.keys():
        return False
    samplers = (held["sampler"], getattr(held["batch_sampler"], "sampler", None))
    return any(isinstance(sampler, ElasticSampler) for sampler in samplers)
