"""Facts of the machine that a process runs on: versions, clock, free memory."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

FALLBACK_FREQUENCY_HZ = 1e9
"""Clock where the system names none: only its product with the FLOP per cycle counts."""

REPORTED_PACKAGES = ("torch", "ray", "flwr")
"""Packages whose versions a run's record of its machines has."""


def machine_facts() -> dict[str, str | int]:
    """Describe this machine: ``host``, ``cores``, ``memory`` [byte], ``system``, versions of Python and packages."""
    return {
        "host": socket.gethostname(),
        "cores": usable_cores(),
        "memory": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in REPORTED_PACKAGES},
    }


def usable_cores() -> int:
    """Count the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def clock_frequency(root: Path = Path("/")) -> float:
    """Return the first core's clock: its maximum by /sys, else by /proc/cpuinfo, else 1 GHz [cycle/s]."""
    with contextlib.suppress(OSError, ValueError):
        kilohertz = float((root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text(encoding="ascii"))
        if kilohertz > 0:
            return kilohertz * 1e3
    megahertz = _fields(root / "proc/cpuinfo").get("cpu MHz", 0.0)
    return megahertz * 1e6 if megahertz > 0 else FALLBACK_FREQUENCY_HZ


def available_memory(root: Path = Path("/")) -> int:
    """Return the memory that a new process can have: free, and allowed by its control groups (v1, v2) [byte]."""
    free_bytes: list[float] = [psutil.virtual_memory().available]
    groups = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if "memory" in controllers.split(","):
                files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                free_bytes += _group_memory(groups / "memory", group, *files)
            elif not controllers:
                for mount in (groups, groups / "unified"):
                    free_bytes += _group_memory(mount, group, "memory.max", "memory.current", "inactive_file")
    return int(max(min(free_bytes), 0))


def _group_memory(mount: Path, name: str, limit: str, usage: str, reclaimable: str) -> Iterator[float]:
    """Yield the free bytes of a control group and of those above it; none without a limit."""
    group = mount / name.lstrip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):
            most, used = (float((folder / file).read_text(encoding="ascii")) for file in (limit, usage))
            # Pages of files count as used, but go when a process needs them.
            yield most - used + _fields(folder / "memory.stat", " ").get(reclaimable, 0.0)
        if folder == mount:
            return


def _fields(file: Path, separator: str = ":") -> dict[str, float]:
    """Read the first numbers of lines such as ``name: 12 kB``, by name; the first line of each name counts."""
    fields: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(separator)
            with contextlib.suppress(ValueError, IndexError):
                fields.setdefault(name.strip(), float(value.split()[0]))
    return fields
