"""Checks of a machine: packages, memory, ports, data."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from client_pipeline.counted import counted
from client_pipeline.runtime.ray.machine import available_memory
from flower_app.deployment.findings import Finding, failure, ok, warning
from flower_app.launch.app_folder import project_file

_MEGA = 1_000_000
_SHARED = Path("/dev/shm")


def check_versions() -> Iterator[Finding]:
    """Check that Python and all packages are those that this release wants."""
    with project_file().open("rb") as file:
        project = tomllib.load(file)["project"]
    if platform.python_version() not in SpecifierSet(project["requires-python"], prereleases=True):
        yield failure(
            "versions",
            f"Python is {platform.python_version()}, expected {project['requires-python']}",
            "make the environment anew with another Python; all machines of a cluster need the same one",
        )
    requirements = [Requirement(text) for text in project["dependencies"]]
    # Flower says which Ray its simulation takes; the machines of a cluster need the same one.
    with_ray = (Requirement(text) for text in metadata.requires("flwr") or ())
    requirements += [r for r in with_ray if r.name == "ray" and r.marker and r.marker.evaluate({"extra": "simulation"})]
    any_wrong = False
    for requirement in requirements:
        installed_version = _installed(requirement.name)
        if not (installed_version and requirement.specifier.contains(installed_version, prereleases=True)):
            any_wrong = True
            expected = f"{requirement.name}{requirement.specifier}"
            state = (
                f"{requirement.name} is {installed_version}"
                if installed_version
                else f"{requirement.name} is not installed"
            )
            yield failure("versions", f"{state}, expected {expected}", f'{sys.executable} -m pip install "{expected}"')
    if not any_wrong:
        shown = ", ".join(f"{name} {_installed(name)}" for name in ("flwr", "ray", "torch"))
        yield ok("versions", f"Python {platform.python_version()}, {shown}")


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def check_accelerator() -> Iterator[Finding]:
    """Say what ``runtime.accelerator`` may name on this machine, whose parts compute on the processor without it."""
    try:
        from client_pipeline.runtime.stage.accelerator import accelerators_here
    except ImportError:
        return  # without torch nothing runs, which the check of the versions says
    descriptions = [f"{name} with {free / 1e9:.1f} GB free" for name, free in accelerators_here().items()]
    yield ok(
        "accelerator", ", ".join(descriptions) or f"none that torch {_installed('torch')} knows: the processor computes"
    )


def check_memory(needed_mb: int, shared_mb: int = 0) -> Iterator[Finding]:
    """Check that there is enough memory, and of it enough that processes can share."""
    free_mb = available_memory() // _MEGA
    if free_mb < needed_mb:
        yield failure(
            "memory",
            f"{free_mb} MB are free, {needed_mb} MB are needed",
            "end other programs, give the machine more memory, or lower --object-store-mb",
        )
    else:
        yield ok("memory", f"{free_mb} MB are free, {needed_mb} MB are needed")
    if shared_mb and _SHARED.is_dir() and (free := shutil.disk_usage(_SHARED).free // _MEGA) < shared_mb:
        yield warning(
            "memory",
            f"{_SHARED} has room for {free} MB, --object-store-mb is {shared_mb}: Ray takes the disk instead",
            "enlarge it (in a container: --shm-size), or lower --object-store-mb",
        )


def check_port(check: str, host: str, port: int, purpose: str) -> Iterator[Finding]:
    """Check that this machine can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            yield failure(
                check,
                f"port {port} of {host}, {purpose}, is in use by another program",
                f"find it with: ss -ltnp 'sport = :{port}'; end it, or choose another port",
            )
        elif error.errno == errno.EACCES:
            yield failure(check, f"port {port} of {host}, {purpose}: {error.strerror}", "choose a port above 1023")
        else:
            yield failure(
                check,
                f"{host} is no address of this machine ({error.strerror or error})",
                "give --host one that `ip -brief address` lists and the other machines reach",
            )
    else:
        yield ok(check, f"port {port} of {host}, {purpose}, is free")


class NeededPort(NamedTuple):
    """Address at which a program of this machine is going to listen."""

    option: str
    """Option of the command line that moves it."""
    host: str
    port: int
    purpose: str


def refuse_taken_ports(ports: Sequence[NeededPort]) -> None:
    """Refuse to start where a program cannot listen, or two would listen at one port."""
    for number, (option, host, port, purpose) in enumerate(ports):
        for other in ports[:number]:
            if other.port == port and (other.host == host or "0.0.0.0" in (other.host, host)):
                raise ValueError(
                    f"{option}: port {port} of {host}, {purpose}, is that of {other.option}, too; choose another port"
                )
        for finding in check_port("port", host, port, purpose):
            if finding.status == "failed":
                # An address of another machine is --host's mistake, except where the option names its own host.
                is_host = "is no address" in finding.found and option not in ("--metrics", "--serve")
                raise ValueError(f"{'--host' if is_host else option}: {finding.found}; {finding.remedy}")


def check_ports(host: str, ports: Mapping[str, int]) -> Iterator[Finding]:
    """Check that this machine can listen on all of them; one line if so."""
    bad = [f for name, port in ports.items() for f in check_port("ports", host, port, name) if f.status == "failed"]
    yield from bad or [ok("ports", f"{host}: {', '.join(map(str, sorted(ports.values())))} are free")]


def check_state_folder(folder: Path) -> Iterator[Finding]:
    """Check that this user alone may look into what outlives a restart."""
    if folder.is_dir() and folder.stat().st_mode & 0o077:
        yield warning(
            "state", f"other users may look into {folder}: it holds tokens and updates", f"chmod 700 {folder}"
        )


def check_data(folder: str) -> Iterator[Finding]:
    """Check that the cluster's text is there."""
    if not folder:
        remedy = "give --data the folder that holds the cluster's own text"
        yield warning("data", "no --data: the cluster reads data.path of the run", remedy)
        return
    path = Path(folder).expanduser()
    if not path.is_dir():
        yield failure("data", f"no folder {path}", "give --data the folder that holds the cluster's text")
    elif not os.access(path, os.R_OK | os.X_OK):
        yield failure("data", f"this user may not read {path}", f"chmod or chown {path} for the user of the service")
    elif not any(path.iterdir()):
        yield failure(
            "data", f"{path} is empty", "put the cluster's text there, under the names of the run's data keys"
        )
    else:
        yield ok("data", f"{path} holds {counted(sum(1 for _ in path.iterdir()), 'file')}")
