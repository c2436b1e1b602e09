"""A process with the libraries of Ray's workers, and the fork of it that they are forks of."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence

from client_pipeline.our_modules import forget_our_modules
from client_pipeline.quick_imports import quick_import
from client_pipeline.runtime import worker_forks

_NEEDED = ("numpy", "torch", "safetensors.torch", "grpc_health.v1.health", "requests", "jsonschema", "yaml")
"""What our actors need, and Ray, which itself no such process may import: what a worker is it reads then."""


@contextlib.contextmanager
def fit_to_fork() -> Iterator[None]:
    """Import within what forks are to have, unless the environment says how."""
    # Neither for numbers that this process computes, nor for threads that a fork would not have; and no fork could use
    # an accelerator that this process had begun to use to see whether it is there.
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK")
    added = [name for name in names if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def import_libraries(modules: Sequence[str]) -> None:
    """Import the libraries that workers need, and ``modules`` of others that a model needs."""
    with fit_to_fork():
        for module in (*_NEEDED, *modules):
            # What cannot be imported is for the worker to say that needs it.
            with contextlib.suppress(Exception):
                if module.startswith("transformers."):
                    from client_pipeline.partition.hugging_face import import_models_library

                    import_models_library()
                quick_import(module)


def fork_server(server: socket.socket, path: str) -> None:
    """Have a fork of this process be the server, whose libraries it has, for as long as this process is there.

    Parameters
    ----------
    server, path : as :func:`client_pipeline.runtime.worker_forks.listen` gives it, and takes it
    """
    parent = os.getpid()
    if os.fork() != 0:
        server.close()
        return
    try:
        keep_open_alone(server.fileno())
        forget_our_modules()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        order = worker_forks.serve_workers(server, path, parent)
        server.close()
        if order is not None:
            worker_forks.become_worker(order)
        sys.exit()
    except SystemExit:
        raise
    except BaseException:
        # It must not go on as the process that it is a fork of.
        traceback.print_exc()
        os._exit(1)


def keep_open_alone(descriptor: int) -> None:
    """Close all other files of a new fork but for input and output: a pipe's end in it would be taken for its owner."""
    for name in os.listdir("/proc/self/fd"):
        if (number := int(name)) > 2 and number != descriptor:
            # That of the list is closed by now.
            with contextlib.suppress(OSError):
                os.close(number)
