"""Whatever a client answers: what is wrong makes that client failed for the round, by name, and nothing else."""

import json
import resource
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Message, MessageType, RecordDict

from client_pipeline.link.compression import CompressionConfig
from client_pipeline.link.update_codec import ErrorFeedback, UpdateCodec
from helpers.fake_grid import FakeGrid
from helpers.hostile_reply import HOSTILE, NUM_CLUSTERS, START, honest, round_of, trained
from helpers.malformed import KINDS, fault, with_metrics, with_report
from helpers.replies import answer_to
from strategies.baselines.flower_strategies import make_stock
from strategies.grid.intake import RoundBounds
from strategies.grid.recording import RecordingGrid, RoundFailed
from strategies.records import to_arrays, to_tensors

pytestmark = pytest.mark.usefixtures("flower_process")


@pytest.fixture(scope="module")
def without():
    """Return the weighted mean of the others alone."""
    others = [trained(n) for n in range(HOSTILE)]
    return {name: sum((1 + n) / 10 * weights[name].double() for n, weights in enumerate(others)) for name in START}


@cache
def round_with_nothing(strategy):
    """The weights that a round comes to in which the client does not answer: the same in every test."""
    weights, _ = round_of(KINDS["nothing"], strategy)
    return weights


@pytest.mark.parametrize("strategy", ["FedAvg", "Krum"])
@pytest.mark.parametrize("name", KINDS)
def test_a_malformed_reply_costs_its_own_cluster_the_round_and_nothing_else(name, strategy, without):
    found, record = round_of(KINDS[name], strategy)
    alone = round_with_nothing(strategy)
    assert {key: value.tolist() for key, value in found.items()} == {
        key: value.tolist() for key, value in alone.items()
    }
    if strategy == "FedAvg":
        for key, value in without.items():
            torch.testing.assert_close(found[key].double(), value, rtol=1e-6, atol=1e-6)
    assert [entry["cluster"] for entry in record["failed"]] == [HOSTILE]
    (failed,) = record["failed"]
    assert 0 < len(failed["reason"]) <= 400 and failed["reason"].isprintable()
    assert len(record["faults"]) == 1
    (recorded,) = record["faults"]
    assert (recorded["cluster"], recorded["recovered"]) == (HOSTILE, False) and recorded["reason"].isprintable()
    assert [report["cluster"] for report in record["clusters"]] == [0, 1, 2, 3]
    assert record["weight"] == 10 and record["train_loss"] == pytest.approx(3.0)
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_all_kinds_at_once_leave_a_round_to_the_one_that_is_honest():
    """Every cluster but one is hostile, each in its own way."""
    kinds = list(KINDS.values())

    def client(message, cluster):
        reply = honest(message, cluster)
        return kinds[cluster - 1](message, reply) if cluster else reply

    grid = FakeGrid(client, 1 + len(kinds))
    recording = RecordingGrid(grid, grid.clusters)
    server = make_stock("FedAvg", {}, 1 + len(kinds))
    result = server.start(recording, initial_arrays=to_arrays(START), num_rounds=1)
    for name, value in to_tensors(result.arrays).items():
        torch.testing.assert_close(value, trained(0)[name])
    assert [entry["cluster"] for entry in recording.last_round["failed"]] == list(range(1, 1 + len(kinds)))


CODEC = UpdateCodec(CompressionConfig(update="top-k", density=0.5))


def compressed(change):
    def client(message, cluster):
        begun = to_tensors(message.content.array_records["arrays"])
        update = ErrorFeedback(CODEC).compress(begun, trained(cluster))
        reply = answer_to(message, cluster, update, weight=1 + cluster)
        return change(reply) if cluster == HOSTILE else reply

    grid = FakeGrid(client, NUM_CLUSTERS)
    recording = RecordingGrid(grid, grid.clusters, codec=CODEC)
    make_stock("FedAvg", {}, NUM_CLUSTERS).start(recording, initial_arrays=to_arrays(START), num_rounds=1)
    return recording.last_round


def part(name, value):
    def change(reply):
        if value is None:
            del reply.content["arrays"][name]
        else:
            reply.content["arrays"][name] = Array(value)
        return reply

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (part("embedding.w/index", None), "'embedding.w/index' is missing"),
        (part("embedding.w", np.zeros(3, dtype=np.float32)), "'embedding.w' belongs to no tensor that was sent"),
        (part("embedding.w/values", np.zeros(7, dtype=np.float32)), r"expected float32 \[3\], found 'float32' \[7\]"),
        (part("embedding.w/index", np.zeros(3, dtype=np.int64)), r"expected int32 \[3\], found 'int64' \[3\]"),
        (part("embedding.w/index", np.array([0, 1, 2**31 - 1], dtype=np.int32)), "rising indices from 0 to 5"),
        (part("embedding.w/index", np.array([-1, 1, 2], dtype=np.int32)), "rising indices from 0 to 5"),
        (part("embedding.w/values", np.full(3, np.nan, dtype=np.float32)), "NaN or Inf"),
        (part("embedding.w/values", np.array([2**30, 0, 1], dtype="<U8")), "expected float32"),
    ],
)
def test_a_malformed_update_is_its_clusters_failure(change, words):
    record = compressed(change)
    assert [entry["cluster"] for entry in record["failed"]] == [HOSTILE]
    (failed,) = record["failed"]
    with pytest.raises(ValueError, match=words):
        raise ValueError(failed["reason"])


def test_text_of_a_client_is_printable_and_short_wherever_it_goes(caplog):
    """A reason with terminal codes and line breaks used to write lines of its own into the server's log."""
    hostile = "\x1b[2Jgone\r\nround 1: all is well \u202e" + "x" * 5000

    def recovered(order, reply):
        return fault(reply, reason=hostile)

    def failing(order, reply):
        return KINDS["an error with terminal codes"](order, reply)

    for answer in (recovered, failing):
        caplog.clear()
        _, record = round_of(answer)
        (entry,) = record["faults"]
        assert entry["reason"].isprintable() and len(entry["reason"]) <= 400
        texts = [line.getMessage() for line in caplog.records]
        assert any("all is well" in text for text in texts)
        assert all(text.replace("\t", "").isprintable() and len(text) < 1000 for text in texts)


def bounded(answer, **bounds):
    return round_of(answer, bounds=RoundBounds(**bounds))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda order, reply: with_metrics(reply, steps=2), "metrics.steps: expected 1, as ordered, found 2"),
        (
            lambda order, reply: with_metrics(reply, **{"num-examples": 7}),
            "metrics.num-examples: expected a number above 0, and at most 6, found 7",
        ),
        (
            lambda order, reply: with_report(reply, plan={"delta": [3, 0], "order": [0], "m": 1}),
            "report.plan: delta [3, 0] sums to 3, expected the model's L = 2 TEBs; change delta or "
            "model.encoder-layers",
        ),
        (
            lambda order, reply: with_report(reply, plan={"delta": [2, 0, 0], "order": [0], "m": 1}),
            "report.plan: delta has 3 entries, expected one for each of the K = 2 devices (0 for a device without a "
            "segment)",
        ),
        (
            lambda order, reply: with_report(reply, plan={"delta": [2, 0], "order": [0], "m": 9}),
            "report.plan: m = 9 micro-batches, expected 1 <= m <= b = 8; change m or batch-size",
        ),
    ],
)
def test_what_the_runs_configuration_does_not_allow_is_refused(answer, words):
    _, record = bounded(
        answer, steps=1, max_weight=6.0, num_blocks=2, batch_size=8, num_devices=dict.fromkeys(range(5), 2)
    )
    assert record["failed"] == [{"cluster": HOSTILE, "reason": words}]


def rounds(answered, borne):
    """Rounds with and without any answer, until one ends the run; returns how many were done."""
    done = []
    for answers in answered:
        grid = FakeGrid(lambda message, n, answers=answers: honest(message, n) if answers else None, 2)
        if not done:
            recording = RecordingGrid(grid, grid.clusters, borne=borne)
        recording._grid = grid
        content = {"arrays": to_arrays(START), "config": ConfigRecord({"server-round": 1 + len(done)})}
        orders = [
            Message(RecordDict(dict(content)), dst_node_id=node, message_type=MessageType.TRAIN) for node in grid.nodes
        ]
        try:
            recording.send_and_receive(orders)
        except RoundFailed:
            return len(done)
        done.append(answers)
    return len(done)


@pytest.mark.parametrize(
    ("borne", "answered", "done"),
    [
        (2, [True, False, False, False], 3),
        (2, [True, False, False, True, False, False, False], 6),
        (1, [True, False, False], 2),
        (0, [True, False], 1),
        (2, [False], 0),
    ],
)
def test_as_many_rounds_without_an_answer_are_borne_in_a_row_as_was_said(borne, answered, done):
    assert rounds(answered, borne) == done


LIMIT = """
import resource, sys
import flwr, torch
from flwr.supercore.task_identity import TaskIdentity
for name in ("_run_id", "_node_id", "_task_id"):
    setattr(TaskIdentity, name, 1)
from helpers import hostile_reply
from helpers.malformed import KINDS, array_of, npy, header_of, with_array
hostile_reply.round_of(lambda order, reply: reply)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + {room}, size + {room}))
for shape in ((2**27,), (2**30,), (2**34, 8), (2**62,), (2**63, 2**63), (0, 2**62)):
    for words in (None, shape):
        _, record = hostile_reply.round_of(
            lambda order, reply: with_array(reply, lambda a: array_of(a, npy(header_of(a, shape=shape)), shape=words))
        )
        (failed,) = record["failed"]
        assert failed["cluster"] == hostile_reply.HOSTILE and "expected float32" in failed["reason"], failed
print("refused")
"""


@pytest.mark.slow
def test_headers_that_announce_huge_arrays_cost_no_memory():
    """In a process that may take 200 MB more than it has: the smallest of them would be 512 MB."""
    assert resource.getrlimit(resource.RLIMIT_AS)[0] in (resource.RLIM_INFINITY, -1)
    done = subprocess.run(
        [sys.executable, "-c", LIMIT.format(room=200_000_000)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout.endswith("refused\n"), done.stderr[-2000:]
