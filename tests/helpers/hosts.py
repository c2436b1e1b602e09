"""Machines for tests: network namespaces on a bridge, or addresses of the loopback where namespaces are not allowed."""

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from pathlib import Path

import psutil

from helpers.signals import default_signals


def namespaces_missing():
    """Reason why there are no network namespaces here; empty if there are."""
    if os.geteuid():
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (iproute2)"
    name = f"cp{uuid.uuid4().hex[:6]}"
    made = _try("ip", "netns", "add", name)
    if made:
        return f"no network namespace: {made}"
    try:
        steps = (
            ("ip", "-n", name, "link", "add", "br0", "type", "bridge"),
            ("ip", "link", "add", "v0", "netns", name, "type", "veth", "peer", "name", "v1", "netns", name),
            ("ip", "netns", "exec", name, "true"),
        )
        for step in steps:
            if failed := _try(*step):
                return f"no network between namespaces: {failed}"
    finally:
        _try("ip", "netns", "del", name)
    return ""


def _try(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return "" if done.returncode == 0 else f"{' '.join(command)}: {done.stderr.strip()}"


class Hosts:
    """Machines by name. Programs that were started on them end with the context, and so do the machines."""

    def __init__(self, names):
        self.names = list(names)
        self.running = []

    def address(self, name):
        raise NotImplementedError

    def ports(self, name):
        """Distance of a machine's ports from the default ones."""
        raise NotImplementedError

    def command(self, name, *arguments):
        raise NotImplementedError

    def processes(self, name):
        """Ids of all processes of a machine, where the machine alone tells them from others; else none."""
        return []

    def start(self, name, *arguments, log, **options):
        """Start a program on a machine."""
        with log.open("ab") as file:
            child = subprocess.Popen(
                self.command(name, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=default_signals,
                **options,
            )
        self.running.append(child)
        return child

    def run(self, name, *arguments, **options):
        """Run a program on a machine to its end."""
        options = {"capture_output": True, "text": True, "check": False} | options
        return subprocess.run(self.command(name, *arguments), **options)

    def end(self, child, timeout_s=30):
        """Ask a program to end, then end it; returns its exit code."""
        child.send_signal(signal.SIGTERM)
        try:
            return child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait(timeout_s)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Devices before their control unit, and this before the server: the other way each would complain.
        for child in reversed(self.running):
            if child.poll() is None:
                self.end(child)


class Namespaces(Hosts):
    """Each machine is a network namespace; all hang on one bridge, in a namespace of its own."""

    def __init__(self, names, rate_mbit=200):
        super().__init__(names)
        self.prefix = f"cp{uuid.uuid4().hex[:6]}"
        self.rate_mbit = rate_mbit

    def __enter__(self):
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self):
        net = f"{self.prefix}-net"
        self._ip("netns", "add", net)
        self._ip("-n", net, "link", "add", "br0", "type", "bridge")
        self._ip("-n", net, "link", "set", "br0", "up")
        for i, name in enumerate(self.names, 1):
            space = f"{self.prefix}-{name}"
            self._ip("netns", "add", space)
            ends = ("eth0", "netns", space), ("type", "veth", "peer", "name", f"v{i}", "netns", net)
            self._ip("link", "add", *ends[0], *ends[1])
            self._ip("-n", net, "link", "set", f"v{i}", "master", "br0", "up")
            self._ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "lo", "up")
            self._ip("-n", space, "link", "set", "eth0", "up")
            limit = ("rate", f"{self.rate_mbit}mbit", "burst", "256kb", "latency", "100ms")
            _try("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)

    def __exit__(self, *error):
        super().__exit__(*error)
        for name in ("net", *self.names):
            space = f"{self.prefix}-{name}"
            for pid in self.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _try("ip", "netns", "del", space)

    def processes(self, name):
        # As `ip netns pids` does, without a program for each question: tests ask many times a second.
        pids = []
        with contextlib.suppress(FileNotFoundError):
            space = os.stat(f"/run/netns/{self.prefix}-{name}")
            for entry in os.scandir("/proc"):
                with contextlib.suppress(OSError):
                    if entry.name.isdigit() and os.path.samestat(os.stat(f"/proc/{entry.name}/ns/net"), space):
                        pids.append(int(entry.name))
        return pids

    def actors(self, name):
        """Ids of a machine's Ray workers that have been called: with the first call Ray loads what it reads it with."""
        workers = []
        for pid in self.processes(name):
            with contextlib.suppress(OSError, psutil.Error):
                process = psutil.Process(pid)
                is_worker = (
                    psutil.Process(process.ppid()).name() == "raylet"
                    and "agent" not in " ".join(process.cmdline()).lower()
                )
                if is_worker and b"_pydantic_core" in Path(f"/proc/{pid}/maps").read_bytes():
                    workers.append(pid)
        return workers

    def _ip(self, *arguments):
        if failed := _try("ip", *arguments):
            raise RuntimeError(failed)

    def connect(self, name, connected):
        """Plug a machine's cable in, or pull it out."""
        number = self.names.index(name) + 1
        self._ip("-n", f"{self.prefix}-net", "link", "set", f"v{number}", "up" if connected else "down")

    def pids(self, name, words):
        """Ids of a machine's processes whose command lines hold these words."""
        found = []
        for pid in self.processes(name):
            with contextlib.suppress(OSError):
                if words in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                    found.append(pid)
        return found

    def address(self, name):
        return f"10.177.0.{self.names.index(name) + 1}"

    def ports(self, name):
        return 0

    def command(self, name, *arguments):
        return ["ip", "netns", "exec", f"{self.prefix}-{name}", *map(str, arguments)]


class Loopback(Hosts):
    """Each machine is an address of the loopback; they share the ports, so each has its own."""

    def address(self, name):
        return f"127.0.77.{self.names.index(name) + 1}"

    def ports(self, name):
        # Below those that the system gives away, and seldom those of another test run.
        return 8_000 + os.getpid() % 80 * 150 + 130 * self.names.index(name)

    def command(self, name, *arguments):
        return [*map(str, arguments)]
