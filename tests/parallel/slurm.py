"""A Slurm of one node on this machine, for tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 120

CPUS = 3
"""Of the node, as Slurm sees it, whatever there are."""

_CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=15
SchedulerParameters=requeue_setup_env_fail
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurmError(Exception):
    """This machine runs no Slurm; says why."""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start a Slurm; yield the environment in which its commands find it.

    Args:
        folder: for its configuration, state and logs.

    Raises:
        NoSlurmError: not root, Slurm is not installed, or its node does not come up.
    """
    if os.geteuid() != 0:
        raise NoSlurmError("its daemons are for root")
    for program in ("munged", "slurmctld", "slurmd", "sbatch", "sinfo"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            raise NoSlurmError(f"there is no {program}: install slurm-wlm and munge")
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    ports = [_free_port() for _ in range(2)]
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(folder=folder, host=host, port=ports[0], node_port=ports[1], cpus=CPUS))
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key"]
    munged += [f"--{kind}={folder}/munge.{end}" for kind, end in (("socket", "socket"), ("pid-file", "pid"))]
    munged += [f"--{kind}={folder}/munge.{end}" for kind, end in (("log-file", "log"), ("seed-file", "seed"))]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for words in (munged, ["slurmctld", "-D"], ["slurmd", "-D"]):
            daemons.append(
                subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        _wait_until_idle(environment, folder)
        yield environment
    finally:
        if (folder / "slurmctld.pid").exists():
            subprocess.run(["scancel", "--me"], env=environment, capture_output=True, timeout=SECONDS, check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()


def _wait_until_idle(environment: dict[str, str], folder: Path) -> None:
    state = ""
    for _ in range(10 * SECONDS):
        found = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        state = found.stdout.strip() or found.stderr.strip()
        if state == "idle":
            return
        time.sleep(0.1)
    logs = "\n".join(path.read_text()[-500:] for path in sorted(folder.glob("*.log")))
    raise NoSlurmError(f"its node is {state!r}\n{logs}")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
