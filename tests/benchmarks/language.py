"""Loss against bytes and against time, of a small language model of Python's own standard library.

    bash run_scripts/benchmark_language.sh 100mbit --json results.json --plot results.png

A transformer predicts the next character of the library's source text. Every method takes the same number of samples,
each worker from a part of the text of its own; a single process takes the batches of all workers at once, and without
communication each worker takes its own. The loss is that of the center on files that nobody trains on, in bits per
character; without communication, it is that of the root's own model. Time is that of training, until what is under way
has arrived; evaluation is not counted. Steps per second are relative to those without communication.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

import hvd_periodic.torch as hvdp
from tests.benchmarks import methods, report
from tests.benchmarks.methods import COMPRESSED, INT8, Make, Method, every_step, periodic, sparse_loco
from tests.benchmarks.training import ALONE

SINGLE = "one process"

METHODS: dict[str, Make] = {
    SINGLE: methods.alone,
    ALONE: methods.alone,
    "Horovod DistributedOptimizer": every_step,
    "averaging": periodic(hvdp.Averaging),
    "averaging, overlap": periodic(hvdp.Averaging, overlap="period"),
    "averaging, int8": periodic(hvdp.Averaging, compression=INT8),
    "averaging, int8, 4 fragments, overlap": periodic(hvdp.Averaging, compression=INT8, fragments=4, overlap="period"),
    "elastic averaging": periodic(hvdp.EASGD),
    "elastic averaging, overlap": periodic(hvdp.EASGD, overlap="period"),
    "AGN": periodic(hvdp.AGN),
    "DiLoCo": periodic(hvdp.DiLoCo),
    "DiLoCo, int8, 4 fragments, overlap": periodic(hvdp.DiLoCo, compression=INT8, fragments=4, overlap="period"),
    **COMPRESSED,
    "SparseLoCo": sparse_loco(),
    "SparseLoCo, overlap": sparse_loco(overlap="period"),
}
"""By name."""

CHARACTERS = 128
"""ASCII; others are one of them."""

HELD_OUT = 20
"""One of so many files is not trained on."""


@dataclass(frozen=True)
class Seen:
    """What was seen of a method at some time.

    Attributes:
        steps: taken by each worker.
        seconds: of training.
        megabytes: that a worker has handed to collectives.
        bits: per character, of the center.
    """

    steps: int
    seconds: float
    megabytes: float
    bits: float


class Language(nn.Module):
    """A transformer that sees the characters before each one."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(width, CHARACTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, length, characters)."""
        hidden = self.characters(text) + self.places
        return self.last(self.layers(hidden, mask=self.mask, is_causal=True))  # type: ignore[no-any-return]


class Library:
    """The text, and batches of it.

    Args:
        part, parts: which of so many parts of the text this worker trains on.
        batch_size: samples in a batch.
        length: characters in a sample.
        rate: of Adam.
        seed: of the order of samples.
    """

    def __init__(self, part: int, parts: int, batch_size: int, length: int, rate: float, seed: int = 0) -> None:
        train, held_out = library()
        size = len(train) // parts
        self._text = train[part * size : (part + 1) * size]
        self._held_out = held_out
        self._batch_size, self._length, self._rate = batch_size, length, rate
        self._generator = torch.Generator().manual_seed(1000 * seed + part)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the local optimizer."""
        return torch.optim.Adam(model.parameters(), lr=self._rate)

    def loss(self, model: nn.Module) -> torch.Tensor:
        """Return the loss of a batch of random places."""
        places = torch.randint(len(self._text) - self._length, (self._batch_size,), generator=self._generator)
        return self._loss(model, self._text, places)

    @torch.no_grad()
    def bits(self, model: nn.Module, batches: int) -> float:
        """Return bits per character on text held out."""
        every = len(self._held_out) // (batches * 64)
        places = torch.arange(batches * 64) * every
        losses = [self._loss(model, self._held_out, some).item() for some in places.split(64)]
        return sum(losses) / len(losses) / math.log(2)

    def _loss(self, model: nn.Module, text: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        samples = text[places[:, None] + torch.arange(self._length + 1)].long()
        logits = model(samples[:, :-1])
        return nn.functional.cross_entropy(logits.reshape(-1, CHARACTERS), samples[:, 1:].reshape(-1))


def library() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the characters of the standard library's own modules: those to train on, and those held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_bytes() for file in files]
    held_out = b"".join(texts[::HELD_OUT])
    train = b"".join(text for i, text in enumerate(texts) if i % HELD_OUT)
    return _characters(train), _characters(held_out)


def _characters(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) % CHARACTERS


def train(method: Method, steps: int, looks: int, bits: Callable[[], float]) -> list[Seen]:
    """Train, and look at the center some times."""
    seen, seconds = [], 0.0
    for look in range(1, looks + 1):
        hvd.barrier()
        started = time.perf_counter()
        for _ in range(steps // looks):
            method.step()
        method.finish()
        hvd.barrier()
        seconds += time.perf_counter() - started
        with method.center():
            seen.append(Seen(look * (steps // looks), seconds, method.bytes_sent() / 1e6, bits()))
    return seen


def run(name: str, arguments: argparse.Namespace) -> list[Seen]:
    """Return what was seen of a method."""
    torch.manual_seed(arguments.seed)
    model = Language(arguments.width, arguments.layers, arguments.length)
    hvd.broadcast_parameters(model.state_dict(), 0)
    part, parts, size = (hvd.rank(), hvd.size(), 1) if name != SINGLE else (0, 1, hvd.size())
    task = Library(part, parts, size * arguments.batch_size, arguments.length, arguments.rate, arguments.seed)
    method = METHODS[name](task, model, arguments.period)
    if name == SINGLE and hvd.rank() > 0:
        method = Method(lambda: None)
    return train(method, arguments.steps, arguments.looks, partial(task.bits, model, arguments.batches))


def main() -> None:
    """Print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--methods", nargs="*", metavar="METHOD", help="only those whose names contain one of these")
    parser.add_argument("--steps", type=int, default=1000, help="of each worker (default: 1000)")
    parser.add_argument("--period", type=int, default=20, help="local steps between exchanges (default: 20)")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a worker in a step (default: 16)")
    parser.add_argument("--length", type=int, default=64, help="characters in a sample (default: 64)")
    parser.add_argument("--width", type=int, default=128, help="of the network (default: 128)")
    parser.add_argument("--layers", type=int, default=2, help="of the network (default: 2)")
    parser.add_argument("--rate", type=float, default=2e-3, help="of Adam (default: 0.002)")
    parser.add_argument("--looks", type=int, default=10, help="at the center (default: 10)")
    parser.add_argument("--batches", type=int, default=16, help="of 64 samples to evaluate on (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the order of samples (default: 0)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    wanted = arguments.methods or [""]
    found = {name: run(name, arguments) for name in METHODS if any(word in name for word in wanted)}
    if hvd.rank() == 0:
        tell(found, arguments)


def tell(found: dict[str, list[Seen]], arguments: argparse.Namespace) -> None:
    """Print what was seen; write and draw it, where that is wanted."""
    title = f"{hvd.size()} workers, {arguments.steps} steps, period {arguments.period}"
    rows = []
    for name, (*_, last) in found.items():
        ratio = f"{found[ALONE][-1].seconds / last.seconds:.2f}" if ALONE in found else ""
        rows.append((name, f"{last.bits:.3f}", f"{last.megabytes:.2f}", f"{last.seconds:.1f}", ratio))
    report.show(title, ("method", "bits per character", "MB sent", "seconds", "steps/s"), rows)
    panels = {
        "megabytes sent by a worker": {
            name: ([each.megabytes for each in seen], [each.bits for each in seen])
            for name, seen in found.items()
            if seen[-1].megabytes
        },
        "seconds of training": {
            name: ([each.seconds for each in seen], [each.bits for each in seen]) for name, seen in found.items()
        },
    }
    report.curves(arguments.plot, title, "bits per character", panels)
    report.write(arguments.json, {name: [asdict(each) for each in seen] for name, seen in found.items()})


if __name__ == "__main__":
    main()
