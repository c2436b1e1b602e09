"""Tensors between the members of a cluster over TLS: as over gloo, and for nobody else."""

import contextlib
import socket
import ssl
import time

import pytest
import torch

from client_pipeline.runtime.transport.meeting_point import MeetingPoint
from client_pipeline.runtime.transport.node_tls import NodeTls
from client_pipeline.runtime.transport.shared_process import join_group, open_meeting
from client_pipeline.runtime.transport.tls_transport import TlsTransport
from client_pipeline.runtime.transport.transport import BACKWARD, FORWARD, GroupAddress, TransportError
from helpers.rings import TIMEOUT_S, Threads, cluster_tls, make_ring

NAMES = ("cu", "d0", "d1")


@pytest.fixture
def files(tmp_path):
    return cluster_tls(tmp_path, NAMES)


@pytest.fixture(params=["gloo", "tls"])
def ring_of(request, files):
    """Make a ring over each of the two ways of carrying tensors."""
    made = []

    def make(size, **options):
        made.extend(make_ring(size, **options, tls=files if request.param == "tls" else None))
        return made

    yield make
    for member in made:
        member.close()


def test_tensors_arrive_from_where_they_were_sent_in_both_directions(ring_of):
    ring = ring_of(3)
    torch.manual_seed(0)
    tensors = {(s, d, i): torch.randn(2, 5, 300) for s in range(3) for d in (FORWARD, BACKWARD) for i in range(4)}

    def exchange(rank):
        following, previous = (rank + 1) % 3, (rank - 1) % 3
        posted = {(previous, FORWARD, i): ring[rank].receive((2, 5, 300), previous, FORWARD, i) for i in range(4)} | {
            (following, BACKWARD, i): ring[rank].receive((2, 5, 300), following, BACKWARD, i) for i in range(4)
        }
        for i in range(4):
            ring[rank].send(tensors[rank, FORWARD, i], following, FORWARD, i)
            ring[rank].send(tensors[rank, BACKWARD, i], previous, BACKWARD, i)
        arrived = {key: receive.wait() for key, receive in posted.items()}
        ring[rank].flush()
        return arrived

    for arrived in Threads(*(lambda r=rank: exchange(r) for rank in range(3))).join():
        assert not isinstance(arrived, Exception), arrived
        assert len(arrived) == 8 and all(torch.equal(tensor, tensors[key]) for key, tensor in arrived.items())


def test_a_tensor_stays_at_its_sender_until_somebody_asks_for_it(ring_of):
    """A stage that could be flooded would need more memory than was planned."""
    first, second, *_ = ring_of(2)
    first.send(torch.ones(2**22), 1, FORWARD, 0)
    flush = Threads(first.flush)
    flush.threads[0].join(0.3)
    assert flush.threads[0].is_alive()
    assert second.receive((2**22,), 0, FORWARD, 0).wait().sum() == 2**22
    assert flush.join() == [None]


def test_a_member_that_leaves_ends_the_waits_of_its_neighbours_at_once(ring_of):
    first, second, *_ = ring_of(2)
    receive = second.receive((2,), 0, FORWARD, 0)
    waiter = Threads(receive.wait)
    time.sleep(0.1)
    began = time.monotonic()
    first.close()
    (error,) = waiter.join()
    assert isinstance(error, TransportError) and "micro-batch 0 from rank 0" in str(error)
    assert time.monotonic() - began < TIMEOUT_S / 3


def test_a_wait_ends_when_its_own_member_leaves(ring_of):
    first, second, *_ = ring_of(2)
    waiter = Threads(second.receive((2,), 0, FORWARD, 0).wait)
    time.sleep(0.1)
    second.close()
    assert isinstance(waiter.join()[0], TransportError)


def test_a_silent_neighbour_is_waited_for_as_long_as_the_group_says(ring_of):
    _, second, *_ = ring_of(2, timeout_s=0.3)
    with pytest.raises(TransportError, match="micro-batch 0 from rank 0"):
        second.receive((2,), 0, FORWARD, 0).wait()


def test_a_member_that_has_left_takes_and_answers_nothing(files):
    """Its sender would believe that all has been read."""
    first, second = make_ring(2, tls=files)
    first.send(torch.ones(2), 1, FORWARD, 0)
    second.receive((2,), 0, FORWARD, 0).wait()
    second.close()
    (error,) = Threads(first.flush).join()
    assert isinstance(error, TransportError)
    first.close()


def test_a_tensor_of_another_size_is_an_error(files):
    first, second = make_ring(2, tls=files)
    first.send(torch.ones(3), 1, FORWARD, 0)
    with pytest.raises(TransportError, match="expected a tensor of 8 bytes, found one of 12"):
        second.receive((2,), 0, FORWARD, 0).wait()
    for member in (first, second):
        member.close()


def test_a_machine_of_another_authority_is_not_let_in(files, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (stranger,) = cluster_tls(other, ["d1"])
    meeting = MeetingPoint("127.0.0.1", files[0], 1.0)
    address = GroupAddress(host="127.0.0.1", port=meeting.port, generation=1, size=2, timeout_s=1.0)
    # It trusts whoever answers: the control unit refuses.
    trusting = NodeTls(certificate=stranger.certificate, key=stranger.key, authority=files[0].authority)
    for tls in (stranger, trusting):
        errors = Threads(lambda: TlsTransport(address, 0, files[0]), lambda t=tls: TlsTransport(address, 1, t)).join()
        assert all(isinstance(error, TransportError) for error in errors), errors
    meeting.close()


def wait_until_refused(connection):
    connection.settimeout(TIMEOUT_S)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        # An alert perhaps, and the end.
        while connection.recv(1024):
            pass


def test_a_member_hears_nobody_who_is_not_of_its_group(files):
    """Neither without TLS, nor with a certificate of the cluster and without what the members told each other."""
    first, second = make_ring(2, tls=files)
    port = second._listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as plain:
        plain.sendall(bytes(64))
        wait_until_refused(plain)
    with socket.create_connection(("127.0.0.1", port)) as raw:
        with files[2].client_context().wrap_socket(raw, server_hostname="127.0.0.1") as member:
            member.sendall(bytes(16) + bytes([0, 0, 0, 0, FORWARD]))
            member.sendall((0).to_bytes(8, "big") + (8).to_bytes(8, "big") + bytes(8))
            wait_until_refused(member)
    first.send(torch.full((2,), 7.0), 1, FORWARD, 0)
    assert second.receive((2,), 0, FORWARD, 0).wait().tolist() == [7.0, 7.0]
    for member in (first, second):
        member.close()


def test_a_flush_is_the_largest_number_on_the_wire(files, monkeypatch):
    """Machines of another release ask, and answer, alike."""
    sent, send = [], ssl.SSLSocket.sendall
    monkeypatch.setattr(ssl.SSLSocket, "sendall", lambda self, data, *a: sent.append(bytes(data)) or send(self, data))
    first, second = make_ring(2, tls=files)
    first.send(torch.ones(2), 1, FORWARD, 0)
    second.receive((2,), 0, FORWARD, 0).wait()
    first.flush()
    assert [data for data in sent if data.startswith(b"\xff" * 8)] == [b"\xff" * 8 + bytes(8)]
    for member in (first, second):
        member.close()


def test_what_leaves_a_member_is_no_plain_text(files, monkeypatch):
    sent = []
    plain_send = socket.socket.send
    monkeypatch.setattr(socket.socket, "send", lambda self, *a: sent.append(bytes(a[0])) or plain_send(self, *a))
    writes = []
    tls_send = ssl.SSLSocket.send
    monkeypatch.setattr(ssl.SSLSocket, "send", lambda self, *a: writes.append(self._sslobj) or tls_send(self, *a))
    first, second = make_ring(2, tls=files)
    first.send(torch.ones(2**20), 1, FORWARD, 0)
    receive = second.receive((2**20,), 0, FORWARD, 0)
    first.close()
    second.close()
    with contextlib.suppress(TransportError):  # on a fast machine it has arrived before the ends were closed
        receive.wait()
    # A socket whose TLS has been let go of would send as it is.
    assert not sent and writes and None not in writes


def test_machines_with_and_without_certificates_do_not_speak_to_each_other(files, monkeypatch):
    meeting = MeetingPoint("127.0.0.1", files[0], 1.0)
    address = {"host": "127.0.0.1", "port": meeting.port, "generation": 1, "size": 2, "timeout_s": 1.0}
    with pytest.raises(RuntimeError, match="has no certificates of its cluster, and is asked for TLS"):
        join_group(GroupAddress(**address, secure=True), 1)
    for name, value in files[1].environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="has certificates of its cluster, and is asked for plain text"):
        join_group(GroupAddress(**address), 1)
    assert isinstance(open_meeting("127.0.0.1", 1.0), MeetingPoint)
    meeting.close()


def test_the_environment_of_ray_names_the_files_or_says_which_it_lacks(files):
    environment = files[1].environment()
    assert NodeTls.from_environment(environment) == files[1]
    assert NodeTls.from_environment({}) is None
    del environment["RAY_TLS_SERVER_KEY"]
    with pytest.raises(ValueError, match="RAY_TLS_SERVER_KEY is not"):
        NodeTls.from_environment(environment)


def test_ranks_that_share_a_process_are_one_member_over_tls_too(files, monkeypatch):
    for name, value in files[0].environment().items():
        monkeypatch.setenv(name, value)
    meeting = open_meeting("127.0.0.1", TIMEOUT_S)
    address = GroupAddress(
        host="127.0.0.1",
        port=meeting.port,
        generation=1,
        size=3,
        timeout_s=TIMEOUT_S,
        name="shared",
        processes=(0, 1, 1),
        secure=True,
    )
    members = Threads(*(lambda r=rank: join_group(address, r) for rank in range(3))).join()
    assert isinstance(members[1]._member.between_processes(0)[0], TlsTransport)
    members[0].send(torch.full((3,), 2.0), 1, FORWARD, 5)
    passed_on = members[1].receive((3,), 0, FORWARD, 5).wait() * 2
    members[1].send(passed_on, 2, FORWARD, 5)
    members[2].send(members[2].receive((3,), 1, FORWARD, 5).wait() + 1, 0, FORWARD, 5)
    assert members[0].receive((3,), 2, FORWARD, 5).wait().tolist() == [5.0] * 3
    for member in members:
        member.close()


def test_a_flush_ends_when_all_has_been_read(ring_of):
    first, second = ring_of(2)
    posted = second.receive((2, 3), 0, FORWARD, 0)
    first.send(torch.ones(2, 3), 1, FORWARD, 0)
    start = time.monotonic()
    first.flush()
    assert time.monotonic() - start < TIMEOUT_S / 2
    assert torch.equal(posted.wait(), torch.ones(2, 3))
