"""Checks that an optimizer is elementwise: its step on a tensor equals its steps on the parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvd_periodic.arguments import outer_name
from hvd_periodic.vectors.layout import Layout

Steps = Callable[[np.ndarray, list[np.ndarray]], np.ndarray]
"""``steps(x, gradients)`` returns ``x`` after one step of a new optimizer for each of the gradients."""


_WHOLE = {"center='sharded'": "center='root'", "fragments": "fewer fragments"}
"""The setting that leaves tensors whole, by the setting that cuts them."""


def require_elementwise(name: str, share: Layout, whole: Layout, steps: Steps) -> None:
    """Raise if this rank holds parts of tensors and the optimizer is not elementwise.

    Layer-wise rates, clipping by norm and factored moments need whole tensors: on parts they would silently compute
    something else. The check compares two steps on a small matrix with two steps on its parts, by two optimizers. The
    ``share`` of the ``whole`` center is this rank's.

    Raises:
        ValueError: the optimizer is not elementwise.

    Example:
        >>> from hvd_periodic.vectors.layout import TensorSpec
        >>> whole = Layout([TensorSpec("w", (4,), "float64", 8)])
        >>> half = whole.restrict(lambda bucket: (0, 2))
        >>> require_elementwise("sgd", half, whole, lambda x, gradients: x - 0.1 * sum(gradients))
    """
    if share is whole or not share.cut or not share.specs:
        return
    random = np.random.default_rng(0)
    x, gradients = random.standard_normal((3, 4)), [100 * random.standard_normal((3, 4)) for _ in range(2)]
    cuts = (slice(0, 5), slice(5, None))
    problem = ""
    try:
        expected = steps(x, gradients).reshape(-1)
        parts = [steps(x.reshape(-1)[cut], [g.reshape(-1)[cut] for g in gradients]) for cut in cuts]
        different = not np.allclose(np.concatenate(parts), expected, rtol=1e-4, atol=1e-6)
    except Exception as error:
        different, problem = True, f" ({type(error).__name__}: {error})"
    if different:
        raise ValueError(
            f"`{share.cut}` cuts tensors, but {name} gives other results on parts than on the whole{problem}: use "
            f"{_WHOLE[share.cut]}, or another `{outer_name()}`"
        )
