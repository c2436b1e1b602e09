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
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from flower_app.launch.app_folder import link_app
from flower_app.launch.waiting_program import SUPEREXEC, WaitingProgram, can_show_as, show_as
from flower_app.our_modules import forget_our_modules, our_modules

SUPERLINK, SIMULATION = "flower-superlink", "flwr-simulation"
_LIBRARIES = ("numpy", "ray", "torch", "safetensors.torch", "tokenizers")
_SERVER_APP = ("flower_app.server_app", "flower_app.training.training_run")
"""What the app's server side begins with, and what it imports when it trains."""
_NOTHING_LEFT_S = 10.0
"""How often a SuperExec asks for work once the only run has started [s]: a hundredth of a second of the SuperLink's
processor each time, a tenth of a core for as long as the run lasts if it went on as often as before."""


def pause(simulation: WaitingProgram, seconds: float) -> None:
    """Wait before the SuperExec asks for work again: ``seconds``, or long when the simulation has started."""
    time.sleep(seconds if simulation.waits else _NOTHING_LEFT_S)


def load_simulation(modules: Sequence[str], folder: str = "") -> Callable[[], Any]:
    """Import what a simulation needs beside its app.

    Parameters
    ----------
    modules : beside those that every simulation needs
    folder : where ours were found, and are no more looked for once: an app that is not of these packages brings its own
    """
    from client_pipeline.quick_imports import quick_import, quick_imports

    with quick_imports():
        from strategies.flower_internals import flwr_simulation, simulation_module
    for module in (*_LIBRARIES, *modules, *_SERVER_APP):
        # Whoever needs it says what is the matter.
        with contextlib.suppress(ImportError):
            quick_import(module)
    flower: Any = simulation_module
    if (install := getattr(flower, "install_from_fab", None)) is not None:
        flower.install_from_fab = partial(link_or_install, install, flower, our_modules())
    forget_our_modules()
    if folder and folder in sys.path:
        sys.path.remove(folder)
    return flwr_simulation


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

    # The launcher knows the simulation by its command line.
    if can_show_as():
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
