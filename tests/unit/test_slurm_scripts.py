"""What the batch scripts do with the signals that Slurm sends; ``tests/parallel/test_slurm.py`` needs a Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
source run_scripts/slurm.sh
scontrol() { printf 'scontrol %s\\n' "$*"; }
# As if the launcher always ended before the script looks whether it has.
kill() {
  if [[ $1 != -0 ]]; then builtin kill "$@"; else while builtin kill -0 "$2" 2>/dev/null; do :; done; return 1; fi
}
run_and_requeue python3 -c "$LAUNCHER"
"""

LAUNCHER = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
signal.sigwait([signal.SIGUSR1])
os._exit(int(os.environ["CODE"]))
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("posix", [{}, {"POSIXLY_CORRECT": "1"}], ids=["", "posix"])
@pytest.mark.parametrize("warning", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize(("code", "told"), [(75, ["scontrol requeue 7"]), (3, [])])
def test_the_exit_code_counts_of_ranks_that_end_at_once_after_a_warning(
    warning: signal.Signals, code: int, told: list[str], posix: dict[str, str]
) -> None:
    """``wait`` of the shell returns the number of the signal, also where the launcher has ended meanwhile."""
    settings = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "LAUNCHER": LAUNCHER, "CODE": str(code)}
    process = subprocess.Popen(
        ["bash", "-c", SCRIPT],
        env=os.environ | settings | posix | {"HVD_PERIODIC_USE_CURRENT_ENV": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(warning)
    output, _ = process.communicate()
    assert process.returncode == code, output
    assert [line for line in output.splitlines() if line.startswith("scontrol")] == told
