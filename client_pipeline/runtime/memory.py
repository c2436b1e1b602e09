"""How a process that trains treats memory that it has freed."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import psutil

_STACK_BYTES = 2 << 20
"""Of a thread that comes later: the system counts a stack whole, however little of it is used. glibc's default is 8 MB,
and how many threads Ray's gRPC starts, for one, grows with the machine's load."""
STACKS_BYTES = 32 * _STACK_BYTES
"""Of all threads that come later: a group's, gloo's, gRPC's."""
RESERVE_BYTES = 32 << 20
"""Kept back of a limit, for who has to say that it was reached."""
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
"""Variable with which the threads of a process share a heap. Of the others, of 64 MB, glibc hands every empty
one back to the system, whatever :func:`keep_freed_memory` says: 9,000 page faults in a step at width 512."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD`` of glibc's ``mallopt``."""


def keep_freed_memory(limit_bytes: int = 1 << 30) -> bool:
    """Have this process keep up to ``limit_bytes`` of freed memory, for tensors up to that size.

    A stage stores activations in its forward passes and frees them in its backward passes. glibc hands such memory
    back to the system, and the next step pays for every page again: 34,000 page faults in a step at width 512, a tenth
    of its time. The process holds its peak instead, which it needs again in every step; and more than that, as kept
    tensors come to lie between large ones that were there for a moment. Where memory is scarce,
    :func:`return_freed_memory` is for it.

    Returns
    -------
    Whether the C library took the setting; others than glibc do not know it.
    """
    return _set_thresholds(limit_bytes)


def return_freed_memory(limit_bytes: int = 1 << 16) -> bool:
    """Have this process give tensors of ``limit_bytes`` and more back to the system when they are freed, each at once.

    They have pages of their own then, so that nothing of them is left between others. A device whose matrices are
    brought back for each product needed three times its tensors' bytes with :func:`keep_freed_memory`, and 1.1 times
    with this; it takes up to a tenth more time.

    Returns
    -------
    Whether the C library took the setting.
    """
    return _set_thresholds(limit_bytes)


def _set_thresholds(limit_bytes: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Either one alone would end glibc's own adaptation of the other, and do harm.
    return bool(mallopt(_MMAP_THRESHOLD, limit_bytes)) and bool(mallopt(_TRIM_THRESHOLD, limit_bytes))


def give_freed_memory_back() -> None:
    """Hand what is free back to the system, once: after something large has left this process."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def resident_bytes() -> int:
    """Memory of this process now [byte]."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """Most memory of this process since :func:`forget_peak` [byte]; since its start where that cannot be forgotten."""
    return _high_water_mark() or _largest_resident()


def forget_peak() -> None:
    """Count the peak anew from here, where the system lets us."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pass


def limit_private_memory(num_bytes: float) -> bool:
    """Allow this process so much private memory beside what it has, for good; files that it maps do not count.

    It is Linux's ``RLIMIT_DATA``: what goes beyond it is not killed, but cannot be had, so that whoever asks can say
    so. A control group would count a file's mapped pages, which the system may drop, and needs rights that a process
    seldom has.

    Returns
    -------
    Whether the system keeps the limit; others than Linux do not.
    """
    now_bytes = private_bytes()
    if not now_bytes:
        return False
    _make_small_stacks()
    most = now_bytes + int(num_bytes) + STACKS_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    whole = most + RESERVE_BYTES if hard == resource.RLIM_INFINITY else min(most + RESERVE_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (min(most, whole), whole))
    return True


def private_bytes() -> int:
    """What the limit of :func:`limit_private_memory` counts now [byte]; 0 where nobody knows it."""
    return _of_status("VmData:")


def _make_small_stacks() -> None:
    """Have threads that start from now on take :data:`_STACK_BYTES` of address space."""
    library = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(256)
    # Of glibc; others have small stacks by default.
    if hasattr(library, "pthread_setattr_default_np") and not library.pthread_getattr_default_np(attributes):
        library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_BYTES))
        library.pthread_setattr_default_np(attributes)
        library.pthread_attr_destroy(attributes)


def use_reserve(used: bool) -> None:
    """Have the reserve of :func:`limit_private_memory`, or keep it back again."""
    _, whole = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (whole if used else whole - RESERVE_BYTES, whole))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had: Python's, numpy's, torch's or the C++ library's."""
    texts = ("can't allocate memory", "not enough memory", "bad_alloc", "Cannot allocate memory")
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def _high_water_mark() -> int:
    """The peak that can be forgotten, which psutil does not read [byte]; 0 where nobody knows it."""
    return _of_status("VmHWM:")


def _of_status(key: str) -> int:
    """A size that Linux alone tells [byte]; 0 elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(key)), 0)


def _largest_resident() -> int:
    # KiB on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
