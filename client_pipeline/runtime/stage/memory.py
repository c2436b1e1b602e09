"""Freed memory, memory limits and memory use of a process that trains."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import psutil

_STACK_BYTES = 2 << 20
"""Stack of a later thread. The system counts all of it; glibc's default is 8 MB."""
STACKS_BYTES = 32 * _STACK_BYTES
"""Stacks of all later threads: a group's, gloo's, gRPC's."""
RESERVE_BYTES = 32 << 20
"""Part of a limit that is kept back for the message that it was reached."""
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
"""Variable with which the threads of a process share one heap; glibc returns each other heap once it is empty."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD`` of glibc's ``mallopt``."""


def keep_freed_memory() -> bool:
    """Keep up to 1 GiB of freed memory in this process, for tensors up to that size.

    A stage frees its activations in each backward pass and needs the same memory in the next step. By default glibc
    returns it, and page faults take a tenth of a step. Where memory is scarce, use :func:`return_freed_memory`.

    Returns
    -------
    Whether the C library took the setting; others than glibc do not know it.
    """
    return _set_thresholds(1 << 30)


def return_freed_memory(limit_bytes: int = 1 << 16) -> bool:
    """Return tensors of ``limit_bytes`` and more to the system as soon as they are freed.

    Each then has pages of its own, so that fragments hold no memory. A step takes up to a tenth more time.

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
    if peak := _of_status("VmHWM:"):
        return peak
    # KiB on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Count the peak anew from here, where the system lets us."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pass


def limit_private_memory(num_bytes: float) -> bool:
    """Limit the private memory that this process may take from now on; files that it maps do not count.

    The limit is Linux's ``RLIMIT_DATA``: an allocation beyond it fails, and the process goes on. A control group would
    count the mapped pages of files, and needs rights that a process seldom has.

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
    """Return the bytes that the limit of :func:`limit_private_memory` counts now; 0 where they are not known."""
    return _of_status("VmData:")


def _make_small_stacks() -> None:
    """Set the stack of later threads to :data:`_STACK_BYTES` of address space."""
    library = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(256)
    # Of glibc; others have small stacks by default.
    if hasattr(library, "pthread_setattr_default_np") and not library.pthread_getattr_default_np(attributes):
        library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_BYTES))
        library.pthread_setattr_default_np(attributes)
        library.pthread_attr_destroy(attributes)


def use_reserve(used: bool) -> None:
    """Free the reserve of :func:`limit_private_memory`, or keep it back again."""
    _, whole = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (whole if used else whole - RESERVE_BYTES, whole))


def is_out_of_memory(error: BaseException) -> bool:
    """True for an error of missing memory: Python's, numpy's, torch's or the C++ library's."""
    texts = ("can't allocate memory", "not enough memory", "bad_alloc", "Cannot allocate memory")
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def _of_status(key: str) -> int:
    """Read a size that psutil does not read and Linux alone gives [byte]; 0 elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(key)), 0)
