"""Run the rendezvous of elastic jobs over torch.distributed, which outlives their workers.

  hvdp rendezvous               on port 29400 of all interfaces
  hvdp rendezvous --port 0      on a free port, which the first line of the output names

Workers find it by HVD_PERIODIC_RENDEZVOUS=HOST:PORT. It runs until it is interrupted. While it is down, workers go on
training, and none can join, or be lost without ending the job; a new one knows nothing of the workers of the old one.
"""

from __future__ import annotations

import argparse
import socket
import threading
from typing import Any

from hvd_periodic.cli.usage_error import UsageError, as_usage_error

PORT = 29400
"""The port that torchrun uses for the same purpose."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--port", type=int, default=PORT, metavar="N", help=f"TCP port; 0: a free one (default: {PORT})"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until this process is interrupted."""
    with as_usage_error():
        if not 0 <= arguments.port < 2**16:
            raise ValueError(f"`--port` must be a TCP port, from 0 to 65535. Received: {arguments.port}")
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise UsageError("PyTorch is not installed, whose store this runs: pip install torch") from error
    try:
        make: Any = distributed.TCPStore  # type: ignore[attr-defined]  # Not in builds without torch.distributed.
        store = make("0.0.0.0", arguments.port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise UsageError(f"Port {arguments.port} cannot be used: pass another --port. {error}") from error
    print(f"HVD_PERIODIC_RENDEZVOUS={socket.gethostname()}:{store.port}", flush=True)
    threading.Event().wait()
    return 0
