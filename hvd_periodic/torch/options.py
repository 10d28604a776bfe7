"""Options of torch optimizers and synchronizers, in addition to the options of all front ends."""

from __future__ import annotations

from typing import Annotated

import torch

from hvd_periodic.options import Options
from hvd_periodic.torch.buffers import Buffers


class TorchOptions(Options, total=False):
    """Options of the torch front end.

    Attributes:
        buffers: policies for the model's buffers at an exchange. ``"average"``: the mean over ranks of real buffers,
            the maximum of integer ones; ``"maximum"``; ``"broadcast"``: the buffers of ``root_rank``; ``"local"``:
            buffers are broadcast at the start and then left alone. Pass one policy for all buffers; a dict from name
            patterns to policies, in which the first match counts; or a function (name, tensor) that returns a policy or
            None. Default, and for buffers that a dict or function leaves open: ``"average"`` for buffers whose name
            marks them as statistics (``running_mean``, ``running_var``, ``num_batches_tracked``, ``moving_...``),
            otherwise ``"local"``.
        center_device: ``"cpu"``: the center, the state of its optimizer and the snapshot of an exchange in flight stay
            in host memory (pinned with CUDA), and are copied to the parameters' device bucket by bucket for an
            exchange. This does not affect the values of the center; a torch optimizer of the center steps on the
            host, with its state there. None: all of these lie on the parameters' device. Synchronous exchange only.
    """

    buffers: Annotated[Buffers, None]
    center_device: Annotated[torch.device | str | None, None]
