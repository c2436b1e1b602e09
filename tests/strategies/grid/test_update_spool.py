"""Updates that wait on disk: read as they were written, gone with the last who has them, and a full disk by name."""

import copy
import errno
import os
import threading

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from client_pipeline.link.compression import CompressionConfig
from client_pipeline.link.update_codec import ErrorFeedback, UpdateCodec
from helpers import hostile_reply, wire_grid
from helpers.fake_grid import FakeGrid
from helpers.hostile_reply import NUM_CLUSTERS, START, honest
from helpers.replies import answer_to
from strategies.baselines.stock import make_stock
from strategies.grid import intake, single_pulls
from strategies.grid.recording import RecordingGrid
from strategies.grid.update_spool import SpooledArray, SpoolError, UpdateSpool, record_bytes, record_of
from strategies.records import shared_tensors, to_arrays, to_tensors

pytestmark = pytest.mark.usefixtures("flower_process")


def open_files(folder):
    """How many files this process has open in a folder."""
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


@pytest.mark.parametrize("name", ARRAYS)
def test_tensors_on_an_arrays_own_bytes_are_its_values(name):
    array = Array(ARRAYS[name])
    tensors = [shared_tensors(record_of([("w", array)]))["w"] for _ in range(2)]
    np.testing.assert_array_equal(tensors[0].numpy(), ARRAYS[name])
    if array.shape != (0, 3):
        assert tensors[0].data_ptr() == tensors[1].data_ptr()


def test_what_is_sent_of_an_array_on_disk_is_flowers_own(tmp_path):
    array = Array(ARRAYS["f4"])
    aside = UpdateSpool(tmp_path).put_aside(array)
    assert (aside.object_id, aside.deflate()) == (array.object_id, array.deflate())
    record, plain = record_of([("w", aside)]), ArrayRecord({"w": array})
    assert record.count_bytes() == plain.count_bytes() == record_bytes(record) == record_bytes(plain)
    copied = copy.deepcopy(record)
    assert type(copied["w"]) is Array and copied == plain
    with pytest.raises(AttributeError, match="make a new one"):
        aside.data = b""


def test_an_array_that_is_no_numpy_file_is_flowers_error(tmp_path):
    spool = UpdateSpool(tmp_path)
    with pytest.raises(TypeError, match="Unsupported serialization type"):
        spool.put_pieces("float32", (1,), "pickle", [b"cos"]).numpy()
    long = np.arange(3.0)
    with pytest.raises(ValueError, match="expected 152 bytes, found 153"):
        spool.put_pieces("float64", (3,), "numpy.ndarray", [Array(long).data, b"x"]).numpy()


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


def test_a_write_and_a_read_may_take_several_calls(tmp_path, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:100], offset))
    monkeypatch.setattr(os, "preadv", lambda file, views, offset: read(file, [views[0][:70]], offset))
    values = np.arange(300.0)
    np.testing.assert_array_equal(UpdateSpool(tmp_path).put_aside(Array(values)).numpy(), values)


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_and_a_folder_that_is_gone_are_errors_that_name_it(tmp_path, monkeypatch):
    with pytest.raises(SpoolError, match="gone: .*No such file or directory; make room .* runs-dir"):
        UpdateSpool(tmp_path / "gone").put_aside(Array(np.ones(3)))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SpoolError, match="of 152 bytes so far .*No space left on device; make room"):
        UpdateSpool(tmp_path).put_aside(Array(np.ones(3)))


def test_a_full_disk_ends_the_run_and_costs_no_cluster_its_round(tmp_path, monkeypatch):
    monkeypatch.setattr(intake, "SMALL_BYTES", 0)
    monkeypatch.setattr(os, "pwrite", full)
    grid = FakeGrid(honest, NUM_CLUSTERS)
    recording = RecordingGrid(grid, grid.clusters, spool=UpdateSpool(tmp_path))
    with pytest.raises(SpoolError, match=str(tmp_path)):
        make_stock("FedAvg", {}, NUM_CLUSTERS).start(recording, initial_arrays=to_arrays(START), num_rounds=1)


def test_a_full_disk_ends_the_run_where_replies_are_put_together_too(tmp_path, monkeypatch):
    monkeypatch.setattr(single_pulls, "SMALL_BYTES", 0)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(AssertionError, match=f"SpoolError.*{tmp_path}"):
        wire_grid.round_of(lambda reply, pieces: pieces, UpdateSpool(tmp_path))


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


def test_small_updates_make_no_file(tmp_path):
    grid = FakeGrid(honest, NUM_CLUSTERS)
    recording = RecordingGrid(grid, grid.clusters, spool=UpdateSpool(tmp_path))
    replies = exchange(recording, grid)
    assert open_files(tmp_path) == 0
    assert all(type(array) is Array for reply in replies for array in reply.content["arrays"].values())


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


@pytest.mark.parametrize("update", ["fp16", "int8", "top-k"])
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
