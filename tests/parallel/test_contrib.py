"""Real jobs with the optimizers of TensorFlow 1 graphs, asserted on what all ranks report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests import compression_oracle as slow
from tests import oracle
from tests.parallel.launch import run_scenarios
from tests.parallel.program import column
from tests.parallel.test_scenarios import EXPECTED, EXPECTED_OF_RANK_1
from tests.parallel.tiers import thorough

pytest.importorskip("horovod.tensorflow")

OF_SIZE = (
    *("constant_gradients", "compressed", "not_finite_on_the_last_rank", "quadratics", "networks", "disagreements"),
    "two_initializations_at_once",
)
"""What the number of ranks makes a difference for."""

JOBS = [
    thorough(("python", 1, "v2")),
    thorough(("horovodrun --gloo", 2, "v1")),
    ("horovodrun --gloo", 2, "v1", *OF_SIZE),
    ("mpirun, MPI", 2, "v2", "constant_gradients", "two_initializations_at_once"),
    thorough(("mpirun, torch.distributed", 2, "v1", *OF_SIZE)),
    thorough(("mpirun, MPI", 3, "v2", *OF_SIZE)),
    thorough(("mpirun", 3, "v2", *OF_SIZE)),
]
"""Launcher, ranks, version, and what the job runs; default: everything."""

whole = pytest.mark.parametrize("ranks", JOBS[:2], ids=lambda job: " ".join(map(str, job[:3])), indirect=True)

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: " ".join(map(str, job[:3])))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    launcher, size, mode, *only = request.param
    folder = tmp_path_factory.mktemp("job")
    return run_scenarios(launcher, size, "contrib_scenarios", folder, 200, mode, framework="tensorflow", only=only)


OF_CONTRIB = {("easgd_contrib", 2): [[1, 0], [1.55, 1.8], [2.55, 1.8], [3.15625, 4.185]]}
"""With contrib's default rate, 0.9/(τ n) = 0.225; as ``EXPECTED``."""

OF_CONTRIB_ON_RANK_1 = {"easgd_contrib": [3, 4.65, 7.65, 8.65875]}


@pytest.mark.parametrize("use_resource", ["None", "True", "False"])
def test_numbers_worked_out_by_hand(use_resource: str, ranks: list[dict[str, Any]]) -> None:
    reported = column(ranks, "constant_gradients")
    for name in ("easgd", "easgd_contrib", "average", "agn"):
        expected = (EXPECTED | OF_CONTRIB).get((name, len(ranks)), [])
        found = [report[f"{name} {use_resource}"] for report in reported]
        assert [list(pair[:2]) for pair in found[0][: len(expected)]] == [pytest.approx(pair) for pair in expected]
        if len(ranks) == 2:
            of_rank_1 = (EXPECTED_OF_RANK_1 | OF_CONTRIB_ON_RANK_1)[name]
            assert [x for x, _, _ in found[1][: len(of_rank_1)]] == pytest.approx(of_rank_1)
        period = 4 if name == "agn" else 2
        for trajectory in found:
            assert [c for _, c, _ in trajectory] == [c for _, c, _ in found[0]], "one center on all ranks"
            assert [rounds for _, _, rounds in trajectory] == [step // period for step in range(1, 9)]


def test_compressed_messages_agree_with_a_slow_oracle(ranks: list[dict[str, Any]]) -> None:
    quantizers = {"int8": (slow.int8, 2), "topk": (slow.top(2), 1), "bf16": (slow.bfloat16, 2)}
    for case in column(ranks, "compressed")[0]:
        name, _, wire = case.partition(" ")
        steps, center = slow.expected(name, len(ranks), *quantizers[wire])
        reports = column(ranks, "compressed", case)
        assert [report[1] for report in reports] == [reports[0][1]] * len(ranks), f"one center of {case}, to the bit"
        assert reports[0][1] == pytest.approx(center, rel=1e-5, abs=1e-5), case
        for rank, (seen, _) in enumerate(reports):
            assert np.ravel(seen) == pytest.approx(np.ravel([x[rank] for x in steps]), rel=1e-5, abs=1e-5), (case, rank)


def test_what_is_not_finite_is_named_before_it_travels(ranks: list[dict[str, Any]]) -> None:
    for rank, (error, center) in enumerate(column(ranks, "not_finite_on_the_last_rank")):
        last = len(ranks) - 1
        assert ("parameter 'w' is not finite at step 2" if rank == last else f"Rank {last} failed") in error
        assert center == [0.0, 0.0], "as it was"


@whole
def test_the_default_rho_of_one_worker(ranks: list[dict[str, Any]]) -> None:
    """The numbers that tf.contrib.opt itself gave."""
    if len(ranks) == 1:
        expected = [[1, 0], [1.3125, 0.4375], [1.984375, 0.4375], [1.9755859375, 0.9501953125]]
        assert ranks[0]["default_rho"] == [pytest.approx(pair) for pair in expected]
    else:
        assert column(ranks, "default_rho") == [ranks[0]["default_rho"]] * len(ranks)


def test_agreement_with_the_oracle(ranks: list[dict[str, Any]]) -> None:
    expected = oracle.contrib_results(len(ranks))
    for name in column(ranks, "quadratics")[0]:
        replicas, center = expected[name]
        for rank, (x, c) in enumerate(column(ranks, "quadratics", name)):
            assert x == pytest.approx(replicas[rank], rel=1e-12, abs=1e-12), f"replica {rank} of {name}"
            assert c == pytest.approx(center, rel=1e-12, abs=1e-12), f"center of {name} on rank {rank}"


def test_ranks_start_alike_and_agree_after_every_exchange(ranks: list[dict[str, Any]]) -> None:
    for name in column(ranks, "networks")[0]:
        reports = column(ranks, "networks", name)
        assert len({report["start"] for report in reports}) == 1, f"{name} starts from the root's weights"
        for report in reports:
            assert report["exchanged"] == reports[0]["exchanged"], f"centers and averages of {name}"
        assert reports[0]["exchanged"][0] != reports[0]["exchanged"][1], "they move"
        assert len({report["local"] for report in reports}) == len(ranks), f"replicas of {name} after a local step"


def test_gradients_of_embeddings_stay_sparse(ranks: list[dict[str, Any]]) -> None:
    """Unless rho makes them dense."""
    for name, report in column(ranks, "networks")[0].items():
        assert any(report["sparse"]) == (not name.startswith("easgd_rho")), name


def test_slots_are_those_of_the_wrapped_optimizer(ranks: list[dict[str, Any]]) -> None:
    for name, report in column(ranks, "networks")[0].items():
        adam, parts = "adam" in name, 4 if "adam" in name else 3
        assert report["slots"] == (["m", "v"] if adam else ["momentum"])
        assert report["slot"] == ("weights/part_0/Adam" if adam else "weights/Momentum")
        assert report["variables"] == (2 * parts + 2 if adam else parts) * (2 if name.startswith("agn") else 1)


@whole
def test_collections(ranks: list[dict[str, Any]]) -> None:
    trained = {"weights", "table", "last"}
    for name, report in column(ranks, "collections")[0].items():
        companion = {"easgd": "local_center_variable", "agn": "grad_variable"}.get(name)
        everywhere = {"global_step", "normalization/average"} | {f"global_center_variable/{w}" for w in trained}
        if name == "agn":
            everywhere |= {f"global_center_variable/{w}/center_Momentum" for w in trained}
        assert set(report["GLOBAL_VARIABLES"]) == everywhere
        assert set(report["TRAINABLE_VARIABLES"]) == trained
        local = trained | {"local_step"} | {f"{w}/Momentum" for w in trained}
        local |= {f"{companion}/{w}" for w in trained} if companion else set()
        assert local <= set(report["LOCAL_VARIABLES"])
        assert not everywhere & set(report["LOCAL_VARIABLES"])


@whole
def test_monitored_sessions_go_on_from_the_checkpoint_of_the_root(ranks: list[dict[str, Any]]) -> None:
    for name in ("average", "agn"):
        rounds = 2 if name == "agn" else 4
        for report in column(ranks, "monitored_session", name):
            first, second = report
            assert [first["steps"], second["steps"]] == [[0, rounds], [rounds, 2 * rounds]]
            assert second["first"] == first["last"] == ranks[0]["monitored_session"][name][0]["last"]
            assert first["first"] != first["last"] != second["last"]
            for run in report:
                assert run["names"] == ["last", "table", "weights"]
                assert run["saved the center"]


@whole
def test_the_center_optimizer_has_a_state_of_its_own(ranks: list[dict[str, Any]]) -> None:
    for report in column(ranks, "first_center_step_of_adam"):
        assert report == [pytest.approx(0.1, rel=1e-5)] * 2


@whole
def test_two_optimizers_in_one_graph(ranks: list[dict[str, Any]]) -> None:
    """The first averages, the second pulls; both count their rounds in one global step."""
    for rank, report in enumerate(column(ranks, "two_optimizers")):
        a, b, center_a, center_b, rounds = report
        assert a == center_a == pytest.approx(6 * len(ranks)), "mean of 6 (1 + 2 rank)"
        alone = column(ranks, "constant_gradients", "easgd None")[rank][5]
        assert [b, center_b] == pytest.approx(alone[:2])
        assert rounds == 6


@whole
def test_the_elastic_term_follows_the_order_of_the_variables(ranks: list[dict[str, Any]]) -> None:
    """At a=3, b=10, c=400 with centers 1 and 100: ab + rho (c − 100), bc + rho (a − 1)."""
    assert column(ranks, "variables_in_another_order") == [[["c", "a"], [180.0, 4001.0]]] * len(ranks)


@whole
def test_what_contribs_own_test_of_elastic_averaging_expects(ranks: list[dict[str, Any]]) -> None:
    """One worker with α = 1: replica and center change places. With more at the largest rate, nothing drifts apart."""
    for report in column(ranks, "contribs_tests", "easgd"):
        seen = report["seen"]
        if len(ranks) == 1:
            expected = [(0, 0, 0), (1, 0, 0), (0, 2, 1), (1, 2, 1), (2, 2, 2), (3, 2, 2), (2, 4, 3), (3, 4, 3)]
            assert [(x, c, rounds) for x, _, _, c, _, _, rounds in seen[:8]] == expected
        for i, (x, _, _, c, _, _, rounds) in enumerate(seen):
            assert rounds == i // 2
            assert x * len(ranks) + c == pytest.approx(len(ranks) * i), "conserved, but for the gradients"
        of_v0, of_v1, of_w = (seen[-1][column] for column in (3, 4, 5))
        assert (of_v1, of_w) == pytest.approx((of_v0 + 1, of_v0 + 1)), "each started from its own value"
        assert report["saved"] == {"v0": [of_v0], "v1": [of_v1], "w": [of_w]}, "the center, by the original names"


@whole
def test_what_contribs_own_test_of_model_averaging_expects(ranks: list[dict[str, Any]]) -> None:
    """Gradients −1 on the first rank and −2 on the others; with two: 1.5 per step in the mean."""
    mean = (1 + 2 * (len(ranks) - 1)) / len(ranks)
    for rank, report in enumerate(column(ranks, "contribs_tests", "average")):
        own = 1.0 if rank == 0 else 2.0
        for i, seen in enumerate(report["seen"]):
            center = 2 * mean * (i // 2)
            x = center + own * (i % 2)
            assert seen == pytest.approx([x, x + 1, x + 1, center, center + 1, center + 1, i // 2])


@whole
def test_what_contribs_own_test_of_agn_expects(ranks: list[dict[str, Any]]) -> None:
    """Adam without memory moves by its rate, whatever the gradients; nothing of the local Adam is global."""
    for report in column(ranks, "contribs_tests", "agn"):
        for i, (*values, rounds) in enumerate(report["seen"]):
            center = 0.1 * (i // 4)
            x = center + 0.1 * (i % 4)
            expected = [x, x + 0.5, x + 1, center, center + 0.5, center + 1]
            assert [*values, rounds] == pytest.approx([*expected, i // 4], abs=1e-6)
            assert i % 4 or values[:3] == values[3:], "pulled, to the bit"
        assert not [name for name in report["global"] if "beta" in name]
        assert all("global_center_variable" in name for name in report["global"] if "Adam" in name)


@whole
def test_an_initializer_that_was_built_too_early_is_named(ranks: list[dict[str, Any]]) -> None:
    for report in column(ranks, "initializers_built_too_early"):
        for case, ((early, late), warned) in report.items():
            assert warned == []
            assert late == "", f"{case}: a second initializer helps"
            if " False " in case:
                assert early == "", f"{case}: without a getter the first one initializes all"
                continue
            assert "An initializer initializes what exists when it is built: move the lines" in early, case
            assert early.startswith("InvalidArgumentError"), case
            assert "below minimize() or apply_gradients()" in early, case


def test_disagreement_is_an_error_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    last = len(ranks) - 1
    found = column(ranks, "disagreements")
    assert column(found, "none") == column(found, "agn") == [""] * len(ranks)
    refusals = {
        "refused": "Received: moving_rate=7.0",
        "workers": f"number of Horovod ranks that exchange, {len(ranks)}: pass hvd.size(), or that of the",
        "foreign": "was not created through the ElasticAverageCustomGetter",
    }
    for case, text in refusals.items():
        assert text in found[last][case]
        assert all(f"Rank {last} failed" in report[case] for report in found[:last])
    if last:
        fragments = {
            "period": "differ in schedule: Every(period=2) on rank",
            "rate": "EASGD(moving_rate=0.05, beta=None, rho=0.5) on rank",
            "shape": "w float32[3] on rank",
            "without gradient": "number of parameters: 2 on rank",
            "buffers": "number of buffers: 1 on rank",
            "class of the center optimizer": "center optimizer: MomentumOptimizer on rank",
            "rate of the center optimizer": "learning_rate of the center optimizer: 0.1 on rank",
        }
        for case, fragment in fragments.items():
            for error in column(found, case):
                assert error.startswith("ValueError: All ranks must run the same optimizer")
                assert fragment in error


def test_horovod_has_to_be_initialized(ranks: list[dict[str, Any]], request: pytest.FixtureRequest) -> None:
    """Also alone: a script of contrib asks Horovod for its size. So has torch.distributed; MPI needs nothing."""
    library = request.node.callspec.params["ranks"][0].partition(", ")[2]
    missing = {"": "hvd.init()", "torch.distributed": "call torch.distributed.init_process_group()", "MPI": ""}[library]
    for error in column(ranks, "not_initialized"):
        assert missing in error
        assert (error == "") == (library == "MPI")


def test_two_initializations_at_once(ranks: list[dict[str, Any]]) -> None:
    """Ranks would wait for each other forever if each began with the operation that is ready first there."""
    assert column(ranks, "two_initializations_at_once") == [[1.0, 11.0]] * len(ranks)
