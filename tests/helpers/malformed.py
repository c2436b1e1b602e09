"""Everything wrong that a client can answer: each kind makes of an honest reply one that must be refused."""

import io
import json
import math
import zipfile

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord


def first(reply):
    """Name and value of the first array with numbers in it."""
    return next((name, array) for name, array in reply.content["arrays"].items() if math.prod(array.shape) > 1)


def with_array(reply, change):
    """The reply with its first array changed."""
    name, array = first(reply)
    reply.content["arrays"][name] = change(array)
    return reply


def npy(header, data=b"", version=(1, 0)):
    """A .npy file with whatever header."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY" + bytes(version) + len(text).to_bytes(2 if version == (1, 0) else 4, "little") + text + data


def array_of(array, data, dtype=None, shape=None, stype="numpy.ndarray"):
    return Array(dtype or array.dtype, tuple(array.shape if shape is None else shape), stype, data)


def header_of(array, descr="<f4", shape=None):
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {tuple(shape or array.shape)}, }}"


def with_report(reply, **changes):
    reply.content["report"] = ConfigRecord({"json": json.dumps(report_of(reply) | changes)})
    return reply


def report_of(reply):
    return json.loads(reply.content["report"]["json"])


def with_state(reply, **changes):
    return with_report(reply, state=report_of(reply)["state"] | changes)


def with_plan(reply, **changes):
    return with_report(reply, plan=report_of(reply)["plan"] | changes)


def with_devices(reply, **changes):
    return with_state(reply, devices=[device | changes for device in report_of(reply)["state"]["devices"]])


def with_metrics(reply, **changes):
    reply.content["metrics"] = MetricRecord(dict(reply.content["metrics"]) | changes)
    return reply


def with_measured(reply, **changes):
    return with_report(reply, measured=report_of(reply)["measured"] | changes)


def fault(reply, **changes):
    record = {
        "kind": "device",
        "cluster": report_of(reply)["cluster"],
        "round": 1,
        "device": 0,
        "step": 1,
        "recovered": True,
    }
    return with_report(reply, faults=[record | {"seconds": 1.0, "bytes": 0, "reason": "it stopped"} | changes])


def with_json(reply, value, key="json"):
    reply.content["report"] = ConfigRecord({key: value})
    return reply


def with_record(reply, name, record):
    reply.content[name] = record
    return reply


def without(reply, *path):
    """The reply without a record, or without a key of one."""
    *records, key = path
    holder = reply.content
    for name in records:
        holder = holder[name]
    del holder[key]
    return reply


def saved(array):
    """Bytes of an array as numpy pickles it."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("bomb.npy", b"\0" * 1_000_000)
    return file.getvalue()


def other_cluster(reply):
    return 0 if report_of(reply)["cluster"] else 1


def of_type(dtype):
    return lambda a: Array(a.numpy().astype(dtype))


def of_bytes(data, **words):
    """An array with other bytes, ``data(array)``, and other words about them."""
    return lambda a: array_of(a, data(a), **words)


def one_nan(a):
    values = a.numpy().copy()
    values.reshape(-1)[1] = np.nan
    return Array(values)


ARRAYS = {
    "another shape": lambda a: Array(a.numpy()[..., :1]),
    "the same numbers in another shape": lambda a: Array(a.numpy().reshape(-1, 1)),
    "another type": of_type(np.int32),
    "numbers of 16 bits": of_type(np.float16),
    "the other byte order": of_type(">f4"),
    "complex numbers": of_type(np.complex64),
    "junk bytes": of_bytes(lambda a: b"junk" * 20),
    "no bytes": of_bytes(lambda a: b""),
    "a pickle": of_bytes(lambda a: saved(np.array([{"an": "object"}], dtype=object))),
    "a zip file": of_bytes(lambda a: zipped()),
    "a serialization of its own": of_bytes(lambda a: a.data, stype="cloudpickle"),
    "too few numbers": of_bytes(lambda a: a.data[:-4]),
    "too many numbers": of_bytes(lambda a: a.data + b"\0" * 4),
    "a header that announces a huge array": of_bytes(lambda a: npy(header_of(a, shape=(2**34,)))),
    "a huge array in words and header": of_bytes(lambda a: npy(header_of(a, shape=(2**34, 8))), shape=(2**34, 8)),
    "a header with a negative shape": of_bytes(lambda a: npy(header_of(a, shape=(-1, 2)))),
    "a header of another type": of_bytes(lambda a: npy(header_of(a, descr="<f8"), a.data[128:])),
    "a header of structures": of_bytes(
        lambda a: npy("{'descr': [('a', '<f4', (1000000,))], 'fortran_order': False, 'shape': (4,), }")
    ),
    "a header of brackets": of_bytes(lambda a: npy("(" * 60_000)),
    "a header longer than the file": of_bytes(lambda a: b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{'descr'"),
    "a header of version 9": of_bytes(lambda a: b"\x93NUMPY\x09\x00" + a.data[8:]),
    "another shape in words alone": of_bytes(lambda a: a.data, shape=(2**40,)),
    "another type in words alone": of_bytes(lambda a: a.data, dtype="float64"),
    "a type that there is none": of_bytes(lambda a: a.data, dtype="float31"),
    "one NaN": one_nan,
    "one infinity": lambda a: Array(np.full(a.shape, -np.inf, dtype=np.float32)),
}
"""The first array with numbers in it, changed."""

RECORDS = {
    "a missing tensor": lambda r: without(r, "arrays", first(r)[0]),
    "one tensor more": lambda r: with_record(
        r, "arrays", ArrayRecord(dict(r.content["arrays"]) | {"of nobody": Array(np.zeros(3, dtype=np.float32))})
    ),
    "a second record of arrays": lambda r: with_record(
        r, "more", ArrayRecord({"w": Array(np.zeros(2, dtype=np.float32))})
    ),
    "a second record of metrics": lambda r: with_record(r, "more", MetricRecord({"num-examples": 10**6})),
    "a second report": lambda r: with_record(r, "more", ConfigRecord({"json": "{}"})),
    "no arrays": lambda r: without(r, "arrays"),
    "no metrics": lambda r: without(r, "metrics"),
    "no report": lambda r: without(r, "report"),
    "nothing at all": lambda r: without(without(without(r, "arrays"), "metrics"), "report"),
    "arrays of another name": lambda r: without(with_record(r, "weights", r.content["arrays"]), "arrays"),
    "metrics in place of arrays": lambda r: with_record(
        without(r, "arrays"), "arrays", MetricRecord({"num-examples": 1})
    ),
    "a missing weight": lambda r: without(r, "metrics", "num-examples"),
    "a missing loss": lambda r: without(r, "metrics", "loss"),
}

METRICS = {
    "an extra metric": {"accuracy": 1.0},
    "a list for the weight": {"num-examples": [1, 2, 3]},
    "an empty list for the loss": {"loss": []},
    "a weight of NaN": {"num-examples": math.nan},
    "a weight below zero": {"num-examples": -5},
    "a weight of zero": {"num-examples": 0},
    "a weight beyond all": {"num-examples": 1e308},
    "a loss of infinity": {"loss": math.inf},
    "a loss below zero": {"loss": -1.0},
    "a loss beyond all": {"loss": 1e308},
    "steps of NaN": {"steps": math.nan},
    "no steps": {"steps": 0},
    "a duration below zero": {"wall-s": -1.0},
}

REPORTS = {
    "a report that is no JSON": lambda r: with_json(r, "{"),
    "a report of bytes": lambda r: with_json(r, b"\x80\x04junk"),
    "a report without its key": lambda r: with_record(r, "report", ConfigRecord({})),
    "a report with a second key": lambda r: with_record(
        r, "report", ConfigRecord(dict(r.content["report"]) | {"more": "text"})
    ),
    "a report that is a list": lambda r: with_json(r, "[1, 2]"),
    "a report of brackets": lambda r: with_json(r, "[" * 100_000),
    "a report without end": lambda r: with_report(r, timeline=[["F", 0, 0, 0.0, 0.0]] * 400_000),
    "a report with NaN": lambda r: with_report(r, prepare_s=math.nan),
    "a report with a number beyond all": lambda r: with_json(
        r, json.dumps(report_of(r) | {"prepare_s": 7}).replace("7", "1e999")
    ),
    "a report with a key of its own": lambda r: with_report(r, **{"\x1b[31mred\n": 1}),
    "a report without a plan": lambda r: with_json(
        r, json.dumps({key: value for key, value in report_of(r).items() if key != "plan"})
    ),
    "faults that are a number": lambda r: with_report(r, faults=5),
    "faults without keys": lambda r: with_report(r, faults=[{}]),
    "a fault of another cluster": lambda r: fault(r, cluster=77),
    "a fault of another round": lambda r: fault(r, round=9),
    "a fault of an unknown kind": lambda r: fault(r, kind="\x1b]0;title\x07"),
    "a fault whose seconds are text": lambda r: fault(r, seconds="soon"),
    "a thousand and one faults": lambda r: with_report(r, faults=report_of(fault(r))["faults"] * 1001),
    "another clusters number": lambda r: with_report(r, cluster=other_cluster(r)),
    "a cluster that there is none": lambda r: with_report(r, cluster=10**9),
    "the state of another cluster": lambda r: with_state(r, cluster=other_cluster(r)),
    "the state of another node": lambda r: with_state(r, node_id=1),
    "a state that is text": lambda r: with_report(r, state="fine"),
    "a state without devices": lambda r: with_state(r, devices=[]),
    "a device of no frequency": lambda r: with_devices(r, frequency=0.0),
    "a device with a key of its own": lambda r: with_devices(r, colour="red"),
    "examples below zero": lambda r: with_report(r, num_examples=-1),
    "examples that are true": lambda r: with_report(r, num_examples=True),
    "a plan with micro batches beyond all": lambda r: with_plan(r, m=10**9),
    "a plan for another model": lambda r: with_plan(r, delta=[10**12] * len(report_of(r)["plan"]["delta"])),
    "a plan with an unknown schedule": lambda r: with_plan(r, schedule="none"),
    "a timeline of a stage that there is none": lambda r: with_report(r, timeline=[["F", 10**9, 0, 0.0, 1.0]]),
    "a timeline of numbers": lambda r: with_report(r, timeline=[1, 2, 3]),
    "a time below zero": lambda r: with_measured(r, tebs={"0": [[8, 1, -1.0]]}),
    "a time beyond all": lambda r: with_measured(r, links={"0": [[8, 1, 1e300]]}),
    "a time of no samples": lambda r: with_measured(r, stream=[[0, 1, 1.0]]),
    "a time without its count": lambda r: with_measured(r, stream=[[8, 1.0]]),
    "times without end": lambda r: with_measured(r, stream=[[8, 1, 1.0]] * 1000),
    "a trial of a device that there is none": lambda r: with_measured(r, spare={"99999": [[8, 1, 1.0]]}),
    "a trial that took for ever": lambda r: with_measured(r, spare={"0": [[8, 1, 1e300]]}),
    "times of a device that there is none": lambda r: with_measured(r, tebs={"99999": [[8, 1, 1.0]]}),
    "a device that there is none": lambda r: with_report(r, devices={"99999": {"blocks": 1, "busy_s": 1.0}}),
    "a device with text for bytes": lambda r: with_report(
        r, devices={"0": {"blocks": 1, "busy_s": 1.0, "peak_bytes": "many", "idle_bytes": "few"}}
    ),
}


def error(code_and_reason):
    return lambda order, reply: Message(Error(*code_and_reason), reply_to=order)


def to_another_message(order, reply):
    reply.metadata.__dict__["_reply_to_message_id"] = "0" * 32
    return reply


KINDS = (
    {name: lambda order, reply, c=change: with_array(reply, c) for name, change in ARRAYS.items()}
    | {name: lambda order, reply, c=change: c(reply) for name, change in (RECORDS | REPORTS).items()}
    | {name: lambda order, reply, c=changes: with_metrics(reply, **c) for name, changes in METRICS.items()}
    | {
        "an error with terminal codes": error((0, "\x1b[2J\x1b[31m" + "boom\r\nround 1: all is well\n" * 1000)),
        "an error without a reason": error((0,)),
        "an error with junk for faults": error((0, 'no power\nfaults: [5, {"kind": []}]')),
        "an answer to another message": to_another_message,
        "nothing": lambda order, reply: None,
    }
)
"""By name: called with the order and an honest reply to it; returns what is sent, None for nothing."""
