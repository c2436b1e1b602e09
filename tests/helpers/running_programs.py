"""Real programs on free ports, ended with their children."""

import contextlib
import itertools
import os
import socket
import subprocess

from flower_app.deployment.programs import listens
from flower_app.launch.processes import MARK, RunProcesses
from helpers.patience import eventually

HOST = "127.0.0.1"
START_S = 180
_PORTS = itertools.count(0, 2)


def free_port():
    """A port that is free with the one after it, and that the system gives to nobody by itself."""
    for _ in range(4_000):
        port = 24_200 + (os.getpid() % 80 * 100 + next(_PORTS)) % 8_300
        if not any(listens(HOST, port + k) for k in range(2)):
            return port
    raise RuntimeError("no free ports")


@contextlib.contextmanager
def taken_port():
    """Give a port of the loopback on which somebody listens."""
    with socket.create_server((HOST, 0)) as listener:
        yield listener.getsockname()[1]


def free_block():
    """First of 120 ports below those that the system gives away."""
    for first in range(11_000 + os.getpid() % 100 * 130, 32_000, 130):
        if not any(listens(HOST, first + k) for k in range(8)):
            return first
    raise RuntimeError("no free ports")


@contextlib.contextmanager
def running(command, environment, log, answers):
    """A program with all that comes out of it, until it is no longer needed."""
    with log.open("wb") as file:
        child = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:

        def answers_or_ended():
            assert child.poll() is None, log.read_text()[-3000:]
            return answers()

        eventually(answers_or_ended, START_S, lambda: log.read_text()[-3000:], poll_s=0.3)
        yield
    finally:
        RunProcesses(environment[MARK]).end()
        child.wait(120)
