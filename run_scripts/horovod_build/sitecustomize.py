"""What every Python of Horovod's build starts with: setup.sh puts this folder on its PYTHONPATH.

- Horovod's CMake files import `distutils`, which Python 3.12 no longer has: setuptools provides it.
- They build for CUDA when torch was built for CUDA and anything looks like a CUDA toolkit. It may be incomplete, or
  newer than Horovod's kernels compile with. So torch tells of a toolkit only if the user has asked for operations on
  GPUs (HVD_PERIODIC_CUDA is not empty).
"""

import contextlib
import os
import sys

with contextlib.suppress(ImportError):
    import _distutils_hack

    _distutils_hack.add_shim()

if not os.environ.get("HVD_PERIODIC_CUDA") and any("torch.utils.cpp_extension" in word for word in sys.orig_argv):
    import torch.utils.cpp_extension

    torch.utils.cpp_extension.CUDA_HOME = None
