"""Limits of the system without which a simulation cannot start, and those that may have ended one."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path

import psutil

_SHARED = Path("/dev/shm")
_FILES, _USUAL_FILES = 128, 1024
"""Open files of a process: the fewest with which a small run has finished, and what systems give."""
_TASKS = 260
"""Processes and threads of the smallest simulation."""
_BYTES = 4_000_000_000
"""Address space of a process: Ray and torch reserve more than they use [byte]."""
_EXHAUSTED = re.compile(
    r"can't start new thread|[Rr]esource temporarily unavailable|[Tt]oo many open files|[Cc]annot allocate memory|"
    r"failed to map segment|MemoryError|std::bad_alloc|timed out during startup|PanicException"
)


def check_limits() -> None:
    """Refuse a machine on which no simulation can start; raise a low soft limit of open files as far as it may be."""
    if sys.platform == "linux" and _SHARED.is_dir() and not os.access(_SHARED, os.W_OK):
        raise ValueError(
            f"{_SHARED}: expected a folder that is writable, where Ray keeps its objects; mount it so (in a container: "
            "--shm-size), or remove it: Ray takes the folder for temporary files then"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _USUAL_FILES:
        soft = _USUAL_FILES if hard == resource.RLIM_INFINITY else min(hard, _USUAL_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < _FILES:
            raise ValueError(
                f"ulimit -n: expected at least {_FILES} open files, found {soft}; raise it (1024 is usual)"
            )
    if (most := _limit(resource.RLIMIT_AS)) is not None and most < _BYTES:
        raise ValueError(
            f"ulimit -v: expected at least {_BYTES / 1e9:g} GB of address space, found {most / 1e9:.1f} GB; raise it, "
            "or limit memory by a control group"
        )
    # The system does not count root's processes.
    if os.geteuid() and (most := _limit(resource.RLIMIT_NPROC)) is not None:
        processes = [process.info for process in psutil.process_iter(["uids", "num_threads"])]
        used = sum(p["num_threads"] or 1 for p in processes if p["uids"] is not None and p["uids"].real == os.getuid())
        if most - used < _TASKS:
            raise ValueError(
                f"ulimit -u: expected room for {_TASKS} processes and threads, found {most} of which {used} are in "
                "use; raise it, or end other programs of this user"
            )


def limits_hint(error: str) -> str:
    """Name the limits that may be behind an error; empty where it does not look like one of them."""
    if not _EXHAUSTED.search(error):
        return ""
    limits = [
        f"{name} = {most}"
        for name, number in (
            ("ulimit -n (open files)", resource.RLIMIT_NOFILE),
            ("ulimit -u (processes and threads)", resource.RLIMIT_NPROC),
            ("ulimit -v (address space, bytes)", resource.RLIMIT_AS),
        )
        if (most := _limit(number)) is not None
    ]
    memory = f"{psutil.virtual_memory().available / 1e9:.1f} GB of memory are free"
    return f"limits of this machine: {', '.join([*limits, memory])}; raise the one that was reached"


def _limit(number: int) -> int | None:
    """Return a soft limit; None where there is none."""
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft
