"""Everything wrong that a client can answer: each kind makes of an honest reply one that must be refused."""

import io
import json
import math
import zipfile

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord

KINDS = {}
"""By name: called with the order and an honest reply to it; returns what is sent, None for nothing."""


def kind(make):
    KINDS[make.__name__.replace("_", " ")] = make
    return make


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
    report = json.loads(reply.content["report"]["json"])
    reply.content["report"] = ConfigRecord({"json": json.dumps(report | changes)})
    return reply


def with_state(reply, **changes):
    state = json.loads(reply.content["report"]["json"])["state"]
    return with_report(reply, state=state | changes)


def with_metrics(reply, **changes):
    reply.content["metrics"] = MetricRecord(dict(reply.content["metrics"]) | changes)
    return reply


def fault(reply, **changes):
    report = json.loads(reply.content["report"]["json"])
    record = {"kind": "device", "cluster": report["cluster"], "round": 1, "device": 0, "step": 1, "recovered": True}
    return with_report(reply, faults=[record | {"seconds": 1.0, "bytes": 0, "reason": "it stopped"} | changes])


# Arrays.


@kind
def a_missing_tensor(order, reply):
    del reply.content["arrays"][first(reply)[0]]
    return reply


@kind
def one_tensor_more(order, reply):
    reply.content["arrays"]["of nobody"] = Array(np.zeros(3, dtype=np.float32))
    return reply


@kind
def another_shape(order, reply):
    return with_array(reply, lambda a: Array(a.numpy()[..., :1]))


@kind
def the_same_numbers_in_another_shape(order, reply):
    return with_array(reply, lambda a: Array(a.numpy().reshape(-1, 1)))


@kind
def another_type(order, reply):
    return with_array(reply, lambda a: Array(a.numpy().astype(np.int32)))


@kind
def numbers_of_16_bits(order, reply):
    return with_array(reply, lambda a: Array(a.numpy().astype(np.float16)))


@kind
def the_other_byte_order(order, reply):
    return with_array(reply, lambda a: Array(a.numpy().astype(">f4")))


@kind
def complex_numbers(order, reply):
    return with_array(reply, lambda a: Array(a.numpy().astype(np.complex64)))


@kind
def junk_bytes(order, reply):
    return with_array(reply, lambda a: array_of(a, b"junk" * 20))


@kind
def no_bytes(order, reply):
    return with_array(reply, lambda a: array_of(a, b""))


@kind
def a_pickle(order, reply):
    file = io.BytesIO()
    np.save(file, np.array([{"an": "object"}], dtype=object), allow_pickle=True)
    return with_array(reply, lambda a: array_of(a, file.getvalue()))


@kind
def a_zip_file(order, reply):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("bomb.npy", b"\0" * 1_000_000)
    return with_array(reply, lambda a: array_of(a, file.getvalue()))


@kind
def a_serialization_of_its_own(order, reply):
    return with_array(reply, lambda a: array_of(a, a.data, stype="cloudpickle"))


@kind
def too_few_numbers(order, reply):
    return with_array(reply, lambda a: array_of(a, a.data[:-4]))


@kind
def too_many_numbers(order, reply):
    return with_array(reply, lambda a: array_of(a, a.data + b"\0" * 4))


@kind
def a_header_that_announces_a_huge_array(order, reply):
    return with_array(reply, lambda a: array_of(a, npy(header_of(a, shape=(2**34,)))))


@kind
def a_huge_array_in_words_and_header(order, reply):
    return with_array(reply, lambda a: array_of(a, npy(header_of(a, shape=(2**34, 8))), shape=(2**34, 8)))


@kind
def a_header_with_a_negative_shape(order, reply):
    return with_array(reply, lambda a: array_of(a, npy(header_of(a, shape=(-1, 2)))))


@kind
def a_header_of_another_type(order, reply):
    return with_array(reply, lambda a: array_of(a, npy(header_of(a, descr="<f8"), a.data[128:])))


@kind
def a_header_of_structures(order, reply):
    header = "{'descr': [('a', '<f4', (1000000,))], 'fortran_order': False, 'shape': (4,), }"
    return with_array(reply, lambda a: array_of(a, npy(header)))


@kind
def a_header_of_brackets(order, reply):
    return with_array(reply, lambda a: array_of(a, npy("(" * 60_000)))


@kind
def a_header_longer_than_the_file(order, reply):
    return with_array(reply, lambda a: array_of(a, b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{'descr'"))


@kind
def a_header_of_version_9(order, reply):
    return with_array(reply, lambda a: array_of(a, b"\x93NUMPY\x09\x00" + a.data[8:]))


@kind
def another_shape_in_words_alone(order, reply):
    return with_array(reply, lambda a: array_of(a, a.data, shape=(2**40,)))


@kind
def another_type_in_words_alone(order, reply):
    return with_array(reply, lambda a: array_of(a, a.data, dtype="float64"))


@kind
def a_type_that_there_is_none(order, reply):
    return with_array(reply, lambda a: array_of(a, a.data, dtype="float31"))


@kind
def one_NaN(order, reply):
    return with_array(
        reply,
        lambda a: Array(
            np.where(np.arange(a.numpy().size).reshape(a.shape) == 1, np.nan, a.numpy()).astype(np.float32)
        ),
    )  # noqa: E501


@kind
def one_infinity(order, reply):
    return with_array(reply, lambda a: Array(np.full(a.shape, -np.inf, dtype=np.float32)))


# Records.


@kind
def a_second_record_of_arrays(order, reply):
    reply.content["more"] = ArrayRecord({"w": Array(np.zeros(2, dtype=np.float32))})
    return reply


@kind
def a_second_record_of_metrics(order, reply):
    reply.content["more"] = MetricRecord({"num-examples": 10**6})
    return reply


@kind
def a_second_report(order, reply):
    reply.content["more"] = ConfigRecord({"json": "{}"})
    return reply


@kind
def no_arrays(order, reply):
    del reply.content["arrays"]
    return reply


@kind
def no_metrics(order, reply):
    del reply.content["metrics"]
    return reply


@kind
def no_report(order, reply):
    del reply.content["report"]
    return reply


@kind
def nothing_at_all(order, reply):
    reply.content.clear()
    return reply


@kind
def arrays_of_another_name(order, reply):
    reply.content["weights"] = reply.content["arrays"]
    del reply.content["arrays"]
    return reply


@kind
def metrics_in_place_of_arrays(order, reply):
    del reply.content["arrays"]
    reply.content["arrays"] = MetricRecord({"num-examples": 1})
    return reply


# Metrics.


@kind
def an_extra_metric(order, reply):
    return with_metrics(reply, accuracy=1.0)


@kind
def a_missing_weight(order, reply):
    del reply.content["metrics"]["num-examples"]
    return reply


@kind
def a_missing_loss(order, reply):
    del reply.content["metrics"]["loss"]
    return reply


@kind
def a_list_for_the_weight(order, reply):
    return with_metrics(reply, **{"num-examples": [1, 2, 3]})


@kind
def an_empty_list_for_the_loss(order, reply):
    return with_metrics(reply, loss=[])


@kind
def a_weight_of_NaN(order, reply):
    return with_metrics(reply, **{"num-examples": math.nan})


@kind
def a_weight_below_zero(order, reply):
    return with_metrics(reply, **{"num-examples": -5})


@kind
def a_weight_of_zero(order, reply):
    return with_metrics(reply, **{"num-examples": 0})


@kind
def a_weight_beyond_all(order, reply):
    return with_metrics(reply, **{"num-examples": 1e308})


@kind
def a_loss_of_infinity(order, reply):
    return with_metrics(reply, loss=math.inf)


@kind
def a_loss_below_zero(order, reply):
    return with_metrics(reply, loss=-1.0)


@kind
def a_loss_beyond_all(order, reply):
    return with_metrics(reply, loss=1e308)


@kind
def steps_of_NaN(order, reply):
    return with_metrics(reply, steps=math.nan)


@kind
def no_steps(order, reply):
    return with_metrics(reply, steps=0)


@kind
def a_duration_below_zero(order, reply):
    return with_metrics(reply, **{"wall-s": -1.0})


# Reports.


@kind
def a_report_that_is_no_JSON(order, reply):
    reply.content["report"] = ConfigRecord({"json": "{"})
    return reply


@kind
def a_report_of_bytes(order, reply):
    reply.content["report"] = ConfigRecord({"json": b"\x80\x04junk"})
    return reply


@kind
def a_report_without_its_key(order, reply):
    reply.content["report"] = ConfigRecord({})
    return reply


@kind
def a_report_with_a_second_key(order, reply):
    reply.content["report"]["more"] = "text"
    return reply


@kind
def a_report_that_is_a_list(order, reply):
    reply.content["report"] = ConfigRecord({"json": "[1, 2]"})
    return reply


@kind
def a_report_of_brackets(order, reply):
    reply.content["report"] = ConfigRecord({"json": "[" * 100_000})
    return reply


@kind
def a_report_without_end(order, reply):
    return with_report(reply, timeline=[["F", 0, 0, 0.0, 0.0]] * 400_000)


@kind
def a_report_with_NaN(order, reply):
    return with_report(reply, prepare_s=math.nan)


@kind
def a_report_with_a_number_beyond_all(order, reply):
    text = json.dumps(json.loads(reply.content["report"]["json"]) | {"prepare_s": 7}).replace("7", "1e999")
    reply.content["report"] = ConfigRecord({"json": text})
    return reply


@kind
def a_report_with_a_key_of_its_own(order, reply):
    return with_report(reply, **{"\x1b[31mred\n": 1})


@kind
def a_report_without_a_plan(order, reply):
    report = json.loads(reply.content["report"]["json"])
    del report["plan"]
    reply.content["report"] = ConfigRecord({"json": json.dumps(report)})
    return reply


@kind
def faults_that_are_a_number(order, reply):
    return with_report(reply, faults=5)


@kind
def faults_without_keys(order, reply):
    return with_report(reply, faults=[{}])


@kind
def a_fault_of_another_cluster(order, reply):
    return fault(reply, cluster=77)


@kind
def a_fault_of_another_round(order, reply):
    return fault(reply, round=9)


@kind
def a_fault_of_an_unknown_kind(order, reply):
    return fault(reply, kind="\x1b]0;title\x07")


@kind
def a_fault_whose_seconds_are_text(order, reply):
    return fault(reply, seconds="soon")


@kind
def a_thousand_and_one_faults(order, reply):
    report = json.loads(fault(reply).content["report"]["json"])
    return with_report(reply, faults=report["faults"] * 1001)


@kind
def another_clusters_number(order, reply):
    return with_report(reply, cluster=0 if json.loads(reply.content["report"]["json"])["cluster"] else 1)


@kind
def a_cluster_that_there_is_none(order, reply):
    return with_report(reply, cluster=10**9)


@kind
def the_state_of_another_cluster(order, reply):
    return with_state(reply, cluster=0 if json.loads(reply.content["report"]["json"])["cluster"] else 1)


@kind
def the_state_of_another_node(order, reply):
    return with_state(reply, node_id=1)


@kind
def a_state_that_is_text(order, reply):
    return with_report(reply, state="fine")


@kind
def a_state_without_devices(order, reply):
    return with_state(reply, devices=[])


@kind
def a_device_of_no_frequency(order, reply):
    state = json.loads(reply.content["report"]["json"])["state"]
    return with_state(reply, devices=[device | {"frequency": 0.0} for device in state["devices"]])


@kind
def a_device_with_a_key_of_its_own(order, reply):
    state = json.loads(reply.content["report"]["json"])["state"]
    return with_state(reply, devices=[device | {"colour": "red"} for device in state["devices"]])


@kind
def examples_below_zero(order, reply):
    return with_report(reply, num_examples=-1)


@kind
def examples_that_are_true(order, reply):
    return with_report(reply, num_examples=True)


@kind
def a_plan_with_micro_batches_beyond_all(order, reply):
    plan = json.loads(reply.content["report"]["json"])["plan"]
    return with_report(reply, plan=plan | {"m": 10**9})


@kind
def a_plan_for_another_model(order, reply):
    plan = json.loads(reply.content["report"]["json"])["plan"]
    return with_report(reply, plan=plan | {"delta": [10**12] * len(plan["delta"])})


@kind
def a_plan_with_an_unknown_schedule(order, reply):
    plan = json.loads(reply.content["report"]["json"])["plan"]
    return with_report(reply, plan=plan | {"schedule": "none"})


@kind
def a_timeline_of_a_stage_that_there_is_none(order, reply):
    return with_report(reply, timeline=[["F", 10**9, 0, 0.0, 1.0]])


@kind
def a_timeline_of_numbers(order, reply):
    return with_report(reply, timeline=[1, 2, 3])


@kind
def a_device_that_there_is_none(order, reply):
    return with_report(reply, devices={"99999": {"blocks": 1, "busy_s": 1.0}})


@kind
def a_device_with_text_for_bytes(order, reply):
    return with_report(reply, devices={"0": {"blocks": 1, "busy_s": 1.0, "peak_bytes": "many", "idle_bytes": "few"}})


# No answer.


@kind
def an_error_with_terminal_codes(order, reply):
    return Message(Error(0, "\x1b[2J\x1b[31m" + "boom\r\nround 1: all is well\n" * 1000), reply_to=order)


@kind
def an_error_without_a_reason(order, reply):
    return Message(Error(0), reply_to=order)


@kind
def an_error_with_junk_for_faults(order, reply):
    return Message(Error(0, 'no power\nfaults: [5, {"kind": []}]'), reply_to=order)


@kind
def an_answer_to_another_message(order, reply):
    reply.metadata.__dict__["_reply_to_message_id"] = "0" * 32
    return reply


@kind
def nothing(order, reply):
    return None
