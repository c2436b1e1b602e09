"""Facts of a machine from its system: clock and free memory."""

from pathlib import Path

import psutil

from client_pipeline.runtime.ray.machine import (
    FALLBACK_FREQUENCY_HZ,
    available_memory,
    clock_frequency,
    machine_facts,
)


def files(root, **content):
    for name, text in content.items():
        path = Path(root, *name.split("__"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_clock_is_the_systems_or_one_gigahertz(tmp_path):
    assert clock_frequency(tmp_path) == FALLBACK_FREQUENCY_HZ
    files(tmp_path, proc__cpuinfo="processor\t: 0\ncpu MHz\t\t: 2300.000\n\nprocessor\t: 1\ncpu MHz\t\t: 800\n")
    assert clock_frequency(tmp_path) == 2.3e9
    files(tmp_path, sys__devices__system__cpu__cpu0__cpufreq__cpuinfo_max_freq="3500000\n")
    assert clock_frequency(tmp_path) == 3.5e9


def test_memory_is_what_machine_and_control_groups_leave(tmp_path, monkeypatch):
    assert 0 < available_memory(tmp_path) <= psutil.virtual_memory().total
    fields = {"MemTotal": 8_000_000, "MemAvailable": 4_000_000}
    fields |= dict.fromkeys(("MemFree", "Buffers", "Cached", "Shmem", "Active", "Inactive"), 1_000_000)
    files(tmp_path, proc__meminfo="".join(f"{name}: {size} kB\n" for name, size in fields.items()))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    assert available_memory(tmp_path) == 4_096_000_000

    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("4:cpu:/\n3:memory:/a/b\n0::/\n")
    group = tmp_path / "sys/fs/cgroup/memory/a"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("3000000000\n")
    (group / "memory.usage_in_bytes").write_text("1000000000\n")
    assert available_memory(tmp_path) == 2_000_000_000
    (group / "memory.stat").write_text("cache 5\ntotal_inactive_file 400000000\n")
    assert available_memory(tmp_path) == 2_400_000_000

    (tmp_path / "proc/self/cgroup").write_text("0::/x/y\n")
    own = tmp_path / "sys/fs/cgroup/x/y"
    own.mkdir(parents=True)
    (own / "memory.max").write_text("max\n")
    (own / "memory.current").write_text("7\n")
    assert available_memory(tmp_path) == 4_096_000_000
    (own.parent / "memory.max").write_text("1500000000\n")
    (own.parent / "memory.current").write_text("500000000\n")
    assert available_memory(tmp_path) == 1_000_000_000


def test_a_machine_names_itself_its_size_and_what_runs_on_it():
    import platform
    import socket
    from importlib import metadata

    facts = machine_facts()
    assert (facts["host"], facts["python"]) == (socket.gethostname(), platform.python_version())
    assert facts["memory"] == psutil.virtual_memory().total and 1 <= facts["cores"] <= psutil.cpu_count()
    assert {name: facts[name] for name in ("torch", "ray", "flwr")} == {
        name: metadata.version(name) for name in ("torch", "ray", "flwr")
    }
