"""A recipe of the page on trainers, as it stands there, under the launcher that has started this rank.

horovodrun --gloo -np 2 python -m tests.parallel.trainer_recipe_program FOLDER "transformers' Trainer"
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hvd_periodic.torch as hvdp

PAGE = (Path(__file__).parents[2] / "docs/guides/trainers.md").read_text()
SELF_STARTING = ("transformers' Trainer", "accelerate")
"""Trainers that initialize torch.distributed themselves, under torchrun."""


def block(heading: str) -> str:
    """Return the first code block below a heading."""
    found = re.search(rf"^## {re.escape(heading)}$.*?^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, heading
    return found[1]


def launched(names: dict[str, Any], heading: str) -> None:
    """Do what the table says of the launcher."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if heading not in SELF_STARTING:
            torch.distributed.init_process_group()
    elif {"HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE"} & os.environ.keys():
        import horovod.torch as hvd

        names["hvd"] = hvd
        exec(block("How to launch") if heading in SELF_STARTING else "hvd.init()", names)


class Ready:
    """Horovod of a recipe that says ``hvd.init()``, where the table asks for something else, which was done."""

    @staticmethod
    def init() -> None:
        """Do nothing."""


def of_lightning(names: dict[str, Any]) -> None:
    import lightning.pytorch as pl

    # Its logs are those of TensorBoard, which imports TensorFlow to write them unless it finds this module.
    sys.modules["tensorboard.compat.notf"] = ModuleType("notf")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = names["model"]

        def training_step(self, batch: Any, index: int) -> Any:
            return cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", self.training_step(batch, index), sync_dist=True)

    names.update(Module=Module, validation_loader=names["loader"], hvd=names.get("hvd", Ready))


def of_transformers(names: dict[str, Any]) -> None:
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = names["inner"]

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            logits = self.net(x)
            return {"loss": cross_entropy(logits, labels), "logits": logits}

    data = [{"x": x, "labels": label} for x, label in names["data"]]
    arguments = TrainingArguments(
        sys.argv[1], use_cpu=True, num_train_epochs=1, save_strategy="no", report_to=[], disable_tqdm=True
    )
    names.update(Trainer=Trainer, model=Net(), arguments=arguments, data=data, test=data)


def of_accelerate(names: dict[str, Any]) -> None:
    from accelerate import Accelerator

    names.update(Accelerator=Accelerator, loss=cross_entropy, targets=None)


def of_ignite(names: dict[str, Any]) -> None:
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Accuracy

    names.update(Events=Events, Accuracy=Accuracy, cross_entropy=cross_entropy, test_loader=names["loader"])
    names.update(
        create_supervised_trainer=create_supervised_trainer, create_supervised_evaluator=create_supervised_evaluator
    )


PRELUDES = {
    "Lightning": of_lightning,
    "transformers' Trainer": of_transformers,
    "accelerate": of_accelerate,
    "Ignite": of_ignite,
}


def main(folder: Path, heading: str) -> None:
    """Run the recipe; write rank, size and a digest of the model that is left."""
    os.chdir(folder)  # Where Lightning writes its logs.
    os.environ["ACCELERATE_USE_CPU"] = "true"  # As `accelerate launch --cpu` does.
    names: dict[str, Any] = {"torch": torch, "hvdp": hvdp}
    launched(names, heading)
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    model = torch.nn.Linear(2, 3)
    data = TensorDataset(torch.randn(48, 2), torch.randint(3, (48,)))
    names.update(
        model=model,
        inner=model,
        data=data,
        loader=DataLoader(data, 4),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        evaluate=lambda model: None,
    )
    PRELUDES[heading](names)
    # The page leaves out the network and the steps of the module.
    exec(block(heading).replace("(pl.LightningModule)", "(Module)"), names)
    optimizer = names["trainer"].optimizers[0] if heading == "Lightning" else names.get("optimizer")
    if heading == "transformers' Trainer":
        optimizer = names["trainer"].optimizer
    found = hvdp.unwrap(optimizer).synchronizer
    ranks = found.membership.communicator
    with found.center():
        values = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    report = {"size": ranks.size, "steps": found.local_steps, "center": hashlib.sha256(b"".join(values)).hexdigest()}
    (folder / f"{ranks.rank}.json").write_text(json.dumps(report))
    ranks.allgather_object(None, "end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
