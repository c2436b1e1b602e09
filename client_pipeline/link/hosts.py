"""Addresses ``host:port``, and the hosts in them."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

import psutil


class HostPort(NamedTuple):
    """An address, read."""

    host: str
    """An IPv6 host stands in brackets."""
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def bare_host(self) -> str:
        """The host without brackets, as sockets take it."""
        return self.host.strip("[]")


def split_address(key: str, address: str, default_port: int | None = None) -> HostPort:
    """Read ``host:port``.

    Parameters
    ----------
    key : what the address is of, for the message
    address : an IPv6 host stands in brackets
    default_port : for an address that gives none, where one may be left out; port 0 is refused then

    Raises
    ------
    ValueError
        Naming ``key`` if there is no host or no port.
    """
    host, colon, port = address.rpartition(":")
    expected_form, least_port = "host:port, such as 127.0.0.1:0", 0
    if default_port is not None:
        expected_form, least_port = "HOST or HOST:PORT", 1
        if not colon:
            host, port = address, str(default_port)
    is_number = port.isdigit() and least_port <= int(port) <= 65535
    if not host or not is_number or (":" in host and not host.startswith("[")):
        raise ValueError(f"{key}: expected {expected_form}, found {address!r}")
    return HostPort(host, int(port))


def check_ipv4_host(key: str, host: str) -> None:
    """Refuse a host that is neither a name nor an IPv4 address: the machines of a deployment do not use IPv6.

    Raises
    ------
    ValueError
        Naming ``key``.
    """
    try:
        is_ipv6 = ipaddress.ip_address(host.strip("[]")).version == 6
    except ValueError:
        is_ipv6 = ":" in host
    if is_ipv6:
        raise ValueError(f"{key}: expected a name or an IPv4 address, found {host!r}: a deployment speaks no IPv6 yet")
    if not host or any(character.isspace() or character == "/" for character in host):
        raise ValueError(f"{key}: expected a name or an IPv4 address, found {host!r}")


def plain_host(host: str) -> str:
    """Return one form for all spellings of a host: brackets, IPv4 within IPv6, short forms, capitals, a last dot."""
    bare = host.strip("[]").rstrip(".").lower()
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        try:
            return socket.inet_ntoa(socket.inet_aton(bare))
        except OSError:
            return bare
    return str(getattr(address, "ipv4_mapped", None) or address)


def check_reached_host(key: str, host: str) -> None:
    """Refuse a host at which no other machine can reach this one: as :func:`check_ipv4_host`, and 0.0.0.0."""
    check_ipv4_host(key, host)
    if not host.strip("0."):
        raise ValueError(
            f"{key}: expected the name or address at which others reach this machine, found {host}, which stands for "
            f"all of its addresses; give one of them: {', '.join(ipv4_addresses())}"
        )


def ipv4_addresses() -> list[str]:
    """Return this machine's IPv4 addresses, those of its loopback last."""
    addresses = [a.address for link in psutil.net_if_addrs().values() for a in link if a.family == socket.AF_INET]
    return sorted(addresses, key=is_loopback)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``."""
    plain = plain_host(host)
    try:
        return ipaddress.ip_address(plain).is_loopback
    except ValueError:
        return plain == "localhost"


def is_here(host: str) -> bool:
    """Return whether an address, or a name, is this machine's: only its own addresses can be bound."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as one:
            one.bind(address)
    except (OSError, UnicodeError):
        return False
    return True
