"""Train on simulated workers: compare algorithms, periods and rates before paying for machines.

  hvdp simulate --algorithm easgd,average,diloco --period 1,10,100
  hvdp simulate --algorithm "easgd(moving_rate=0.1),easgd" --problem network --plot comparison.png
  hvdp simulate --algorithm mine.Damped --function mine:loss_and_gradient

Workers are threads that run the algorithms of the package. Every combination of the algorithms, periods and learning
rates trains on the same data. All workers start from the same parameters, and each draws its own noise and examples.
The same command gives the same numbers.

Your own function, --function module:name, is called with the parameters, a float64 vector, and a numpy Generator, and
returns (loss, gradient). It runs on several threads, and must not change the parameters. All workers start from its
attribute `start`, or from --dimension zeros.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from hvd_periodic.arguments import require_int, require_momentum, require_real
from hvd_periodic.cli import choice_parser, output, plots
from hvd_periodic.cli.problems import PROBLEMS, Problem, Shape, from_function
from hvd_periodic.cli.simulation import Outcome, Setting, Training, simulate
from hvd_periodic.cli.usage_error import UsageError, as_usage_error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--algorithm",
        default="average,easgd,diloco",
        metavar="A,...",
        help="algorithms to compare (default: %(default)s)",
    )
    parser.add_argument(
        "--period", default="10", metavar="P,...", help="periods in local steps, or schedules (default: 10)"
    )
    parser.add_argument(
        "--learning-rate", default="0.1", metavar="R,...", help="learning rates of a worker's SGD (default: 0.1)"
    )
    parser.add_argument(
        "--momentum", type=float, default=0.0, metavar="M", help="momentum of a worker's SGD (default: 0)"
    )
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="number of workers (default: 4)")
    parser.add_argument(
        "--steps", type=int, default=1000, metavar="N", help="local steps of each worker (default: 1000)"
    )
    parser.add_argument(
        "--overlap",
        default="0",
        metavar="D",
        help="local steps during which an exchange is in flight, or period (default: 0)",
    )
    parser.add_argument(
        "--fragments",
        type=int,
        default=1,
        metavar="F",
        help="number of fragments that are exchanged one by one (default: 1)",
    )
    parser.add_argument(
        "--compression",
        default="none",
        metavar="C",
        help="compression of messages: none, fp16, bf16, int8, int4, e3m0, int2, topk(0.01) (default: none)",
    )
    _add_problem(parser.add_argument_group("problem"))
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw losses and distances into FILE: .png, .svg, .pdf"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, including the curves, instead of the table")


def _add_problem(problem: argparse._ArgumentGroup) -> None:
    """Add the options of the problem to train on."""
    problem.add_argument(
        "--problem", choices=PROBLEMS, default="network", help="problem to train on (default: network)"
    )
    problem.add_argument("--function", metavar="MODULE:NAME", help="train on your own function instead of a problem")
    problem.add_argument(
        "--dimension", type=int, default=20, metavar="N", help="number of parameters or inputs (default: 20)"
    )
    problem.add_argument(
        "--condition",
        type=float,
        default=100.0,
        metavar="K",
        help="ratio of the largest to the smallest curvature (default: 100)",
    )
    problem.add_argument(
        "--noise", type=float, default=1.0, metavar="S", help="noise of gradients or targets (default: 1)"
    )
    problem.add_argument(
        "--heterogeneity",
        type=float,
        default=0.5,
        metavar="H",
        help="difference between workers' data; 0: all draw from the same distribution (default: 0.5)",
    )
    problem.add_argument("--batch", type=int, default=16, metavar="B", help="examples per step (default: 16)")
    problem.add_argument("--seed", type=int, default=0, help="seed of data and noise (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Train with every setting; print and draw the results."""
    plots.require(arguments.plot)
    training, settings, problem = _training(arguments), _settings(arguments), _problem(arguments)
    outcomes = []
    with output.progress("simulating", training.steps * len(settings)) as advance:
        for setting in settings:
            with as_usage_error(str(setting)):
                outcomes.append(simulate(problem, setting, training, partial(advance, now=str(setting))))
    pairs = list(zip(settings, outcomes, strict=True))
    what = arguments.function or arguments.problem
    if arguments.json:
        records = [outcome.record(setting) for setting, outcome in pairs]
        head = {"problem": what, "workers": training.workers, "steps": training.steps, "seed": training.seed}
        output.write_json(head | {"runs": records})
    else:
        _show(f"{what}: {training.workers} workers, {training.steps} steps each", pairs)
    if arguments.plot:
        plots.draw(arguments.plot, f"{what}, {training.workers} workers", _panels(pairs))
    return 0


def _training(arguments: argparse.Namespace) -> Training:
    """Return the arguments that all settings share."""
    with as_usage_error():
        workers = require_int(arguments.workers, "`--workers`", 1)
        steps = require_int(arguments.steps, "`--steps`", 1)
        fragments = require_int(arguments.fragments, "`--fragments`", 1)
        momentum = require_momentum(arguments.momentum, "`--momentum`")
        seed = require_int(arguments.seed, "`--seed`", 0)
    if arguments.overlap != "period" and not arguments.overlap.isdigit():
        raise UsageError(f"`--overlap` must be local steps, or period. Received: {arguments.overlap!r}")
    overlap = arguments.overlap if arguments.overlap == "period" else int(arguments.overlap)
    wires = choice_parser.compressions(arguments.compression)
    if len(wires) > 1:
        raise UsageError(f"`--compression` takes one value for all trainings. Received: {arguments.compression!r}")
    return Training(workers, steps, momentum, seed, overlap, fragments, wires[0][1])


def _settings(arguments: argparse.Namespace) -> list[Setting]:
    """Return every combination of algorithm, period and learning rate."""
    combinations = product(
        choice_parser.algorithms(arguments.algorithm),
        choice_parser.periods(arguments.period),
        choice_parser.rates(arguments.learning_rate, "--learning-rate"),
    )
    return [
        Setting(algorithm, period, rate, made, schedule) for (algorithm, made), (period, schedule), rate in combinations
    ]


def _problem(arguments: argparse.Namespace) -> Problem:
    """Return the problem to train on."""
    with as_usage_error():
        require_int(arguments.dimension, "`--dimension`", 1)
        require_int(arguments.batch, "`--batch`", 1)
        if not require_real(arguments.condition, "`--condition`", positive=True) >= 1:
            raise UsageError(f"`--condition` must be at least 1. Received: {arguments.condition!r}")
        for name in ("noise", "heterogeneity"):
            require_real(getattr(arguments, name), f"`--{name}`", positive=False)
    if arguments.function:
        function = choice_parser.user_object(arguments.function, "--function")
        return from_function(function, arguments.dimension, arguments.seed, arguments.function)
    names = ("workers", "dimension", "condition", "noise", "heterogeneity", "batch")
    shape = Shape(**{name: getattr(arguments, name) for name in names})
    return PROBLEMS[arguments.problem](shape, np.random.default_rng(arguments.seed))


def _show(title: str, pairs: list[tuple[Setting, Outcome]]) -> None:
    """Print a row for each training."""
    columns = ("algorithm", "period", "rate", "center", "replicas", "distance", "exchanges", "MB sent")
    rows = []
    for setting, outcome in pairs:
        typed = (setting.algorithm, setting.period, f"{setting.learning_rate:g}")
        if outcome.diverged is None:
            later = outcome.course[len(outcome.course) // 2 :]
            means = (np.mean([getattr(point, name) for point in later]) for name in ("replicas", "distance"))
            numbers = (f"{value:.4g}" for value in (outcome.center, *means))
            rows.append((*typed, *numbers, str(outcome.exchanges), f"{outcome.bytes / 1e6:.3g}"))
        else:
            rows.append((*typed, f"diverged at step {outcome.diverged}", "", "", "", ""))
    output.show(title, columns, rows)
    output.say(
        "center: final loss of the center, after the last exchange. replicas, distance: loss of the replicas and their "
        "distance to the center, means over workers and the second half of training. exchanges, MB sent: per worker."
    )


def _panels(pairs: list[tuple[Setting, Outcome]]) -> list[plots.Panel]:
    """Return panels of losses over steps and over bytes sent, and of distances over steps."""
    losses, sent, distances = [], [], []
    points = [point for _, outcome in pairs for point in outcome.course]
    positive = all(0 < loss < math.inf for point in points for loss in (point.center, point.replicas))
    for color, (setting, outcome) in enumerate(pairs):
        course, label = outcome.course, str(setting)
        steps, center = [point.step for point in course], [point.center for point in course]
        exchanged = [point for point in course if point.bytes]
        megabytes = [point.bytes / 1e6 for point in exchanged]
        losses.append(plots.Curve(label, steps, center, color))
        losses.append(plots.Curve("mean of the replicas", steps, [point.replicas for point in course], color, ":"))
        sent.append(plots.Curve(label, megabytes, [point.center for point in exchanged], color))
        distances.append(plots.Curve(label, steps, [point.distance for point in course], color))
    log = "y" if positive else ""
    return [
        plots.Panel("local step", "loss of the center", losses, log),
        plots.Panel("MB sent by a worker", "loss of the center", sent, f"x{log}" if any(c.x for c in sent) else ""),
        plots.Panel("local step", "distance of replicas to the center", distances),
    ]
