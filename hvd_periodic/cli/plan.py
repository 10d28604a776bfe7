"""Estimate the cost of training on n ranks: traffic, share of time in exchanges, steps per second; recommend a period.

  hvdp plan --parameters 25.6M --ranks 8 --bandwidth 10 --latency 50 --step 100
  hvdp plan --model model.safetensors --ranks 8 --bandwidth 1 --step 50 --plot plan.png
  mpirun -np 4 hvdp plan --parameters 25.6M --step 100 --measure

The equations are in hvd_periodic.cost_model. With --measure, costs are measured on the ranks of this job, in host
memory: of the network with allreduces of 4 kB to 17 MB, and with PyTorch of each algorithm and compression with
exchanges; the root prints. Otherwise you give the network, and CPU costs, the same for all algorithms, are those of one
core that copies 7 GB/s, as measured in docs/performance. All algorithms send the same bytes, of a replicated center.
The standard deviation of the step time, --spread, determines how long ranks wait for the slowest.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvd_periodic import Algorithm, Wire
from hvd_periodic.arguments import require_int, require_real
from hvd_periodic.cli import choice_parser, exchange_methods, output, plots, ranks
from hvd_periodic.cli.exchange_methods import Advice, ExchangeMethod, Row
from hvd_periodic.cli.models import parameters_of
from hvd_periodic.cli.usage_error import UsageError, as_usage_error
from hvd_periodic.cost_model import Job, Method, Network, typical

SUFFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--parameters", metavar="N", help="number of model parameters: 25600000, 25.6M, 1.5G")
    model.add_argument(
        "--model",
        type=Path,
        metavar="FILE",
        help="count the parameters in this file: .safetensors, .npz, .keras, .h5, .pt",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="number of workers")
    parser.add_argument("--step", type=float, required=True, metavar="MS", help="duration of a local step in ms")
    parser.add_argument(
        "--spread", type=float, default=0.0, metavar="MS", help="standard deviation of the step time in ms (default: 0)"
    )
    parser.add_argument("--bandwidth", type=float, metavar="GBIT", help="bandwidth of each rank in Gbit/s")
    parser.add_argument(
        "--latency", type=float, metavar="US", help="latency of a message in microseconds (default: 50)"
    )
    parser.add_argument("--measure", action="store_true", help="measure the network and exchanges in this job")
    parser.add_argument(
        "--algorithm", default="average", metavar="A,...", help="algorithms to compare (default: average)"
    )
    parser.add_argument(
        "--period", default="1,10,100", metavar="P,...", help="periods in local steps (default: 1,10,100)"
    )
    parser.add_argument(
        "--compression", default="none,int8", metavar="C,...", help="compressions to compare (default: none,int8)"
    )
    parser.add_argument(
        "--share", type=float, default=0.1, metavar="S", help="target share of time spent in exchanges (default: 0.1)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="total steps; limits the period so that the run has at least 100 exchanges",
    )
    parser.add_argument(
        "--learning-rate", type=float, metavar="R", help="learning rate of a single-worker run, used in the advice"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw costs over periods into FILE: .png, .svg, .pdf")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Print and draw the costs, on one rank."""
    _check(arguments)
    plots.require(arguments.plot)
    algorithms, wires = choice_parser.algorithms(arguments.algorithm), choice_parser.compressions(arguments.compression)
    periods = choice_parser.integers(arguments.period, "--period")
    nbytes = 4 * (parameters_of(arguments.model) if arguments.model else count(arguments.parameters))
    if arguments.measure:
        workers, network, methods, speaks = _measured(algorithms, wires)
        if not speaks:
            return 0
    else:
        workers, network = _stated(arguments)
        methods = list(exchange_methods.every_method(algorithms, wires, lambda algorithm, wire: typical(wire)))
    with as_usage_error():
        job = Job(workers, nbytes, arguments.step / 1e3, 1, spread=arguments.spread / 1e3)
    advice = exchange_methods.advise(job, network, methods, arguments.share, arguments.steps)
    found = exchange_methods.rows(job, network, methods, sorted({*periods, advice.period}))
    if arguments.json:
        costs = {
            method.name: {"begin_seconds": method.costs.begin, "byte_seconds": method.costs.work} for method in methods
        }
        output.write_json(_record(job, network, found, advice, arguments) | {"own_work": costs})
    else:
        _show(job, network, found, advice, arguments)
    if arguments.plot:
        plots.draw(arguments.plot, _title(job, network), _panels(job, network, methods, advice, periods))
    return 0


def count(text: str) -> int:
    """Return a number of parameters, which may end in k, M, G or B.

    Example:
        >>> count("25.6M"), count("1e3")
        (25600000, 1000)
    """
    factor = SUFFIXES.get(text[-1:], 1)
    with as_usage_error():
        try:
            number = float(text[:-1] if factor > 1 else text) * factor
        except ValueError:
            raise ValueError(f"`--parameters` must be a number such as 25.6M. Received: {text!r}") from None
        found = round(require_real(number, "`--parameters`", positive=True))
        if found < 1:
            raise ValueError(f"`--parameters` must be at least 1. Received: {text!r}")
        return found


def _check(arguments: argparse.Namespace) -> None:
    """Refuse invalid numbers, and options that --measure replaces."""
    with as_usage_error():
        require_real(arguments.step, "`--step`", positive=True)
        require_real(arguments.spread, "`--spread`", positive=False)
        if not 0 < arguments.share < 1:
            raise ValueError(f"`--share` must be between 0 and 1. Received: {arguments.share!r}")
        if arguments.steps is not None:
            require_int(arguments.steps, "`--steps`", 1)
        if arguments.learning_rate is not None:
            require_real(arguments.learning_rate, "`--learning-rate`", positive=True)
        given = [f"--{name}" for name in ("ranks", "bandwidth", "latency") if getattr(arguments, name) is not None]
        if arguments.measure and given:
            raise ValueError(f"--measure measures the network and the ranks itself: omit {' and '.join(given)}")


def _stated(arguments: argparse.Namespace) -> tuple[int, Network]:
    """Return the number of workers and the network from the options."""
    for name in ("ranks", "bandwidth"):
        if getattr(arguments, name) is None:
            raise UsageError(f"Pass --{name}, or use --measure in a job: mpirun -np 4 hvdp plan --measure ...")
    latency = 50.0 if arguments.latency is None else arguments.latency
    with as_usage_error():
        workers = require_int(arguments.ranks, "`--ranks`", 1)
        byte = 8e-9 / require_real(arguments.bandwidth, "`--bandwidth`", positive=True)
        return workers, Network(require_real(latency, "`--latency`", positive=False) / 1e6, byte)


def _measured(
    algorithms: list[choice_parser.Choice], wires: list[choice_parser.Choice]
) -> tuple[int, Network, list[ExchangeMethod], bool]:
    """Return workers, network and exchange methods of this job, and whether this process prints. Collective."""
    job = ranks.job()
    workers, root = job.communicator.size, job.communicator.rank == 0
    if workers == 1:
        raise UsageError("There is only one rank, and no network to measure: mpirun -np 4 hvdp plan --measure ...")
    total = len(ranks.ALLREDUCES) + len(algorithms) * len(wires) * len(ranks.EXCHANGES)
    with output.progress("measuring", total) if root else nullcontext(output.nothing) as advance:
        network = ranks.network(job, advance)

        def method(algorithm: Algorithm, wire: Wire) -> Method:
            return ranks.method(job, network, algorithm, wire, advance) or typical(wire)

        return workers, network, list(exchange_methods.every_method(algorithms, wires, method)), root


def _title(job: Job, network: Network) -> str:
    spread = f" ± {1e3 * job.spread:g}" if job.spread else ""
    return (
        f"{amount(job.nbytes / 4)} parameters ({job.nbytes / 1e6:,.6g} MB), "
        f"{job.workers} rank{'' if job.workers == 1 else 's'}, "
        f"{8e-9 / network.byte if network.byte else float('inf'):.3g} Gbit/s, {1e6 * network.message:.3g} µs, "
        f"steps of {1e3 * job.step:g}{spread} ms"
    )


def amount(number: float) -> str:
    """Return a number of parameters in words.

    Example:
        >>> amount(7e9), amount(25.6e6), amount(1e6), amount(12_345)
        ('7 billion', '25.6 million', '1 million', '12,345')
    """
    if number >= 1e9:
        return f"{number / 1e9:.4g} billion"
    return f"{number / 1e6:.4g} million" if number >= 1e6 else f"{number:,.0f}"


def megabytes(nbytes: float) -> str:
    """Return bytes in MB, to three digits, without an exponent.

    Example:
        >>> megabytes(2.8e10), megabytes(5.6e8), megabytes(1.234e6), megabytes(0)
        ('28,000', '560', '1.23', '0')
    """
    value = float(f"{nbytes / 1e6:.3g}")
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _show(job: Job, network: Network, found: list[Row], advice: Advice, arguments: argparse.Namespace) -> None:
    """Print the table and the advice."""
    columns = ("exchange", "period", "MB per step", "in exchanges", "steps/s", "of local")
    cells = [
        (row.exchange, str(row.period), megabytes(row.sent), f"{100 * row.share:.3g} %", f"{row.rate:.4g}",
         f"{row.rate * job.step:.2f}")
        for row in found
    ]  # fmt: skip
    output.show(_title(job, network), columns, cells)
    output.say(
        "MB per step: sent by each rank. in exchanges: share of the time, including waiting for the slowest rank. of "
        "local: relative to steps without communication. overlap: exchanges travel until just before the next one."
    )
    output.say()
    for name, text in advice.lines(job, arguments.learning_rate).items():
        output.say(f"{name}: {text}")


def _record(job: Job, network: Network, found: list[Row], advice: Advice, arguments: argparse.Namespace) -> Any:
    """Return plain values."""
    return {
        "parameters": round(job.nbytes / 4),
        "ranks": job.workers,
        "step_seconds": job.step,
        "spread_seconds": job.spread,
        "message_seconds": network.message,
        "byte_seconds": network.byte,
        "rows": [asdict(row) for row in found],
        "recommended": {
            "period": advice.period,
            "exchange": advice.exchange,
            "moving_rate": advice.moving_rate(job),
            "learning_rate": arguments.learning_rate,
            "why": advice.lines(job, arguments.learning_rate),
        },
    }


def _panels(
    job: Job, network: Network, methods: list[ExchangeMethod], advice: Advice, periods: list[int]
) -> list[plots.Panel]:
    """Return panels of three quantities over periods."""
    longest = max(100, 2 * advice.period, *periods)
    places = sorted({round(longest ** (i / 40)) for i in range(41)})
    by_name: dict[str, list[Row]] = {}
    for row in exchange_methods.rows(job, network, methods, places):
        by_name.setdefault(row.exchange, []).append(row)
    names = list(dict.fromkeys(name.removesuffix(", overlap") for name in by_name))
    marks = {f"recommended: {advice.period}": float(advice.period)}

    def panel(label: str, what: Any, log: str) -> plots.Panel:
        curves = []
        for name, each in by_name.items():
            plain = name.removesuffix(", overlap")
            places = [row.period for row in each] if len(each) > 1 else [1, longest]
            values = [what(row) for row in each] * (1 if len(each) > 1 else 2)
            style = "--" if plain != name else "-" if len(each) > 1 else ":"
            curves.append(plots.Curve(name, places, values, names.index(plain), style))
        return plots.Panel("period, in local steps", label, curves, log, marks)

    return [
        panel("steps per second", lambda row: row.rate, "x"),
        panel("share of time in exchanges, %", lambda row: 100 * row.share, "x"),
        panel("MB that a rank sends per step", lambda row: row.sent / 1e6, "xy"),
    ]
