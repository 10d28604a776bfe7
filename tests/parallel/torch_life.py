"""What scripts do around an exchange without thinking of it; part of the jobs of ``scenarios.py``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import hvd_periodic.torch as hvdp
from tests.parallel.program import Scenarios, attempt, crossed
from tests.parallel.torch_job import hvd

scenario = Scenarios()

Mode = Callable[[], AbstractContextManager[Any]]

MODES: dict[str, Mode] = {
    "none": nullcontext,
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def bits(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def train(model: torch.nn.Module, optimizer: Any, steps: int, mode: Mode = nullcontext) -> None:
    """Take steps on data that differ between ranks, with only ``optimizer.step()`` in the mode."""
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=generator)).square().mean().backward()
        with mode():
            optimizer.step()


def in_mode(mode: Mode, make: Callable[[Any, Any], Any]) -> Any:
    """Call everything in a mode; return what came out, and whether the user's own code was in that mode."""
    torch.manual_seed(0)
    model = network()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, inner, 1)  # The state of the local optimizer is the user's, and made outside.
    with mode():
        optimizer = make(inner, model)
    train(model, optimizer, 3, mode)
    with mode(), optimizer.center():
        own = [torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
        seen = bits(list(model.state_dict().values()))
    with mode():
        expected = [torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
        distance = optimizer.synchronizer.distance()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.synchronizer.broadcast()
        optimizer.finalize()
    train(model, optimizer, 3, mode)
    with mode():
        exported = hvdp.center_state_dict(model, optimizer)
        optimizer.finalize()
    if any(tensor.is_inference() for tensor in exported.values()):
        raise RuntimeError("What is exported has to be usable outside of the mode")
    return own == expected, [seen, distance, bits(list(exported.values())), bits(list(model.parameters()))]


@scenario
def modes() -> Any:
    """The same training in every mode of PyTorch."""
    algorithms: dict[str, Callable[..., Any]] = {
        "easgd": lambda o, m: hvdp.ElasticAverageOptimizer(o, m, 2, moving_rate=0.25, rho=0.5),
        "agn sharded": lambda o, m: hvdp.AGNOptimizer(o, m, 2, center="sharded"),
    }
    found: dict[str, Any] = {name: {} for name in MODES}
    for key in algorithms:
        found["none"][key] = in_mode(MODES["none"], algorithms[key])
    for name, key in crossed([name for name in MODES if name != "none"], list(algorithms)):
        found[name][key] = in_mode(MODES[name], algorithms[key])
    return found


@scenario
def buffers() -> Any:
    """A mask that all set, an infinity of one rank at one exchange, a queue that all take over from the root."""
    torch.manual_seed(hvd.rank())
    model = network()
    model.register_buffer("mask", torch.zeros(2))
    model.register_buffer("queue", torch.nn.functional.normalize(torch.randn(3, 2), dim=1))
    model.register_buffer("random_state", torch.get_rng_state()[:8])
    rules = {"mask": "average", "queue": "broadcast"}
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvdp.ElasticAverageOptimizer(inner, model, 1, 0.25, buffers=rules, center="sharded", nonfinite="ignore")
    statistic, seen = model[1].running_mean, []
    for step in range(3):
        model.mask[1] = float("-inf")
        model.queue[step] = torch.nn.functional.normalize(torch.randn(2), dim=0)
        model.random_state.fill_(hvd.rank())
        with torch.no_grad():
            statistic.fill_(hvd.rank())
            if step == 1 and hvd.rank() == 0:
                statistic[0] = float("inf")
        optimizer.zero_grad()
        optimizer.step()
        norm = (model.queue.norm(dim=1) - 1).abs().max().item()
        seen.append([statistic.tolist()[:2], model.mask.tolist(), model.random_state.tolist()[0], norm < 1e-6])
    return seen, bits([model.queue, *model[1].buffers()])


@scenario
def adopted_quadratics() -> Any:
    """Losses h (x - b)²/2 of two parameters, of which the second is frozen after round 2 and thawed after round 3."""
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for name in "wv"})
    optimizer = hvdp.PeriodicOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, hvdp.DiLoCo(), 3)
    odd, seen = hvd.rank() % 2, []
    losses = {"w": ((0.5, 1.0)[odd], (3.0, -1.0)[odd]), "v": ((1.0, 2.0)[odd], (0.5, 2.0)[odd])}
    for done in range(1, 6):
        for _ in range(3):
            optimizer.zero_grad()
            sum(h * (model[name] - b).square().sum() / 2 for name, (h, b) in losses.items()).backward()
            optimizer.step()
        seen.append([model["w"].item(), model["v"].item()])
        if done in (2, 3):
            model["v"].requires_grad_(done == 3)
            optimizer.adopt()
    return seen


@scenario
def thawed_layers() -> Any:
    """A backbone that is thawed and added to the optimizer, on other data on each rank, for each placement."""
    results = {}
    for center in ("replicated", "sharded"):
        torch.manual_seed(hvd.rank())
        model = network()
        model[0].requires_grad_(False)
        inner = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
        optimizer = hvdp.AGNOptimizer(inner, model, 4, center=center)
        train(model, optimizer, 5)
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
        model[0].bias.requires_grad_(hvd.rank() == 0)
        different = attempt(optimizer.adopt)
        model[0].bias.requires_grad_(True)
        optimizer.adopt()
        came = bits(list(model.state_dict().values()))
        train(model, optimizer, 5)
        optimizer.finalize()
        with optimizer.center():
            values = list(model.state_dict().values())
            results[center] = [different, came, bits(values), optimizer.synchronizer.rounds]
    return results
