"""Ray's workers as forks of one process of their machine, which imports their libraries once.

A worker of Ray's is a program that imports torch: more than a second of a processor and 130 MB, more than twice that
with transformers, for each simulated device that has an actor of its own. Where
:func:`client_pipeline.runtime.private_ray.lean_head` starts a Ray, its raylet starts this file in place of Ray's
``default_worker.py`` and ``setup_worker.py``, with the same arguments. The first that comes imports the libraries and
becomes the server of the others: each sends it arguments, environment and output, has it fork, and ends; the fork runs
Ray's file. Memory that nobody writes to is shared. A worker that finds no server runs Ray's file itself.

It imports nothing but the standard library until it is the server, and Ray in the forks alone: what a worker is, such
as its job, Ray reads from the environment when it is imported.
"""

# Alone: a program; lean_head names its file to Ray.

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IMPORTS = "COLLAPIPE_WORKER_IMPORTS"
"""Environment variable: more modules that the server imports, with commas."""
_NEEDED = ("numpy", "torch", "safetensors.torch", "grpc_health.v1.health", "requests", "jsonschema", "yaml")
"""What our actors need, and Ray."""
_RAYLET, _CONTEXT, _LANGUAGE = "--raylet-name=", "--serialized-runtime-env-context=", "--language="
_MODULE_PATH = "PYTHONPATH"
_PACKAGES = ("client_pipeline", "flower_app", "strategies")
_STARTED_S = 120.0
"""How long a worker waits for its fork: the server may still import [s]."""
_LOOK_S = 1.0
"""How often the server looks whether the raylet is still there [s]."""
_READ_S = 5.0
"""How long the server waits for an order's next piece, and everybody else for it [s]."""
_LENGTH = struct.Struct("!I")
_MOST_BYTES = 1 << 22
"""Of an order: environments and command lines are shorter."""


def socket_path(arguments: Sequence[str]) -> str:
    """Name the server's socket, beside that of the worker's raylet; empty where the arguments name none."""
    raylet = next((argument[len(_RAYLET) :] for argument in arguments if argument.startswith(_RAYLET)), "")
    folder, name = os.path.split(raylet)
    # No longer than the raylet's own, which is as long as a socket's name may be.
    return os.path.join(folder, name.replace("raylet", "forks", 1)) if "raylet" in name else ""


def listen(path: str) -> socket.socket | None:
    """Take the server's place; ``None`` if it is taken.

    Whoever may connect has programs started as this user, so that nobody else may.
    """
    server = socket.socket(socket.AF_UNIX)
    # Shorter than the name itself, and there for a moment.
    unlinked = os.path.join(os.path.dirname(path), f"f{os.getpid()}")
    previous = os.umask(0o177)
    try:
        server.bind(unlinked)
        server.listen(128)
        # Under its name it answers from the beginning, and one of many gets the name.
        os.link(unlinked, path)
    except OSError:
        server.close()
        return None
    finally:
        os.umask(previous)
        with contextlib.suppress(OSError):
            os.unlink(unlinked)
    return server


def own_order(arguments: Sequence[str]) -> dict[str, Any]:
    """Describe what a fork is to be: this process, with its environment, folder and module path."""
    folder = os.getcwd()
    return {"arguments": [*arguments], "environment": {**os.environ}, "folder": folder, "modules": [*sys.path]}


def order_fork(path: str, arguments: Sequence[str]) -> bool:
    """Ask the server for a fork that takes this process's place and output; whether there is one."""
    content = json.dumps(own_order(arguments)).encode()
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(_STARTED_S)
            server.connect(path)
            socket.send_fds(server, [_LENGTH.pack(len(content))], [0, 1, 2])
            server.sendall(content)
            return server.recv(1) == b"+"
    except OSError:
        return False


def serve_workers(server: socket.socket, raylet: int) -> dict[str, Any] | None:
    """Fork a worker for each order. Returns ``None`` when the raylet has gone, and in a fork what was ordered.

    Parameters
    ----------
    server : as :func:`listen` gives it
    raylet : this process's parent when it began
    """
    while os.getppid() == raylet:
        if not select.select([server], [], [], _LOOK_S)[0]:
            continue
        worker, _ = server.accept()
        with worker, contextlib.suppress(OSError, ValueError):
            worker.settimeout(_READ_S)
            order, files = _read_order(worker)
            try:
                if os.fork() == 0:
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                    return order
            finally:
                for file in files:
                    os.close(file)
            worker.sendall(b"+")
    return None


def _read_order(worker: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Read one order and its three files; raises ``OSError`` or ``ValueError``, with nothing left open."""
    user = struct.unpack("3i", worker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]
    if user != os.geteuid():
        raise ValueError(f"user {user} may start nothing here")
    head, files, _, _ = socket.recv_fds(worker, _LENGTH.size, 3)
    try:
        if len(head) != _LENGTH.size or len(files) != 3 or (size := _LENGTH.unpack(head)[0]) > _MOST_BYTES:
            raise ValueError("not an order")
        content = b""
        while len(content) < size:
            if not (piece := worker.recv(size - len(content))):
                raise ValueError("the order ends too soon")
            content += piece
        order = json.loads(content)
        return {name: order[name] for name in ("arguments", "environment", "folder", "modules")}, files
    except BaseException as error:
        for file in files:
            os.close(file)
        if isinstance(error, KeyError | TypeError | RecursionError):
            raise ValueError("not an order") from error
        raise


def import_libraries() -> None:
    """Import the libraries that workers need; of ours only what knows how, which is forgotten.

    A worker may bring another release of ours.
    """
    # Neither for numbers that this process computes, nor for threads that a fork would not have.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    sys.path.insert(0, str(Path(__file__).parents[2]))
    try:
        from client_pipeline.quick_imports import quick_import

        for module in (*_NEEDED, *filter(None, os.environ.get(IMPORTS, "").split(","))):
            with contextlib.suppress(ImportError):
                if module.startswith("transformers."):
                    from client_pipeline.partition.hugging_face import import_models_library

                    import_models_library()
                quick_import(module)
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.split(".")[0] in _PACKAGES]:
            del sys.modules[name]
    importlib.invalidate_caches()


def become_worker(order: Mapping[str, Any]) -> None:
    """Be the fork: take over what was ordered, and nothing that forks of one process must not have in common."""
    import numpy

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    environment = order["environment"]
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        # What is as it was stays where the system has put it: from there Ray finds where a process's title is.
        if os.environ.get(name) != value:
            os.environ[name] = value
    os.chdir(order["folder"])
    sys.path[:] = order["modules"]
    random.seed()
    numpy.random.seed()
    run_worker(order["arguments"])


def run_worker(arguments: Sequence[str]) -> None:
    """Run Ray's own file."""
    file = _rays_file("default_worker.py")
    sys.argv = [file, *arguments]
    # As Python does for a file that it is started with.
    sys.path.insert(0, os.path.dirname(file))
    runpy.run_path(file, run_name="__main__")


def _rays_file(name: str) -> str:
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.origin is not None
    return os.path.join(os.path.dirname(spec.origin), "_private", "workers", name)


def set_up(arguments: Sequence[str]) -> list[str]:
    """Do what Ray's ``setup_worker.py`` does for a worker with an environment of its own, where it is only variables.

    Ray's program would import Ray to set them. What more it may have to do, such as another interpreter, it is left.

    Parameters
    ----------
    arguments : the worker's, as Ray hands them to that program: this file's name first, the environment among them

    Returns
    -------
    Those that the worker takes.
    """
    context = next((a[len(_CONTEXT) :] for a in arguments if a.startswith(_CONTEXT)), "{}")
    settings: dict[str, Any] = {"py_executable": sys.executable}
    settings |= {name: value for name, value in json.loads(context).items() if value}
    variables = settings.pop("env_vars", {})
    interprets = any(name.startswith(("PYTHON", "LD_")) and name != _MODULE_PATH for name in variables)
    if interprets or "$" in "".join(variables.values()) or settings != {"py_executable": sys.executable}:
        file = _rays_file("setup_worker.py")
        os.execv(sys.executable, [sys.executable, file, *arguments])
    previous = _module_path()
    os.environ.update(variables)
    modules = _module_path()
    if modules != previous:
        sys.path[:] = modules + [folder for folder in sys.path if folder not in previous]
    return [a for a in arguments[1:] if not a.startswith((_CONTEXT, _LANGUAGE))]


def _module_path() -> list[str]:
    return [os.path.abspath(folder) for folder in os.environ.get(_MODULE_PATH, "").split(os.pathsep) if folder]


def main() -> None:
    """Have the worker forked, or become the server, and in its forks the worker."""
    # The folder of this file holds modules with everybody's names.
    sys.path.pop(0)
    arguments, raylet = sys.argv[1:], os.getppid()
    if arguments and arguments[0] == sys.argv[0]:
        arguments = set_up(arguments)
    path = socket_path(arguments)
    server = listen(path) if path else None
    if server is None:
        if not (path and order_fork(path, arguments)):
            run_worker(arguments)
        return
    order: dict[str, Any] | None = own_order(arguments)
    import_libraries()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if os.fork() != 0:
        order = serve_workers(server, raylet)
    server.close()
    if order is not None:
        become_worker(order)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)


if __name__ == "__main__":
    main()
