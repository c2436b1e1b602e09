"""Probe of a Ray address: ``python -m client_pipeline.runtime.control_unit.ray_probe HOST:PORT [OWN-HOST]``.

It is a process of its own, because an address without a Ray may keep a caller waiting for minutes. It prints one JSON
object. With ``OWN-HOST``, the address of a node on this machine, it also asks the devices for their software.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from client_pipeline.runtime.ray.private_ray import without_secrets
from client_pipeline.runtime.transport.node_tls import NodeTls

TIMEOUT_S = 120.0


def probe(
    address: str,
    own_host: str = "",
    token: Path | None = None,
    tls: NodeTls | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Probe a Ray, in a process of its own.

    Parameters
    ----------
    address : ``host:port`` of its head
    own_host : address of a node on this machine; empty: there is none yet
    token : file of the secret that its nodes share
    tls : certificate of this machine; None: plain text
    timeout_s : for all of it

    Returns
    -------
    ``ray`` and ``python`` (the head's versions), and with ``own_host`` the ``devices`` (their addresses) and their
    ``software``; or ``error``.
    """
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token.resolve())} if token else {}
    secret |= tls.environment() if tls else {}
    inherited = without_secrets(os.environ) if token else os.environ
    command = [sys.executable, "-m", __name__, address, *([own_host] if own_host else [])]
    try:
        process = subprocess.run(
            command,
            env={**inherited, **secret, "RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout_s:g} s"}
    for line in reversed(process.stdout.splitlines()):
        if line.startswith("{"):
            return dict(json.loads(line))
    return {"error": (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]}


def versions(address: str) -> Mapping[str, str]:
    """Return the versions of Ray and Python that a cluster was started with."""
    import ray
    from ray._common.usage.usage_lib import get_cluster_metadata

    metadata = get_cluster_metadata(ray._raylet.GcsClient(address=address)) or {}
    return {"ray": str(metadata.get("ray_version", "")), "python": str(metadata.get("python_version", ""))}


def _answer(address: str, own_host: str) -> dict[str, Any]:
    answer: dict[str, Any] = dict(versions(address))
    if own_host:
        from client_pipeline.runtime.control_unit.actors import join_ray
        from client_pipeline.runtime.devices.device_nodes import device_software, joined_devices
        from client_pipeline.runtime.ray.placement import Placement

        join_ray(Placement(ray_address=address, host=own_host))
        devices = joined_devices()
        answer |= {"devices": devices, "software": device_software(devices, TIMEOUT_S / 2)}
    return answer


def main() -> None:
    """Print the answer."""
    address, *own_host = sys.argv[1:]
    try:
        answer = _answer(address, *(own_host or [""]))
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
