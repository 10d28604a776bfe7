"""Processes that have imported a framework, and become ranks of jobs: a job pays for its work, not for its imports.

A launcher starts ``python -S warm.py client SOCKET ...``, which hands its arguments, environment, folder and streams to
a server. The server forks itself: the child is the rank, in a state as after its imports, and shares nothing with
others from then on. The client ends as the rank ends, and the rank ends with the client.

There are two servers, at ``SOCKET0`` and ``SOCKET1``, for even and odd ranks: the hashes of their strings, and so the
order in their sets, differ, as between processes that start by themselves. A command may be a server that imports more
(``warm.py on SOCKET0 warm.py server ...``). Servers end with the process that they were started for.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

Command = dict[str, Any]

SERVERS = 2

_LENGTH = 8


def number_of_rank() -> int:
    """Return the number of the server for this process, which a launcher has started."""
    known = (os.environ.get(name) for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK", "RANK"))
    return int(next(filter(None, known), "0")) % SERVERS


def client(path: str, arguments: list[str]) -> int:
    """Have the command run, in this process's place; return its exit status as ``waitpid`` gives it."""
    command = {"arguments": arguments, "environment": dict(os.environ), "folder": str(Path.cwd())}
    message = json.dumps(command).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [len(message).to_bytes(_LENGTH, "big")], [0, 1, 2])
        connection.sendall(message)
        return int.from_bytes(_receive(connection, _LENGTH), "big")


def _receive(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise EOFError("The other end has gone")
        received += part
    return bytes(received)


def serve(path: str, owner: int) -> Command:
    """Fork a child for each command; return the command in the child. Ends when the owner, a process, does."""
    try:
        lives = os.pidfd_open(owner)
    except ProcessLookupError:  # It has gone in the meantime.
        _leave(Path(path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(128)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener.fileno(), lives], [], [])
            if lives in ready:
                _leave(Path(path))
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    os.close(lives)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with connection:
        size, streams, _, _ = socket.recv_fds(connection, _LENGTH, 3)
        command: Command = json.loads(_receive(connection, int.from_bytes(size, "big")))
        child = os.fork()
        if child != 0:
            _supervise(child, connection, streams)
    # Not a session: Linux schedules sessions apart (autogroups), and a rank that yields would not let others run.
    os.setpgrp()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    return command


def _leave(path: Path) -> NoReturn:
    """End a server, and leave nothing: the last of a folder removes it."""
    for remove in (path.unlink, path.parent.rmdir, path.parent.parent.rmdir):
        with suppress(OSError):
            remove()
    os._exit(0)


def _supervise(child: int, connection: socket.socket, streams: list[int]) -> None:
    """Tell the client how the child has ended; or end the child, if the client has gone."""
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    descriptor = os.pidfd_open(child)
    ready, _, _ = select.select([descriptor, connection.fileno()], [], [])
    if descriptor not in ready:
        with suppress(ProcessLookupError):  # The child may not have a group yet.
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with suppress(BrokenPipeError):
        connection.sendall(status.to_bytes(_LENGTH, "big"))
    os._exit(0)


def become(command: Command) -> None:
    """Run a command of Python's as a new process would."""
    import runpy

    import numpy as np

    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in added if folder and folder not in sys.path]
    np.random.seed()  # As Python's own generator; others would have the same numbers otherwise.
    option, *arguments = command["arguments"]
    if option == "-m":
        sys.argv = arguments
        sys.path[0] = command["folder"]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv = ["-c", *arguments[1:]]
        sys.path[0] = ""
        exec(arguments[0], {"__name__": "__main__"})
    else:
        sys.argv = [option, *arguments]
        sys.path[0] = str(Path(option).resolve().parent)
        runpy.run_path(option, run_name="__main__")


def end() -> NoReturn:
    """End this process, whose program is over, as Python does, but leave its memory as it is.

    To take down modules, Python writes to all memory that ranks share, which would first be copied: it takes a rank
    longer than its start. Programs that raise an error or call ``sys.exit`` end as always.
    """
    import atexit
    import threading

    threading._shutdown()  # Waits for threads that are no daemons.
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # As mpi4py does after all of Python has gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(role: str, path: str, arguments: Sequence[str]) -> None:
    """Be a client, or a server that has imported these modules; in the children of a server, run a command.

    Args:
        role: ``"client"`` of the server of this rank; ``"on"`` this very server; or ``"server"``.
        path: of the socket, for a client without the number.
        arguments: the command; of a server its owner, and the modules.
    """
    if role != "server":
        where = path if role == "on" else f"{path}{number_of_rank()}"
        code = os.waitstatus_to_exitcode(client(where, list(arguments)))
        if code < 0:
            with suppress(OSError):  # SIGKILL has no handler.
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        sys.exit(code)
    import importlib

    owner, *modules = arguments
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # What is there now stays: the ranks need not look at it again.
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        raise SystemExit(f"A process with several threads cannot be forked: one of {modules} starts some")
    become(serve(path, int(owner)))
    end()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
