"""A job under elastic Horovod that goes on while ranks come and go; see ``test_elastic_state.py``.

horovodrun --gloo --host-discovery-script ... python -m tests.parallel.elastic_state_program SCENARIO FOLDER

Every worker descends on a quadratic of its rank. Whoever begins a stretch of training says so in ``FOLDER/begun``, and
at the end everybody writes what it has.
"""

from __future__ import annotations

import sys
from typing import Any

import horovod.torch as hvd
import torch

import hvd_periodic.torch as hvdp
from hvd_periodic.comm.horovod import HorovodCommunicator
from hvd_periodic.torch import elastic
from tests.parallel import elastic_scenarios as scenarios
from tests.parallel.elastic_events import begin, end, happen
from tests.parallel.elastic_torch_model import Further


def main(scenario: scenarios.Scenario) -> None:
    """Train; die where the scenario says so."""
    hvd.init()
    if scenario.collectives:
        HorovodCommunicator.piggyback_limit_bytes = 0
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.zeros(scenarios.SIZE, dtype=torch.float64))
    policies = scenarios.policies_of(scenario)
    further = Further(model, policies)
    local = further.optimizer(scenario.algorithm)
    algorithm = {"easgd": hvdp.EASGD, "averaging": hvdp.Averaging, "agn": hvdp.AGN, "diloco": hvdp.DiLoCo}
    if scenario.inner:
        of_host, ranks = algorithm[scenario.inner](), hvdp.node_ranks if scenario.grouped else None
        local = hvdp.PeriodicOptimizer(local, model, of_host, scenarios.INNER_PERIOD, process_set=ranks)
    options = {"overlap": scenario.overlap, "center": scenario.center, "timeout_seconds": scenario.timeout}
    options["parameters"] = policies
    optimizer = hvdp.PeriodicOptimizer(local, model, algorithm[scenario.algorithm](), scenarios.PERIOD, **options)
    state = elastic.State(model, optimizer, commit="exchange", batch=0)
    state.register_reset_callbacks([lambda: optimizer.param_groups[0].update(note=hvd.size())])

    @hvd.elastic.run
    def train(state: Any) -> None:
        begin(hvd.rank(), hvd.size(), optimizer.synchronizer.local_steps)
        while state.batch < scenarios.STEPS:
            step = state.batch
            happen(scenario.events, step, hvd.rank(), hvd.size(), state, HorovodCommunicator)
            model.x.grad = model.x.detach() - torch.tensor(scenarios.target(hvd.rank(), step), dtype=torch.float64)
            further.descend(hvd.rank(), step)
            state.batch += 1
            optimizer.step()
        optimizer.finalize()

    train(state)
    with optimizer.center():
        center = {"center": model.x.tolist(), **further.values("_center")}
    found = {"x": model.x.tolist(), **further.values(), **center, "note": optimizer.param_groups[0]["note"]}
    end(hvd.rank(), **found, steps=optimizer.synchronizer.local_steps, batch=state.batch)


if __name__ == "__main__":
    main(scenarios.SCENARIOS[sys.argv[1]])
