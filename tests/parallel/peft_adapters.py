"""Adapters of peft that are added in mid-run; part of the jobs of ``huggingface_scenarios.py``."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import hvd_periodic.torch as hvdp
from tests.parallel.finetuning import Averaging, Net, off, sgd
from tests.parallel.program import Scenarios
from tests.parallel.torch_job import hvd
from tests.parallel.trainer_ranks import PERIOD

scenario = Scenarios()


def low_rank(model: Net, seed: int) -> Any:
    """Add an adapter, and return the model that peft makes around this one."""
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["backbone"]))


def adapters(model: Net, name: str) -> list[Any]:
    return [p for of, p in model.named_parameters() if f"lora_A.{name}." in of or f"lora_B.{name}." in of]


@scenario
def adapters_that_are_added_later() -> dict[str, Any]:
    """An adapter of low rank after 6 steps, when the model is frozen; and another one in its place after 5 more."""
    rank, errors, config = hvd.rank(), [], LoraConfig(r=1, target_modules=["backbone"])
    expected = Averaging([Net(0, other) for other in range(hvd.size())])
    model = Net(rank, rank)
    optimizer = hvdp.ModelAverageOptimizer(sgd(model.parameters()), model, PERIOD)

    def train(steps: int) -> None:
        expected.train(steps)
        for _ in range(steps):
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
        errors.append(off(model, expected))

    train(6)
    expected.exchange()
    wrapped, others = low_rank(model, 100 + rank), [low_rank(each, 100) for each in expected.models]
    expected.add(lambda each: adapters(each, "default"))
    optimizer.add_param_group({"params": adapters(model, "default")})
    optimizer.adopt()
    train(5)
    expected.exchange()
    for each, seed in [(wrapped, 200 + rank), *((other, 200) for other in others)]:
        torch.manual_seed(seed)
        each.add_adapter("second", config)
        each.set_adapter("second")
    expected.add(lambda each: adapters(each, "second"))
    optimizer.add_param_group({"params": adapters(model, "second")})
    optimizer.adopt()
    train(PERIOD + 1)
    optimizer.finalize()
    expected.exchange()
    errors.append(off(model, expected))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    return {"errors": errors, "trained": trained, "moved": any(map(float, adapters(model, "second")[1]))}
