"""Flower's SuperLink for one simulation; the two programs that it brings about are forks of the same process.

A SuperLink starts ``flower-superexec``, and this ``flwr-simulation``. Each is a program that imports Flower, FastAPI
and SQLAlchemy for one to two seconds, and the latter Ray and PyTorch besides, one after the other. Here one process
imports what they share, and both wait as forks of it, the simulation's with its libraries, until whoever starts them
in Flower sends their arguments. Once the simulation has started, the SuperExec asks seldom for more work, as there is
none. All else is as in Flower's.

``python -m flower_app.launch.simulation_superlink FOLDER MODULES OPTIONS`` runs ``flower-superlink OPTIONS`` in
``FOLDER``; the simulation imports ``MODULES``, with commas between, beside those that every one needs. Linux alone:
other systems' libraries need not survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flower_app.our_modules import forget_our_modules

SUPERLINK, SUPEREXEC, SIMULATION = "flower-superlink", "flower-superexec", "flwr-simulation"
_LIBRARIES = ("numpy", "ray", "torch", "safetensors.torch", "tokenizers")
_SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
_POLL_S = 0.02
_NOTHING_LEFT_S = 10.0
"""How often a SuperExec asks for work once the only run has started [s]: a hundredth of a second of the SuperLink's
processor each time, a tenth of a core for as long as the run lasts if it went on as often as before."""
_ARGUMENTS = 45
"""Of the fields after the name in ``/proc/self/stat``, where the command line begins; the next one is its end."""


class WaitingProgram:
    """A fork that becomes a program when it is sent its arguments; once started, as much of a ``Popen`` as Flower uses.

    It ends without them when nobody is left who could send some.

    Parameters
    ----------
    name : of the program
    load : makes ready what it needs, and gives what runs it
    """

    def __init__(self, name: str, load: Callable[[], Callable[[], Any]]) -> None:
        self.name = name
        read, self._arguments = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._arguments)
            _become(name, read, load)
        os.close(read)

    def start(self, command: Sequence[str], **options: Any) -> Any:
        """Start a command as ``subprocess.Popen`` would: this program, once, or another that has a process of its own.

        It has this process's output or none, leads a session, and knows no other options.
        """
        if command[0] == self.name and not options.items() - {"start_new_session": True, **_SILENT}.items():
            # It may be gone, or have started already; it saves time, and no more.
            with contextlib.suppress(OSError), open(self._give_up(), "w", encoding="utf-8") as pipe:
                json.dump({"arguments": command[1:], "silent": "stdout" in options}, pipe)
                return self
        return subprocess.Popen(command, **options)

    @property
    def waits(self) -> bool:
        """Whether this process can still start it."""
        return self._arguments >= 0

    def forget(self) -> None:
        """Leave it to others to start."""
        with contextlib.suppress(OSError):
            os.close(self._give_up())

    def _give_up(self) -> int:
        if self._arguments < 0:
            raise BrokenPipeError("it was sent its arguments before, or given up")
        pipe, self._arguments = self._arguments, -1
        return pipe

    def terminate(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout: float) -> None:
        """Wait for its end, in the process that it is a fork of.

        Raises
        ------
        subprocess.TimeoutExpired
            If it is there after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(self.name, timeout)
                time.sleep(_POLL_S)


def _become(name: str, arguments: int, load: Callable[[], Callable[[], Any]]) -> None:
    """Wait for arguments, and be the program; does not return."""
    run = load()
    with open(arguments, encoding="utf-8") as pipe:
        text = pipe.read()
    if not text:
        sys.exit()
    order = json.loads(text)
    os.setsid()
    if order["silent"]:
        nothing = os.open(os.devnull, os.O_WRONLY)
        for output in (1, 2):
            os.dup2(nothing, output)
    sys.argv = [name, *order["arguments"]]
    show_as(name)
    sys.exit(run())


def _command_line() -> tuple[int, int]:
    """Where this process's command line lies in its memory, from and to; the same twice if the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        begin, end = (int(field) for field in fields[_ARGUMENTS : _ARGUMENTS + 2])
    except (OSError, ValueError):
        return 0, 0
    return begin, end


def show_as(title: str) -> None:
    """Have the system's tools show another command line of this process; its environment stays to be seen."""
    begin, end = _command_line()
    if begin >= end:
        return
    text = title.encode()[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


def pause(simulation: WaitingProgram, seconds: float) -> None:
    """Wait before the SuperExec asks for work again: ``seconds``, or long when the simulation has started."""
    time.sleep(seconds if simulation.waits else _NOTHING_LEFT_S)


def load_simulation(modules: Sequence[str], folder: str = "") -> Callable[[], Any]:
    """Import what a simulation needs beside its app.

    Parameters
    ----------
    modules : beside those that every simulation needs
    folder : where ours were found, and are no more looked for once: the app brings its own
    """
    from client_pipeline.quick_imports import quick_import, quick_imports

    with quick_imports():
        from strategies.flower_internals import flwr_simulation
    for module in (*_LIBRARIES, *modules):
        # Whoever needs it says what is the matter.
        with contextlib.suppress(ImportError):
            quick_import(module)
    forget_our_modules()
    if folder and folder in sys.path:
        sys.path.remove(folder)
    return flwr_simulation


def main() -> None:
    """Run ``flower-superlink`` beside the two that wait."""
    folder, modules, *options = sys.argv[1:]
    # Without an installation all of ours is here, and nowhere else. Some have Python not look where it starts.
    started_in = os.getcwd() if sys.path[0] == os.getcwd() else ""
    os.chdir(folder)
    sys.argv = [SUPERLINK, *options]
    from client_pipeline.quick_imports import quick_imports

    with quick_imports():
        from strategies.flower_internals import (
            flower_superexec,
            flower_superlink_module,
            subprocess_executor_module,
            superexec_loop_module,
        )
    flower: Any = flower_superlink_module
    executor: Any = subprocess_executor_module
    loop: Any = superexec_loop_module

    begin, end = _command_line()
    # The launcher knows the simulation by its command line.
    if begin < end:
        needed = [name for name in modules.split(",") if name]
        simulation = WaitingProgram(SIMULATION, lambda: load_simulation(needed, started_in))
        executor.subprocess = SimpleNamespace(Popen=simulation.start, DEVNULL=subprocess.DEVNULL)
        loop.time = SimpleNamespace(sleep=lambda seconds: pause(simulation, seconds))
        superexec = WaitingProgram(SUPEREXEC, lambda: flower_superexec)
        simulation.forget()
        flower.subprocess = SimpleNamespace(Popen=superexec.start, TimeoutExpired=subprocess.TimeoutExpired)
        show_as(" ".join(sys.argv))
    flower.flower_superlink()


if __name__ == "__main__":
    main()
