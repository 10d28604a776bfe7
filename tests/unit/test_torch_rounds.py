"""Rounds with a quorum in PyTorch, with threads as ranks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import Communicator, Compression  # noqa: E402
from tests.helpers import run_ranks  # noqa: E402


@pytest.mark.parametrize("compression", [Compression.none, Compression.int8], ids=str)
def test_accumulators_stay_where_a_round_moves_nothing(compression: Any) -> None:
    """No rank has a weight in the first round; vectors of PyTorch change in place."""

    def work(communicator: Communicator) -> list[float]:
        seen: list[float] = []
        model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(24, dtype=torch.float64))})
        local = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"process_set": communicator, "quorum": 2, "compression": compression}
        options |= {"weight": lambda: float(len(seen) > 0), "outer_optimizer": lambda p: torch.optim.SGD(p, lr=1.0)}
        optimizer = hvdp.PeriodicOptimizer(local, model, hvdp.AGN("average"), 2, **options)
        optimizer.synchronizer.begin()
        optimizer.synchronizer.exchanger.replay([range(3)] * 2)
        communicator.allgather_object(None, "replayed")
        for _ in range(2):
            for _ in range(2):
                model["w"].grad = torch.full((24,), communicator.rank + 1.0, dtype=torch.float64)
                optimizer.step()
            vectors = optimizer.synchronizer.state_dict()["vectors"]["parameters"]
            seen += [float(vectors["gradient"]["w"][0]), float(vectors["center"]["w"][0])]
        return seen

    for rank, seen in enumerate(run_ranks(3, work)):
        assert seen == pytest.approx([2.0 * (rank + 1), 0.0, 0.0, -4.0], abs=1e-6)
