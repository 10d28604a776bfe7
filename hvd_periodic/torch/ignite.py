"""PyTorch Ignite: a handler that evaluates and saves the center, and ends training on all ranks.

Needs ``pytorch-ignite``, which only this module imports.
"""

from __future__ import annotations

from typing import Any

import torch
from ignite.engine import Engine, Events

from hvd_periodic.torch.trainers import Centers, gather


class PeriodicHandler:
    """Lets Ignite engines evaluate the center, and ends training on all ranks.

    While an evaluator runs, the model holds the center. At the end of training all ranks exchange their remaining
    steps, and from then on the model holds the center. Ranks may have different numbers of batches. If one rank
    terminates, for example by early stopping, all do: at the end of that epoch, or at an exchange before it. Without
    such an exchange, an evaluator that is attached to the end of the epoch causes an error on all ranks. During
    training all ranks run attached evaluators together; with different numbers of batches, at the end of an epoch.
    Attach the handler after the handlers that decide on termination::

        optimizer = hvdp.ElasticAverageOptimizer(optimizer, model, communication_period=10)
        trainer = create_supervised_trainer(model, optimizer, cross_entropy)
        evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(test_loader))
        handler = PeriodicHandler(model, optimizer)
        handler.attach(trainer, evaluator)

    For ``ignite.handlers.Checkpoint`` the handler holds the center under the names of the model: the root must save
    ``{"model": handler, "optimizer": optimizer}``. To resume exactly, use :func:`hvd_periodic.torch.save`.

    Args:
        model: the model that is trained.
        optimizer: an optimizer of this package.
        others: further optimizers, if there are several.

    Raises:
        TypeError: an optimizer of another package.
        RuntimeError: during training, on all ranks: some ranks have reached an evaluation, and others have not.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, *others: Any) -> None:
        self._model, self._centers = model, Centers([optimizer, *others])
        self._communicator = self._centers.synchronizers[0].membership.communicator
        self._uneven = self._training = self._within = self._followed = False
        self._started_at = self._last_step = 0

    def attach(self, trainer: Engine, *evaluators: Engine) -> None:
        """Attach to a trainer and to evaluators of its model, which otherwise see the replica; may be called again."""
        if not trainer.has_event_handler(self._begin, Events.STARTED):
            trainer.add_event_handler(Events.STARTED, self._begin)
            trainer.add_event_handler(Events.EPOCH_STARTED, self._begin_epoch)
            trainer.add_event_handler(Events.ITERATION_STARTED, self._centers.leave)  # However an evaluator ended.
            trainer.add_event_handler(Events.ITERATION_COMPLETED, self._follow)
            trainer.add_event_handler(Events.EPOCH_COMPLETED, self._end_epoch)
            trainer.add_event_handler(Events.TERMINATE, self._terminate)
            trainer.add_event_handler(Events.COMPLETED, self._end)
        for evaluator in evaluators:
            evaluator.add_event_handler(Events.STARTED, self._show, trainer)
            # A run that continues after an error does not fire STARTED again.
            evaluator.add_event_handler(Events.ITERATION_STARTED, self._centers.enter)
            evaluator.add_event_handler(Events.COMPLETED | Events.TERMINATE, self._centers.leave)

    def report(self, sink: Any, every: int = 1) -> None:
        """Show one in ``every`` exchanges with a function of numbers and step, such as one of an Ignite logger."""
        self._centers.report(sink, every)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model with the values of the center."""
        return self._centers.state_of(self._model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this state into the model."""
        self._model.load_state_dict(state)

    def _begin(self, trainer: Engine) -> None:
        """Find out whether all ranks are sure to have the same number of batches."""
        batches = set(gather(self._communicator, trainer.state.epoch_length))
        self._uneven, self._training = len(batches) > 1 or batches == {None}, True
        self._started_at = self._centers.synchronizers[0].local_steps

    def _show(self, evaluator: Engine, trainer: Engine) -> None:
        """Show the center once all ranks are ready: metrics cover all ranks."""
        event = trainer.last_event_name
        if event == Events.EPOCH_COMPLETED:
            self._wait_for_all()
        if self._training:
            self._gather(f"the evaluation at {getattr(event, 'name', event)}")
        self._centers.enter()

    def _gather(self, place: str, value: Any = None) -> list[Any]:
        """Return the values of all ranks, if all have reached the same place in training."""
        failure = RuntimeError(
            f"Not all ranks have reached {place}: one has no more batches, has terminated, or evaluates at other "
            "events. All ranks must run attached evaluators; with different numbers of batches, at "
            "Events.EPOCH_COMPLETED, where they wait for each other. To evaluate on one rank alone, do not attach its "
            "evaluator, but run it inside `with optimizer.center():`"
        )
        found = gather(self._communicator, (place, value), failure)
        if any(other != place for other, _ in found):
            raise failure
        return [value for _, value in found]

    def _wait_for_all(self) -> None:
        if self._uneven:
            self._finalize("the end of the epoch")

    def _finalize(self, place: str) -> None:
        """Leave training together; asynchronous ranks first do a handshake, as their ``finalize()`` has none."""
        if not self._in_step:
            self._gather(place)
        self._centers.finalize()

    @property
    def _in_step(self) -> bool:
        """Whether ranks exchange at the same steps."""
        return self._centers.synchronizers[0].exchanger.steps_agree

    def _begin_epoch(self, trainer: Engine) -> None:
        """Note the last step of the epoch, if all ranks have the same number of batches, one step each."""
        self._within, self._followed = True, False
        self._last_step = self._centers.synchronizers[0].local_steps + (trainer.state.epoch_length or 0)

    def _follow(self, trainer: Engine) -> None:
        """Terminate at the exchange in which another rank has left training in the middle of an epoch."""
        if not self._uneven and self._has_left() and not trainer.should_terminate:
            self._followed = True
            trainer.terminate()

    def _has_left(self) -> bool:
        """Return whether a rank was leaving at the last exchange of this training."""
        exchanged = self._centers.synchronizers[0].counters.last_exchange > self._started_at
        return self._in_step and exchanged and self._centers.left

    def _end_epoch(self, trainer: Engine) -> None:
        """End the epoch on all ranks; if one has terminated, end training with the same events on all ranks."""
        self._wait_for_all()
        self._within = False
        own = not self._followed and trainer.should_terminate
        asked = {wish for wish in self._gather("the end of the epoch", own) if wish}
        if asked == {"skip_completed"}:
            trainer.terminate(skip_completed=True)
        elif asked:
            trainer.terminate()

    def _terminate(self, trainer: Engine) -> None:
        """End training on all ranks after this one has terminated, in whichever way.

        In the middle of an epoch, the other ranks wait at their next exchange, or at the end of the epoch if it is
        first.
        """
        if self._within:
            exchange = min(synchronizer.counters.next_exchange for synchronizer in self._centers.synchronizers)
            if not self._uneven and self._in_step and (self._has_left() or exchange <= self._last_step):
                self._centers.finalize()
            self._end_epoch(trainer)
        if trainer.should_terminate == "skip_completed":
            self._end()

    def _end(self) -> None:
        self._training = self._within = False
        self._finalize("the end of training")
        self._centers.settle(self._model)
