"""A job under elastic Horovod, whose ranks change; see ``test_elastic.py``.

horovodrun --gloo --host-discovery-script ... python -m tests.parallel.elastic_program torch kill FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


def torch_parts() -> tuple[Any, Any, Any]:
    """Return Horovod, a step of training, and its state."""
    import horovod.torch as hvd
    import torch

    import hvd_periodic.torch as hvdp

    hvd.init()
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    state = hvd.elastic.TorchState(model=model, optimizer=inner, batch=0)
    made: list[Any] = []

    def step() -> None:
        if not made:
            made.append(hvdp.ModelAverageOptimizer(inner, model, 2))
        model(torch.ones(1, 2)).sum().backward()
        made[0].step()

    return hvd, step, state


def keras_parts() -> tuple[Any, Any, Any]:
    """The same with a compiled step of Keras."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    import hvd_periodic.tensorflow as hvdp

    hvd.init()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    state = hvd.elastic.ObjectState(
        bcast_object=lambda value, **_: hvd.broadcast_object(value), get_rank=hvd.rank, batch=0
    )
    made: list[Any] = []

    @tf.function
    def compiled() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones((1, 2))))
        variables = model.trainable_variables
        made[0].apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def step() -> None:
        if not made:
            made.append(hvdp.ModelAverageOptimizer(keras.optimizers.SGD(0.1), model, 2))
        compiled()

    return hvd, step, state


def main(framework: str, change: str, folder: Path) -> None:
    """Train while ranks come or go; print the error that ends it."""
    hvd, step, state = {"torch": torch_parts, "keras": keras_parts}[framework]()

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.batch < 400:
            state.batch += 1
            step()
            if change == "kill" and state.batch == 5 and hvd.rank() == 1:
                os._exit(1)
            if change == "add" and state.batch == 5:
                (folder / "more").touch()
                while hvd.size() == 1:  # until the job has found the other host
                    time.sleep(0.1)
                    state.commit()

    try:
        train(state)
    except Exception as error:
        print("ENDED", " ".join(str(error).split()), flush=True)
        os._exit(3)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
