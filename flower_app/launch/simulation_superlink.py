"""Flower's SuperLink for one simulation; the programs that it brings about are forks of the same process.

A SuperLink starts ``flower-superexec``, and this ``flwr-simulation``. Each is a program that imports Flower, FastAPI
and SQLAlchemy for one to two seconds, and the latter Ray and PyTorch besides, one after the other. Here one process
imports what they share, and both wait as forks of it, the simulation's with its libraries, until whoever starts them
in Flower sends their arguments. The simulation's, in turn, has two forks that need its libraries: the server of Ray's
workers (:mod:`client_pipeline.runtime.worker_forks`), and the check of the run (:mod:`flower_app.launch.run_check`).
The SuperExec asks for work when the launcher lets the app begin, not before: a simulation that it has started has to
call within 30 s, or is started anew. After that it asks seldom, as there is no more. All else is as in Flower's.

``python -m flower_app.launch.simulation_superlink ORDER OPTIONS`` runs ``flower-superlink OPTIONS``; the order is JSON,
the fields of :class:`SimulationOrder`. Linux alone: other systems' libraries need not survive a fork.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from client_pipeline.our_modules import forget_our_modules, our_modules
from client_pipeline.quick_imports import quick_import, quick_imports
from client_pipeline.runtime.worker_forks import FORKS_SOCKET, listen
from client_pipeline.runtime.worker_libraries import fit_to_fork, fork_server, import_libraries, keep_open_alone
from flower_app.launch.app_folder import link_app
from flower_app.launch.submit import wait_for_word
from flower_app.launch.waiting_program import SUPEREXEC, WaitingProgram, can_show_as, show_as

SUPERLINK, SIMULATION = "flower-superlink", "flwr-simulation"
_LIBRARIES = ("ray", "tokenizers")
_SERVER_APP = ("flower_app.server_app", "flower_app.training.training_run")
"""What the app's server side begins with, and what it imports when it trains."""
_NOTHING_LEFT_S = 10.0
"""How often a SuperExec asks for work once the only run has started [s]: a hundredth of a second of the SuperLink's
processor each time, a tenth of a core for as long as the run lasts if it went on as often as before."""


@dataclass(frozen=True, kw_only=True)
class SimulationOrder:
    """What the launcher wants."""

    folder: str
    """Where the SuperLink works."""
    modules: Sequence[str]
    """What the simulation and Ray's workers import beside what every one needs."""
    config: str
    """The run's configuration, a TOML file."""
    word: int | None = None
    """Descriptor of the pipe at which the SuperExec waits before it asks for work; None: it does not wait."""
    check: int | None = None
    """Descriptor that the answer of the run's check is written to; None: it has been checked."""
    check_words: int | None = None
    """Descriptor that whatever the check prints is written to; None: this program's log."""


def pause(simulation: WaitingProgram, seconds: float) -> None:
    """Wait before the SuperExec asks for work again: ``seconds``, or long when the simulation has started."""
    time.sleep(seconds if simulation.waits else _NOTHING_LEFT_S)


def load_simulation(
    order: SimulationOrder, workers: socket.socket | None = None, folder: str = ""
) -> Callable[[], Any]:
    """Import what a simulation needs beside its app, and fork those who need a part of it.

    Parameters
    ----------
    order : which libraries, and whether there is something to check
    workers : where Ray's workers ask for a fork; None: they have another server
    folder : where ours were found, and are no more looked for once: an app that is not of these packages brings its own
    """
    import_libraries(order.modules)
    # A Ray that the app starts is another.
    socket_path = os.environ.pop(FORKS_SOCKET, "")
    if workers is not None:
        fork_server(workers, socket_path)
    check = None if order.check is None else fork_check(order.config, order.check, order.check_words)
    with quick_imports():
        from strategies.flower_internals import flwr_simulation, simulation_module
    for module in (*_LIBRARIES, *_SERVER_APP):
        # Whoever needs it says what is the matter.
        with contextlib.suppress(ImportError):
            quick_import(module)
    flower: Any = simulation_module
    if (install := getattr(flower, "install_from_fab", None)) is not None:
        flower.install_from_fab = partial(link_or_install, install, flower, our_modules())
    forget_our_modules()
    if folder and folder in sys.path:
        sys.path.remove(folder)
    return partial(run_alone, check, flwr_simulation)


def run_alone(check: int | None, run: Callable[[], Any]) -> Any:
    """Run the simulation when no dead process of a check is left beside it; ``check`` is its id.

    It ends with its answer, and that came before the launcher's word.
    """
    if check is not None:
        os.waitpid(check, 0)
    return run()


def begin_at_word(word: int | None, run: Callable[[], Any]) -> Any:
    """Run something as soon as the launcher lets it begin; see :attr:`SimulationOrder.word`."""
    if word is not None:
        wait_for_word(word)
    return run()


def fork_check(config: str, answer: int, words: int | None = None) -> int:
    """Have a fork of this process check a run; returns its process id.

    Parameters
    ----------
    config : TOML file
    answer : descriptor of the answer, closed here
    words : what it prints goes to, closed here
    """
    from flower_app.launch.run_check import check_and_tell

    if (check := os.fork()) != 0:
        for descriptor in filter(None, (answer, words)):
            os.close(descriptor)
        return check
    try:
        if words is not None:
            for output in (1, 2):
                os.dup2(words, output)
        keep_open_alone(answer)
        check_and_tell(Path(config), Connection(answer, readable=False))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Without an answer the launcher checks for itself.
        os._exit(0)


def link_or_install(
    install: Callable[..., Any], flower: Any, modules: Mapping[str, ModuleType], bundle: bytes, **options: Any
) -> Any:
    """Install the simulation's app; one that is made of the packages here is neither unpacked nor imported again.

    Flower unpacks and copies 600 files, and Python compiles those that it imports.

    Parameters
    ----------
    install : Flower's own function
    flower : its module of the simulation's program, which says where an app lies
    modules : of the packages here, by name
    bundle, options : what Flower calls its function with

    Returns
    -------
    Folder of the app.
    """
    # A release that puts an app elsewhere, or a file system without links: Flower's own way is always there.
    with contextlib.suppress(AttributeError, OSError, zipfile.BadZipFile):
        name, version = flower.get_fab_metadata(bundle)
        place = Path(flower.get_project_dir(name, version, hashlib.sha256(bundle).hexdigest()))
        if not place.exists() and link_app(bundle, place):
            sys.modules.update(modules)
            return place
    return install(bundle, **options)


def main() -> None:
    """Run ``flower-superlink`` beside those that wait."""
    order, *options = sys.argv[1:]
    simulation_order = SimulationOrder(**json.loads(order))
    # Without an installation all of ours is here, and nowhere else. Some have Python not look where it starts.
    started_in = os.getcwd() if sys.path[0] == os.getcwd() else ""
    os.chdir(simulation_order.folder)
    sys.argv = [SUPERLINK, *options]
    # The launcher knows the simulation by its command line.
    is_shown = can_show_as()
    # From the beginning, for Ray starts, too.
    workers = listen(os.environ[FORKS_SOCKET]) if is_shown else None
    with quick_imports(), fit_to_fork():
        from strategies.flower_internals import (
            flower_superexec,
            flower_superlink_module,
            subprocess_executor_module,
            superexec_loop_module,
        )
    flower: Any = flower_superlink_module
    executor: Any = subprocess_executor_module
    loop: Any = superexec_loop_module

    if is_shown:
        simulation = WaitingProgram(SIMULATION, lambda: load_simulation(simulation_order, workers, started_in))
        executor.subprocess = SimpleNamespace(Popen=simulation.start, DEVNULL=subprocess.DEVNULL)
        loop.time = SimpleNamespace(sleep=lambda seconds: pause(simulation, seconds))
    if workers is not None:
        workers.close()
    # Who waits for the answer of a check has to notice that nobody is left to make it.
    for descriptor in filter(None, (simulation_order.check, simulation_order.check_words)):
        os.close(descriptor)
    superexec = WaitingProgram(SUPEREXEC, lambda: partial(begin_at_word, simulation_order.word, flower_superexec))
    flower.subprocess = SimpleNamespace(Popen=superexec.start, TimeoutExpired=subprocess.TimeoutExpired)
    if is_shown:
        simulation.forget()
        show_as(" ".join(sys.argv))
    if simulation_order.word is not None:
        os.close(simulation_order.word)
    flower.flower_superlink()


if __name__ == "__main__":
    main()
