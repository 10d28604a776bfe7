"""The numpy core on mpi4py, without Horovod: the contract of communicators and the losses of the oracle.

mpirun -np 2 python -m tests.parallel.mpi_program FOLDER

With an argument more, asynchronous exchange on mpi4py by this transport, beside a Horovod that has started MPI; or two
trainings at once; or errors; or the bits that each library leads to.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from hvd_periodic.comm.mpi import MPICommunicator
from hvd_periodic.numpy import SGD, AGNOptimizer, ElasticAverageOptimizer, ModelAverageOptimizer
from tests import oracle
from tests.conformance.communicator_contract import check_communicator
from tests.conformance.messages_contract import check_messages
from tests.parallel.program import attempt, repeated


def main(folder: Path) -> None:
    """Write this rank's replica and center for each algorithm."""
    from mpi4py import MPI

    communicator = MPICommunicator()
    check_communicator(communicator)
    assert arrives_by_itself(communicator), "a large sum travels while no rank polls"
    check_messages(communicator.messages, communicator.size, MPI.COMM_WORLD.Barrier)
    if find_spec("torch") is not None:
        import torch

        from hvd_periodic.torch.communicator import TensorsOverMPI

        check_communicator(TensorsOverMPI(), torch.from_numpy)
    results = {}
    for name, make in (
        ("easgd", lambda *a: ElasticAverageOptimizer(*a, 2, moving_rate=0.25, process_set=communicator)),
        ("average", lambda *a: ModelAverageOptimizer(*a, 2)),
        ("agn", lambda *a: AGNOptimizer(*a, 4, process_set=MPI.COMM_WORLD)),
    ):
        x = np.array(oracle.START)
        optimizer = make(SGD(oracle.RATE, oracle.MOMENTUM), {"w": x})
        for _ in range(oracle.STEPS):
            optimizer.step([np.array(oracle.gradient(communicator.rank, x.tolist()))])
        replica = x.tolist()
        with optimizer.center():
            results[name] = (replica, x.tolist())
    (folder / f"{communicator.rank}.json").write_text(json.dumps(results))


def arrives_by_itself(communicator: MPICommunicator) -> bool:
    """Return whether a large sum arrives in its buffer before anybody waits for it; collective."""
    buffer, limit = np.ones(2**20, np.float32), time.monotonic() + 30
    wait = communicator.allreduce(buffer, "by itself")
    while buffer[-1] != communicator.size and time.monotonic() < limit:
        time.sleep(1e-3)
    arrived = bool(buffer[-1] == communicator.size)
    wait()
    return arrived


def beside_horovod(folder: Path, transport: str) -> None:
    """Write the replica's way that is left to the center, and the center, of gradients −1 − 2 rank.

    Arrays are exchanged over Horovod meanwhile.
    """
    import horovod.torch as hvd
    import torch

    import hvd_periodic.torch as hvdp
    from hvd_periodic.asynchronous.worker import VARIABLE
    from hvd_periodic.numpy.communicator import communicator_of

    os.environ[VARIABLE] = transport
    hvd.init()
    x = torch.nn.Parameter(torch.zeros(3))
    local = torch.optim.SGD([x], lr=1.0)
    options = {"asynchronous": True, "process_set": MPICommunicator()}
    check_communicator(communicator_of(None))
    optimizer = hvdp.ElasticAverageOptimizer(local, [("x", x)], 2, moving_rate=0.25, **options)
    for _ in range(8):
        x.grad = torch.full([3], -1.0 - 2 * hvd.rank())
        optimizer.step()
    optimizer.finalize()
    replica = x.tolist()
    with optimizer.center():
        (folder / f"{hvd.rank()}.json").write_text(json.dumps([replica, x.tolist()]))


def two_trainings(folder: Path) -> None:
    """Write what this rank sees of two trainings at once, of the even and of the odd ranks, one after another way.

    The ranks of the first average, those of the second exchange asynchronously: numpy over a part of MPI's ranks, then
    PyTorch over a Horovod of these.
    """
    import horovod.torch as hvd
    import torch
    from mpi4py import MPI

    import hvd_periodic.torch as hvdp
    from hvd_periodic.comm.mpi import group_of_ranks

    number = MPI.COMM_WORLD.Get_rank()
    ranks = group_of_ranks([number % 2, number % 2 + 2])
    found: dict[str, Any] = {"rank": ranks.Get_rank()}
    of_arrays = {"process_set": ranks, "root_rank": number % 2 + 2}
    wrong = {"w": np.zeros(3)}, number
    found["wrong on one rank"] = attempt(lambda: ModelAverageOptimizer(SGD(1.0), *wrong, **of_arrays))
    x = np.full(3, float(number))
    if number % 2:
        arrays: Any = ElasticAverageOptimizer(SGD(1.0), {"w": x}, 2, 0.25, asynchronous=True, **of_arrays)
    else:
        arrays = ModelAverageOptimizer(SGD(1.0), {"w": x}, 2, **of_arrays)
    for _ in range(8):
        arrays.step([np.full(3, -1.0 - 2 * number)])
    arrays.finalize()
    replica = x.tolist()
    with arrays.center():
        found["numpy"] = replica, x.tolist()

    hvd.init(comm=ranks)
    w = torch.nn.Parameter(torch.full([3], float(number)))
    local = torch.optim.SGD([w], lr=1.0)
    tensors: Any = (
        hvdp.ElasticAverageOptimizer(local, [("w", w)], 2, 0.25, asynchronous=True)
        if number % 2
        else hvdp.ModelAverageOptimizer(local, [("w", w)], 2)
    )
    for _ in range(8):
        w.grad = torch.full([3], -1.0 - 2 * number)
        tensors.step()
    tensors.finalize()
    replica = w.tolist()
    with tensors.center():
        found["torch"] = replica, w.tolist()
    marks = Path(os.environ["PMIX_SERVER_TMPDIR"]).glob("hvd_periodic.*")
    found["marks"] = sorted(path.name for path in marks)
    MPI.COMM_WORLD.Barrier()
    (folder / f"{number}.json").write_text(json.dumps(found))


def errors(folder: Path) -> None:
    """Write the errors of this rank where libraries disagree, or one of them does not work."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    import hvd_periodic.torch as hvdp
    from hvd_periodic.comm.selection import VARIABLE as CHOICE
    from hvd_periodic.numpy.communicator import communicator_of as of_arrays

    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    x = torch.nn.Parameter(torch.zeros(1))

    def averaged(**options: Any) -> object:
        return hvdp.ModelAverageOptimizer(torch.optim.SGD([x], lr=1.0), [("x", x)], 2, **options)

    found = {}
    # Of a Horovod that was built for another PyTorch, this import is an ImportError, too.
    with patch.dict(sys.modules, {"horovod.torch": None}):
        found["groups of a broken Horovod"] = attempt(hvdp.node_groups)
        with patch.dict(os.environ, {CHOICE: "horovod"}):
            found["broken Horovod"] = attempt(averaged)
        with patch.dict(os.environ, {CHOICE: "mpi"}):
            found["MPI instead"] = attempt(averaged)
    found["elastic"] = attempt(lambda: hvdp.elastic.State(optimizer=averaged()))
    found["function"] = attempt(lambda: averaged(process_set=hvdp.node_ranks))
    found["node_ranks"] = attempt(hvdp.node_ranks)
    found["on a GPU"] = attempt(lambda: MPICommunicator().check_devices(["cpu", "cuda"]))
    store = dist.FileStore(str(folder / "rendezvous"), size)
    dist.init_process_group("gloo", store=store, rank=size - 1 - rank, world_size=size)
    found["numbers of PyTorch"] = attempt(averaged)
    found["numbers of MPI"] = attempt(lambda: averaged(process_set=MPI.COMM_WORLD))
    found["numbers, for arrays"] = attempt(lambda: of_arrays(None).unique_name())
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def same_bits(folder: Path, front_end: str) -> None:
    """Write digests of this rank's replica and of the center after training over each library, by way to exchange.

    ``HVD_PERIODIC_COMM`` names one of the libraries; without it, all are tried in this process.
    """
    from hvd_periodic.comm.selection import LIBRARIES, requested
    from hvd_periodic.comm.selection import VARIABLE as CHOICE

    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{what}"]) for what in ("RANK", "SIZE"))
    trained = _in_a_session if front_end == "tensorflow.contrib_opt" else partial(_trained, front_end)
    libraries = [requested()] if requested() else list(LIBRARIES)
    if "horovod" in libraries:
        importlib.import_module(f"horovod.{'tensorflow' if 'tensorflow' in front_end else 'torch'}").init()
    if "torch" in libraries:
        import torch.distributed as dist

        store = dist.FileStore(str(folder / "rendezvous"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = {}
    for library in libraries:
        os.environ[CHOICE] = str(library)
        found[library] = {name: trained(*way, rank) for name, way in _ways(front_end).items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


def _ways(front_end: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return algorithms and options, by name; those that need other collectives, where graphs take their time."""
    from hvd_periodic import AGN, EASGD, Averaging, Compression, DiLoCo

    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "easgd": (EASGD, {}),
        "agn": (AGN, {"optimizer_state": "average"}),
        "diloco": (DiLoCo, {"center": "sharded"}),
        "overlap": (Averaging, {"overlap": 1}),
        "fragments": (Averaging, {"fragments": 2, "overlap": "period"}),
        "root": (EASGD, {"center": "root"}),
        "int8": (EASGD, {"compression": Compression.int8}),
        "topk": (Averaging, {"compression": Compression.topk(0.25)}),
    }
    some = ("easgd", "root", "topk", *repeated(*ways)) if "tensorflow" in front_end else ways
    return {name: way for name, way in ways.items() if name in some}


def _trained(front_end: str, algorithm: Any, options: dict[str, Any], rank: int) -> list[str]:
    """Train a network on data of this rank; return digests of the replica and of the center."""
    module = importlib.import_module(f"hvd_periodic.{front_end}")
    random = np.random.default_rng(rank)
    inputs = random.standard_normal((12, 8, 6)).astype(np.float32)

    def digests(optimizer: Any, values: Callable[[], list[np.ndarray]]) -> list[str]:
        optimizer.synchronizer.finalize()
        replica = _digest(values())
        with optimizer.synchronizer.center():
            return [replica, _digest(values())]

    if front_end == "numpy":
        arrays = {"w": random.standard_normal((6, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}
        optimizer = module.PeriodicOptimizer(module.SGD(0.1, momentum=0.9), arrays, algorithm(), 3, **options)
        for batch in inputs:
            error = np.tanh(batch @ arrays["w"]) + arrays["b"]
            optimizer.step({"w": batch.T @ error / 24, "b": error.mean(axis=0)})
        return digests(optimizer, lambda: list(arrays.values()))
    if front_end == "torch":
        import torch

        torch.manual_seed(rank)
        network = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        local = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        optimizer = module.PeriodicOptimizer(local, network, algorithm(), 3, **options)
        for batch in inputs:
            optimizer.zero_grad()
            network(torch.from_numpy(batch)).square().mean().backward()
            optimizer.step()
        return digests(optimizer, lambda: [value.detach().numpy() for value in network.parameters()])
    import keras

    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)])
    optimizer = module.PeriodicOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), model, algorithm, 3, **options)
    model.compile(optimizer, loss="mse", jit_compile=False)
    examples = inputs.reshape(-1, 6)
    model.fit(examples, np.zeros((len(examples), 3), np.float32), batch_size=8, epochs=1, verbose=0, shuffle=False)
    return digests(optimizer, model.get_weights)


def _in_a_session(algorithm: Any, options: dict[str, Any], rank: int) -> list[str]:
    """Train two variables in a session; return digests of the replica and of the center, which the root may hold."""
    from hvd_periodic import AGN, EASGD, Averaging, DiLoCo
    from tests.parallel.contrib_options_scenarios import Session
    from tests.parallel.tensorflow_job import hvd

    names = {EASGD: "easgd", AGN: "agn", Averaging: "average", DiLoCo: "diloco"}
    refused = {("optimizer_state", "average"), ("center", "sharded")}
    training = Session(names[algorithm], True, 3, **dict(options.items() - refused))
    for _ in range(12):
        training.step()
    training.land()
    replica, center = training.values()
    return [_digest([np.array(replica)]), _digest([np.array(hvd.broadcast_object(center))])]


def _digest(values: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()


if __name__ == "__main__":
    given, *more = sys.argv[1:]
    if not more:
        main(Path(given))
    elif more == ["two trainings"]:
        two_trainings(Path(given))
    elif more == ["errors"]:
        errors(Path(given))
    elif more[0] == "same bits":
        same_bits(Path(given), more[1])
    else:
        beside_horovod(Path(given), *more)
