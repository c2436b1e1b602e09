"""Ray nodes of a cluster's devices, with their software and accelerators.

On an edge box the control unit starts a Ray of its own (``ray start --head``) and real devices join it
(``ray start --address``). Each offers a custom resource that names it::

    control unit, head        device, node              device, node
    collapipe-device-0: 1     collapipe-device-1: 1     collapipe-device-2: 1
    (if it is one itself)
"""

from __future__ import annotations

import hashlib
import re
import socket
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import ray

from client_pipeline.link.hosts import split_address
from client_pipeline.runtime.ray.machine import machine_facts
from client_pipeline.runtime.ray.placement import ACTOR_CPUS, RESERVED
from client_pipeline.system.devices import DEVICE_PREFIX, device_resource

K = TypeVar("K")

_CONNECT_S = 5.0
NOBODY_THERE = "nobody answers at"
MOVED = "start it again there, with its present address (join anew: collapipe join CODE --host ADDRESS)"
"""Remedy for a device that is not at the address under which it joined."""
_IMPORT_FAILED = re.compile(r"ImportError|ModuleNotFoundError|No module named|failed to import|AttributeError")
_CHECK_TIMEOUT_S = 120.0
"""A device's first process imports torch [s]."""


def check_answers(address: str) -> None:
    """Raise ``OSError`` or ``ValueError`` if no program listens at ``host:port``; Ray would try for a minute.

    An empty address, ``auto`` and ``local`` name no host and pass.
    """
    if address in ("", "auto", "local"):
        return
    place = split_address("Ray's address", address)
    socket.create_connection((place.bare_host, place.port), timeout=_CONNECT_S).close()


def device_nodes() -> dict[int, dict[str, Any]]:
    """Return the Ray nodes that are devices, by device.

    Raises
    ------
    ValueError
        If two nodes say that they are the same device.
    """
    nodes: dict[int, dict[str, Any]] = {}
    for node in ray.nodes():
        for name in node["Resources"] if node["Alive"] else ():
            if match := re.fullmatch(rf"{DEVICE_PREFIX}(\d+)", name):
                device = int(match[1])
                if device in nodes:
                    both = f"{nodes[device]['NodeManagerAddress']} and {node['NodeManagerAddress']}"
                    raise ValueError(
                        f"device {device}: {both} both claim this number; give each device of a cluster its own number "
                        "(collapipe join CODE --cluster N --device K)"
                    )
                nodes[device] = node
    return nodes


def joined_devices() -> dict[int, str]:
    """Return the devices that have joined this Ray, with their addresses; raises as :func:`device_nodes`."""
    return {device: str(node["NodeManagerAddress"]) for device, node in device_nodes().items()}


def wait_for_devices(num_devices: int, timeout_s: float, least: int | None = None) -> dict[int, str]:
    """Wait until the devices 0 .. ``num_devices`` - 1 have joined.

    Parameters
    ----------
    num_devices : of the cluster
    timeout_s : how long they may take [s]
    least : devices that suffice when the time is over; None: all

    Returns
    -------
    The address of each that has joined.

    Raises
    ------
    ValueError
        Naming those that did not come, and the remedy.
    """
    least = num_devices if least is None else least
    deadline = time.monotonic() + timeout_s
    while missing := sorted(set(range(num_devices)) - (host_by_device := joined_devices()).keys()):
        if time.monotonic() > deadline:
            if num_devices - len(missing) >= least:
                break
            came = ", ".join(map(str, sorted(host_by_device))) or "none"
            raise ValueError(
                f"devices {', '.join(map(str, missing))} of {num_devices} have not joined the cluster's Ray within "
                f"{timeout_s:g} s (joined: {came}); start them with collapipe join, or describe the devices that "
                "the cluster has in a device profile"
            )
        time.sleep(0.5)
    return {device: host_by_device[device] for device in range(num_devices) if device in host_by_device}


def software() -> dict[str, str | int]:
    """Return a digest of the code that devices share with their control unit, and the facts of the machine."""
    return {"code": code_digest(), **machine_facts()}


@cache
def code_digest() -> str:
    """Digest of the sources of ``client_pipeline``, wherever they came from."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        # As text: a bundle may have other line ends.
        digest.update(f"{path.relative_to(root).as_posix()}\n{path.read_text(encoding='utf-8')}".encode())
    return digest.hexdigest()[:16]


def device_software(
    devices: dict[int, str], timeout_s: float = _CHECK_TIMEOUT_S
) -> dict[int, dict[str, str | int] | str]:
    """Ask each device for its software; a text says why one did not answer, at once where its address is empty."""
    away = {k: reason for k, reason in _unreachable().items() if k in devices}
    ask = ray.remote(num_cpus=ACTOR_CPUS)(software)
    return away | _answers_by({k: _on_device(ask, k).remote() for k in devices.keys() - away.keys()}, timeout_s)


def remedy_of(answer: str) -> str:
    """Return the remedy for a device that gave, in place of its software, this reason."""
    if answer.startswith(NOBODY_THERE):
        return MOVED
    if _IMPORT_FAILED.search(answer):
        return "install the same release there"
    return "it is busy, or a program on it stands still: look there, and start collapipe there again"


def _unreachable() -> dict[int, str]:
    """Return why this machine cannot reach devices; Ray counts one whose address has changed as alive for a while."""
    reasons = {}
    for device, node in device_nodes().items():
        host, port = str(node["NodeManagerAddress"]), int(node.get("NodeManagerPort", 0))
        try:
            if port:
                socket.create_connection((host, port), timeout=_CONNECT_S).close()
        except OSError as error:
            reasons[device] = f"{NOBODY_THERE} {host}:{port} ({error})"
    return reasons


def _on_device(task: Any, device: int) -> Any:
    """Direct a Ray task to the node of a device."""
    return task.options(resources={device_resource(device): RESERVED})


def _answers_by(asked: Mapping[K, Any], timeout_s: float) -> dict[K, Any]:
    """Wait for answers; a text says why one did not come."""
    deadline = time.monotonic() + timeout_s
    answers: dict[K, Any] = {}
    for key, reference in asked.items():
        try:
            answers[key] = ray.get(reference, timeout=max(deadline - time.monotonic(), 0.1))
        except ray.exceptions.GetTimeoutError:
            answers[key] = f"no answer within {timeout_s:g} s"
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            answers[key] = f"{type(cause).__name__}: {cause}"
    return answers


def missing_accelerator(kind: str) -> str:
    """Return why this machine cannot compute on a kind of accelerator; empty if it can."""
    # It imports torch, which the asking process does without.
    from client_pipeline.runtime.stage.accelerator import find_accelerator

    try:
        find_accelerator(kind)
    except ValueError as error:
        return str(error)
    return ""


def check_accelerators(kind: str, devices: dict[int, str]) -> None:
    """Refuse devices without the accelerator that they are to compute on.

    Parameters
    ----------
    kind : ``runtime.accelerator``; ``cpu`` and ``auto`` any machine has
    devices : address of each that is a node of its own; empty: all of them are on this one

    Raises
    ------
    ValueError
        Naming all of them, with what each has, and the remedy.
    """
    if kind in ("cpu", "auto"):
        return
    ask = ray.remote(num_cpus=ACTOR_CPUS)(missing_accelerator)
    if devices:
        asked = {f"device {k} at {host}": _on_device(ask, k).remote(kind) for k, host in devices.items()}
    else:
        asked = {"this cluster's machine": ask.remote(kind)}
    answers = _answers_by(asked, _CHECK_TIMEOUT_S)
    if refusals := [f"{location}: {answer}" for location, answer in answers.items() if answer]:
        raise ValueError("; ".join(refusals))


def check_devices(devices: dict[int, str], timeout_s: float = _CHECK_TIMEOUT_S) -> dict[int, dict[str, str | int]]:
    """Refuse devices that cannot run what the control unit runs.

    Returns
    -------
    Each device's machine, as :func:`machine_facts` has it.

    Raises
    ------
    ValueError
        Naming the device, what it has, and the remedy.
    """
    own_digest, machines = code_digest(), {}
    for device, answer in device_software(devices, timeout_s).items():
        location = f"device {device} at {devices[device]}"
        if isinstance(answer, str):
            raise ValueError(f"{location}: {answer}; {remedy_of(answer)}")
        if answer["code"] != own_digest:
            raise ValueError(
                f"{location}: another release of CollaPipe (code {answer['code']}, here {own_digest}); install the "
                "same release on the server, the control units and the devices"
            )
        machines[device] = {name: value for name, value in answer.items() if name != "code"}
    return machines
