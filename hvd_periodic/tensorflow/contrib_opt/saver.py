"""Checkpoints that hold the centers under the names of the model's variables."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_periodic.tensorflow.contrib_opt.getters import CustomGetter, parts


def saver_of_centers(getter: CustomGetter, var_list: Any, name: str, **options: Any) -> Any:
    """Return a ``tf.compat.v1.train.Saver`` that saves centers in place of their replicas.

    Args:
        getter: holds the centers.
        var_list: variables, or a dict by name. None: all trainable variables.
        name: name of the saver.
        options: arguments of ``Saver``.

    Raises:
        RuntimeError: no variable was created through the getter.
    """
    if not getter.centers:
        raise RuntimeError(
            f"No variable was created through the {type(getter).__name__}: create the model first, in a "
            "variable_scope with the getter as its custom_getter"
        )
    chosen = tf.compat.v1.trainable_variables() if var_list is None else var_list
    saved: dict[str, Any] = {}
    for key, variable in chosen.items() if isinstance(chosen, dict) else ((None, v) for v in chosen):
        for part in parts(variable):
            center = getter.centers.get(part.ref(), part)
            slices = part._save_slice_info
            if slices is None:
                saved[key or part.op.name] = center
            else:
                saved.setdefault(key or slices.full_name, []).append(center)
    return tf.compat.v1.train.Saver(saved, name=name, **options)
