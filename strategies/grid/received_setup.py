"""A node's answer before round 1, as the server takes it in."""

from __future__ import annotations

from typing import Any

from flwr.app import ConfigRecord, RecordDict

from strategies.grid.received_report import ReportTerms, check_state
from strategies.grid.received_values import FLAG, TEXT, MalformedReply, check_object, excerpt, parse_json, whole
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
        schema = {"state": _ANY, "truncated": whole(), "restored": FLAG, "at-once": whole()}
        check_object(answer, schema, "set-up", frozenset({"at-once"}))
        cluster = state.get("cluster") if isinstance(state, dict) else None
        whole(0, num_clusters - 1).check(cluster, "set-up.state.cluster")
        check_state(state, ReportTerms(cluster=int(cluster or 0), node_id=node_id, round=0))
    return dict(answer)


_ANY = TEXT._replace(words="anything", fits=lambda value: True)
