"""Two hosts emulated on one machine: network namespaces with host names of their own, joined by a virtual cable."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.conftest import PATIENCE

NETWORK = "10.9.0"

_ENTER = """#!/bin/sh
namespace={prefix}$1
shift
exec ip netns exec $namespace unshare -u sh -c 'hostname {prefix}'${{namespace#{prefix}}}'; exec "$@"' sh "$@"
"""

_AGENT = """#!/bin/sh
host=${{1##*.}}
shift
exec {enter} $host sh -c "$*"
"""


class NoHostsError(Exception):
    """This machine emulates no hosts; says why."""


@contextmanager
def two_hosts(folder: Path) -> Iterator[list[str]]:
    """Set the hosts up; yield the words that start mpirun on both.

    Args:
        folder: for the scripts that enter a host.

    Raises:
        NoHostsError: not root, or the kernel or its tools lack something.
    """
    if os.geteuid() != 0:
        raise NoHostsError("network namespaces are for root")
    for tool in ("ip", "unshare", "hostname"):
        if shutil.which(tool) is None:
            raise NoHostsError(f"there is no {tool}")
    prefix = f"hvdp{os.getpid()}h"
    names = [f"{prefix}{host}" for host in (1, 2)]
    enter, agent = folder / "enter.sh", folder / "agent.sh"
    enter.write_text(_ENTER.format(prefix=prefix))
    agent.write_text(_AGENT.format(enter=enter))
    for script in (enter, agent):
        script.chmod(0o755)
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "v1", "netns", names[0], "type", "veth", "peer", "name", "v2", "netns", names[1])
        for host, name in enumerate(names, 1):
            _ip("-n", name, "address", "add", f"{NETWORK}.{host}/24", "dev", f"v{host}")
            for device in ("lo", f"v{host}"):
                _ip("-n", name, "link", "set", device, "up")
        _run(str(enter), "1", "true")
        interfaces = f"{NETWORK}.0/24"
        yield [
            *(str(enter), "1", "mpirun", "-H", f"{NETWORK}.1:8,{NETWORK}.2:8", "--map-by", "node", "--bind-to", "none"),
            *("--mca", "plm_rsh_agent", str(agent), "--mca", "btl", "tcp,self,vader"),
            *("--mca", "btl_tcp_if_include", interfaces, "--mca", "oob_tcp_if_include", interfaces),
        ]
    finally:
        for name in names:
            _clear(name)


def _clear(name: str) -> None:
    """End what still runs in a namespace, and remove it."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for process in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    finished = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE * 20, check=False)
    if finished.returncode != 0:
        raise NoHostsError(f"{' '.join(words)}: {finished.stderr.strip()}")
