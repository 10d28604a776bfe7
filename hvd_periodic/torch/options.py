"""What constructors of torch optimizers and synchronizers take besides the options of all front ends."""

from __future__ import annotations

from typing import Annotated

import torch

from hvd_periodic.options import Options
from hvd_periodic.torch.buffers import Buffers


class TorchOptions(Options, total=False):
    """Options of the torch front end.

    Attributes:
        buffers: what becomes of the model's buffers at an exchange. ``"average"``: real ones become their mean over
            ranks, integer ones their maximum; ``"maximum"``; ``"broadcast"``: all become those of ``root_rank``;
            ``"local"``: they are broadcast at the start and then left alone. One of these for all; a dict from patterns
            of names to them, of which the first that matches counts; or a function (name, tensor) to one of them or
            None. Default, and for what a dict or function leaves open: ``"average"`` for buffers whose name says that
            they are statistics (``running_mean``, ``running_var``, ``num_batches_tracked``, ``moving_...``), otherwise
            ``"local"``.
        center_device: ``"cpu"``: the center, the state of what moves it and the snapshot of an exchange under way lie
            in host memory, pinned beside CUDA, and come to the parameters' device bucket by bucket, for an exchange.
            It goes where it goes without; a torch optimizer of the center steps on the host, with its state there.
            None: all lie beside the parameters. Synchronously.
    """

    buffers: Annotated[Buffers, None]
    center_device: Annotated[torch.device | str | None, None]
