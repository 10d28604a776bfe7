"""Periodic exchange for ``model.fit`` of Keras 3 on any backend: JAX, PyTorch or TensorFlow.

Example::

    import keras
    import hvd_periodic.keras as hvdp

    exchange = hvdp.PeriodicExchange(model, hvdp.Averaging(), period=10)
    model.fit(shard, callbacks=[exchange])

It imports neither Horovod nor a backend that Keras does not use. For Keras on TensorFlow, ``hvd_periodic.tensorflow``
has optimizers that do the same inside of compiled steps.
"""

from hvd_periodic.algorithms import BMUF, EASGD, Averaging, DiLoCo, SlowMo
from hvd_periodic.keras.exchange import PeriodicExchange
from hvd_periodic.presets import sparse_loco
from hvd_periodic.schedules import QSR, AdaComm, Clock, Doubling, DyLU, Every, Piecewise, PostLocal, Schedule, Seconds
from hvd_periodic.wires import Compression

__all__ = [
    "BMUF",
    "EASGD",
    "QSR",
    "AdaComm",
    "Averaging",
    "Clock",
    "Compression",
    "DiLoCo",
    "Doubling",
    "DyLU",
    "Every",
    "PeriodicExchange",
    "Piecewise",
    "PostLocal",
    "Schedule",
    "Seconds",
    "SlowMo",
    "sparse_loco",
]
