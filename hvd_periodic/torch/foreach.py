"""Operations on lists of tensors in few kernels: torch has only private names for them, which its optimizers use.

A loop over the tensors would launch one kernel per tensor.
Tests: ``test_torch_space.py::test_verbs_agree_with_the_default``; for norms, ``test_coding.py``.
"""

import torch

add = torch._foreach_add_
copy = torch._foreach_copy_
lerp = torch._foreach_lerp_
maximum = torch._foreach_maximum
multiply = torch._foreach_mul_
norm = torch._foreach_norm
subtract = torch._foreach_sub
zero = torch._foreach_zero_
