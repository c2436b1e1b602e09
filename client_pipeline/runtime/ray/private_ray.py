"""A Ray of one program: it listens on the loopback alone and refuses calls without a secret of its own.

By default Ray listens on all addresses of the machine, takes every caller and runs what it is sent. Token and loopback
are variables that Ray reads once, when it is imported. So they are in the environment of a program before it starts, or
:func:`prepare_private_ray` puts them there before the first import of Ray.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from client_pipeline.runtime.ray.ray_folder import folder_for_ray, short_folder
from client_pipeline.runtime.stage.memory import ONE_HEAP
from client_pipeline.runtime.transport.node_tls import TLS_VARIABLES

TOKEN_BYTES = 32
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0 Ray takes the loopback address on every system, as it does where it knows no clusters."""
ATTEMPTS = 3
"""Starts of a Ray: it gives its own processes 30 s, which a busy machine exceeds."""
NODE_IS_LATE = "node timed out during startup"
"""Part of Ray's message then."""
_SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", _LOOPBACK, *TLS_VARIABLES)
_NOWHERE = "http://127.0.0.1:9"
"""Port of the loopback at which nobody answers."""
RAY_SETTINGS = {
    **ONE_HEAP,
    # Ray reports nothing to its makers, not even that it reports nothing.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": _NOWHERE,
    # It asks a cloud's metadata addresses all the same, by the user's proxy: these two have one of their own.
    **dict.fromkeys(("http://169.254.169.254_proxy", "http://metadata.google.internal_proxy"), _NOWHERE),
    # The parts of a run wait for each other: with Ray's own niceness of 15 a busy program beside them slows them all.
    "RAY_worker_niceness": "0",
    # No worker starts before it is needed.
    "RAY_prestart_worker_first_driver": "0",
    # Ray leaves the variables of accelerators alone, as it will in its next releases.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Settings of each Ray that this project starts; the environment may change them."""

RAY_INTERNALS = {
    "ray._raylet.GcsClient": "client of a Ray that this process has not joined; superfluous with a public one",
    "ray._common.usage.usage_lib.get_cluster_metadata": "its versions; superfluous with a public call for them",
    "__ray_concurrency_group__": "mark of ray.method, by which a shared actor knows what a member answers at once; "
    "superfluous with a public accessor",
}
"""Names of Ray without documentation that this package uses, with the use and the part that would replace it."""


def private_environment() -> dict[str, str]:
    """Make the variables of a Ray that is about to start, and of all programs that speak to it; the secret is new.

    Only processes of this user can read them.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(TOKEN_BYTES), _LOOPBACK: "0"}


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop secret, certificates and addresses of another Ray."""
    return {name: value for name, value in environment.items() if name not in _SETTINGS}


def prepare_private_ray() -> None:
    """Put the variables of a private Ray into this process's environment, unless they are there.

    Raises
    ------
    RuntimeError
        If Ray is imported already: it would neither know the secret nor keep to the loopback.
    """
    if os.environ.get("RAY_AUTH_MODE") == "token" and os.environ.get(_LOOPBACK) == "0":
        return
    if "ray" in sys.modules:
        raise RuntimeError("Ray was imported before it had a secret; call prepare_private_ray() at the program's start")
    for name in _SETTINGS:
        os.environ.pop(name, None)
    os.environ.update(private_environment())
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def private_ray(*, num_cpus: int = 1, **options: Any) -> Iterator[None]:
    """Start a Ray for this process, and end it; a Ray that the process uses already is kept.

    Parameters
    ----------
    num_cpus : processors that it believes in
    options : more of ``ray.init``

    Raises
    ------
    RuntimeError
        As :func:`prepare_private_ray`.
    """
    prepare_private_ray()
    import ray

    if ray.is_initialized():
        yield
        return
    with folder_for_ray(short_folder()) as folder:
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                ray.init(
                    # Whatever cluster RAY_ADDRESS may name is not joined.
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    **{"_temp_dir": str(folder / "ray"), **options},
                )
                break
            except Exception as error:
                ray.shutdown()
                if NODE_IS_LATE not in str(error) or not attempts_left:
                    raise
        try:
            yield
        finally:
            ray.shutdown()
