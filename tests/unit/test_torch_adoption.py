"""Changes of the trained set in the middle of training, in PyTorch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvd_periodic.torch as hvdp  # noqa: E402
from hvd_periodic import AGN, BMUF, EASGD, Averaging, Communicator, Compression, DiLoCo, SlowMo  # noqa: E402
from tests.covering import covering  # noqa: E402
from tests.helpers import errors, run_ranks  # noqa: E402

ALGORITHMS: dict[str, Any] = {
    "average": Averaging,
    "diloco": DiLoCo,
    "slowmo": SlowMo,
    "bmuf": BMUF,
    "easgd": lambda: EASGD(0.25, rho=0.5),
    "agn": AGN,
}
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "root": {"center": "root"},
    "sharded": {"center": "sharded"},
    "int8": {"compression": Compression.int8},
    "fragments": {"fragments": 2},
}
PERIOD = 3


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
        self.v = torch.nn.Parameter(torch.tensor([[2.0, 1.0], [0.0, -1.0]], dtype=torch.float64))


def made(comm: Communicator, model: Any, algorithm: str, **options: Any) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    local = torch.optim.SGD(trained, lr=0.125, momentum=0.5)
    if algorithm == "agn":
        options["outer_optimizer"] = lambda groups: torch.optim.Adam(groups, lr=0.1)
    return hvdp.PeriodicOptimizer(local, model, ALGORITHMS[algorithm](), PERIOD, process_set=comm, **options)


def train(optimizer: Any, model: Any, rank: int, steps: int) -> list[Any]:
    seen = []
    for _ in range(steps):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = (0.5 + 0.25 * rank) * (parameter.detach() - (1.5 - rank))
        optimizer.step()
        seen.append({name: parameter.tolist() for name, parameter in model.named_parameters()})
    return seen


@pytest.mark.parametrize(("algorithm", "way"), covering(ALGORITHMS, WAYS, together=1))
def test_the_same_set_right_after_an_exchange_changes_nothing(algorithm: str, way: str) -> None:
    def job(comm: Communicator, adopts: bool) -> list[Any]:
        model = Net()
        optimizer = made(comm, model, algorithm, **WAYS[way])
        seen = train(optimizer, model, comm.rank, 2 * PERIOD)
        optimizer.synchronizer.sync()
        if adopts:
            optimizer.adopt()
        seen += train(optimizer, model, comm.rank, 2 * PERIOD)
        optimizer.finalize()
        return [*seen, [p.tolist() for p in model.parameters()], optimizer.synchronizer.rounds]

    assert run_ranks(2, partial(job, adopts=True)) == run_ranks(2, partial(job, adopts=False))


def test_numbers_of_diloco() -> None:
    """Two workers with F_i = h_i (x - b_i)²/2; v is frozen after round 2 and thawed after round 3."""

    def job(comm: Communicator) -> list[float]:
        model, rank, seen = Net(), comm.rank, []
        for parameter in model.parameters():
            parameter.data.zero_()
        local = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvdp.PeriodicOptimizer(local, model, DiLoCo(), PERIOD, process_set=comm)
        for done in range(1, 6):
            for _ in range(PERIOD):
                model.w.grad = (0.5, 1.0)[rank] * (model.w.detach() - (3.0, -1.0)[rank])
                model.v.grad = (1.0, 2.0)[rank] * (model.v.detach() - (0.5, 2.0)[rank]) if done != 3 else None
                optimizer.step()
            seen.append(model.v[0, 0].item())
            if done in (2, 3):
                model.v.requires_grad = done == 3
                optimizer.adopt()
        assert model.w[0].item() != 0
        return seen

    numbers = [0.7391475, 1.420331637, 1.420331637, 1.442588048, 1.463099129]
    assert run_ranks(2, job) == [pytest.approx(numbers, abs=1e-8)] * 2


@pytest.mark.parametrize("way", ["replicated", "root", "sharded"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_freeze_thaw_and_add_a_group(algorithm: str, way: str) -> None:
    """What stays trains as if it were alone."""

    def job(comm: Communicator, alone: bool) -> dict[str, Any]:
        model, rank = Net(), comm.rank
        model.v.requires_grad = not alone
        optimizer = made(comm, model, algorithm, **WAYS[way])
        seen = train(optimizer, model, rank, PERIOD + 1)
        model.v.requires_grad, model.v.grad = False, None
        optimizer.adopt()
        found: dict[str, Any] = {"left": model.v.tolist()}
        seen += train(optimizer, model, rank, PERIOD + 2)
        found["frozen"] = model.v.tolist()
        if not alone:
            model.u = torch.nn.Parameter(torch.full((3,), 1.0 + rank, dtype=torch.float64))
            optimizer.add_param_group({"params": [model.u]})
            model.v.requires_grad = True
        optimizer.adopt()
        found["came"] = None if alone else model.u.tolist()
        seen += train(optimizer, model, rank, 2 * PERIOD)
        optimizer.finalize()
        found["end"] = {name: p.tolist() for name, p in model.named_parameters()}
        return found | {"w": [each["w"] for each in seen]}

    together, alone = (run_ranks(3, partial(job, alone=each)) for each in (False, True))
    for rank in range(3):
        found = together[rank]
        torch.testing.assert_close(torch.tensor(found["w"]), torch.tensor(alone[rank]["w"]), rtol=1e-6, atol=1e-9)
        assert found["left"] == found["frozen"] == together[0]["left"]
        assert found["came"] == [1.0, 1.0, 1.0]
        assert found["end"] == together[0]["end"] or algorithm == "easgd"


def test_a_parameter_that_is_removed_from_its_group() -> None:
    """The center's optimizer, which follows the groups of the local one, keeps its state of those that stay."""

    def job(comm: Communicator, alone: bool) -> list[float]:
        model = Net()
        model.v.requires_grad = not alone
        optimizer = made(comm, model, "agn")
        train(optimizer, model, comm.rank, PERIOD)
        model.v.requires_grad, model.v.grad = False, None
        optimizer.param_groups[0]["params"] = [model.w]
        if not alone:
            optimizer.adopt()
        train(optimizer, model, comm.rank, PERIOD)
        w: list[float] = model.w.tolist()
        return w

    together, alone = (run_ranks(2, partial(job, alone=each)) for each in (False, True))
    assert together == alone


@pytest.mark.parametrize("policy", ["local", "broadcast", "present", "rows"])
def test_a_parameter_with_a_policy_gets_another_name(policy: str) -> None:
    """As in a layer that an adapter wraps: its pattern matches nothing then, and counts again once it is back."""

    def job(comm: Communicator) -> None:
        model = Net()
        optimizer = made(comm, model, "diloco", parameters={"v": policy})
        for trained in (True, False, False, True):
            if trained and not hasattr(model, "v"):
                model.v = model.base_layer_v.requires_grad_()
                del model.base_layer_v
                optimizer.add_param_group({"params": [model.v]})
            elif not trained and hasattr(model, "v"):
                model.base_layer_v = model.v.requires_grad_(False)
                del model.v
                optimizer.param_groups[0]["params"] = [model.w]
            optimizer.adopt()
            train(optimizer, model, comm.rank, 1)
            assert optimizer.synchronizer.replica.by_policy == ({policy: ["v"]} if trained else {})

    run_ranks(2, job)


@pytest.mark.parametrize("algorithm", ["diloco", "agn"])
def test_after_finalize_of_asynchronous_training(algorithm: str) -> None:
    """What stays trains as if it were alone."""

    def job(comm: Communicator, alone: bool) -> list[Any]:
        model = Net()
        model.v.requires_grad = not alone
        optimizer = made(comm, model, algorithm, asynchronous=True)
        assert "before finalize()" in optimizer.synchronizer.adoption_refusal()
        optimizer.synchronizer.begin()
        for part in range(2):
            for rank in range(comm.size):
                train(optimizer, model, comm.rank, PERIOD if rank == comm.rank else 0)
                comm.allgather_object(None, "in turn")
            optimizer.finalize()
            if not part and not alone:
                model.v.requires_grad = False
                model.u = torch.nn.Parameter(torch.full((3,), 1.0 + comm.rank, dtype=torch.float64))
                optimizer.add_param_group({"params": [model.u]})
                optimizer.adopt()
                assert model.u.tolist() == [1.0] * 3
        with optimizer.center():
            return [model.w.tolist(), None if alone else [model.u.tolist(), model.v.tolist()]]

    together, alone = (run_ranks(2, partial(job, alone=each)) for each in (False, True))
    assert [found[0] for found in together] == [pytest.approx(found[0], rel=1e-6) for found in alone]
    assert together[0] == together[1]


def test_a_set_that_changes_without_adopt_is_an_error_that_names_it() -> None:
    def job(comm: Communicator) -> None:
        model = Net()
        optimizer = made(comm, model, "average")
        model.v.requires_grad = False
        train(optimizer, model, comm.rank, PERIOD)

    assert all("adopt()" in str(error) for error in errors(2, job))


def test_sets_that_differ_are_an_error_everywhere_and_training_goes_on() -> None:
    def job(comm: Communicator, tries: bool) -> Any:
        model, message = Net(), ""
        optimizer = made(comm, model, "diloco")
        seen = train(optimizer, model, comm.rank, PERIOD)
        if tries:
            model.v.requires_grad = comm.rank == 0
            with pytest.raises(ValueError, match="All ranks must run the same optimizer") as error:
                optimizer.adopt()
            message, model.v.requires_grad = str(error.value), True
        return message, seen + train(optimizer, model, comm.rank, 2 * PERIOD)

    tried, plain = (run_ranks(2, partial(job, tries=each)) for each in (True, False))
    assert tried[0][0] == tried[1][0] != ""
    assert [seen for _, seen in tried] == [seen for _, seen in plain]


def test_save_and_load_afterwards() -> None:
    def job(comm: Communicator) -> None:
        model = Net()
        optimizer = made(comm, model, "agn")
        train(optimizer, model, comm.rank, 2)
        model.v.requires_grad = False
        optimizer.adopt()
        train(optimizer, model, comm.rank, PERIOD + 1)
        state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        after = train(optimizer, model, comm.rank, 2 * PERIOD)
        other = Net()
        local = torch.optim.SGD(other.parameters(), lr=0.125, momentum=0.5)
        other.v.requires_grad = False
        outer = lambda groups: torch.optim.Adam(groups, lr=0.1)  # noqa: E731
        again = hvdp.PeriodicOptimizer(local, other, AGN(), PERIOD, outer_optimizer=outer, process_set=comm)
        other.load_state_dict(weights)
        again.load_state_dict(state)
        assert train(again, other, comm.rank, 2 * PERIOD) == after

    run_ranks(2, job)


def test_pairs_need_the_model() -> None:
    model = Net()
    optimizer = hvdp.ModelAverageOptimizer(torch.optim.SGD(model.parameters(), 0.1), list(model.named_parameters()), 2)
    with pytest.raises(ValueError, match=r"adopt\(\) needs the model"):
        optimizer.adopt()
    model.v.requires_grad = False
    optimizer.adopt(list(model.named_parameters()))
    train(optimizer, model, 0, 3)


def test_kinds_of_training_that_cannot_adopt_yet_say_so_before_they_begin() -> None:
    def job(comm: Communicator) -> None:
        assert made(comm, Net(), "easgd").synchronizer.adoption_refusal() is None
        later = made(comm, Net(), "easgd", quorum=1)
        assert later.synchronizer.adoption_refusal() == ("before finalize() in asynchronous training or with a quorum")
        later.finalize()
        assert later.synchronizer.adoption_refusal() is None

    run_ranks(2, job)


def test_several_levels_are_refused() -> None:
    def job(comm: Communicator) -> None:
        model = Net()
        inside = made(comm, model, "average")
        several = hvdp.PeriodicOptimizer(inside, model, Averaging(), PERIOD, process_set=comm)
        with pytest.raises(RuntimeError, match=r"adopt\(\) is not available for several levels of optimizers"):
            several.adopt()

    run_ranks(1, job)
