"""A node's answer before round 1, as the server takes it in."""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord, RecordDict

from client_pipeline.runtime.machine import REPORTED_PACKAGES
from strategies.grid.received_report import ReportTerms, check_state
from strategies.grid.received_values import (
    FLAG,
    TEXT,
    Kind,
    MalformedReply,
    Schema,
    check_object,
    excerpt,
    one_of,
    parse_json,
    whole,
)
from strategies.records import CONFIG

_ANSWER_BYTES = 1 << 20


def checked_setup(content: RecordDict, node_id: int, num_clusters: int) -> dict[str, Any]:
    """Return a node's answer: ``error`` (a mistake of its user), ``unused`` (its number), or ``state`` and more.

    Parameters
    ----------
    content : of its reply
    node_id : of the node that was asked
    num_clusters : N

    Raises
    ------
    MalformedReply
        Naming the key; also if it answers for another node.
    """
    if set(content) != {CONFIG} or not isinstance(content[CONFIG], ConfigRecord):
        raise MalformedReply(f"expected one record {CONFIG}, found {excerpt(' '.join(list(content)[:8]))}")
    answer: Any = parse_json(content.config_records[CONFIG].get("json"), "set-up", _ANSWER_BYTES)
    if isinstance(answer, dict) and "error" in answer:
        check_object(answer, {"error": TEXT}, "set-up")
    elif isinstance(answer, dict) and "unused" in answer:
        check_object(answer, {"unused": whole()}, "set-up")
    else:
        state: Any = answer.get("state") if isinstance(answer, dict) else None
        check_object(answer, _SETUP, "set-up", frozenset({"at-once", "machine", "device-machines"}))
        cluster = state.get("cluster") if isinstance(state, dict) else None
        whole(0, num_clusters - 1).check(cluster, "set-up.state.cluster")
        check_state(state, ReportTerms(cluster=int(cluster or 0), node_id=node_id, round=0))
        for device, machine in answer.get("device-machines", {}).items():
            one_of(*map(str, range(len(state["devices"])))).check(device, "set-up.device-machines")
            check_object(machine, _MACHINE, f"set-up.device-machines.{device}")
    return dict(answer)


_ANY = TEXT._replace(words="anything", fits=lambda value: True)
_NAME = Kind("text of at most 200 characters", lambda value: isinstance(value, str) and len(value) <= 200)
_MACHINE: Schema = {
    **dict.fromkeys(("host", "system", "python", *REPORTED_PACKAGES), _NAME),
    "cores": whole(1, 1 << 20),
    "memory": whole(),
}
_SETUP: Schema = {
    "state": _ANY,
    "truncated": whole(),
    "restored": FLAG,
    "at-once": whole(),
    "machine": _MACHINE,
    "device-machines": Kind("an object", lambda value: isinstance(value, dict)),
}
