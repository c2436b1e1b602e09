"""Records of traffic: between test machines, taken on their bridge; and between the programs of this one."""

import contextlib
import signal
import subprocess
import sys

import pytest

from helpers.patience import eventually
from helpers.signals import default_signals

_PROGRAM = """
import contextlib, signal, socket, sys
interface, path = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE: nothing may be missed
wire.bind((interface, 0))
with open(path, "wb", 0) as file:
    while True:
        # A cable that is pulled out says so once.
        with contextlib.suppress(OSError):
            # Links between namespaces carry segments of up to 64 KiB, put together.
            file.write(wire.recv(1 << 18))
"""


@contextlib.contextmanager
def recorded(hosts, names, folder):
    """Record all that these machines of :class:`helpers.hosts.Namespaces` send and get; yields the files.

    A tensor's bytes stand in a file as they were sent, but where a segment ends.
    """
    files = [folder / f"{name}.packets" for name in names]
    programs = []
    try:
        for name, file in zip(names, files, strict=True):
            interface = f"v{hosts.names.index(name) + 1}"
            command = [sys.executable, "-c", _PROGRAM, interface, str(file)]
            # The bridge's own namespace sees both directions of each cable.
            programs.append(subprocess.Popen(hosts.command("net", *command), preexec_fn=default_signals))
        eventually(lambda: all(file.exists() for file in files))
        yield files
    finally:
        for program in programs:
            program.send_signal(signal.SIGTERM)
            program.wait(120)


def found_in(files, patterns):
    """Return the names of those bytes that stand in the records."""
    records = [file.read_bytes() for file in files]
    return {name for name, pattern in patterns.items() if any(pattern in record for record in records)}


@contextlib.contextmanager
def recorded_loopback(file):
    """Record all that programs of this machine send each other over TCP, UDP and the like; ``file`` gets it."""
    program = subprocess.Popen([sys.executable, "-c", _PROGRAM, "lo", str(file)], preexec_fn=default_signals)
    try:
        eventually(lambda: file.exists() or program.poll() is not None)
        if program.poll() is not None:
            pytest.skip("recording packets needs the right to (CAP_NET_RAW)")
        yield
    finally:
        program.terminate()
        program.wait(120)
