"""Flower's SuperExec for a SuperNode, as a fork of that, with a fork server for client apps: libraries come once.

Flower starts a program for each message, which imports Flower, NumPy, Ray and the app before it looks at the message:
most of the processor time that a message takes on a control unit's machine. Here it is a fork of a process that has
them (:func:`serve_forks`), the app too if it is that of the release that is installed here, whose digest
(:func:`~flower_app.deployment.app_digest.app_digest`) is known. The SuperExec itself is a fork of the SuperNode's
program, which has imported Flower, and the fork server one of the SuperExec. It asks for work when the SuperNode says
so, and seldom besides. All else is as in Flower's: a process for each message, which ends with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from client_pipeline.our_modules import forget_our_modules, our_modules
from flower_app.deployment.app_digest import app_digest
from flower_app.deployment.bell import Bell, when_told
from flower_app.launch.waiting_program import SUPEREXEC, show_as

CLIENT_APP = "flwr-clientapp"
"""The program that a SuperExec starts for a message."""
_LIBRARIES = ("numpy", "ray", "httpcore", "ray._common.pydantic_compat", "ray._common.usage.usage_lib")
"""The last three when a message's process speaks to its SuperNode and joins its Ray."""
_SHORT_HASH = 8
"""Of an app's hash, in the name of the folder that Flower unpacks it to."""


class ForkServer:
    """The fork server as the SuperExec sees it: it takes command lines of client apps, and starts them.

    Parameters
    ----------
    orders : file descriptor of the pipe that it reads
    """

    def __init__(self, orders: int) -> None:
        self._orders = orders

    def start(self, command: Sequence[str], **options: Any) -> Any:
        """Start a command as ``subprocess.Popen`` would; only a client app's comes from there."""
        if command[0] == CLIENT_APP and not options:
            # The fork server may be gone; it saves time, and no more.
            with contextlib.suppress(OSError):
                os.write(self._orders, f"{json.dumps(command[1:])}\n".encode())
                return None
        return subprocess.Popen(command, **options)


def serve_forks(orders: int, load: Callable[[], Callable[[], None]]) -> None:
    """Be the process that client apps are forks of. Returns when it ends, and in a client app's process when that does.

    Parameters
    ----------
    orders : file descriptor, of which each line is a client app's arguments as JSON; its end is the process's
    load : imports what a client app needs, and gives what runs one
    """
    # Told to end, the SuperExec ends, and so does the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    run = load()
    # The app that the server has sent brings its own modules, and not all need be those of this release.
    forget_our_modules()
    with open(orders, encoding="utf-8") as lines:
        order = next((line for line in lines if os.fork() == 0), "")
    if not order:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _forget_random_numbers()
    sys.argv = [CLIENT_APP, *json.loads(order)]
    show_as(CLIENT_APP)
    run()


def _forget_random_numbers() -> None:
    """Draw new seeds, lest each message's noise be the same."""
    import numpy

    random.seed()
    numpy.random.seed()


def load_client_app(release: str, answers: Bell) -> Callable[[], None]:
    """Import all that a client app needs, and this release's; nothing of it starts a thread.

    Parameters
    ----------
    release : digest of the app that is installed here
    answers : to be rung when it has left its answer
    """
    from client_pipeline.quick_imports import quick_import, quick_imports
    from strategies.grid.piece_waits import look_again_soon

    with quick_imports():
        for library in _LIBRARIES:
            # Another release may have it elsewhere: a message's process imports it then.
            with contextlib.suppress(ImportError):
                quick_import(library)
        from strategies.flower_internals import flwr_clientapp, run_clientapp_module

        quick_import("flower_app.client_app")
    look_again_soon(run_clientapp_module, "pull_and_inflate_object_from_tree")
    flower: Any = run_clientapp_module
    if (install := getattr(flower, "install_from_fab", None)) is not None:
        flower.install_from_fab = partial(install_app, install, release, our_modules())
    if (push := getattr(flower, "push_message", None)) is not None:
        flower.push_message = partial(push_and_ring, push, answers)
    return flwr_clientapp


def push_and_ring(push: Callable[..., None], answers: Bell, *arguments: Any) -> None:
    """Leave an answer with the SuperNode, as Flower does, and say so; ``arguments`` are those of ``push``."""
    push(*arguments)
    answers.ring()


def install_app(
    install: Callable[..., Any], release: str, modules: Mapping[str, ModuleType], bundle: bytes, **options: Any
) -> Any:
    """Install a message's app; that of the release that is installed here is imported already, and unpacked once.

    Flower unpacks an app for each message, and then finds that it lies there.

    Parameters
    ----------
    install : Flower's own function
    release : digest of the release's app
    modules : that app, by name
    bundle, options : what Flower calls its function with

    Returns
    -------
    Folder of the app.
    """
    with contextlib.suppress(ValueError):
        if app_digest(bundle) == release:
            sys.modules.update(modules)
            # Nothing is read in there any more but which object is the app.
            if place := _unpacked(bundle):
                return place
    return install(bundle, **options)


def _unpacked(bundle: bytes) -> Path | None:
    """Where Flower has unpacked an app, if it has; a release that puts it elsewhere unpacks it again."""
    if not (home := os.environ.get("FLWR_HOME")):
        return None
    places = Path(home, "apps").glob(f"*.{hashlib.sha256(bundle).hexdigest()[:_SHORT_HASH]}")
    return next((place for place in places if (place / "pyproject.toml").is_file()), None)


def load_superexec(run: Callable[[], Any], release: str, work: Bell, answers: Bell) -> Callable[[], Any]:
    """Make ready what a SuperExec needs, its fork server with it; a client app's process never returns from here.

    Parameters
    ----------
    run : the SuperExec, and what is returned
    release : digest of the app that is installed here
    work : rung when there is some
    answers : to be rung when a client app has left its answer
    """
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(write)
        show_as(f"{SUPEREXEC}: {CLIENT_APP}")
        serve_forks(read, partial(load_client_app, release, answers))
        sys.exit()
    os.close(read)
    from strategies.flower_internals import subprocess_executor_module, superexec_loop_module

    executor: Any = subprocess_executor_module
    executor.subprocess = SimpleNamespace(Popen=ForkServer(write).start, DEVNULL=subprocess.DEVNULL)
    return when_told(work, superexec_loop_module, run)
