"""What a local step costs, without any exchange, as a multiple of the plain optimizer's step in the same run.

    python -m tests.benchmarks.local_step [--framework tensorflow]

The local optimizer is SGD with momentum. In PyTorch a step is that of the optimizer; in TensorFlow it is a whole step
of ``fit`` on a model of 20 thousand parameters in 20 variables, where what a step costs besides its arithmetic shows.
Figures are medians of alternating repetitions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

from tests.benchmarks import report
from tests.benchmarks.exchange import MODELS

NEVER = 2**30
"""Steps until the first exchange."""

Steps = dict[str, Callable[[], float]]
"""What measures the seconds of a step, by name; the first is the unit."""


@dataclass(frozen=True)
class Result:
    """A step that was measured.

    Attributes:
        step: its name.
        microseconds: median.
        more: than the plain optimizer's, microseconds; median of the differences.
        ratio: of the plain optimizer's; median of the ratios.
        lowest, highest: ratios.
    """

    step: str
    microseconds: float
    more: float
    ratio: float
    lowest: float
    highest: float


def measured(steps: Steps, repetitions: int) -> list[Result]:
    """Return the results of alternating repetitions; the first two are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repetitions + 2):
        for name, step in steps.items():
            seconds[name].append(1e6 * step())
    unit = next(iter(seconds.values()))[2:]
    results = []
    for name, (_, _, *values) in seconds.items():
        ratios = [own / plain for own, plain in zip(values, unit, strict=True)]
        more = median(own - plain for own, plain in zip(values, unit, strict=True))
        results.append(Result(name, median(values), more, median(ratios), min(ratios), max(ratios)))
    return results


def main() -> None:
    """Print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch", help="default: torch")
    parser.add_argument("--repetitions", type=int, default=15, help="of each step (default: 15)")
    parser.add_argument(
        "--model", choices=MODELS, default="resnet-50", help="sizes of parameters, in PyTorch (default: resnet-50)"
    )
    arguments = parser.parse_args()
    framework = importlib.import_module(f"tests.benchmarks.local_step_{arguments.framework}")
    results = measured(framework.steps(arguments.model), arguments.repetitions)
    rows = []
    for each in results:
        values = f"{each.microseconds:.0f}", f"{each.more:+.0f}", f"{each.ratio:.2f}"
        rows.append((each.step, *values, f"{each.lowest:.2f} to {each.highest:.2f}"))
    title = f"local steps, {arguments.framework}"
    report.show(title, ("step", "µs", "more", "ratio", "repetitions"), rows)
    ranges = {each.step: (each.ratio, each.lowest, each.highest) for each in results}
    report.bars(arguments.plot, title, "times the plain optimizer's", ranges)
    report.write(arguments.json, [asdict(each) for each in results])


if __name__ == "__main__":
    main()
