"""Operations on lists of tensors in few kernels: torch has no public names for them, and its own optimizers use these.

A loop over the tensors would take as many kernels as there are.
Tests: ``test_torch_space.py::test_verbs_agree_with_the_default``; of norms, ``test_coding.py``.
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
