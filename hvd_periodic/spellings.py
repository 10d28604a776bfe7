"""Spellings of version 0.1, which work for one version more, with a warning that says what to write."""

from __future__ import annotations

import warnings


def warn_old(old: str, new: str, stacklevel: int = 2) -> None:
    """Warn about a spelling of version 0.1.

    Args:
        old: what was written.
        new: what to write.
        stacklevel: frames between this call and the line that the warning names; 2: who called the caller.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_old("`f(old=...)`", "`new=`")
        >>> print(caught[0].message)
        `f(old=...)` is a spelling of version 0.1 and ends with the next version: write `new=`
    """
    warnings.warn(
        f"{old} is a spelling of version 0.1 and ends with the next version: write {new}",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )
