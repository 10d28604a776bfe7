"""Training by accelerate and by transformers' Trainer, as each rank sees it.

torchrun --nproc-per-node 2 -m tests.parallel.huggingface_scenarios FOLDER
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

import hvd_periodic.torch as hvdp
from hvd_periodic.torch import huggingface
from hvd_periodic.torch.huggingface import PeriodicTrainerCallback
from tests.parallel import peft_adapters
from tests.parallel.program import Scenarios, attempt, log
from tests.parallel.trainer_ranks import PERIOD, Quadratic, begin, distance, easgd

scenario = Scenarios()
FOLDER = Path(sys.argv[1])
RANK, SIZE = begin(FOLDER)


def elastic(optimizer: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> Any:
    return hvdp.ElasticAverageOptimizer(optimizer, model, PERIOD, **options)


def accelerator_with(**options: Any) -> Accelerator:
    """Return an accelerator, as a program has one of."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **options)


class Net(Quadratic):
    """As a Trainer calls it, with a buffer that is exchanged: what it evaluates is what the model holds."""

    def __init__(self) -> None:
        super().__init__(RANK)
        self.register_buffer("running_mean", torch.zeros(1))
        self.seen: list[list[float]] = []

    def forward(self, labels: Any = None) -> dict[str, torch.Tensor]:
        if not self.training:
            self.seen.append(self.x.tolist())
        return {"loss": self.loss(), "logits": torch.zeros(len(labels), 1)}


class Examples(Dataset[Any]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"labels": torch.tensor(float(index))}


@scenario
def accelerated() -> dict[str, Any]:
    """A loop of the user's, with two backward passes for each of thirteen steps."""
    accelerator = accelerator_with(gradient_accumulation_steps=2)
    net = Net()
    found = huggingface.prepare(accelerator, net, elastic(net.sgd(), net), DataLoader(Examples(26 * SIZE)))
    model, optimizer, loader = found
    shown: list[float] = []
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if step == 11:
            with hvdp.unwrap(optimizer).center():
                shown = net.x.tolist()
    hvdp.unwrap(optimizer).finalize()
    with hvdp.unwrap(optimizer).center():
        end = net.x.tolist()
    return {
        "ranks": [accelerator.process_index, accelerator.num_processes],
        "shown": distance(shown, easgd(SIZE, {4}, 6)[1]),
        "end": distance(end, easgd(SIZE, {4, 8, 12, 13}, 13)[1]),
        "steps": hvdp.unwrap(optimizer).synchronizer.local_steps,
    }


@scenario
def half_precision() -> list[Any]:
    """Under autocast; and by a scaler, with an overflow on one rank, which counts."""
    accelerator = accelerator_with(mixed_precision="bf16")
    layer = torch.nn.Sequential(torch.nn.Linear(4, 1))
    local = hvdp.ModelAverageOptimizer(torch.optim.SGD(layer.parameters(), lr=0.01), layer, PERIOD)
    model, _ = huggingface.prepare(accelerator, layer, local)
    types = set()
    layer[0].register_forward_hook(lambda *call: types.add(str(call[-1].dtype)))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaled = AcceleratedOptimizer(local, scaler=scaler)
    for step in range(9):
        loss = model(torch.ones(2, 4) * (1 + RANK)).square().mean()
        scaler.scale(loss * (torch.inf if RANK == 1 and step == 2 else 1)).backward()
        scaled.step()
        scaled.zero_grad()
    counters = hvdp.unwrap(scaled).synchronizer.counters
    return [sorted(types), counters.local_steps, counters.skipped_updates, counters.rounds]


def arguments(name: str, **options: Any) -> TrainingArguments:
    AcceleratorState._reset_state(reset_partial_state=True)
    return TrainingArguments(
        str(FOLDER / name),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=1,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        **({"num_train_epochs": 1, "save_strategy": "no", "logging_steps": 3} | options),
    )


def trainer(
    name: str, *callbacks: Any, steps: int = 13, every_rank: bool = False, make: Any = elastic, **options: Any
) -> Trainer:
    net = Net()
    return Trainer(
        net,
        arguments(name, **options),
        train_dataset=Examples(steps * SIZE),
        eval_dataset=Examples(SIZE),
        optimizers=(net.sgd(), None),
        callbacks=[PeriodicTrainerCallback(make, every_rank), *callbacks],
    )


@scenario
def goes_where_the_oracle_goes() -> dict[str, Any]:
    """Thirteen steps: exchanges at 4, 8, 12 and the end; evaluated and saved at 6, 12 and the end."""
    options = {"eval_strategy": "steps", "eval_steps": 6, "save_strategy": "steps", "save_steps": 6}
    made = trainer("oracle", **options)
    made.train()
    net = made.model
    centers = {6: easgd(SIZE, {4}, 6)[1], 12: easgd(SIZE, {4, 8, 12}, 12)[1], 13: easgd(SIZE, {4, 8, 12, 13}, 13)[1]}
    saved = {step: load_file(FOLDER / "oracle" / f"checkpoint-{step}" / "model.safetensors") for step in centers}
    evaluated = made.evaluate()
    return {
        "ranks": [made.args.process_index, made.args.world_size],
        "seen": [distance(a, b) for a, b in zip(net.seen, centers.values(), strict=False)],
        "looks": len(net.seen),
        "saved": [distance(saved[step]["x"].tolist(), center) for step, center in centers.items()],
        "end": distance(net.x.tolist(), centers[13]),
        "evaluated": evaluated["epoch"],
        "steps": made.state.global_step,
    }


@scenario
def the_root_alone_writes() -> list[str]:
    made = trainer(f"of rank {RANK}", save_strategy="epoch", num_train_epochs=2, steps=5)
    made.train()
    return sorted({file.name for file in (FOLDER / f"of rank {RANK}").rglob("*") if file.is_file()})


@scenario
def accumulates() -> list[int]:
    made = trainer("accumulates", gradient_accumulation_steps=3, steps=9)
    made.train()
    return [made.state.global_step, hvdp.unwrap(made.optimizer).synchronizer.local_steps]


@scenario
def trains_twice() -> list[Any]:
    """A Trainer keeps its optimizer, of which one level is ours."""
    made = trainer("twice", steps=5)
    made.train()
    first = hvdp.unwrap(made.optimizer)
    made.train()
    second = hvdp.unwrap(made.optimizer)
    return [first is second, isinstance(second.inner, type(first)), second.synchronizer.local_steps]


class Ends(TrainerCallback):
    """Notes what a rank has when it starts, and after each epoch."""

    start: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        steps = hvdp.unwrap(of["optimizer"]).synchronizer.local_steps
        self.start = self.start or [of["model"].x.tolist(), steps]

    def on_epoch_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        optimizer = hvdp.unwrap(of["optimizer"])
        momentum = [of_parameter["momentum_buffer"] for of_parameter in optimizer.state.values()]
        tensors = (of["model"].x, *optimizer.synchronizer.center_tensors(), *momentum)
        self.bits = [tensor.detach().numpy().tobytes().hex() for tensor in tensors]


def resumed(name: str, every_rank: bool) -> list[Any]:
    """Fifteen steps at once, and ten of them again."""
    whole, parts = Ends(), Ends()
    saving = {"save_strategy": "steps", "save_steps": 5}
    trainer(name, whole, num_train_epochs=3, steps=5, every_rank=every_rank, **saving).train()
    torch.distributed.barrier()
    again = trainer(name, parts, num_train_epochs=3, steps=5, every_rank=every_rank)
    again.train(resume_from_checkpoint=str(FOLDER / name / "checkpoint-5"))
    saved = load_file(FOLDER / name / "checkpoint-5" / "model.safetensors")["x"].tolist()
    return [whole.bits == parts.bits, parts.start == [saved, 5], again.state.global_step]


@scenario
def resumes() -> list[Any]:
    return [resumed("exact", True), resumed("root", False)]


@scenario
def resumes_from_another_folder() -> dict[str, Any]:
    """Which a Trainer does not tell of, while that of its own has a checkpoint of the same step and another run."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "num_train_epochs": 3, "steps": 5}
    whole, found = Ends(), {}
    trainer("before", whole, every_rank=True, **saving).train()
    trainer("after", every_rank=True, **saving).train()
    torch.distributed.barrier()
    if RANK == 0:
        shutil.copytree(FOLDER / "before" / "checkpoint-5", FOLDER / "copied")
        shutil.copytree(FOLDER / "before" / "checkpoint-5", FOLDER / "moved" / "checkpoint-5")
        shutil.move(FOLDER / "before", FOLDER / "gone")
        shutil.copytree(FOLDER / "gone", FOLDER / "before")
        shutil.rmtree(FOLDER / "before" / "checkpoint-5" / "ranks")
    torch.distributed.barrier()
    for case, path, told in (
        ("where it was written", FOLDER / "gone" / "checkpoint-5", False),
        ("told", FOLDER / "copied", True),
        ("lost", FOLDER / "copied", False),
    ):
        if RANK == 0 and case == "where it was written":
            shutil.copytree(FOLDER / "copied" / "ranks", FOLDER / "before" / "checkpoint-5" / "ranks")
        if RANK == 0 and case == "lost":
            shutil.rmtree(FOLDER / "before")
        torch.distributed.barrier()
        parts = Ends()
        options = {"resume_from_checkpoint": str(path)} if told else {}
        again = trainer("after", parts, every_rank=True, num_train_epochs=3, steps=5, **options)
        with log() as lines:
            again.train(resume_from_checkpoint=str(path))
        found[case] = [whole.bits == parts.bits, [line for line in lines if "exchanges" in line]]
    return found


@scenario
def stops_early_on_all() -> list[int]:
    """As soon as the loss of the center, over all ranks, is no lower than before."""
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "loss"}
    stopping = EarlyStoppingCallback(1, early_stopping_threshold=1e9)
    made = trainer("stops", stopping, num_train_epochs=20, steps=3, load_best_model_at_end=True, **options)
    made.train()
    best = load_file(f"{made.state.best_model_checkpoint}/model.safetensors")["x"].tolist()
    return [made.state.global_step, int(made.model.x.tolist() == best)]


PLACES = ("root", "sharded")


class Asks(TrainerCallback):
    """Asks for a checkpoint at the sixth step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        self.due = state.global_step == 5

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        control.should_save = control.should_save or self.due


@scenario
def centers_that_are_elsewhere() -> dict[str, list[str]]:
    """What a Trainer that saves the optimizer says of them."""

    def nested(optimizer: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> Any:
        return hvdp.ModelAverageOptimizer(elastic(optimizer, model, **options), model, 2 * PERIOD)

    def refused(place: str, make: Any = elastic, *first: Any, **options: Any) -> str:
        made = trainer(f"{place} is refused", make=partial(make, center=place), **options)
        for callback in first:
            made.callback_handler.callbacks.insert(0, callback)
        return attempt(made.train)

    saving = {"save_strategy": "steps", "save_steps": 6}
    return {
        "saves": [refused(place, **saving) for place in PLACES],
        "saves every rank": [refused(place, every_rank=True, **saving) for place in PLACES],
        "nested": [refused(place, nested, **saving) for place in PLACES],
        "asked": [refused(place, elastic, Asks()) for place in PLACES],
    }


@scenario
def asked_afterwards() -> dict[str, Any]:
    """By a callback that comes after ours: what is saved; and where all ranks would have to read the center."""
    trainer("asked", Asks()).train()
    torch.distributed.barrier()
    saved = load_file(FOLDER / "asked" / "checkpoint-6" / "model.safetensors")["x"].tolist()
    elsewhere = {
        "optimizer": {},
        "model": {"save_only_model": True},
        "every rank": {"save_only_model": True, "every_rank": True},
    }
    refused = [
        attempt(trainer("asked elsewhere", Asks(), make=partial(elastic, center="sharded"), **options).train)
        for options in elsewhere.values()
    ]
    return {"saved": distance(saved, easgd(SIZE, {4}, 6)[1]), **dict(zip(elsewhere, refused, strict=True))}


@scenario
def saved_in_another_way() -> str:
    """Without asking the model for its state."""

    class Saves(Trainer):
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            super()._save(output_dir, {"x": self.model.x})

    net = Net()
    callbacks = [PeriodicTrainerCallback(elastic), Asks()]
    options = {"train_dataset": Examples(13 * SIZE), "optimizers": (net.sgd(), None)}
    return attempt(Saves(net, arguments("in another way"), callbacks=callbacks, **options).train)


class Stops(TrainerCallback):
    """Stops training on the root, after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        control.should_training_stop |= RANK == 0 and state.global_step == self.steps


@scenario
def stops_on_one_rank() -> str:
    """Where the other trains on."""
    return attempt(trainer("stopped", Stops(6), logging_steps=6).train)


@scenario
def models_of_centers_that_are_elsewhere() -> dict[str, float]:
    """What a Trainer saves of them that saves the model only, with what every rank has beside it."""
    found = {}
    for place in PLACES:
        options = {"save_strategy": "steps", "save_steps": 6, "save_only_model": True, "every_rank": True}
        trainer(place, make=partial(elastic, center=place), **options).train()
        torch.distributed.barrier()
        saved = load_file(FOLDER / place / "checkpoint-6" / "model.safetensors")["x"].tolist()
        found[place] = distance(saved, easgd(SIZE, {4}, 6)[1])
    return found


def misfits() -> dict[str, Callable[[], object]]:
    def plain() -> None:
        net = Net()
        huggingface.prepare(accelerator_with(), net, net.sgd())

    def plain_trainer() -> None:
        net = Net()
        callbacks = [PeriodicTrainerCallback(lambda optimizer, model: optimizer)]
        made = Trainer(net, arguments("plain"), train_dataset=Examples(SIZE), callbacks=callbacks)
        made.train()

    def wrapped() -> None:
        net = Net()
        model, optimizer = accelerator_with().prepare(net, elastic(net.sgd(), net))
        model(torch.ones(1))["loss"].backward()
        optimizer.step()

    def strangers() -> None:
        class One:
            process_index, num_processes = 0, 1

        net = Net()
        huggingface.prepare(One(), net, elastic(net.sgd(), net))

    return {"plain": plain, "plain trainer": plain_trainer, "wrapped": wrapped, "strangers": strangers}


@scenario
def what_is_refused() -> dict[str, str]:
    return {name: attempt(function) for name, function in misfits().items()}


scenario.include(peft_adapters.scenario)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(RANK)
    scenario.run(FOLDER, RANK)
