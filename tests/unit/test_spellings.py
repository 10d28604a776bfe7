"""Spellings of version 0.1 work, and warn with what to write; names of front ends are found in front ends."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvd_periodic
import hvd_periodic.numpy
from hvd_periodic import AGN, Averaging, LocalCommunicator, logs
from hvd_periodic.algorithms import Exchange
from hvd_periodic.centers import Replicated
from hvd_periodic.vectors.store import FlatStore
from tests.conftest import PATIENCE
from tests.one_rank import one_rank


@pytest.mark.parametrize("name", sorted(hvd_periodic._WAS_HERE))
def test_numpy_optimizers_were_in_the_package_itself(name: str) -> None:
    with pytest.warns(
        DeprecationWarning, match=rf"`hvd_periodic\.{name}`.*: write `hvd_periodic\.numpy\.{name}`$"
    ) as w:
        found = getattr(hvd_periodic, name)
    assert found is getattr(hvd_periodic.numpy, name)
    assert w[0].filename == __file__
    assert name not in hvd_periodic.__all__


def test_names_of_front_ends_are_named_with_their_homes() -> None:
    with pytest.raises(AttributeError) as caught:
        _ = hvd_periodic.Synchronizer
    where = "it is in hvd_periodic.torch and hvd_periodic.tensorflow"
    assert str(caught.value) == f"module 'hvd_periodic' has no attribute 'Synchronizer': {where}"
    with pytest.raises(AttributeError, match=r"has no attribute 'Synchroniser'$"):
        _ = hvd_periodic.Synchroniser


@pytest.mark.parametrize("front_end", hvd_periodic._FRONT_ENDS)
def test_every_name_that_only_front_ends_have_is_known(front_end: str) -> None:
    if front_end != "numpy":
        pytest.importorskip(front_end)
    module = importlib.import_module(f"hvd_periodic.{front_end}")
    known = hvd_periodic._FRONT_ENDS[front_end]
    modules = {name for name in known - {*module.__all__} if (Path(module.__file__ or "").parent / name).exists()}
    modules |= {name for name in known if (Path(module.__file__ or "").parent / f"{name}.py").exists()}
    assert known - modules == {*module.__all__} - {*hvd_periodic.__all__} - hvd_periodic._WAS_HERE - modules


def test_importing_the_package_leaves_logging_alone() -> None:
    program = (
        "import logging, hvd_periodic.numpy; log = logging.getLogger('hvd_periodic'); print(log.handlers, log.level)"
    )
    environment = os.environ | {logs.VARIABLE: "info"}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE * 60, check=True)
    assert done.stdout == "[] 0\n"
    assert not done.stderr


CONSTRUCTORS = ["PeriodicOptimizer", "ElasticAverageOptimizer", "ModelAverageOptimizer", "AGNOptimizer"]


def made(framework: str, name: str, *models: str, **given: Any) -> Any:
    """Return an optimizer of one rank, whose model is passed under these names; ``model`` by default."""
    module, local, model = one_rank(framework)
    given |= dict.fromkeys(models or ["model"], model)
    if name == "PeriodicOptimizer":
        given = {"algorithm": AGN(), "period": 2, **given}
    return getattr(module, name)(local(), **given)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_the_model_was_named_parameters(framework: str, name: str) -> None:
    alone = {"process_set": LocalCommunicator()}
    with pytest.warns(DeprecationWarning, match=rf"^`{name}\(named_parameters=\.\.\.\)`.*: write `model=`$") as warned:
        optimizer = made(framework, name, "named_parameters", **alone)
    assert [each.filename for each in warned if issubclass(each.category, DeprecationWarning)] == [__file__], [
        str(each) for each in warned
    ]
    assert optimizer.synchronizer.replica.names == (["x"] if framework == "numpy" else ["weight", "bias"])
    with pytest.raises(TypeError, match=r"^`named_parameters` and `model` are two names of one argument"):
        made(framework, name, "named_parameters", "model", **alone)


def test_a_name_beside_the_positional_argument_is_refused() -> None:
    local, arrays = hvd_periodic.numpy.SGD(0.1), {"x": np.zeros(2)}
    with pytest.raises(TypeError, match=r"^`named_parameters` and `model` are two names"):
        hvd_periodic.numpy.ModelAverageOptimizer(local, arrays, named_parameters=arrays)  # type: ignore[call-arg]


def test_arrays_as_a_replica_were_named_parameters() -> None:
    with pytest.warns(DeprecationWarning, match="write `model=`"):
        replica = hvd_periodic.numpy.NumpyReplica(named_parameters={"x": np.zeros(2)})  # type: ignore[call-arg]
    assert replica.names == ["x"]


AGN_OLD = r"^`AGNOptimizer\(center_optimizer=\.\.\.\)`.*: write `outer_optimizer=`$"


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_the_outer_optimizer_of_agn_was_the_center_optimizer(framework: str) -> None:
    """Seen from the error about one that is none, which has the new name."""
    alone = {"process_set": LocalCommunicator()}
    with (
        pytest.warns(DeprecationWarning, match=AGN_OLD),
        pytest.raises(TypeError, match=r"^`outer_optimizer` must be .* Received: str"),
    ):
        made(framework, "AGNOptimizer", center_optimizer="adam", **alone)
    with pytest.raises(TypeError, match=r"^`center_optimizer` and `outer_optimizer` are two names of one argument"):
        made(framework, "AGNOptimizer", center_optimizer=None, outer_optimizer=None, **alone)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'center_optimizer'"):
        made(framework, "ElasticAverageOptimizer", center_optimizer=None, **alone)


def test_the_outer_optimizer_of_arrays_was_the_center_optimizer() -> None:
    x, moving = np.zeros(1), hvd_periodic.numpy.SGD(0.5)
    with pytest.warns(DeprecationWarning, match=AGN_OLD):
        optimizer = hvd_periodic.numpy.AGNOptimizer(
            hvd_periodic.numpy.SGD(0.125),
            {"x": x},
            1,
            center_optimizer=moving,  # type: ignore[call-arg]
        )
    optimizer.step([np.ones(1)])
    assert x == -0.5


def test_the_wrapped_optimizer_of_arrays_was_the_optimizer() -> None:
    local, other = hvd_periodic.numpy.SGD(0.1), hvd_periodic.numpy.SGD(0.5)
    optimizer = hvd_periodic.numpy.ModelAverageOptimizer(local, {"x": np.zeros(2)})
    message = r"^`ModelAverageOptimizer\.optimizer` is .*: write `\.inner`$"
    with pytest.warns(DeprecationWarning, match=message) as warned:
        assert optimizer.optimizer is local
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=message):
        optimizer.optimizer = other
    assert optimizer.inner is other


@pytest.mark.parametrize("framework", ["numpy", "torch", "tensorflow"])
def test_the_wrapped_optimizer_has_one_name(framework: str) -> None:
    module, local, model = one_rank(framework)
    inside = local()
    assert module.ModelAverageOptimizer(inside, model, process_set=LocalCommunicator()).inner is inside


def test_files_of_keras_name_the_wrapped_optimizer_as_before() -> None:
    module, local, model = one_rank("tensorflow")
    optimizer = module.ModelAverageOptimizer(local(), model, process_set=LocalCommunicator())
    assert optimizer.inner_optimizer is optimizer.inner
    assert {"inner", "inner_optimizer"} & {*dir(optimizer)} == {"inner_optimizer"}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_the_ranks_of_arrays_were_the_communicator(name: str) -> None:
    communicator = LocalCommunicator()
    with pytest.warns(DeprecationWarning, match=rf"^`{name}\(communicator=\.\.\.\)`.*: write `process_set=`$"):
        optimizer = made("numpy", name, communicator=communicator)
    assert optimizer.synchronizer.membership.communicator is communicator
    with pytest.raises(TypeError, match=r"^`communicator` and `process_set` are two names of one argument"):
        made("numpy", name, communicator=communicator, process_set=communicator)


def test_configurations_of_keras_are_read_and_have_their_keys() -> None:
    """Those of version 0.1 hold ``overlap``, which was always 0."""
    module, local, model = one_rank("tensorflow")
    optimizer = module.AGNOptimizer(local(), model, outer_optimizer=local(), process_set=LocalCommunicator())
    config = optimizer.get_config()
    assert {"center_optimizer", "communication_period", "overlap"} <= {*config}
    again = module.AGNOptimizer.from_config(config | {"overlap": 0})
    assert again.get_config() == config


def test_members_of_communicators() -> None:
    """They are read, set and overridden under their old names."""
    with pytest.warns(DeprecationWarning, match=r"`Own\.(larger|encloses)` .*: write `") as caught:

        class Own(LocalCommunicator):
            encloses = 7

            def larger(self, x: Any, y: Any) -> Any:
                return max(x, y)

    assert [warning.filename for warning in caught] == [__file__] * 2
    own = Own()
    assert (own.piggyback_limit_bytes, own.maximum(2, 3)) == (7, 3)
    with pytest.warns(DeprecationWarning, match=r"`Own\.meets_with` .*: write `\.handshake_group`$"):
        assert own.meets_with is own
    with pytest.warns(DeprecationWarning, match=r"`Own\.waits_busily` .*: write `\.busy_waits`$"):
        own.waits_busily = True
    assert own.busy_waits


def test_members_of_algorithms_of_users_had_other_names() -> None:
    with pytest.warns(DeprecationWarning, match=r"^`Mine\..*` is a spelling of version 0\.1") as warned:

        class Mine(Averaging):
            keeps_error = False

            def one_by_one(self, size: int) -> Averaging:
                return self

            def closes(self, exchange: Exchange) -> float:
                return 0.5

            def hand_out(self, space: Any, center: Any, exchange: Exchange) -> Any:
                return center["center"] + 1

    assert [str(each.message) for each in warned] == [
        f"`Mine.{old}` is a spelling of version 0.1 and ends with the next version: write `{new}`"
        for old, new in (
            ("keeps_error", "uses_error_feedback"),
            ("closes", "contraction"),
            ("one_by_one", "asynchronous_variant"),
            ("hand_out", "publish"),
        )
    ]
    assert warned[0].filename == __file__
    assert not Mine.uses_error_feedback
    assert Mine().contraction(Exchange(2, 1)) == 0.5
    assert Mine().asynchronous_variant(2) == Mine()
    assert Mine().publish(None, {"center": 1}, Exchange(2, 1)) == 2


def test_members_of_placements_replicas_and_stores_of_users_had_other_names() -> None:
    with pytest.warns(DeprecationWarning, match=r"^`Mine\.bytes_to_hand_out` .*: write `bytes_to_publish`$"):
        placement = type("Mine", (Replicated,), {"bytes_to_hand_out": lambda self, nbytes: nbytes})
    assert placement(LocalCommunicator(), 0).bytes_to_publish(4) == 4
    with pytest.warns(DeprecationWarning, match=r"^`Mine\.resting` .*: write `offload`$"):
        replica = type("Mine", (hvd_periodic.numpy.NumpyReplica,), {"resting": lambda self, value: -value})
    assert replica({"x": np.zeros(2)}).offload(1) == -1
    with pytest.warns(DeprecationWarning, match=r"^`Mine\.away` .*: write `offloaded`$"):
        assert type("Mine", (FlatStore,), {"away": True}).offloaded


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_names_of_members_are_those_of_their_classes() -> None:
    """Read, called by ``super()``, from a mixin, as a field of a dataclass, and set."""

    class Ranks(LocalCommunicator):
        def lost(self) -> list[int]:
            return [*super().lost(), 7]

        @property
        def meets_with(self) -> Any:
            return super().meets_with

    ranks = Ranks()
    assert ranks.dead_ranks() == ranks.lost() == [7]
    assert ranks.handshake_group is ranks.meets_with is ranks

    class Mixin:
        def hand_out(self, space: Any, center: Any, exchange: Exchange) -> Any:
            return center["center"] + 2

    class Mixed(Mixin, Averaging):
        pass

    assert Mixed().publish(None, {"center": 1}, Exchange(2, 1)) == 3
    assert (Averaging().keeps_error, Averaging().spent) == (True, None)

    @dataclass
    class Away(FlatStore):
        layout: Any = None
        away: bool = True

    store = Away()
    assert store.offloaded
    store.away = False
    assert not store.offloaded
