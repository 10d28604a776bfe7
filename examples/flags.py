"""The flags of the digits examples, and what the core makes of them: an algorithm and a schedule."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import digits

import hvd_periodic as hvdp

ALGORITHMS = tuple(digits.TITLES)
_WAIT = ("allreduce", "all")
"""What has no asynchronous form."""
COMPRESSIONS = ("none", "fp16", "bf16", "int8", "topk")
SCHEDULES = ("every", "post-local", "piecewise", "doubling", "qsr", "adacomm", "seconds")


def _overlap(text: str) -> int | str:
    """Return local steps, or the word for a whole period."""
    return text if text == "period" else int(text)


WIRES: dict[str, Any] = {
    "overlap": {"type": _overlap, "default": 0, "help": "local steps for which exchanges travel, or period"},
    "compression": {"choices": COMPRESSIONS, "default": "none", "help": "of what travels; topk: a tenth"},
    "fragments": {"type": int, "default": 1, "help": "parts of the model that are exchanged one after another"},
}


def parse(
    description: str,
    algorithms: tuple[str, ...] = (*ALGORITHMS, "all"),
    loops: tuple[str, ...] = (),
    placements: tuple[str, ...] = (),
    checkpoints: bool = False,
    wires: tuple[str, ...] = (),
) -> argparse.Namespace:
    """Return the flags; they are the same for every framework, but for the choices that it has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--algorithm", choices=algorithms, default="easgd", help="how the workers exchange")
    parser.add_argument("--period", type=int, default=10, help="local steps between exchanges")
    parser.add_argument("--moving-rate", type=float, help="easgd: moving rate; default: the largest without overshoot")
    parser.add_argument("--beta", type=float, help="easgd: moving rate times the number of workers, instead")
    parser.add_argument("--rho", type=float, default=0.0, help="easgd: elastic term in the local loss")
    parser.add_argument("--op", choices=("sum", "average"), default="sum", help="agn: over the workers' gradients")
    without_waiting = [name for name in algorithms if name not in _WAIT] if "diloco" in algorithms else ["easgd", "agn"]
    text = f"{', '.join(without_waiting)}: exchange without waiting for others"
    parser.add_argument("--asynchronous", action="store_true", help=text)
    parser.add_argument("--epochs", type=int, default=30, help="passes over the shard of each worker")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and worker")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="of SGD")
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and of the order of the images")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder for the record and the plot")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="train nothing; show the runs in FOLDER")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    if "diloco" in algorithms:
        _add_newer(parser)
    if loops:
        parser.add_argument("--loop", choices=loops, default=loops[0], help="who writes the training loop")
    if placements:
        parser.add_argument("--center", choices=placements, default=placements[0], help="where the center lives")
    if checkpoints:
        text = "save here after every epoch and go on from there; SIGUSR1 stops with exit code 75"
        parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help=text)
    for name in wires:
        parser.add_argument(f"--{name}", **WIRES[name])
    args = parser.parse_args()
    if args.asynchronous and args.algorithm not in without_waiting:
        parser.error(f"--asynchronous is for {', '.join(without_waiting)}, not for {args.algorithm}")
    if checkpoints and args.checkpoints and args.asynchronous:
        parser.error("--checkpoints are taken by all workers at the same epoch, and --asynchronous ones are not there")
    if checkpoints and args.checkpoints and args.algorithm == "all":
        parser.error("--checkpoints are those of one algorithm")
    return args


def _add_newer(parser: argparse.ArgumentParser) -> None:
    """Add what scripts of tf.contrib.opt do not have."""
    text = "diloco: λ; default: 0.7, asynchronously on more than 4 workers 0.4"
    parser.add_argument("--outer-learning-rate", type=float, help=text)
    parser.add_argument("--outer-momentum", type=float, default=hvdp.DiLoCo().outer_momentum, help="diloco: μ")
    parser.add_argument("--slow-momentum", type=float, default=hvdp.SlowMo().slow_momentum, help="slowmo: β")
    parser.add_argument(
        "--block-momentum", type=float, help="bmuf: η; default: 1 - 1/n of n workers, asynchronously at most 0.5"
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="every", help="how the period varies")
    parser.add_argument(
        "--seconds", type=float, default=0.05, help="from one exchange to the next, under that schedule"
    )
    parser.add_argument("--decay", action="store_true", help="cosine of the learning rate to a tenth; qsr follows it")
    parser.add_argument(
        "--optimizer-state", choices=("local", "reset", "average"), default="local", help="the momentum"
    )


def compression(args: argparse.Namespace) -> hvdp.Wire:
    """Return the wire that was asked for."""
    if args.compression == "topk":
        return hvdp.Compression.topk(0.1)
    wire: hvdp.Wire = getattr(hvdp.Compression, args.compression)
    return wire


def runs(args: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the flags of each run: one, or one per algorithm."""
    chosen = ALGORITHMS if args.algorithm == "all" else (args.algorithm,)
    return [argparse.Namespace(**vars(args) | {"algorithm": algorithm}) for algorithm in chosen]


def algorithm(args: argparse.Namespace) -> hvdp.Algorithm:
    """Return the algorithm that was asked for."""
    made: dict[str, Any] = {
        "easgd": lambda: hvdp.EASGD(args.moving_rate, args.beta, args.rho),
        "average": hvdp.Averaging,
        "agn": lambda: hvdp.AGN(args.op),
        "diloco": lambda: hvdp.DiLoCo(args.outer_learning_rate, args.outer_momentum),
        "slowmo": lambda: hvdp.SlowMo(args.slow_momentum),
        "bmuf": lambda: hvdp.BMUF(args.block_momentum),
    }
    return made[args.algorithm]()


def schedule(args: argparse.Namespace, steps: int) -> hvdp.Schedule:
    """Return the schedule that was asked for, of a training with so many local steps."""
    period, shorter = args.period, max(1, args.period // 2)
    made: dict[str, Any] = {
        "every": lambda: hvdp.Every(period),
        "post-local": lambda: hvdp.PostLocal(steps // 10, period),
        "piecewise": lambda: hvdp.Piecewise({0: shorter, steps // 2: 2 * period}),
        "doubling": lambda: hvdp.Doubling(max(1, period // 4), every_rounds=10, limit=2 * period),
        "qsr": lambda: hvdp.QSR(shorter, args.learning_rate * shorter**0.5),
        "adacomm": lambda: hvdp.AdaComm(2 * period, every_rounds=5),
        "seconds": lambda: hvdp.Seconds(args.seconds),
    }
    return made[args.schedule]()
