"""Checks of running programs on this and other machines: answers, certificates, clocks, releases."""

from __future__ import annotations

import email.utils
import http
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from client_pipeline.link.hosts import split_address
from flower_app.deployment.control_unit_box import RUNTIME_HOST
from flower_app.deployment.credentials import DeviceFiles
from flower_app.deployment.findings import Finding, failure, ok, warning
from flower_app.deployment.head_check import check_head
from flower_app.deployment.programs import listens
from flower_app.deployment.ray_node import node_tls
from flower_app.launch.superlink import is_healthy, opener_for

SKEW_S = 5.0
"""Flower refuses a SuperNode whose clock is further ahead."""
_TIMEOUT_S = 5.0
_STAYS_S = 3.0
"""Time for which a SuperNode must answer: one that the server refuses answers for a moment, too [s]."""


def check_superlink(address: str, ca: Path) -> Iterator[Finding]:
    """Check that the SuperLink answers, under a certificate of our authority, and that the clocks agree."""
    place = split_address("superlink", address)
    if not listens(place.bare_host, place.port, _TIMEOUT_S):
        yield failure(
            "superlink",
            f"nobody answers at {address}",
            "start it there (collapipe up edge-server), and let this port through the firewall",
        )
        return
    try:
        with opener_for(ca).open(f"https://{address}/health", timeout=_TIMEOUT_S) as answer:
            date = answer.headers.get("Date", "")
    except (OSError, urllib.error.URLError, ValueError) as error:
        yield _refused(address, ca, error)
        return
    yield ok("superlink", f"{address} answers, and its certificate is of {ca}")
    yield _control(address, ca)
    yield _clock(address, date)


def _refused(address: str, ca: Path, error: Exception) -> Finding:
    reason = getattr(error, "reason", error)
    if not isinstance(reason, ssl.SSLCertVerificationError):
        return failure(
            "superlink",
            f"{address} does not answer like a SuperLink with TLS: {reason}",
            "check which program listens there; a SuperLink of collapipe up edge-server always has TLS",
        )
    verify_message = reason.verify_message
    if "expired" in verify_message:
        remedy = "start the edge server again: collapipe up edge-server --name HOST renews its certificate"
    elif "mismatch" in verify_message or "not valid for" in verify_message:
        host = split_address("superlink", address).host
        remedy = f"start the edge server by this name: collapipe up edge-server --name {host}"
    else:
        remedy = f"let this box join that edge server: collapipe join CODE; {ca} is of another authority"
    return failure("superlink", f"{address}: its certificate is refused: {verify_message}", remedy)


def _control(address: str, ca: Path) -> Finding:
    """Check that the port for SuperNodes answers nobody else."""
    question = urllib.request.Request(f"https://{address}/v1/control/list-runs", data=b"", method="POST")
    try:
        with opener_for(ca).open(question, timeout=_TIMEOUT_S) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    except OSError as error:
        return failure("control", f"{address} does not answer: {error}", "look who listens there")
    if status == http.HTTPStatus.FORBIDDEN:
        return ok("control", f"{address} answers SuperNodes alone")
    return failure(
        "control",
        f"anyone who reaches {address} can start runs and register keys: it answers orders with HTTP status {status}",
        "start it by collapipe up edge-server, which keeps its control on the server's own machine",
    )


def _clock(address: str, date: str) -> Finding:
    server_time = email.utils.parsedate_to_datetime(date).timestamp() if date else None
    if server_time is None:
        return warning("clock", f"{address} does not say its time", "compare the clocks by hand: date -u")
    # The header has whole seconds, cut off.
    skew = time.time() - server_time - 0.5
    if abs(skew) > SKEW_S:
        side = "ahead of" if skew > 0 else "behind"
        return failure(
            "clock",
            f"this machine's clock is {abs(skew):.0f} s {side} the server's",
            "set both by NTP (timedatectl set-ntp true): certificates and Flower's SuperNode signatures go by the time",
        )
    return ok("clock", f"within {SKEW_S:g} s of the server's")


def check_supernode(port: int) -> Iterator[Finding]:
    """Check that this machine's SuperNode answers, and stays: one that the server refuses ends, and starts again."""
    deadline = time.monotonic() + _STAYS_S
    while is_healthy(f"{RUNTIME_HOST}:{port}"):
        if time.monotonic() > deadline:
            yield ok("supernode", f"it answers at {RUNTIME_HOST}:{port}")
            return
        time.sleep(0.2)
    yield failure(
        "supernode",
        f"the SuperNode is not running: nothing stays up at {RUNTIME_HOST}:{port}",
        "look whether collapipe boxes shows this box as approved, and read the output of collapipe join; a SuperNode "
        "that has just started needs a moment",
    )


def check_ray(
    address: str, files: DeviceFiles, host: str, devices: int | None = None, *, is_head: bool = False
) -> Iterator[Finding]:
    """Check that the cluster's Ray answers, in our versions and with our secret, and that its devices can work.

    Parameters
    ----------
    address : ``host:port`` of the control unit's Ray
    files : this machine's folder
    host : address of this machine
    devices : how many must have joined; None: as many as there are
    is_head : whether a node of this Ray runs on this machine
    """
    from client_pipeline.runtime.control_unit.ray_probe import probe

    place = split_address("ray", address)
    if not listens(place.bare_host, place.port, _TIMEOUT_S):
        yield failure(
            "ray",
            f"no Ray head answers at {address}",
            "start the control unit (collapipe join on its machine), and let its ports through the firewall",
        )
        return
    own_host = host if is_head else ""
    tls = node_tls(files, host)
    try:
        check_head(place, tls)
    except (OSError, ValueError) as error:
        reason, _, remedy = str(error).partition("; ")
        yield failure("encryption", reason, remedy or files.remedy)
        return
    if tls is None:
        yield ok("encryption", "the cluster is on the loopback of one machine: nobody else can listen")
    else:
        yield ok("encryption", "the machines of the cluster speak TLS, by an authority of their own")
    answer_of_ray = probe(address, own_host, files.ray_token if files.ray_token.is_file() else None, tls)
    if "error" in answer_of_ray:
        why = str(answer_of_ray["error"])
        if "uthenticat" in why or "token" in why.lower():
            reason, remedy = (
                f"the Ray at {address} refuses this machine's secret: {why}",
                "let this box join again: collapipe join CODE",
            )
        else:
            reason = f"the program that listens at {address} is not a Ray of this release: {why}"
            remedy = "look who listens there"
        yield failure("ray", reason, remedy)
        return
    yield from _versions(address, answer_of_ray)
    if own_host:
        yield from _devices(answer_of_ray, devices)


def _versions(address: str, answer_of_ray: Mapping[str, Any]) -> Iterator[Finding]:
    import platform
    from importlib import metadata

    versions_here = {"ray": metadata.version("ray"), "python": platform.python_version()}
    differences = [
        f"{name} {answer_of_ray[name]}, here {versions_here[name]}"
        for name in versions_here
        if answer_of_ray.get(name) != versions_here[name]
    ]
    if differences:
        yield failure(
            "ray",
            f"the Ray at {address} has {'; '.join(differences)}",
            "install the same Python and packages on all machines of the cluster, and start them again",
        )
    else:
        yield ok("ray", f"{address} answers: ray {versions_here['ray']}, Python {versions_here['python']}")


def _devices(answer_of_ray: Mapping[str, Any], num_expected: int | None) -> Iterator[Finding]:
    from client_pipeline.runtime.devices.device_nodes import code_digest, remedy_of

    host_by_device: dict[int, str] = {int(k): str(v) for k, v in answer_of_ray["devices"].items()}
    missing = sorted(set(range(num_expected or 0)) - host_by_device.keys())
    if missing or not host_by_device:
        who = f"device {', '.join(map(str, missing))} has not joined" if missing else "no device has joined"
        yield failure("devices", who, "start it on its machine: collapipe join --state FOLDER")
    for device, answer in sorted((int(k), v) for k, v in answer_of_ray["software"].items()):
        location = f"device {device} at {host_by_device[device]}"
        if isinstance(answer, str):
            yield failure("devices", f"{location}: {answer}", remedy_of(answer))
        elif answer["code"] != code_digest():
            yield failure("devices", f"{location} has another release: {json.dumps(answer)}", "install the same there")
        else:
            yield ok("devices", f"{location}: torch {answer['torch']}, the same release")
