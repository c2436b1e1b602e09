"""Updates that wait on disk: read as they were written, gone with the last who has them, and a full disk by name."""

import errno
import itertools
import os
import sys
import threading
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import Array, ConfigRecord, Message, MessageType, RecordDict

from client_pipeline.link.compression import CompressionConfig
from client_pipeline.link.update_codec import ErrorFeedback, UpdateCodec
from helpers import hostile_reply
from helpers.fake_grid import FakeGrid
from helpers.hostile_reply import NUM_CLUSTERS, START, honest
from helpers.replies import answer_to
from strategies.baselines.flower_strategies import make_stock
from strategies.grid import intake
from strategies.grid.recording import RecordingGrid
from strategies.grid.update_spool import SpooledArray, SpoolError, UpdateSpool
from strategies.records import to_arrays, to_tensors

pytestmark = pytest.mark.usefixtures("flower_process")


def open_files(folder):
    """Count the files that this process has open in a folder."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue
    return sum(link.startswith(str(folder)) for link in links)


ARRAYS = {
    **{kind: (np.arange(24) - 7).astype(kind).reshape(2, 3, 4) for kind in ("f2", "f4", "f8", "i1", "i4", "i8", "u1")},
    "bool": np.array([True, False]),
    "columns first": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "scalar": np.array(2.5, dtype=np.float32),
    "empty": np.empty((0, 3), dtype=np.float32),
    "one": np.ones(1),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_is_read_as_it_was_written(name, tmp_path):
    array = Array(ARRAYS[name])
    aside = UpdateSpool(tmp_path).put_aside(array)
    assert isinstance(aside, Array)
    assert (aside.dtype, aside.shape, aside.stype, aside.data) == (array.dtype, array.shape, array.stype, array.data)
    values = aside.numpy()
    np.testing.assert_array_equal(values, ARRAYS[name])
    assert values.dtype == ARRAYS[name].dtype and values.flags.writeable
    assert values.flags.f_contiguous == ARRAYS[name].flags.f_contiguous
    # What a strategy does to its own values stays there.
    values[...] = 0
    np.testing.assert_array_equal(aside.numpy(), ARRAYS[name])


def test_a_file_has_no_name_and_goes_with_the_last_array_of_its_round(tmp_path):
    spool = UpdateSpool(tmp_path)
    first = [spool.put_aside(Array(np.full(3, float(n)))) for n in range(2)]
    assert spool.put_aside(first[0]) is first[0]
    # A process that is killed here leaves nothing.
    assert os.listdir(tmp_path) == [] and open_files(tmp_path) == 1
    spool.begin_round()
    second = spool.put_aside(Array(np.full(3, 9.0)))
    assert open_files(tmp_path) == 2
    del first[0]
    assert first[0].numpy().tolist() == [1.0] * 3
    del first[0]
    assert open_files(tmp_path) == 1 and second.numpy().tolist() == [9.0] * 3
    spool.begin_round()
    del second
    assert open_files(tmp_path) == 0


def test_several_threads_write_to_one_file(tmp_path):
    spool, written = UpdateSpool(tmp_path), {}

    def write(number):
        written[number] = [spool.put_aside(Array(np.full(1000, float(number)))) for _ in range(20)]

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert open_files(tmp_path) == 1
    assert all((array.numpy() == number).all() for number, arrays in written.items() for array in arrays)


def interrupted(act, step, other):
    """Run ``act`` in a thread that stops before a step of the interpreter in the spool's own functions.

    Another thread runs ``other`` then: to its end, or as far as it comes while the first one has what it waits for.
    Returns whether there is such a step.
    """
    steps, threads = itertools.count(), []

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.endswith("update_spool.py"):
            return None
        frame.f_trace_opcodes = True
        if next(steps) == step:
            threads.append(threading.Thread(target=other))
            threads[0].start()
            threads[0].join(0.01)
        return trace

    def traced():
        sys.settrace(trace)
        try:
            act()
        finally:
            sys.settrace(None)

    first = threading.Thread(target=traced)
    first.start()
    first.join()
    for thread in threads:
        thread.join()
    return bool(threads)


@pytest.mark.parametrize("begun", [False, True], ids=["a new file", "a file that is there"])
def test_a_thread_that_is_interrupted_anywhere_writes_beside_another(begun, tmp_path):
    for step in itertools.count():
        folder, written = tmp_path / str(step), {}
        folder.mkdir()
        spool = UpdateSpool(folder)
        if begun:
            written[0] = spool.put_aside(Array(np.full(2, 0.0)))
        arrays = {number: Array(np.full(2 + number, float(number))) for number in (1, 2)}

        def write(number, spool=spool, arrays=arrays, written=written):
            written[number] = spool.put_aside(arrays[number])

        if not interrupted(partial(write, 1), step, partial(write, 2)):
            break
        values = {number: array.numpy().tolist() for number, array in written.items()}
        assert values == {number: [float(number)] * (2 + number) for number in written} and {1, 2} <= written.keys()
        # A round has one file, whoever was first.
        assert open_files(folder) == 1
    assert step > 20


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_the_run_and_costs_no_cluster_its_round(tmp_path, monkeypatch):
    monkeypatch.setattr(intake, "SMALL_BYTES", 0)
    monkeypatch.setattr(os, "pwrite", full)
    grid = FakeGrid(honest, NUM_CLUSTERS)
    recording = RecordingGrid(grid, grid.clusters, spool=UpdateSpool(tmp_path))
    with pytest.raises(SpoolError, match=str(tmp_path)):
        make_stock("FedAvg", {}, NUM_CLUSTERS).start(recording, initial_arrays=to_arrays(START), num_rounds=1)


@pytest.mark.parametrize("strategy", ["FedAvg", "FedMedian", "FedTrimmedAvg", "Krum", "FedAvgM", "FedAdam"])
def test_flowers_strategies_make_the_same_of_updates_on_disk(strategy, tmp_path, monkeypatch):
    expected, _ = hostile_reply.round_of(lambda order, reply: reply, strategy)
    monkeypatch.setattr(intake, "SMALL_BYTES", 0)
    spool, written = UpdateSpool(tmp_path), []
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *arguments: written.append(arguments) or write(*arguments))
    found, record = hostile_reply.round_of(lambda order, reply: reply, strategy, spool=spool)
    assert record["failed"] == [] and len(written) == len(START) * NUM_CLUSTERS
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in expected.items()
    }


def exchange(recording, grid):
    orders = []
    for node in grid.nodes:
        content = {"arrays": to_arrays(START), "config": ConfigRecord({"server-round": 1})}
        orders.append(Message(RecordDict(content), dst_node_id=node, message_type=MessageType.TRAIN))
    return recording.send_and_receive(orders)


def test_a_rounds_file_is_gone_when_the_next_round_is_out(tmp_path, monkeypatch):
    """Flower's ``start`` keeps the list of the last round's replies until it gets the next one."""
    monkeypatch.setattr(intake, "SMALL_BYTES", 0)
    numbers = []

    def client(message, cluster):
        numbers.append(open_files(tmp_path))
        return honest(message, cluster)

    grid = FakeGrid(client, NUM_CLUSTERS)
    recording = RecordingGrid(grid, grid.clusters, spool=UpdateSpool(tmp_path))
    replies = exchange(recording, grid)
    assert len(replies) == NUM_CLUSTERS and open_files(tmp_path) == 1
    reply = exchange(recording, grid)[0]
    assert replies == [] and numbers == [0] * 2 * NUM_CLUSTERS
    # Who keeps a reply keeps its values.
    exchange(recording, grid)
    np.testing.assert_array_equal(
        reply.content["arrays"]["embedding.w"].numpy(), hostile_reply.trained(0)["embedding.w"]
    )


@pytest.mark.parametrize("update", ["fp16", "int8", "int4", "top-k"])
def test_compressed_updates_are_decoded_one_by_one_to_the_same_weights(update, tmp_path, monkeypatch):
    codec = UpdateCodec(CompressionConfig(update=update))

    def client(message, cluster):
        begun = to_tensors(message.content.array_records["arrays"])
        return answer_to(message, cluster, ErrorFeedback(codec).compress(begun, hostile_reply.trained(cluster)))

    def weights():
        grid = FakeGrid(client, NUM_CLUSTERS)
        recording = RecordingGrid(grid, grid.clusters, codec=codec, spool=UpdateSpool(tmp_path))
        return [reply.content["arrays"] for reply in exchange(recording, grid)]

    in_memory = weights()
    monkeypatch.setattr(intake, "SMALL_BYTES", 0)
    on_disk = weights()
    assert {type(array) for record in on_disk for array in record.values()} == {SpooledArray}
    for cluster, (record, aside) in enumerate(zip(in_memory, on_disk, strict=True)):
        change = ErrorFeedback(codec).compress(START, hostile_reply.trained(cluster))
        expected = codec.apply(START, change)
        for name, value in to_tensors(aside).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
            assert record[name].data == aside[name].data
