"""Ports of a machine's programs that another program has: said before any of them starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from flower_app.deployment.findings import Finding
from flower_app.deployment.machine_checks import check_port

_LAST_RUN_S = 10.0
"""How long the programs of an earlier start may take to let go of their ports [s]."""


class NeededPort(NamedTuple):
    """Where a program of this machine is going to listen."""

    option: str
    """Of the command line, that moves it."""
    host: str
    port: int
    purpose: str


def refuse_taken_ports(ports: Sequence[NeededPort]) -> None:
    """Wait a moment for ports to be free, then refuse.

    Raises
    ------
    ValueError
        Naming the option, the port, and how to find who has it.
    """
    deadline = time.monotonic() + _LAST_RUN_S
    while taken := [(needed, found) for needed in ports for found in _problems(needed)]:
        if time.monotonic() >= deadline:
            needed, finding = taken[0]
            raise ValueError(f"{needed.option}: {finding.found}; {finding.remedy}")
        time.sleep(0.2)


def _problems(needed: NeededPort) -> list[Finding]:
    findings = check_port("port", needed.host, needed.port, needed.purpose)
    # What else is wrong with an address the program itself says best.
    return [finding for finding in findings if finding.status == "failed" and "in use" in finding.found]
