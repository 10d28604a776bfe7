"""Lightning on two ranks: whoever has started them, it is as if it were meant for ranks that exchange now and then."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.beside import trainers, with_trainers  # noqa: F401
from tests.parallel.launch import run_scenarios

pytest.importorskip("horovod.torch")
pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("with_trainers")]

@pytest.fixture(scope="module", params=["mpirun"])
def ranks(request, with_trainers, tmp_path_factory) -> list[dict[str, Any]]:
    return run_scenarios(request.param, 2, "lightning_scenarios", tmp_path_factory.mktemp("job"), 150)

def test_x(ranks):
    for k in ranks[0]:
        for r in ranks: print(k, r[k])
    assert 0
