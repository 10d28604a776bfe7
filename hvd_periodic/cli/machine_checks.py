"""Checks of the doctor on the machine itself: memory, interfaces, cores and environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvd_periodic.cli.findings import OK, PROBLEM, WARNING, Finding

ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
YIELD = "OMPI_MCA_mpi_yield_when_idle"
TRANSPORT = "HVD_PERIODIC_TRANSPORT"
MEGABYTE = 2**20
ENOUGH = 256 * MEGABYTE
"""Sufficient bytes of shared memory: a center of 60 million parameters."""

_BRIDGES = ("docker", "virbr", "br-", "veth", "cni", "podman")
"""Prefixes of interfaces that lead to no other host."""


def shared_memory(folder: Path = Path("/dev/shm"), mounts: Path = Path("/proc/mounts")) -> Iterator[Finding]:
    """Check the shared memory that asynchronous exchange on one host uses."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        text = "does not exist or is not writable: asynchronous exchange goes through a service thread"
        yield Finding(WARNING, str(folder), text, f"mount -t tmpfs -o size=2g tmpfs {folder}")
        return
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    lines = mounts.read_text().splitlines() if mounts.is_file() else []
    options = [line.split()[3].split(",") for line in lines if line.split()[1:2] == [str(folder)]]
    text = f"{free / MEGABYTE:,.0f} MB are free"
    if any("noexec" in each for each in options):
        text += "; it is noexec, which does not matter"
    if free < ENOUGH:
        text += ": a larger asynchronous center goes through a service thread, and NCCL and data loaders need more, too"
        mend = f"mount -o remount,size=2g {folder}  # in a container: docker run --shm-size=2g"
        yield Finding(WARNING, str(folder), text, mend)
    else:
        yield Finding(OK, str(folder), text)


def interfaces(folder: Path = Path("/sys/class/net")) -> Iterator[Finding]:
    """Check the network interfaces."""
    names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    up = [name for name in names if _is_up(folder / name)]
    others = [name for name in up if name != "lo"]
    bridges = [name for name in others if name.startswith(_BRIDGES)]
    what = "network interfaces"
    if not others:
        text = "there is none besides lo: jobs stay on this host, and elastic jobs need its name"
        yield Finding(WARNING, what, text, "horovodrun --gloo --network-interface lo ...")
    elif bridges:
        real = [name for name in others if name not in bridges]
        text = (
            f"{', '.join(up)} are up, but {', '.join(bridges)} may not reach other hosts: name the interfaces that do"
        )
        chosen = ",".join(real) or "lo"
        yield Finding(
            WARNING,
            what,
            text,
            f"mpirun --mca btl_tcp_if_include {chosen} --mca oob_tcp_if_include {chosen} ...; "
            f"horovodrun --network-interface {chosen} ...",
        )
    else:
        yield Finding(OK, what, f"{', '.join(up)} are up")


def _is_up(interface: Path) -> bool:
    try:
        return bool(int((interface / "flags").read_text(), 16) & 1)
    except (OSError, ValueError):
        return False


def host_name(found: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the addresses of this host's name."""
    if "error" in found:
        text = f"{found['host']} has no address ({found['error']}): launchers look it up"
        yield Finding(WARNING, "host name", text, f"echo '127.0.0.1 {found['host']}' >> /etc/hosts")
    else:
        yield Finding(OK, "host name", f"{found['host']} is {', '.join(found['addresses'])}")


def processor(environment: Mapping[str, str], cores: int, ranks: int, open_mpi: bool) -> Iterator[Finding]:
    """Check the cores, and how ranks use them."""
    share = max(1, cores // ranks)
    if ranks > cores:
        text = f"{ranks} ranks share {cores}; Open MPI counts cores as slots, and needs to be told to share them"
        yield Finding(WARNING, "cores", text, f"mpirun -np {ranks} --oversubscribe --bind-to none ...")
    else:
        yield Finding(OK, "cores", f"{cores} for {ranks} ranks")
    if "OMP_NUM_THREADS" not in environment and ranks > 1:
        text = f"is not set: each of {ranks} ranks may start {cores} threads, which compete for cores"
        yield Finding(WARNING, "OMP_NUM_THREADS", text, f"export OMP_NUM_THREADS={share}")
    if open_mpi and ranks >= cores and environment.get(YIELD) != "1":
        text = (
            "is not set, and no core is left for waiting: Open MPI busy-waits on cores that train, which slows "
            "training with overlap by about a tenth"
        )
        yield Finding(WARNING, YIELD, text, f"export {YIELD}=1")


def settings(environment: Mapping[str, str], root: bool, open_mpi: bool, horovod: bool) -> Iterator[Finding]:
    """Check the variables that decide how jobs run; those of Horovod if it is installed."""
    missing = [name for name in ROOT if environment.get(name) != "1"]
    if root and open_mpi and missing:
        text = f"you are root, and Open MPI refuses to run as root without {' and '.join(missing)}"
        yield Finding(PROBLEM, "root", text, f"export {' '.join(f'{name}=1' for name in missing)}")
    if horovod:
        yield from _settings_of_horovod(environment)
    transport = environment.get(TRANSPORT)
    if transport not in (None, "", "service", "window"):
        text = f"must be service or window. Received: {transport!r}"
        yield Finding(PROBLEM, TRANSPORT, text, f"unset {TRANSPORT}")


def _settings_of_horovod(environment: Mapping[str, str]) -> Iterator[Finding]:
    cycle = environment.get("HOROVOD_CYCLE_TIME")
    if cycle is None:
        text = "is not set: 1 ms, which suits synchronous jobs. For asynchronous jobs, 50 leaves more time on a core"
        yield Finding(OK, "HOROVOD_CYCLE_TIME", text, "export HOROVOD_CYCLE_TIME=50  # for asynchronous jobs")
    elif not _number(cycle) <= 10:
        text = f"is {cycle} ms: this suits asynchronous jobs, but synchronous exchanges wait up to that long"
        yield Finding(WARNING, "HOROVOD_CYCLE_TIME", text, "unset HOROVOD_CYCLE_TIME  # for synchronous jobs")
    if environment.get("HOROVOD_MPI_THREADS_DISABLE", "0") != "0":
        text = "is set: the service of asynchronous exchange uses TCP instead of MPI"
        yield Finding(WARNING, "HOROVOD_MPI_THREADS_DISABLE", text, "unset HOROVOD_MPI_THREADS_DISABLE")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("inf")
