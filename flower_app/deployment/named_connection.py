"""A SuperLink by its name in Flower's own configuration: ``[superlink.NAME]`` of ``~/.flwr/config.toml``.

Its ``address`` is where runs are started (``flwr run . NAME`` uses the same), its ``root-certificates`` the ``ca.pem``
of the edge server's folder. Where the control units reach the SuperLink, the certificate beside it says.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from client_pipeline.link.hosts import HostPort, split_address
from client_pipeline.near_names import did_you_mean
from flower_app.deployment.authority import read_certificate
from flower_app.deployment.certs import certificate_hosts
from flower_app.deployment.credentials import ServerFiles

_LOCAL = ("localhost", "127.0.0.1", "::1")


class NamedConnection(NamedTuple):
    """What a name stands for."""

    address: HostPort
    """That the control units reach."""
    control: str
    """``host:port`` that runs are started at."""
    certs: ServerFiles


def named_connection(name: str) -> NamedConnection | None:
    """Look a name up in Flower's configuration; None where it is a host.

    Raises
    ------
    ValueError, FileNotFoundError
        For a connection that lacks something, or a word that is nearly the name of one.
    """
    file = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    connections = _connections(file)
    if name not in connections:
        if ":" not in name and "." not in name and (near := did_you_mean(name, connections)):
            raise ValueError(f"--superlink: {file} has no connection {name!r}, found {', '.join(connections)}{near}")
        return None
    key, connection = f"[superlink.{name}] of {file}", connections[name]
    certificate = connection.get("root-certificates")
    if not isinstance(connection.get("address"), str) or not isinstance(certificate, str):
        raise ValueError(
            f"--superlink: {key}: expected address and root-certificates, found {', '.join(connection) or 'nothing'}; "
            "a simulation needs no --superlink"
        )
    certs = ServerFiles((file.parent / certificate).expanduser().resolve().parent)
    certs.check()
    control = split_address(key, connection["address"])
    hosts = certificate_hosts(read_certificate(certs.certificate))
    # Unless --control-port says otherwise, control is on the port after that of the SuperNodes.
    host = next((host for host in hosts if host not in _LOCAL), next(iter(hosts), control.host))
    return NamedConnection(HostPort(host, control.port - 1), str(control), certs)


def _connections(file: Path) -> dict[str, dict[str, Any]]:
    try:
        connections = tomllib.loads(file.read_text(encoding="utf-8")).get("superlink", {})
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--superlink: {file}: expected TOML: {error}") from error
    return {name: value for name, value in connections.items() if isinstance(value, dict)}
