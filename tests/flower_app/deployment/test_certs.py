"""``collapipe certs``: what it makes is taken by OpenSSL, gRPC and Flower, and what is there stays."""

import ssl
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.supernode.register import try_load_public_key
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.deployment import revocation
from flower_app.deployment.authority import read_certificate
from flower_app.deployment.certs import CertsRequest, certificate_hosts, make_certificates
from flower_app.deployment.credentials import CuFiles, ServerFiles
from flower_app.deployment.supernodes import trusted_keys


def make(out, **changes):
    options = {"servers": ["10.0.0.1", "edge.example"], "clusters": 2, "out": out} | changes
    return make_certificates(CertsRequest(**options))


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def handshake(server, client):
    """A TLS handshake in memory between two contexts; raises what OpenSSL raises."""
    ends = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
    tls = [server.wrap_bio(*ends[0], server_side=True), client.wrap_bio(*ends[1], server_hostname="edge.example")]
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
    make(tmp_path)
    make(tmp_path / "stranger")
    server, cu = ServerFiles(tmp_path / "server"), CuFiles(tmp_path / "cu-1")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(server.certificate, server.key)
    serving.load_verify_locations(server.ca)
    serving.verify_mode = ssl.CERT_REQUIRED
    # As strict as Python 3.13 is by default.
    strict = ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    serving.verify_flags |= strict

    def client(files):
        context = ssl.create_default_context(cafile=files.ca)
        context.load_cert_chain(files.certificate, files.key)
        context.verify_flags |= strict
        return context

    peer = handshake(serving, client(cu))
    assert ("commonName", "cu-1") in [pair for entry in peer["subject"] for pair in entry]
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(serving, client(CuFiles(tmp_path / "stranger" / "cu-1")))
    # A control unit's certificate cannot stand for a server.
    posing = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    posing.load_cert_chain(cu.certificate, cu.key)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(posing, client(cu))


def test_the_servers_certificate_is_for_its_hosts_and_for_its_own_processes(tmp_path):
    make(tmp_path)
    hosts = certificate_hosts(read_certificate(tmp_path / "server" / "server.pem"))
    assert hosts == ["10.0.0.1", "edge.example", "localhost", "127.0.0.1", "::1"]


def test_supernode_keys_are_what_flower_takes(tmp_path):
    make(tmp_path)
    for name in ("cu-0", "cu-1"):
        private = serialization.load_ssh_private_key((tmp_path / name / "supernode.key").read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        spki = private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        # The server's copy, read by Flower's own command.
        assert try_load_public_key(tmp_path / "server" / "supernodes" / f"{name}.pub") == spki


def test_what_is_secret_is_for_its_owner_alone(tmp_path):
    make(tmp_path)
    secret = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix in (".key", "")]
    assert len(secret) == 16
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
    folders = [path for path in tmp_path.rglob("*") if path.is_dir() and path.name != "supernodes"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_another_call_keeps_what_is_there_and_adds_what_is_missing(tmp_path):
    first = make(tmp_path)
    before = contents(tmp_path)
    assert len(first["made"]) == 24 and make(tmp_path)["made"] == [] and contents(tmp_path) == before
    more = make(tmp_path, clusters=3)
    assert {name.rsplit("/", 2)[1] for name in more["made"]} == {"cu-2", "devices-2"}
    after = contents(tmp_path)
    assert after.pop("authority/issued.json") != before.pop("authority/issued.json")
    assert after.items() >= before.items()
    assert (tmp_path / "server" / "supernodes" / "cu-2.pub").is_file()


def test_renewing_changes_certificates_and_no_identity(tmp_path):
    make(tmp_path)
    before = contents(tmp_path)
    make(tmp_path, renew=True, days=30)
    changed = {name for name, content in contents(tmp_path).items() if before[name] != content}
    renewed = {f"{who}.{end}" for who in ("server/server", "cu-0/cu", "cu-1/cu") for end in ("pem", "key")}
    # The certificates that are replaced can still be revoked.
    assert changed == renewed | {"authority/issued.json"}


def test_another_host_needs_a_new_certificate(tmp_path):
    make(tmp_path)
    with pytest.raises(
        ValueError, match=r"--server: .*server\.pem is there already and is not for 10\.0\.0\.9, but for"
    ):
        make(tmp_path, servers=["10.0.0.9"])
    make(tmp_path, servers=["10.0.0.9"], renew=True)
    assert "10.0.0.9" in certificate_hosts(read_certificate(tmp_path / "server" / "server.pem"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server", "10.0.0.1:9092", "--clusters", "1"], "without a port, found '10.0.0.1:9092'"),
        (["--server", "https://x", "--clusters", "1"], "--server: expected a name or an address"),
        (["--server", "x", "--clusters", "0"], "--clusters: expected at least 1, found 0"),
        (["--server", "x", "--clusters", "1", "--days", "0"], "--days: expected at least 1, found 0"),
    ],
)
def test_bad_options_are_named(arguments, message, tmp_path):
    done = CliRunner().invoke(app, ["certs", *arguments, "--out", str(tmp_path)])
    assert done.exit_code == 2 and message in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_revoked_control_unit_loses_all_its_certificates_and_its_key(tmp_path):
    make(tmp_path)
    first = read_certificate(tmp_path / "cu-1" / "cu.pem").serial_number
    make(tmp_path, renew=True)
    second = read_certificate(tmp_path / "cu-1" / "cu.pem").serial_number
    key = (tmp_path / "cu-1" / "supernode.pub").read_text()
    others = {name: data for name, data in contents(tmp_path).items() if name.startswith(("cu-0/", "devices-0/"))}
    done = CliRunner().invoke(app, ["revoke", "--cluster", "1", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    revoked = x509.load_pem_x509_crl((tmp_path / "server" / "revoked.pem").read_bytes())
    assert {entry.serial_number for entry in revoked} == {first, second}
    authority = read_certificate(tmp_path / "authority" / "ca.pem")
    assert revoked.is_signature_valid(authority.public_key())
    assert (tmp_path / "server" / "revoked.pub").read_text() == key
    assert not (tmp_path / "server" / "supernodes" / "cu-1.pub").exists()
    assert {name: data for name, data in contents(tmp_path).items() if name.startswith(("cu-", "devices-"))} == others
    # The cluster gets another identity, and what was revoked stays so.
    make(tmp_path)
    assert (tmp_path / "cu-1" / "supernode.pub").read_text() != key
    assert (tmp_path / "server" / "revoked.pub").read_text() == key
    assert read_certificate(tmp_path / "cu-1" / "cu.pem").serial_number not in (first, second)


def test_a_key_that_was_revoked_is_not_trusted_from_an_older_copy_of_the_folder(tmp_path):
    make(tmp_path)
    old = (tmp_path / "server" / "supernodes" / "cu-1.pub").read_text()
    revocation.revoke(tmp_path, 1)
    server = ServerFiles(tmp_path / "server")
    # Copying a folder over another deletes nothing there.
    (server.supernodes / "cu-1.pub").write_text(old)
    assert set(trusted_keys(server)) == {"cu-0"}
    server.revoked_keys.write_text("no key\n")
    with pytest.raises(ValueError, match=r"revoked\.pub: expected public keys in OpenSSH format"):
        trusted_keys(server)


def test_who_never_had_a_certificate_cannot_be_revoked(tmp_path):
    make(tmp_path)
    with pytest.raises(ValueError, match="--cluster: .*authority has issued no certificate to cu-7"):
        revocation.revoke(tmp_path, 7)
