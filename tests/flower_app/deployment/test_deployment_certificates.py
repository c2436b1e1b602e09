"""Certificates and keys of a deployment: OpenSSL and Flower take them, and a revoked one is refused everywhere."""

import datetime
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.supernode.register import try_load_public_key
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.deployment import revocation
from flower_app.deployment.certificate_authority import (
    Authority,
    certificate_hosts,
    read_certificate,
    write_public,
    write_secret,
)
from flower_app.deployment.credentials import ServerFiles
from flower_app.deployment.supernodes import trusted_keys
from helpers.joining import control_units, edge_folder, joined_by_files

NAME = "edge.example"


def handshake(server, client):
    """A TLS handshake in memory between two contexts; raises what OpenSSL raises."""
    ends = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
    tls = [server.wrap_bio(*ends[0], server_side=True), client.wrap_bio(*ends[1], server_hostname=NAME)]
    done = [False, False]
    for _ in range(10):
        for i in (1, 0):
            if not done[i]:
                try:
                    tls[i].do_handshake()
                    done[i] = True
                except ssl.SSLWantReadError:
                    pass
            ends[1 - i][0].write(ends[i][1].read())
    assert all(done)
    return tls[0].getpeercert()


def test_server_and_control_unit_trust_each_other_and_nobody_else(tmp_path):
    edge_folder(tmp_path / "certs", NAME)
    unit = joined_by_files(tmp_path / "certs", tmp_path / "box").folder.files
    (stranger,) = control_units(tmp_path / "elsewhere" / "certs")
    server = ServerFiles(tmp_path / "certs" / "server")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(server.certificate, server.key)
    serving.load_verify_locations(server.ca)
    serving.verify_mode = ssl.CERT_REQUIRED
    # As strict as Python 3.13 is by default.
    strict = ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    serving.verify_flags |= strict

    def client(files):
        context = ssl.create_default_context(cafile=unit.ca)
        context.load_cert_chain(files.certificate, files.key)
        context.verify_flags |= strict
        return context

    peer = handshake(serving, client(unit))
    assert ("commonName", "cu-0") in [pair for entry in peer["subject"] for pair in entry]
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(serving, client(stranger))
    # Neither certificate of a control unit can stand for the edge server.
    for certificate in (unit.certificate, unit.node_certificate):
        posing = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        posing.load_cert_chain(certificate, unit.key)
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(posing, client(unit))


def test_supernode_keys_are_what_flower_takes(tmp_path):
    for cluster, files in enumerate(control_units(tmp_path / "certs", 2)):
        private = serialization.load_ssh_private_key(files.supernode_key.read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        spki = private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        # The server's copy, read by Flower's own command.
        assert try_load_public_key(tmp_path / "certs" / "server" / "supernodes" / f"cu-{cluster}.pub") == spki


def test_the_servers_certificate_is_for_its_names_and_its_own_processes(tmp_path):
    """With --host beside --name it was for the name alone, and the server waited for itself."""
    edge_folder(tmp_path, "old.example")
    edge_folder(tmp_path, "new.example").check()
    server = ServerFiles(tmp_path / "server")
    hosts = certificate_hosts(read_certificate(server.certificate))
    assert hosts == ["new.example", "old.example", "localhost", "127.0.0.1", "::1"]
    kept = server.certificate.read_bytes()
    edge_folder(tmp_path, "old.example")
    assert server.certificate.read_bytes() == kept


def test_a_certificate_that_is_about_to_expire_is_renewed_at_the_next_start(tmp_path):
    folder = edge_folder(tmp_path, NAME)
    server, authority = folder.server, Authority.load(folder.authority)
    certificate, key = authority.issue_server([NAME], 20)
    write_public(server.certificate, certificate)
    write_secret(server.key, key)
    edge_folder(tmp_path, NAME)
    until = read_certificate(server.certificate).not_valid_after_utc
    assert until > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=300)
    assert read_certificate(folder.authority.certificate) == authority.certificate


def test_a_revoked_control_unit_loses_its_certificate_and_its_key(tmp_path):
    root = tmp_path / "certs"
    first, second = control_units(root, 2)
    key = (root / "server" / "supernodes" / "cu-1.pub").read_text()
    done = CliRunner().invoke(app, ["revoke", "--cluster", "1", "--out", str(root), "--json"])
    assert done.exit_code == 0, done.output
    revoked = x509.load_pem_x509_crl((root / "server" / "revoked.pem").read_bytes())
    assert [entry.serial_number for entry in revoked] == [read_certificate(second.certificate).serial_number]
    assert revoked.is_signature_valid(read_certificate(root / "authority" / "ca.pem").public_key())
    assert (root / "server" / "revoked.pub").read_text() == key
    assert not (root / "server" / "supernodes" / "cu-1.pub").exists() and (root / "cu-0" / "cu.pem").is_file()
    # Copying a folder over another deletes nothing there.
    server = ServerFiles(root / "server")
    (server.supernodes / "cu-1.pub").write_text(key)
    assert set(trusted_keys(server)) == {"cu-0"}
    server.revoked_keys.write_text("no key\n")
    with pytest.raises(ValueError, match=r"revoked\.pub: expected public keys in OpenSSH format"):
        trusted_keys(server)
    with pytest.raises(ValueError, match="--cluster: .*authority has issued no certificate to cu-7"):
        revocation.revoke(root, 7)


def test_a_control_unit_of_collapipe_certs_is_revoked_and_its_place_is_joined_anew(tmp_path):
    """An older release made folders for all boxes on the edge server, with their keys."""
    root = tmp_path / "certs"
    folder = edge_folder(root)
    authority, key = Authority.load(folder.authority), ec.generate_private_key(ec.SECP256R1())
    write_public(root / "cu-0" / "cu.pem", authority.sign_client(key.public_key(), "cu-0", 365))
    for name in ("cu.key", "supernode.key", "ray-token", "cluster.key"):
        write_secret(root / "cu-0" / name, b"secret")
    line = folder.server.supernodes / "cu-0.pub"
    (other,) = control_units(tmp_path / "other" / "certs")
    write_public(root / "cu-0" / "supernode.pub", other.supernode_public_key.read_bytes() + b" cu-0\n")
    write_public(line, (root / "cu-0" / "supernode.pub").read_bytes())
    with pytest.raises(ValueError, match="cu-0 is another machine; collapipe revoke --cluster 0 takes its rights"):
        joined_by_files(root, tmp_path / "early", control_unit=True, cluster=0)
    assert CliRunner().invoke(app, ["revoke", "--cluster", "0", "--out", str(root)]).exit_code == 0
    assert not (root / "cu-0").exists() and not line.exists()
    assert joined_by_files(root, tmp_path / "box", control_unit=True, cluster=0).folder.box()["name"] == "cu-0"
