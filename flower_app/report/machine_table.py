"""The report's table of machines: whose seconds the wall clock's are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from client_pipeline.runtime.machine import REPORTED_PACKAGES

_SHOWN = 100
"""Machines at most."""
_TITLES = ("who", "host", "cores", "memory", "system", "Python", *REPORTED_PACKAGES)


def machine_section(starts_by_run: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the section, as HTML: a row for each machine, with all that ran on it.

    Parameters
    ----------
    starts_by_run : name of each run -> its lines of ``machines.jsonl``
    """
    rows = [
        [label, _start(start), *row]
        for label, starts in starts_by_run.items()
        for start in _that_differ(starts)
        for row in _rows(start)
    ]
    heading = '<h2 id="machines">Machines</h2>'
    if not rows:
        return f"{heading}<p>The run has not named its machines.</p>"
    # A column that says the same everywhere says nothing.
    shown = [i for i in range(len(rows[0])) if i > 1 or len({row[i] for row in rows}) > 1]
    titles = ["run", "rounds", *_TITLES]
    head = "".join(f"<th>{titles[i]}</th>" for i in shown)
    cells = ["".join(f"<td>{escape(row[i])}</td>" for i in shown) for row in rows[:_SHOWN]]
    more = f"<p>{len(rows) - _SHOWN} more are in machines.jsonl.</p>" if len(rows) > _SHOWN else ""
    return f"{heading}<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>{more}"


def _that_differ(starts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Starts of a run on other machines, or other versions, than the one before."""
    machines = [(start["server"], start["clusters"]) for start in starts]
    return [start for i, start in enumerate(starts) if i == 0 or machines[i] != machines[i - 1]]


def _start(start: Mapping[str, Any]) -> str:
    return f"from {int(start['after_round']) + 1}"


def _rows(start: Mapping[str, Any]) -> Iterator[list[str]]:
    """Cells of each machine; the same one stands once."""
    who_by_machine: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for role, number, machine in _places(start):
        names = ("host", "cores", "memory", "system", "python", *REPORTED_PACKAGES)
        key = tuple(_cell(name, machine.get(name)) for name in names)
        who_by_machine.setdefault(key, {}).setdefault(role, []).append(number)
    for key, roles in who_by_machine.items():
        who = "; ".join(f"{role} {', '.join(numbers)}".strip() for role, numbers in roles.items())
        yield [who, *key]


def _places(start: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    yield "server", "", start["server"]
    for cluster, machines in start["clusters"].items():
        with_devices = "" if machines["devices"] else " and devices"
        yield f"control units{with_devices} of clusters", cluster, machines["control_unit"]
    for cluster, machines in start["clusters"].items():
        for device, machine in machines["devices"].items():
            yield f"devices of cluster {cluster}:", device, machine


def _cell(name: str, value: Any) -> str:
    if name == "memory" and isinstance(value, int):
        return f"{value / 1e9:.1f} GB"
    return "-" if value is None else str(value)
