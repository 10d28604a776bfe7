"""Fits the cost model to measured exchanges, and predicts the time per step of larger jobs.

    bash run_scripts/benchmark_exchange.sh 2 --model 1-million --json 2.json   # and other sizes, and 4 ranks
    python -m tests.benchmarks.predictions *.json --gigabits 10 --period 32

Prints what was measured beside what the model says, and predictions for 2 to 1,024 workers on a network described
by options. ``hvd_periodic.cost_model`` has the equations.
"""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

from hvd_periodic.cost_model import Costs, Job, Measurement, Network, fit, seconds_per_step
from hvd_periodic.vectors.layout import DEFAULT_BUCKET_BYTES
from hvd_periodic.wires import Plain
from tests.benchmarks import report
from tests.benchmarks.exchange import COMPRESSIONS

WORKERS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

CYCLE = 1e-3
"""Seconds of Horovod's cycle, which our launch scripts leave at its default: an allreduce alone sleeps until the next.

Where ranks share a core, exchanges of ours take as many times as long, however short they are: they do not sleep."""

EVERY_STEP = "allreduce at every step"


def measurements(files: list[Path]) -> list[Measurement]:
    """Return what the benchmark has written of what the model knows: synchronous exchanges, and Horovod's own."""
    found = []
    for file in files:
        job = json.loads(file.read_text())
        sharing = max(1.0, job["ranks"] / job["cores"])
        ours = {each["exchange"]: "Optimizer" in each["exchange"] for each in job["results"]}
        found += [
            Measurement(
                each["exchange"],
                job["ranks"],
                4 * job["parameters"],
                each["milliseconds"] / 1e3,
                COMPRESSIONS.get(each["compression"], Plain()),
                sharing,
                DEFAULT_BUCKET_BYTES if ours[each["exchange"]] else inf,
                job["tensors"],
                0.0 if ours[each["exchange"]] else CYCLE,
            )
            for each in job["results"]
            if "asynchronous" not in each["exchange"] and (ours[each["exchange"]] or "allreduce" in each["exchange"])
        ]
    return found


def compared(costs: Costs, measured: list[Measurement]) -> list[tuple[str, ...]]:
    """Return rows of what was measured and fitted."""
    rows = []
    for each in measured:
        predicted = costs.predicted(each)
        error = 100 * (predicted / each.seconds - 1)
        times = (f"{1e3 * seconds:.2f}" for seconds in (each.seconds, predicted))
        rows.append((each.method, str(each.workers), f"{each.nbytes / 1e6:.2f}", *times, f"{error:+.0f}"))
    return rows


def predictions(costs: Costs, network: Network, job: Job) -> dict[str, list[float]]:
    """Return seconds per step by number of workers, of every method, and with overlap."""
    flat = next(iter(costs.methods))
    found: dict[str, list[float]] = {EVERY_STEP: []}
    for workers in WORKERS:
        every = Job(workers, job.nbytes, job.step, 1, spread=job.spread)
        found[EVERY_STEP].append(seconds_per_step(every, costs.methods[flat], network))
        for name, method in costs.methods.items():
            if "Optimizer" not in name:
                continue
            wire = COMPRESSIONS.get(name.partition(", ")[2], Plain())
            for overlap in (0, job.period - 1) if job.period > 1 else (0,):
                own = Job(workers, job.nbytes, job.step, job.period, overlap, 1, wire, job.spread)
                label = f"{name}, overlap" if overlap else name
                found.setdefault(label, []).append(seconds_per_step(own, method, network))
    return found


def main() -> None:
    """Print both tables."""
    parser = report.parser(__doc__, "the predictions")
    parser.add_argument("files", nargs="+", type=Path, help="what the benchmark of exchanges has written")
    parser.add_argument("--gigabits", type=float, default=10, help="of the network, per second (default: 10)")
    parser.add_argument("--microseconds", type=float, default=50, help="for a message (default: 50)")
    parser.add_argument("--megabytes", type=float, default=100, help="of parameters (default: 100)")
    parser.add_argument("--milliseconds", type=float, default=100, help="of a local step (default: 100)")
    parser.add_argument("--spread", type=float, default=5, help="its standard deviation, in milliseconds (default: 5)")
    parser.add_argument("--period", type=int, default=32, help="local steps between exchanges (default: 32)")
    arguments = parser.parse_args()
    measured = measurements(arguments.files)
    costs = fit(measured)
    report.show(
        "measured and fitted", ("exchange", "ranks", "MB", "ms", "model", "error in %"), compared(costs, measured)
    )
    network = Network(arguments.microseconds / 1e6, 8e-9 / arguments.gigabits)
    job = Job(
        1,
        1e6 * arguments.megabytes,
        arguments.milliseconds / 1e3,
        arguments.period,
        spread=arguments.spread / 1e3,
    )
    found = predictions(costs, network, job)
    title = f"milliseconds per step, {arguments.megabytes:g} MB, {arguments.gigabits:g} Gbit/s, period {job.period}"
    rows = [(name, *(f"{1e3 * seconds:.0f}" for seconds in values)) for name, values in found.items()]
    report.show(title, ("workers", *map(str, WORKERS)), rows)
    panel = {name: (WORKERS, [1e3 * seconds for seconds in values]) for name, values in found.items()}
    report.curves(arguments.plot, title, "milliseconds per step", {"workers": panel}, base=2)
    report.write(arguments.json, found)


if __name__ == "__main__":
    main()
