"""One rank of a program on numpy arrays: every method is a call that a user might make."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np

from hvd_periodic.numpy import SGD, PeriodicOptimizer
from tests.fuzz.player import ALGORITHMS, PERIODS, Player, Setup, Trained
from tests.fuzz.ranks import InjectedError

MOMENTA = {"sgd": 0.0, "momentum": 0.9, "adam": 0.5}
"""Of the only optimizer that there is."""


class NumpyPlayer(Player):
    """One rank, of one level: there are no others, and no modes."""

    def made(self, setup: Setup) -> Trained:
        """Return new arrays, one of 16 bits, and an optimizer of them."""
        model = {"weight": np.ones((setup.width, 3)), "bias": np.zeros(setup.width, np.float16), "scale": np.ones(())}
        local = SGD(0.05, MOMENTA[setup.optimizer])
        optimizer = PeriodicOptimizer(
            local,
            model,
            ALGORITHMS[setup.algorithm],
            PERIODS[setup.period],
            asynchronous=setup.asynchronous,
            process_set=self.communicator,
            **setup.options(),
        )
        return Trained(setup, model, optimizer)

    def step(self, trained: Trained) -> None:
        """Descend, each rank to another place."""
        self.batches += 1
        target = np.sin(1000 * self.communicator.rank + self.batches)
        trained.optimizer.step({name: np.asarray(x - target, x.dtype) for name, x in trained.model.items()})

    def overflow(self, trained: Trained) -> None:
        """Pass over a batch, as is done where gradients are not finite."""
        trained.optimizer.skip()

    def closure(self, trained: Trained, raising: bool) -> None:
        """Take a step, unless the gradients cannot be computed."""
        if raising:
            raise InjectedError("in the backward pass")
        self.step(trained)

    def replaced(self, trained: Trained, how: str) -> None:
        """Ask for a copy."""
        pair = trained.model, trained.optimizer
        trained.model, trained.optimizer = (
            copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
        )

    def change(self, trained: Trained, what: str) -> None:
        """Change arrays after construction, where there is such a change."""
        trained.before = None
        local, weight = trained.optimizer.inner, trained.model["weight"]
        if what == "rate":
            local.learning_rate *= 0.5
        elif what == "state":
            local.velocities = None
        elif what == "resize":
            weight.shape = (3, trained.setup.width)
        elif what == "replace":
            trained.model["weight"] = weight.copy()
        elif what == "nan":
            weight.fill(np.nan)

    def state(self, trained: Trained) -> Any:
        """Return what the optimizer has, and its exchanges."""
        return {"exchanges": trained.optimizer.synchronizer.state_dict(), "local": vars(trained.optimizer.inner)}

    def load_state(self, trained: Trained, state: Any) -> None:
        """Load both."""
        trained.optimizer.synchronizer.load_state_dict(state["exchanges"])
        vars(trained.optimizer.inner).update(state["local"])

    def weights(self, trained: Trained) -> Any:
        """Return copies of the arrays."""
        return copy.deepcopy(trained.model)

    def load_weights(self, trained: Trained, weights: Any) -> None:
        """Copy them into the arrays."""
        for name, array in trained.model.items():
            if weights[name].shape != array.shape:
                raise InjectedError("loading weights")
            array[...] = weights[name]

    def parameters(self, trained: Trained) -> list[Any]:
        """Return copies."""
        return list(copy.deepcopy(trained.model).values())

    def is_finite(self, trained: Trained) -> bool:
        """Return whether all are."""
        return all(bool(np.isfinite(array).all()) for array in trained.model.values())
