"""Checks of a node's answer before round 1: the run names the node whose answer nobody can read."""

import json

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from client_pipeline.runtime.ray.machine import machine_facts
from flower_app.training.cluster_setup import set_up_clusters
from helpers.cluster_states import states
from helpers.fake_grid import FIRST_NODE, FakeGrid

pytestmark = pytest.mark.usefixtures("flower_process")


def set_up(answer, hear=lambda message: None, **options):
    """Set up two clusters; the second node answers by ``answer(its honest answer)``."""

    def client(message, cluster):
        hear(message)
        state = states()[cluster].to_dict() | {"node_id": message.metadata.dst_node_id, "num_examples": 10}
        told = {"state": state, "truncated": 0, "restored": False}
        told = answer(told) if cluster else told
        if isinstance(told, RecordDict | Error):
            return Message(told, reply_to=message)
        return Message(RecordDict({"config": ConfigRecord({"json": json.dumps(told)})}), reply_to=message)

    grid = FakeGrid(client, 2)
    return set_up_clusters(grid, list(grid.nodes), {}, {}, 2, 16, **options)


def with_state(**changes):
    return lambda told: told | {"state": told["state"] | changes}


def with_device(**changes):
    return lambda told: (
        told | {"state": told["state"] | {"devices": [device | changes for device in told["state"]["devices"]]}}
    )


def test_an_honest_answer_is_taken_as_it_is():
    second = set_up(lambda told: told).states[1]
    expected = states()[1]
    expected.node_id, expected.num_examples = FIRST_NODE + 1, 10
    assert second == expected


def test_each_node_is_told_where_it_may_pull_weights_and_no_other_nodes_token():
    addresses = {}

    def hear(message):
        addresses[message.metadata.dst_node_id] = message.content["config"]["pull-from"]

    set_up(lambda told: told, hear, pulls={FIRST_NODE: "first"})
    assert addresses == {FIRST_NODE: "first", FIRST_NODE + 1: ""}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda told: 5, "set-up: expected an object, found 5"),
        (lambda told: {}, "set-up: state is missing"),
        (lambda told: told | {"extra": 1}, "set-up: unknown key 'extra'"),
        (lambda told: told | {"machine": {}}, "set-up.machine: host is missing"),
        (
            lambda told: told | {"machine": machine_facts() | {"host": "x" * 201}},
            "set-up.machine.host: expected text of at most 200 characters",
        ),
        (
            lambda told: told | {"machine": machine_facts() | {"cores": 0}},
            "set-up.machine.cores: expected a whole number from 1",
        ),
        (
            lambda told: told | {"device-machines": {"9": machine_facts()}},
            "set-up.device-machines: expected one of 0, 1",
        ),
        (lambda told: told | {"device-machines": {"0": 5}}, "set-up.device-machines.0: expected an object, found 5"),
        (lambda told: told | {"truncated": -1}, "set-up.truncated: expected a whole number of at least 0, found -1"),
        (lambda told: told | {"state": []}, "set-up.state.cluster: expected a whole number from 0 to 1, found None"),
        (with_state(cluster=2), "set-up.state.cluster: expected a whole number from 0 to 1, found 2"),
        (with_state(cluster=True), "set-up.state.cluster: expected a whole number from 0 to 1, found True"),
        (with_state(node_id=FIRST_NODE), f"state.node_id: expected {FIRST_NODE + 1}, found {FIRST_NODE}"),
        (with_state(devices=[]), "state.devices: expected 1 or more devices, found 0"),
        (with_state(devices={}), "state.devices: expected a list, found an object of 0 entries"),
        (with_state(num_examples=0.5), "state.num_examples: expected a whole number"),
        (with_state(block_memory=float("nan")), "set-up: expected JSON, NaN is not a JSON number"),
        (with_device(frequency=0.0), r"state.devices\[0\].frequency: expected a finite number from 1e-30 to 1e\+21"),
        (with_device(memory="much"), r"state.devices\[0\].memory: expected a finite number from 0 to 1e\+21, found 'm"),
        (with_device(colour="red"), r"state.devices\[0\]: unknown key 'colour'"),
        (lambda told: RecordDict(), "expected one record config, found"),
        (lambda told: RecordDict({"config": ArrayRecord({})}), "expected one record config, found 'config'"),
        (lambda told: RecordDict({"config": ConfigRecord({"json": b"{}"})}), "set-up: expected text, found b'{}'"),
        (lambda told: RecordDict({"config": ConfigRecord({"json": "[" * 100000})}), "set-up: expected JSON, maximum"),
        (lambda told: RecordDict({"config": ConfigRecord({"json": " " * 2**21})}), "expected at most 1048576 charact"),
    ],
)
def test_an_answer_that_cannot_be_read_ends_the_set_up_with_the_nodes_name(answer, words):
    with pytest.raises(Exception) as raised:
        set_up(answer)
    assert raised.type is RuntimeError and raised.match(f"set-up: node {FIRST_NODE + 1}: its answer .*{words}")
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    "answer",
    [lambda told: {"error": "no such\n\x1b[31mfile" + "x" * 9999}, lambda told: Error(0, "no\n\x1b[2Jpower" * 9999)],
)
def test_a_nodes_own_words_are_printable_and_short(answer):
    with pytest.raises((ValueError, RuntimeError), match=r"(no such|no)\\n\\x1b") as raised:
        set_up(answer)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 2100


def test_arrays_in_an_answer_are_not_even_looked_at():
    junk = ArrayRecord({"w": Array("float32", (2**40,), "numpy.ndarray", b"junk")})
    with pytest.raises(RuntimeError, match="expected one record config, found 'config arrays'"):
        set_up(lambda told: RecordDict({"config": ConfigRecord({"json": "{}"}), "arrays": junk}))
