"""Takes in replies that were changed at random, under a limit of memory: ``fuzz_replies.py --number 10000``.

Each is an honest reply with one to three changes to its structure: records, arrays, headers, metrics, keys of the
report at any depth. It must either fail by name, or be whole: then it holds what strategies and reports go by.
"""

import argparse
import gc
import json
import logging
import math
import random
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
import psutil
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from client_pipeline.partition.plan import ClusterPlan
from helpers.malformed import KINDS, array_of, header_of, npy
from helpers.replies import answer_to
from strategies.grid.intake import ReplyIntake, RoundBounds
from strategies.records import to_arrays, train_config

ROOM_BYTES = 300_000_000
GROWTH_BYTES = 20_000_000
START = {"a": torch.zeros(4, 5), "b": torch.ones(3), "c": torch.tensor(1.0)}
PLAN = ClusterPlan(delta=(2, 2), order=(0, 1), m=4)
ODD = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**400,
    1e308,
    -1e308,
    0.5,
    "",
    "\x1b[2J\n",
    "\ud800",
    "x" * 5000,
    [],
    {},
    [[]],
]
ODD_SHAPES = [(), (0,), (-1,), (2**40,), (4, 5), (5, 4), (20,), (3,), (2**62, 2**62), (0, 2**62)]
DTYPES = "float32 float64 float16 int8 int64 complex64 bool object bfloat16 <f4 >f4 |O <U9 junk".split()
STYPES = ["numpy.ndarray", "torch", "", "pickle"]


def changed_json(draw, value, depth=0):
    """A JSON value with something else somewhere in it."""
    if isinstance(value, dict) and value and depth < 6 and draw.random() < 0.85:
        key = draw.choice(sorted(value))
        what = draw.random()
        if what < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if what < 0.2:
            return value | {draw.choice(["x", "", "\x00", "cluster", "reason"]): draw.choice(ODD)}
        return value | {key: changed_json(draw, value[key], depth + 1)}
    if isinstance(value, list) and value and depth < 6 and draw.random() < 0.85:
        place = draw.randrange(len(value))
        what = draw.random()
        if what < 0.2:
            return value * draw.choice([0, 2, 1000])
        return [*value[:place], changed_json(draw, value[place], depth + 1), *value[place + 1 :]]
    return draw.choice(ODD)


def change_report(draw, reply):
    report = json.loads(reply.content["report"]["json"])
    text = json.dumps(changed_json(draw, report))
    if draw.random() < 0.1:
        place = draw.randrange(len(text))
        text = text[:place] + draw.choice(["[" * 3000, "NaN", "1e999", "}", '"', "\x00"]) + text[place:]
    reply.content["report"] = ConfigRecord({"json": text})


def change_metrics(draw, reply):
    metrics = dict(reply.content["metrics"])
    key = draw.choice([*metrics, "accuracy", ""])
    value = draw.choice([math.nan, math.inf, -math.inf, -1, 0, 1, 7.5, 1e308, 2**62, [], [1, 2], [math.nan]])
    metrics[key] = value
    if draw.random() < 0.2:
        del metrics[key]
    reply.content["metrics"] = MetricRecord(metrics)


def change_array(draw, reply):
    arrays = dict(reply.content["arrays"])
    name = draw.choice(list(arrays))
    array, what = arrays[name], draw.random()
    if what < 0.3:
        data = bytearray(array.data)
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        array = array_of(array, bytes(data))
    elif what < 0.5:
        header = header_of(array, draw.choice(DTYPES), draw.choice(ODD_SHAPES) or (1,))
        version = draw.choice([(1, 0), (2, 0), (3, 0), (9, 9)])
        array = array_of(array, npy(header, array.data[128:], version))
    elif what < 0.6:
        array = array_of(array, array.data[: draw.randrange(len(array.data))])
    elif what < 0.8:
        array = array_of(array, array.data, draw.choice(DTYPES), draw.choice(ODD_SHAPES), draw.choice(STYPES))
    elif what < 0.9:
        # One that an earlier change calls larger than memory, or negative, cannot be made.
        shape = array.shape if 0 <= math.prod(array.shape) < 1e6 and min(array.shape, default=0) >= 0 else (20,)
        array = Array(np.full(shape, draw.choice([np.nan, np.inf, -np.inf, 3e38]), dtype=np.float32))
    else:
        array = Array(np.zeros(draw.choice([(1,), (4, 5), (3,), (0,)]), dtype=draw.choice(["f4", "f8", "f2", "i4"])))
    arrays[name] = array
    if draw.random() < 0.1:
        del arrays[name]
    if draw.random() < 0.1:
        arrays[draw.choice(["", "a/values", "../x", "\x1b[1m"])] = array
    reply.content["arrays"] = ArrayRecord(arrays)


def change_records(draw, reply):
    records = dict(reply.content)
    name = draw.choice([*records, "more", ""])
    records[name] = draw.choice([ArrayRecord({}), MetricRecord({}), ConfigRecord({}), ConfigRecord({"json": b"\x80"})])
    if draw.random() < 0.4:
        del records[draw.choice(list(records))]
    reply.content = RecordDict(records)


def drawn(draw, order, cluster):
    """A hostile reply."""
    reply = answer_to(order, cluster, {name: value + 1 for name, value in START.items()}, steps=1)
    if draw.random() < 0.05:
        return Message(
            Error(draw.randrange(999), draw.choice([None, "", "\n\n", "x\nfaults: [{}]", "\x1b" * 9999])),
            reply_to=order,
        )
    if draw.random() < 0.05:
        made = KINDS[draw.choice(sorted(KINDS))](order, reply)
        return reply if made is None else made
    for _ in range(draw.randint(1, 3)):
        if set(reply.content) != {"arrays", "metrics", "report"} or not isinstance(
            reply.content["arrays"], ArrayRecord
        ):
            break
        if (
            not reply.content["arrays"]
            or "json" not in reply.content["report"]
            or not isinstance(reply.content["metrics"], MetricRecord)
        ):
            break
        try:
            draw.choice([change_report, change_report, change_metrics, change_array, change_records])(draw, reply)
        except (ValueError, TypeError, RecursionError):
            # Not even Flower can say that: numbers of its messages have 64 bits, and JSON has to be parsed again.
            break
    return reply


def whole(taken):
    """Tell whether an accepted reply holds what strategies and reports go by."""
    arrays, metrics = taken.message.content["arrays"], taken.message.content["metrics"]
    good = list(arrays) == list(START)
    for name, value in START.items():
        found = arrays[name].numpy()
        good &= found.shape == tuple(value.shape) and found.dtype == np.float32 and bool(np.isfinite(found).all())
    good &= (
        all(type(value) in (int, float) and math.isfinite(value) for value in metrics.values())
        and metrics["steps"] == 1
    )
    report = taken.report
    good &= report["cluster"] == 1 and report["state"]["cluster"] == 1 and report["plan"]["m"] == PLAN.m
    return good and len(json.dumps(report, allow_nan=False)) < 1 << 20


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in ("_run_id", "_node_id", "_task_id"):
        setattr(TaskIdentity, name, 1)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    draw, process = random.Random(options.seed), psutil.Process()
    bounds = RoundBounds(steps=1, max_weight=100.0, num_blocks=4, batch_size=8, num_devices={1: 2})
    intake = ReplyIntake({101: 1}, None, bounds)
    content = RecordDict({"arrays": to_arrays(START), "config": train_config(1, PLAN)})
    order = Message(content, dst_node_id=101, message_type=MessageType.TRAIN)
    order.metadata.__dict__["_message_id"] = "the order's"
    limit = process.memory_info().vms + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    accepted, reasons, began = 0, set(), None
    for i in range(options.number):
        taken = intake.take(order, drawn(draw, order, 1))
        if taken.reason is None:
            accepted += 1
            assert whole(taken), taken
        else:
            assert taken.cluster == 1 and taken.reason.isprintable() and 0 < len(taken.reason) <= 400, taken.reason
            assert "cannot be read" not in taken.reason, taken.reason
            assert taken.message.has_error() and taken.faults
            reasons.add(taken.reason[:40])
        if i == options.number // 10:
            gc.collect()
            began = process.memory_info().rss
    gc.collect()
    growth = process.memory_info().rss - began
    print(
        f"{options.number} replies: {accepted} accepted and whole, {options.number - accepted} refused for "
        f"{len(reasons)} kinds of reason; memory grew by {growth / 1e6:.1f} MB"
    )
    assert growth < GROWTH_BYTES


if __name__ == "__main__":
    main()
