"""The authority of one cluster: whom its machines believe, and who is told why not."""

import contextlib
import shutil
import socket
import ssl
import stat
import threading

import pytest
import torch
from cryptography.exceptions import InvalidSignature

from client_pipeline.link.hosts import HostPort
from client_pipeline.runtime.meeting_point import MeetingPoint
from client_pipeline.runtime.node_tls import NodeTls
from client_pipeline.runtime.tls_transport import TlsTransport
from client_pipeline.runtime.transport import FORWARD, GroupAddress
from flower_app.deployment import head_check
from flower_app.deployment.authority import read_certificate
from flower_app.deployment.certs import CertsRequest, certificate_hosts, make_certificates
from flower_app.deployment.cluster_authority import forget_node_key, node_tls
from flower_app.deployment.credentials import CuFiles, DeviceFiles, ServerFiles
from flower_app.deployment.head_check import HeadWatch, check_head, wait_for_head
from flower_app.deployment.revocation import revoke
from helpers.rings import TIMEOUT_S, Threads

HOST = "127.0.0.1"


@pytest.fixture
def certs(tmp_path):
    make_certificates(CertsRequest(servers=["10.0.0.1"], clusters=2, out=tmp_path / "certs"))
    return tmp_path / "certs"


def machine(folder, tmp_path, name, host=HOST):
    temp = tmp_path / name
    temp.mkdir()
    return node_tls(DeviceFiles(folder), host, temp)


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


def test_machines_of_a_cluster_believe_each_other_and_no_other_cluster(certs, tmp_path):
    head = machine(certs / "cu-0", tmp_path, "head")
    with ray_like(head) as address:
        check_head(address, machine(certs / "devices-0", tmp_path, "device"))
        other = machine(certs / "devices-1", tmp_path, "other")
        with pytest.raises(ValueError, match="--cu: the certificate of .* is not of this machine's cluster"):
            check_head(address, other)
        # It believes whom it should not, and is not believed.
        posing = type(other)(certificate=other.certificate, key=other.key, authority=head.authority)
        with pytest.raises(ValueError, match="--certs: .* refuses this machine's certificate"):
            check_head(address, posing)


def test_a_machine_is_believed_at_its_own_address_alone(certs, tmp_path):
    with ray_like(machine(certs / "cu-0", tmp_path, "head", host="10.0.0.2")) as address:
        device = machine(certs / "devices-0", tmp_path, "device", host="10.0.0.3")
        # The loopback is every machine's own.
        check_head(address, device)
        context = device.client_context()
        with socket.create_connection(address) as raw, pytest.raises(ssl.SSLCertVerificationError, match="10.0.0.4"):
            context.wrap_socket(raw, server_hostname="10.0.0.4")


def test_a_machine_with_several_addresses_listens_at_the_one_that_its_certificate_is_for(certs, tmp_path):
    hosts = ["127.0.0.2", "127.0.0.3"]
    tls = [machine(certs / "devices-0", tmp_path, host, host) for host in hosts]
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


def test_a_clusters_certificate_stands_for_no_edge_server(certs, tmp_path):
    with ray_like(machine(certs / "cu-0", tmp_path, "head", host="10.0.0.1")) as address:
        context = ssl.create_default_context(cafile=ServerFiles(certs / "server").ca)
        with socket.create_connection(address) as raw, pytest.raises(ssl.SSLCertVerificationError):
            context.wrap_socket(raw, server_hostname="10.0.0.1")


def test_machines_with_and_without_certificates_are_told_apart(certs, tmp_path):
    device = machine(certs / "devices-0", tmp_path, "device")
    with listening(lambda connection: connection.sendall(b"\0\0\0\x04\0")) as plain:
        check_head(plain, None)
        with pytest.raises(ValueError, match="speaks plain text, and this machine TLS; start all machines"):
            check_head(plain, device)
    with ray_like(device) as address:
        with pytest.raises(ValueError, match="speaks TLS, and this machine's folder has nothing of its cluster's"):
            check_head(address, None)
    # Nobody is there: Ray says so.
    check_head(address, device)


def test_a_device_notices_that_its_control_unit_was_started_anew_and_nothing_else(certs, tmp_path, monkeypatch):
    monkeypatch.setattr(head_check, "_WATCH_S", 0.0)
    device = machine(certs / "devices-0", tmp_path, "device")
    first, second = (machine(certs / "cu-0", tmp_path, name) for name in ("first", "second"))
    other = machine(certs / "cu-1", tmp_path, "other")
    with ray_like(first) as address:
        watch, plain = HeadWatch(address, device), HeadWatch(address, None)
        assert [watch.reason(), watch.reason(), plain.reason()] == ["", "", ""]
    # Nobody is there; then somebody who is not of this cluster; then the same again.
    assert watch.reason() == ""
    for tls, is_noticed in ((other, False), (first, False), (second, True)):
        with ray_like(tls) as address:
            watch._head = address
            assert ("was started anew" in watch.reason()) == is_noticed
    assert plain.reason() == ""
    # The one that it has joined anew.
    with ray_like(second) as address:
        watch._head = address
        watch.forget()
        assert watch.reason() == ""


def test_a_device_looks_after_its_control_unit_every_few_seconds(certs, tmp_path, monkeypatch):
    watch, looks = HeadWatch(("127.0.0.1", 1), machine(certs / "devices-0", tmp_path, "device")), []
    monkeypatch.setattr(HeadWatch, "_present", lambda self, tls: looks.append(tls))
    assert [watch.reason() for _ in range(10)] == [""] * 10 and len(looks) == 1


def test_a_head_that_is_given_other_certificates_is_waited_for(certs, tmp_path, monkeypatch):
    monkeypatch.setattr(head_check, "_AGAIN_S", 0.01)
    device, words = machine(certs / "devices-0", tmp_path, "device"), []
    with ray_like(machine(certs / "cu-1", tmp_path, "other")) as wrong:
        with pytest.raises(ValueError, match="is not of this machine's cluster"):
            wait_for_head(wrong, device, 0.1, words.append)
    assert len(words) == 1 and "trying for 0.1 s" in words[0]
    with ray_like(device) as right:
        heads = [wrong, right]
        monkeypatch.setattr(head_check, "check_head", lambda head, tls: check_head(heads.pop(0) and right, tls))
        wait_for_head(wrong, device, 60.0, words.append)
    assert len(words) == 1


def test_a_folder_of_an_older_release_has_no_certificate_and_half_a_folder_is_an_error(certs, tmp_path):
    devices = DeviceFiles(certs / "devices-0")
    devices.cluster_key.unlink()
    with pytest.raises(FileNotFoundError, match=r"neither .*cluster.key nor .*node.pem; copy the whole folder"):
        node_tls(devices, HOST, tmp_path)
    devices.cluster_ca.unlink()
    assert node_tls(devices, HOST, tmp_path) is None
    # The next collapipe certs makes what is missing, by the same authority.
    make_certificates(CertsRequest(servers=["10.0.0.1"], clusters=2, out=certs))
    assert devices.cluster_ca.read_bytes() == CuFiles(certs / "cu-0").cluster_ca.read_bytes()


def test_a_machine_signs_for_itself_and_forgets_the_key_when_it_ends(certs, tmp_path):
    node = node_tls(DeviceFiles(certs / "devices-0"), "10.0.0.3", tmp_path)
    assert certificate_hosts(read_certificate(node.certificate)) == ["10.0.0.3", "localhost", "127.0.0.1", "::1"]
    assert stat.S_IMODE(node.key.stat().st_mode) == 0o600
    forget_node_key(tmp_path)
    assert not node.key.exists() and (certs / "devices-0" / "cluster.key").is_file()


def test_a_revoked_cluster_has_another_authority_afterwards(certs):
    before = (certs / "cu-0" / "cluster.pem").read_bytes(), (certs / "cu-1" / "cluster.pem").read_bytes()
    kept = shutil.copytree(certs / "devices-0", certs.parent / "kept")
    revoke(certs, 0)
    assert not (certs / "devices-0").exists() and not (certs / "authority" / "cluster-0").exists()
    make_certificates(CertsRequest(servers=["10.0.0.1"], clusters=2, out=certs))
    after = (certs / "cu-0" / "cluster.pem").read_bytes(), (certs / "cu-1" / "cluster.pem").read_bytes()
    assert after[0] != before[0] and after[1] == before[1]
    # Who has kept the old folder signs for nobody who is believed.
    old, new = (read_certificate(folder / "cluster.pem") for folder in (kept, certs / "devices-0"))
    certificate = read_certificate(node_tls(DeviceFiles(kept), HOST, certs.parent).certificate)
    certificate.verify_directly_issued_by(old)
    with pytest.raises((InvalidSignature, ValueError)):
        certificate.verify_directly_issued_by(new)
