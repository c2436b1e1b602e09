"""Ray's workers as forks of one process of their machine, which imports their libraries once.

A worker of Ray's is a program that imports torch: more than a second of a processor and 130 MB, more than twice that
with transformers, for each simulated device that has an actor of its own. Where
:func:`client_pipeline.runtime.private_ray.lean_head` starts a Ray, its raylet starts this file in place of Ray's
``default_worker.py`` and ``setup_worker.py``, with the same arguments. The first that comes imports the libraries and
becomes the server of the others: each sends it arguments, environment and output, has it fork, and ends; the fork runs
Ray's file. Memory that nobody writes to is shared. A worker that finds no server runs Ray's file itself. Where a
process with these libraries was there before this Ray, a fork of that is the server
(:mod:`client_pipeline.runtime.worker_libraries`).

It imports nothing but the standard library until it is the server, and Ray in the forks alone: what a worker is, such
as its job, Ray reads from the environment when it is imported.
"""

# Alone: a program; lean_head names its file to Ray.

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import resource
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
FORKS_SOCKET = "COLLAPIPE_WORKER_FORKS"
"""Environment variable: of a server that whoever starts this Ray has already."""
_RAYLET, _CONTEXT, _LANGUAGE = "--raylet-name=", "--serialized-runtime-env-context=", "--language="
_MODULE_PATH = "PYTHONPATH"
_FIELDS = ("arguments", "environment", "folder", "modules", "leads_group", "most_files", "expendable")
_EXPENDABLE = "/proc/self/oom_score_adj"
"""Who is ended first when the machine has no memory left: with Ray the workers."""
_STARTED_S = 50.0
"""How long a worker waits for its fork: the server may still import [s]. Ray waits for a minute."""
_LOOK_S = 0.2
"""How often the server looks whether the raylet is still there [s]: the end of a run waits for it."""
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

    Whoever may connect has programs started as this user, so that nobody else may. Ray's folder is open to everybody:
    another may take the name, or take it away. So who connects looks whom it has reached, too.
    """
    server = socket.socket(socket.AF_UNIX)
    # No longer than the name itself, and there for a moment.
    unlinked = os.path.join(os.path.dirname(path), f"{os.getpid():x}")
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


def order_of_this_process(arguments: Sequence[str]) -> dict[str, Any]:
    """Describe what a fork is to be: this process, with its environment, folder and module path."""
    return {
        "arguments": [*arguments],
        "environment": {**os.environ},
        "folder": os.getcwd(),
        "modules": [*sys.path],
        "leads_group": os.getpgrp() == os.getpid(),
        "most_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "expendable": _expendable(),
    }


def _expendable() -> str:
    """How this process stands among those that are ended for want of memory; empty if the system does not say."""
    with contextlib.suppress(OSError):
        return Path(_EXPENDABLE).read_text(encoding="ascii")
    return ""


def order_fork(path: str, arguments: Sequence[str]) -> bool:
    """Ask the server for a fork that takes this process's place and output.

    Returns
    -------
    Whether there is one.

    Raises
    ------
    ConnectionRefusedError
        If the server that had this place is gone.
    """
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(_STARTED_S)
        try:
            server.connect(path)
            # The environment holds the secret of this Ray.
            if _peer(server) != os.geteuid():
                return False
            content = json.dumps(order_of_this_process(arguments)).encode()
            socket.send_fds(server, [_LENGTH.pack(len(content))], [0, 1, 2])
            server.sendall(content)
            return server.recv(1) == b"+"
        except ConnectionRefusedError:
            raise
        except OSError:
            return False


def serve_workers(server: socket.socket, path: str, raylet: int) -> dict[str, Any] | None:
    """Fork a worker for each order. Returns ``None`` at the end, and in a fork what was ordered.

    It is over when the raylet has gone, or another server has this one's place.

    Parameters
    ----------
    server, path : as :func:`listen` gives it, and takes it
    raylet : process id of this process's parent
    """
    place = os.stat(path).st_ino
    while os.getppid() == raylet and _has_place(path, place):
        if not select.select([server], [], [], _LOOK_S)[0]:
            continue
        worker, _ = server.accept()
        with worker, contextlib.suppress(OSError, ValueError):
            worker.settimeout(_READ_S)
            order, files = _read_order(worker)
            try:
                if os.fork() == 0:
                    return _take_output(order, files)
            finally:
                for file in files:
                    os.close(file)
            worker.sendall(b"+")
    return None


def _has_place(path: str, place: int) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(path).st_ino == place
    return False


def _take_output(order: dict[str, Any], files: Sequence[int]) -> dict[str, Any]:
    """Write and read what the ordering process did; a fork that cannot must not go on as the server."""
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        if order["leads_group"]:
            # Whoever ends a worker's group must not end the others.
            os.setpgid(0, 0)
    except BaseException:
        os._exit(1)
    return order


def _peer(connection: socket.socket) -> int:
    """User of the process at the other end."""
    fields = struct.Struct("3i")
    return int(fields.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, fields.size))[1])


def _read_order(worker: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Read one order and its three files; raises ``OSError`` or ``ValueError``, with nothing left open."""
    if (user := _peer(worker)) != os.geteuid():
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
        # It sends no more, and waits.
        if select.select([worker], [], [], 0)[0]:
            raise ValueError("whoever ordered it is gone")
        return {name: order[name] for name in _FIELDS}, files
    except BaseException as error:
        for file in files:
            os.close(file)
        if isinstance(error, KeyError | TypeError | RecursionError):
            raise ValueError("not an order") from error
        raise


def become_worker(order: Mapping[str, Any]) -> None:
    """Be the fork: take over what was ordered, and nothing that forks of one process must not have in common."""
    import numpy
    import torch

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _take_environment(order["environment"])
    # A Ray that the worker starts is another.
    os.environ.pop(FORKS_SOCKET, None)
    _take_limits(order)
    # It may be gone, as a worker's folder may be later.
    with contextlib.suppress(OSError):
        os.chdir(order["folder"])
    sys.path[:] = order["modules"]
    # Python does so with its own numbers.
    numpy.random.seed()
    torch.default_generator.seed()
    run_worker(order["arguments"])


def _take_environment(environment: Mapping[str, str]) -> None:
    """Have these variables and no others.

    What is as it was stays where the system has put it, and so does the first one: from there Ray finds where a
    process's title is.
    """
    variables = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
    place = variables[0]
    room = len(ctypes.string_at(place)) if place else 0
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    first = ctypes.string_at(variables[0]) if variables[0] else b""
    if variables[0] != place and place and 0 < len(first) <= room:
        ctypes.memmove(place, first, len(first) + 1)
        variables[0] = place


def _take_limits(order: Mapping[str, Any]) -> None:
    """Have the limits that Ray's processes hand on, which the server need not have from them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Not all systems let everybody.
    with contextlib.suppress(OSError, ValueError):
        files = order["most_files"]
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (files if most == resource.RLIM_INFINITY else min(files, most), most)
        )
    with contextlib.suppress(OSError):
        Path(_EXPENDABLE).write_text(str(order["expendable"]), encoding="ascii")


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


def take_environment(arguments: Sequence[str]) -> list[str]:
    """Do what Ray's ``setup_worker.py`` does, where that is to set where modules are.

    Ray's program would import Ray for that. All else that an environment of its own takes is left to it, such as
    another interpreter, or variables that libraries read when they are imported: it starts Ray's own worker then.

    Parameters
    ----------
    arguments : as Ray hands them to that program: the interpreter's own options, this file's name, and the worker's,
        with the environment among them if it is not the common one

    Returns
    -------
    Those that the worker takes.
    """
    first = arguments.index(sys.argv[0]) + 1
    options, of_worker = arguments[: first - 1], arguments[first:]
    context = next((a[len(_CONTEXT) :] for a in of_worker if a.startswith(_CONTEXT)), "{}")
    settings: dict[str, Any] = {"py_executable": sys.executable}
    settings |= {name: value for name, value in json.loads(context).items() if value}
    variables = settings.pop("env_vars", {})
    simple = variables.keys() <= {_MODULE_PATH} and "$" not in variables.get(_MODULE_PATH, "")
    if not simple or settings != {"py_executable": sys.executable}:
        worker = [*options, _rays_file("default_worker.py"), *of_worker]
        os.execv(sys.executable, [sys.executable, _rays_file("setup_worker.py"), *worker])
    previous = _module_path()
    os.environ.update(variables)
    if (modules := _module_path()) != previous:
        sys.path[:] = modules + [folder for folder in sys.path if folder not in previous]
    return [a for a in of_worker if not a.startswith((_CONTEXT, _LANGUAGE))]


def _module_path() -> list[str]:
    return [os.path.abspath(folder) for folder in os.environ.get(_MODULE_PATH, "").split(os.pathsep) if folder]


def _import_libraries() -> None:
    """Import what workers need, by modules of ours, which are forgotten: a worker may bring another release."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    try:
        from client_pipeline.our_modules import forget_our_modules
        from client_pipeline.runtime.worker_libraries import import_libraries

        import_libraries([*filter(None, os.environ.get(IMPORTS, "").split(","))])
        forget_our_modules()
    finally:
        sys.path.pop(0)


def main() -> None:
    """Have the worker forked, or become the server, and in its forks the worker."""
    if not sys.flags.safe_path:
        # The folder of this file holds modules with everybody's names.
        sys.path.pop(0)
    arguments = take_environment(sys.argv[1:]) if sys.argv[0] in sys.argv[1:] else sys.argv[1:]
    with contextlib.suppress(ConnectionRefusedError):
        if (beside := os.environ.get(FORKS_SOCKET)) and order_fork(beside, arguments):
            return
    path = socket_path(arguments)
    server = listen(path) if path else None
    if path and server is None:
        try:
            if order_fork(path, arguments):
                return
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            server = listen(path)
    if server is None:
        print("this worker is no fork: it imports its libraries itself", file=sys.stderr)
        run_worker(arguments)
        return
    raylet = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
    order: dict[str, Any] | None = order_of_this_process(arguments)
    _import_libraries()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        is_server = os.fork() != 0
    except OSError:
        is_server = False
        os.unlink(path)
    if is_server:
        order = serve_workers(server, path, raylet)
    server.close()
    if order is not None:
        become_worker(order)
    elif is_server and os.getppid() != raylet:
        with contextlib.suppress(OSError):
            os.unlink(path)


if __name__ == "__main__":
    main()
