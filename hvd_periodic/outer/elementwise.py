"""Whether an optimizer may be cut: its step on a tensor is that of its steps on the parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvd_periodic.arguments import outer_name
from hvd_periodic.vectors.layout import Layout

Steps = Callable[[np.ndarray, list[np.ndarray]], np.ndarray]
"""``steps(x, gradients)`` returns what a new optimizer makes of ``x`` in as many steps as there are gradients."""


_WHOLE = {"center='sharded'": "center='root'", "fragments": "fewer fragments"}
"""What leaves tensors whole, by what cuts them."""


def require_elementwise(name: str, share: Layout, whole: Layout, steps: Steps) -> None:
    """Raise unless the optimizer treats elements one by one, where this rank holds parts of tensors.

    Layer-wise rates, clipping by norm and factored moments need whole tensors: on parts they would compute something
    else, without a word. Two steps on a small matrix, and on its two parts by two optimizers, tell.

    Args:
        name: of the optimizer, for the message.
        share: what this rank holds.
        whole: what all hold.
        steps: runs a new optimizer.

    Raises:
        ValueError: it does not.

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
            f"`{share.cut}` cuts tensors, and {name} computes something else on parts than on the whole{problem}: use "
            f"{_WHOLE[share.cut]}, or another `{outer_name()}`"
        )
