"""A control unit's set-up and reports as the server takes them in: every key has a type.

What is said of others is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from client_pipeline.partition.plan import MOST_TOKEN_SLICES, ClusterPlan
from client_pipeline.runtime.ray.machine import REPORTED_PACKAGES
from client_pipeline.runtime.transport.faults import CLUSTER_FAULTS
from client_pipeline.timetable.schedules import splits_backward
from strategies.clusters import DEVICE_RANGES
from strategies.grid.received_values import (
    FLAG,
    LIST,
    OBJECT,
    SECONDS,
    SIZE,
    TEXT,
    Kind,
    MalformedReply,
    Schema,
    check_object,
    exactly,
    excerpt,
    number,
    one_of,
    or_none,
    parse_json,
    whole,
)
from strategies.printable import printable
from strategies.records import CONFIG

MOST_FAULTS = 1000
"""Records of one cluster in one round."""
_SETUP_BYTES = _REPORT_BYTES = 1 << 20
_EVENT_BYTES = 160
_EVENT = (one_of("F", "B", "W"), whole(), whole(), number(), number())
"""Kind, stage, micro-batch, start and end of an entry of the timeline."""
_TIME = (whole(1, 1 << 20), whole(1, 1 << 31), number(0.0, 1e6))
"""Samples, count and seconds of an entry of ``measured``."""
_MOST_SIZES = 64
"""Sizes of micro-batches in a round: two of a batch, and those of the plans that a round may have had."""
_MOST_DEVICES, _MOST_MICRO_BATCHES, _MOST_BLOCKS = 1024, 1 << 16, 1 << 16
"""Limits for an order without a plan to compare with."""

_MEMORY = frozenset({"held_bytes", "idle_bytes", "peak_bytes"})
_DEVICE: Schema = {"blocks": SIZE, "busy_s": SECONDS, "held_bytes": SIZE, "idle_bytes": SIZE, "peak_bytes": SIZE}
_PROFILE: Schema = {key: number(*limits) for key, limits in DEVICE_RANGES.items()}
_NAME = Kind("text of at most 200 characters", lambda value: isinstance(value, str) and len(value) <= 200)
_MACHINE: Schema = {
    **dict.fromkeys(("host", "system", "python", *REPORTED_PACKAGES), _NAME),
    "cores": whole(1, 1 << 20),
    "memory": whole(),
}
_SETUP: Schema = {
    "state": Kind("anything", lambda value: True),
    "truncated": whole(),
    "restored": FLAG,
    "at-once": whole(),
    "machine": _MACHINE,
    "device-machines": OBJECT,
}


@dataclass(frozen=True, kw_only=True)
class ReportTerms:
    """Values that a report must agree with."""

    cluster: int
    node_id: int
    round: int
    plan: ClusterPlan | None = None
    """The order's; None where the control unit plans for itself."""
    num_devices: int | None = None
    """K of the cluster; None: that of the plan."""
    num_blocks: int | None = None
    """L; None: that of the plan."""
    batch_size: int | None = None
    """b; None: not known."""

    @property
    def most_devices(self) -> int:
        """Devices that the report may speak of."""
        if self.num_devices is not None:
            return self.num_devices
        return _MOST_DEVICES if self.plan is None else len(self.plan.delta)

    @property
    def most_micro_batches(self) -> int:
        """Micro-batches that the report may speak of."""
        return self.plan.m if self.plan is not None else self.batch_size or _MOST_MICRO_BATCHES

    @property
    def most_events(self) -> int:
        """Entries that the timeline of a step may have; a schedule may have three passes of a micro-batch."""
        passes = 3 if self.plan is None or splits_backward(self.plan.schedule) else 2
        return passes * self.most_numbers * self.most_devices

    @property
    def most_numbers(self) -> int:
        """Numbers that the micro-batches, or their token slices, may have in it."""
        return self.most_micro_batches * (self.plan.token_slices if self.plan is not None else MOST_TOKEN_SLICES)


def checked_setup(content: RecordDict, node_id: int, num_clusters: int) -> dict[str, Any]:
    """Return a node's answer before round 1.

    It has ``error`` (a mistake of its user), ``unused`` (its number), or ``state`` and more.

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
    answer: Any = parse_json(content.config_records[CONFIG].get("json"), "set-up", _SETUP_BYTES)
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


def checked_door(content: RecordDict) -> dict[str, Any]:
    """Return what a node says of the door at which its box answers with a model.

    It has ``error``, or ``cluster`` and either the address of its ``door`` or ``closed``.

    Raises
    ------
    MalformedReply
        Naming the key.
    """
    if set(content) != {CONFIG} or not isinstance(content[CONFIG], ConfigRecord):
        raise MalformedReply(f"expected one record {CONFIG}, found {excerpt(' '.join(list(content)[:8]))}")
    answer: Any = parse_json(content.config_records[CONFIG].get("json"), "door", _SETUP_BYTES)
    if isinstance(answer, dict) and "error" in answer:
        schema: Schema = {"error": TEXT}
    elif isinstance(answer, dict) and "door" in answer:
        schema = {"cluster": whole(), "door": TEXT}
    else:
        schema = {"cluster": whole(), "closed": FLAG}
    check_object(answer, schema, "door")
    return dict(answer)


def checked_report(text: Any, terms: ReportTerms) -> dict[str, Any]:
    """Return a report of a round that was trained.

    Raises
    ------
    MalformedReply
        Naming the key.
    """
    events = terms.most_events if terms.num_devices or terms.plan else 0
    report: Any = parse_json(text, "report", _REPORT_BYTES + _EVENT_BYTES * events)
    check_object(report, _schema(terms), "report", frozenset({"computed_steps"}))
    _check_plan(report["plan"], terms)
    _check_devices(report["devices"], terms)
    _check_measured(report["measured"], terms)
    _check_timeline(report["timeline"], terms)
    check_state(report["state"], terms)
    return dict(report) | {"faults": checked_faults(report["faults"], terms)}


def checked_faults(raw: Any, terms: ReportTerms) -> list[dict[str, Any]]:
    """Return the records of a round's faults, their reasons as one printable line each.

    Raises
    ------
    MalformedReply
        For anything but a list of records of this cluster and round.
    """
    if not isinstance(raw, list) or len(raw) > MOST_FAULTS:
        raise MalformedReply(f"report.faults: expected a list of at most {MOST_FAULTS} records, found {excerpt(raw)}")
    schema: Schema = {
        "kind": one_of(*CLUSTER_FAULTS),
        "cluster": exactly(terms.cluster),
        "round": exactly(terms.round),
        "device": or_none(whole(0, terms.most_devices - 1)),
        "step": whole(0, 2**31),
        "recovered": FLAG,
        "seconds": or_none(number(-1e9, 1e9)),
        "bytes": SIZE,
        "reason": TEXT,
    }
    for i, record in enumerate(raw):
        check_object(record, schema, f"report.faults[{i}]")
    return [record | {"reason": printable(record["reason"][:1000])} for record in raw]


def check_state(raw: Any, terms: ReportTerms) -> None:
    """Refuse a cluster's state that is another's, or whose devices no planner could plan with.

    Raises
    ------
    MalformedReply
        Naming the key.
    """
    schema: Schema = {
        "cluster": exactly(terms.cluster),
        "node_id": exactly(terms.node_id),
        "devices": LIST,
        "block_memory": number(0.0, 1e21),
        "num_examples": whole(0, 2**40),
        "last_loss": or_none(number()),
    }
    check_object(raw, schema, "state")
    devices: Sequence[Any] = raw["devices"]
    expected = terms.num_devices if terms.plan is None else len(terms.plan.delta)
    if not devices or len(devices) > _MOST_DEVICES or expected not in (None, len(devices)):
        words = "1 or more" if expected is None else str(expected)
        raise MalformedReply(f"state.devices: expected {words} devices, found {len(devices)}")
    for k, device in enumerate(devices):
        check_object(device, _PROFILE, f"state.devices[{k}]")


def _schema(terms: ReportTerms) -> Schema:
    return {
        "cluster": exactly(terms.cluster),
        "num_examples": whole(0, 2**40),
        "loss": number(0.0, 1e12),
        "plan": OBJECT,
        "devices": OBJECT,
        "measured": {
            **dict.fromkeys(("tebs", "links", "inlets", "spare"), OBJECT),
            "stream": LIST,
            "pipeline_s": SECONDS,
        },
        "timeline": LIST,
        "state": OBJECT,
        "faults": LIST,
        "peak_bytes": SIZE,
        "moved_blocks": SIZE,
        "moved_bytes": SIZE,
        "link_bytes": SIZE,
        "snapshots": {"taken": SIZE, "bytes": SIZE, "fetch_s": SECONDS},
        "prepare_s": SECONDS,
        "train_s": SECONDS,
        "collect_s": SECONDS,
        "computed_steps": number(0.0, 1e6),
        "paced_s": or_none(SECONDS),
        "stream_bytes": {"up": SIZE, "down": SIZE},
        "payload_bytes": {"up": SIZE, "down": SIZE, "update": SIZE},
    }


def _check_plan(raw: Any, terms: ReportTerms) -> None:
    """Compare the plan that was carried out with the order's: devices may have been lost, TEBs and m stay."""
    try:
        plan = ClusterPlan.from_dict(raw, "report.plan")
        ordered = terms.plan
        plan.check(
            num_blocks=terms.num_blocks or min(sum((ordered or plan).delta), _MOST_BLOCKS),
            batch_size=terms.most_micro_batches,
            num_devices=terms.num_devices if ordered is None else len(ordered.delta),
            location="report.plan",
        )
    except (ValueError, OverflowError) as error:
        raise MalformedReply(printable(str(error))) from error
    if len(plan.delta) > _MOST_DEVICES or not plan.devices:
        raise MalformedReply(f"report.plan: expected 1 to {_MOST_DEVICES} devices, found {len(plan.delta)}")
    if ordered is not None and plan.m != ordered.m:
        raise MalformedReply(f"report.plan: expected m = {ordered.m}, found {plan.m}")
    if ordered is not None and plan.token_slices != ordered.token_slices:
        raise MalformedReply(f"report.plan: expected token_slices = {ordered.token_slices}, found {plan.token_slices}")


def _check_devices(raw: dict[str, Any], terms: ReportTerms) -> None:
    known = {str(k) for k in range(terms.most_devices)}
    for name, device in raw.items():
        if name not in known:
            raise MalformedReply(f"report.devices: expected names from 0 to {len(known) - 1}, found {excerpt(name)}")
        check_object(device, _DEVICE, f"report.devices.{name}", optional=_MEMORY)


def _check_measured(raw: dict[str, Any], terms: ReportTerms) -> None:
    """Refuse times that no planner could plan with: products of them stay finite, and their lists short."""
    known = {str(k) for k in range(terms.most_devices)}
    lists = {"report.measured.stream": raw["stream"]}
    for name in ("tebs", "links", "inlets", "spare"):
        for device, times in raw[name].items():
            if device not in known:
                words = f"expected names from 0 to {len(known) - 1}"
                raise MalformedReply(f"report.measured.{name}: {words}, found {excerpt(device)}")
            lists[f"report.measured.{name}.{device}"] = times
    for location, times in lists.items():
        if not isinstance(times, list) or len(times) > _MOST_SIZES:
            raise MalformedReply(f"{location}: expected a list of at most {_MOST_SIZES} times, found {excerpt(times)}")
        for i, entry in enumerate(times):
            if not isinstance(entry, list) or len(entry) != len(_TIME):
                raise MalformedReply(f"{location}[{i}]: expected samples, count and seconds, found {excerpt(entry)}")
            for kind, value in zip(_TIME, entry, strict=True):
                kind.check(value, f"{location}[{i}]")


def _check_timeline(raw: list[Any], terms: ReportTerms) -> None:
    devices, numbers = terms.most_devices, terms.most_numbers
    if len(raw) > terms.most_events:
        raise MalformedReply(f"report.timeline: expected at most {terms.most_events} events, found {len(raw)}")
    for i, event in enumerate(raw):
        location = f"report.timeline[{i}]"
        if not isinstance(event, list) or len(event) != len(_EVENT):
            raise MalformedReply(
                f"{location}: expected kind, stage, micro-batch, start and end, found {excerpt(event)}"
            )
        for kind, value in zip(_EVENT, event, strict=True):
            kind.check(value, location)
        if event[1] >= devices or event[2] >= numbers or event[4] < event[3]:
            raise MalformedReply(f"{location}: its stage, micro-batch or times do not fit the plan")
