"""Replies that cannot be put together, and replies that would fill the memory."""

import json
import subprocess
import sys

import pytest
import torch

from helpers.wire_grid import HOSTILE, LARGE_START, NUM_CLUSTERS, START, change_array, round_of
from strategies.grid.reply_pieces import _Pieces
from strategies.grid.update_spool import UpdateSpool

pytestmark = pytest.mark.usefixtures("flower_process")


def without_first(kind):
    return lambda reply, pieces: {
        name: piece
        for name, piece in pieces.items()
        if name != next(n for n, p in pieces.items() if p.startswith(kind))
    }


def junk(kind):
    def tamper(reply, pieces):
        name = next(name for name, piece in pieces.items() if piece.startswith(kind))
        head = pieces[name].split(b"\x00")[0].rpartition(b" ")[0]
        return pieces | {name: head + b" 4\x00\xff\xfe{["}

    return tamper


TAMPERINGS = {
    "a chunk is missing": without_first(b"ArrayChunk "),
    "an array is missing": without_first(b"Array "),
    "a record is missing": without_first(b"MetricRecord "),
    "chunks that there are none of": lambda reply, pieces: change_array(pieces, arraychunk_ids=[0, 7]),
    "chunks that are text": lambda reply, pieces: change_array(pieces, arraychunk_ids="all"),
    "a shape that is text": lambda reply, pieces: change_array(pieces, shape="round"),
    "a type that is a number": lambda reply, pieces: change_array(pieces, dtype=5),
    "an array of junk": junk(b"Array "),
    "records of junk": junk(b"RecordDict "),
    "metrics of junk": junk(b"MetricRecord "),
    "a report of junk": junk(b"ConfigRecord "),
    "no head": lambda reply, pieces: pieces | {reply.object_id: b"junk"},
    "an unknown class": lambda reply, pieces: pieces | {reply.object_id: b"Exploit  0\x00"},
    "one chunk three thousand times": lambda reply, pieces: change_array(pieces, arraychunk_ids=[0] * 3000),
}


@pytest.fixture(params=["in memory", "on disk"])
def spool_and_start(request, tmp_path):
    """Give the place where arrays are put together, and weights of a size for it."""
    return (None, START) if request.param == "in memory" else (UpdateSpool(tmp_path), LARGE_START)


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_reply_that_cannot_be_put_together_is_its_clusters_failure(name, spool_and_start):
    weights, record = round_of(TAMPERINGS[name], *spool_and_start)
    assert [entry["cluster"] for entry in record["failed"]] == [HOSTILE]
    reason = record["failed"][0]["reason"]
    assert reason.startswith("its reply cannot be put together: ") and reason.isprintable()
    assert ("more than was asked for" in reason) == ("times" in name)
    for name, value in spool_and_start[1].items():
        torch.testing.assert_close(weights[name], value + 0.5)


def test_whole_replies_pass_as_they_are(spool_and_start):
    weights, record = round_of(lambda reply, pieces: pieces, *spool_and_start)
    assert record["failed"] == []
    for name, value in spool_and_start[1].items():
        torch.testing.assert_close(weights[name], value + 1)


def test_records_of_many_bytes_are_refused_unread():
    """Heads of arrays, reports and metrics have a bound of their own."""

    def tamper(reply, pieces):
        return change_array(pieces, dtype="x" * (1 << 22))

    _, record = round_of(tamper)
    (failed,) = record["failed"]
    assert "its records come to more than 4194304 bytes" in failed["reason"]


def test_what_a_reply_says_that_it_answers_does_not_count():
    """The pieces come from the client, and with them the id of the message that they answer."""

    def tamper(reply, pieces):
        own = reply.metadata.reply_to_message_id.encode()
        return pieces | {reply.object_id: pieces[reply.object_id].replace(own, b"0" * len(own))}

    _, record = round_of(tamper)
    assert record["failed"] == [] and len(record["clusters"]) == NUM_CLUSTERS


def test_the_chunks_of_one_array_are_no_longer_fetched_once_they_are_too_many():
    """The bytes of an array were counted once all of its chunks were in memory."""
    chunk, fetched = b"ArrayChunk  1000\x00" + bytes(1000), []
    names = [f"{number:064x}" for number in range(2000)]

    def pull(name):
        fetched.append(name)
        return chunk

    body = {"dtype": "uint8", "shape": [2_000_000], "stype": "numpy.ndarray", "arraychunk_ids": list(range(2000))}
    text = json.dumps(body)
    pieces = _Pieces(pull, 3000, None)
    with pytest.raises(ValueError, match="its arrays come to more than 3000 bytes"):
        pieces._array(f"Array {','.join(names)} {len(text)}\x00{text}".encode())
    # Each thread may have begun with one more.
    assert 3 <= len(fetched) < 200


BOMB = """
import resource, sys
from flwr.supercore.task_identity import TaskIdentity
for name in ("_run_id", "_node_id", "_task_id"):
    setattr(TaskIdentity, name, 1)
from helpers import wire_grid
wire_grid.round_of(lambda reply, pieces: pieces)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 200_000_000, size + 200_000_000))
million = [0] * 1_000_000
_, record = wire_grid.round_of(lambda reply, pieces: wire_grid.change_array(pieces, arraychunk_ids=million))
(failed,) = record["failed"]
assert "more than was asked for" in failed["reason"], failed
print("refused")
"""


@pytest.mark.slow
def test_one_chunk_a_million_times_takes_no_memory():
    """Four gigabytes of three megabytes, in a process that may take 200 MB more than it has."""
    done = subprocess.run([sys.executable, "-c", BOMB], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.endswith("refused\n"), done.stderr[-2000:]
