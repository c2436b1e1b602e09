"""Machines of one cluster believe each other by its authority alone, and a refusal says why."""

import contextlib
import socket
import ssl
import threading

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec

from client_pipeline.link.hosts import HostPort
from client_pipeline.runtime.transport.meeting_point import MeetingPoint
from client_pipeline.runtime.transport.node_tls import NodeTls
from client_pipeline.runtime.transport.tls_transport import TlsTransport
from client_pipeline.runtime.transport.transport import FORWARD, GroupAddress
from flower_app.deployment import head_check
from flower_app.deployment.certificate_authority import Authority, key_pem, write_public, write_secret
from flower_app.deployment.credentials import DeviceFiles
from flower_app.deployment.head_check import check_head, wait_for_head
from helpers.rings import TIMEOUT_S, Threads

HOST = "127.0.0.1"


def node_of(authority, folder, host=HOST):
    """A machine's certificate within the cluster of an authority, where a box keeps it."""
    files, key = DeviceFiles(folder), ec.generate_private_key(ec.SECP256R1())
    write_public(files.cluster_ca, authority.pem)
    write_public(files.node_certificate, authority.sign_node(key.public_key(), host, 1))
    write_secret(files.key, key_pem(key))
    return NodeTls(certificate=files.node_certificate, key=files.key, authority=files.cluster_ca, host=host)


@pytest.fixture(scope="module")
def authorities():
    """Make the authorities of two clusters."""
    return Authority.create(), Authority.create()


@contextlib.contextmanager
def listening(answer):
    """Address of a program that does ``answer(connection)`` with whoever comes."""

    def serve(listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), connection:
                answer(connection)

    with socket.create_server((HOST, 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield HostPort(HOST, listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


def ray_like(tls):
    """A head: mutual TLS, and a first word as soon as it believes its caller."""

    def answer(raw):
        context = tls.server_context()
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(raw, server_side=True) as connection:
            assert connection.selected_alpn_protocol() == "h2"
            connection.sendall(b"settings")

    return listening(answer)


def test_machines_of_a_cluster_believe_each_other_and_no_other_cluster(authorities, tmp_path):
    head = node_of(authorities[0], tmp_path / "head")
    with ray_like(head) as address:
        check_head(address, node_of(authorities[0], tmp_path / "device"))
        other = node_of(authorities[1], tmp_path / "other")
        with pytest.raises(ValueError, match="--cu: the certificate of .* is not of this machine's cluster"):
            check_head(address, other)
        # It believes whom it should not, and is not believed.
        posing = NodeTls(certificate=other.certificate, key=other.key, authority=head.authority, host=HOST)
        with pytest.raises(ValueError, match="--state: .* refuses this machine's certificate"):
            check_head(address, posing)
    # Nobody is there: Ray says so.
    check_head(address, head)
    with listening(lambda connection: connection.sendall(b"\0\0\0\x04\0")) as plain:
        with pytest.raises(ValueError, match="speaks plain text, and this machine TLS; let both machines join"):
            check_head(plain, head)


def test_a_machine_is_believed_at_its_own_address_alone(authorities, tmp_path):
    with ray_like(node_of(authorities[0], tmp_path / "head", "10.0.0.2")) as address:
        device = node_of(authorities[0], tmp_path / "device", "10.0.0.3")
        # The loopback is every machine's own.
        check_head(address, device)
        context = device.client_context()
        with socket.create_connection(address) as raw, pytest.raises(ssl.SSLCertVerificationError, match="10.0.0.4"):
            context.wrap_socket(raw, server_hostname="10.0.0.4")


def test_a_machine_with_several_addresses_listens_at_the_one_that_its_certificate_is_for(authorities, tmp_path):
    hosts = ["127.0.0.2", "127.0.0.3"]
    tls = [node_of(authorities[0], tmp_path / host, host) for host in hosts]
    meeting = MeetingPoint(hosts[0], tls[0], TIMEOUT_S)
    address = GroupAddress(host=hosts[0], port=meeting.port, generation=1, size=2, timeout_s=TIMEOUT_S)
    # As the processes of its Ray node learn it.
    nodes = [NodeTls.from_environment(node.environment()) for node in tls]
    first, second = Threads(*(lambda r=rank: TlsTransport(address, r, nodes[r]) for rank in range(2))).join()
    first.send(torch.ones(3), 1, FORWARD, 0)
    assert second.receive((3,), 0, FORWARD, 0).wait().sum() == 3
    assert second._listener.getsockname()[0] == hosts[1]
    for member in (first, second):
        member.close()


def test_a_head_that_is_given_other_certificates_is_waited_for(authorities, tmp_path, monkeypatch):
    monkeypatch.setattr(head_check, "_AGAIN_S", 0.01)
    device, words = node_of(authorities[0], tmp_path / "device"), []
    with ray_like(node_of(authorities[1], tmp_path / "other")) as wrong:
        with pytest.raises(ValueError, match="is not of this machine's cluster"):
            wait_for_head(wrong, device, 0.1, words.append)
    assert len(words) == 1 and "trying for 0.1 s" in words[0]
    with ray_like(device) as right:
        heads = [wrong, right]
        monkeypatch.setattr(head_check, "check_head", lambda head, tls: check_head(heads.pop(0) and right, tls))
        wait_for_head(wrong, device, 60.0, words.append)
    assert len(words) == 1
