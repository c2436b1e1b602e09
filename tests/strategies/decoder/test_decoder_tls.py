"""Addresses, ports and certificates of the decoder's service."""

import datetime
import socket
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from client_pipeline.link.base import LinkError
from client_pipeline.link.stream import DecoderStream, LinkCertificates
from helpers.certificates import certificate, link_certificates, service_files
from helpers.decoder_cases import batch_of, head_trainer, service_of, step_id, train_round, train_step
from strategies.decoder.config import DecoderConfig
from strategies.decoder.service import DecoderService
from strategies.decoder.trainer import DecoderTrainer


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")
    ca = certificate(folder, "ca")
    for name in ("service", "cu"):
        certificate(folder, name, ca)
    stranger = certificate(folder, "stranger-ca")
    certificate(folder, "stranger", stranger)
    certificate(folder, "alone")
    return folder


def test_a_cu_trains_over_tls_with_the_root_that_its_message_brought(pki):
    with service_of(num_clusters=1, **service_files(pki, "alone")) as service:
        address = service.open_round(1, [0], 1)[0]
        assert address.tls and "BEGIN CERTIFICATE" in address.root_certificate
        train_round(address, [batch_of(0, 3)])
        assert service.finish_round().clusters[0].steps == 1


def test_a_cu_without_tls_or_with_another_root_is_turned_away(pki):
    with service_of(num_clusters=1, **service_files(pki, "alone")) as service:
        address = service.open_round(1, [0], 1)[0]
        with pytest.raises(LinkError, match=f"decoder at {address.target}"):
            DecoderStream.open(replace(address, tls=False))
        with pytest.raises(LinkError, match=f"decoder at {address.target} .*cannot be reached"):
            DecoderStream.open(replace(address, root_certificate=(pki / "stranger-ca.pem").read_text()))
        train_round(address, [batch_of(0, 3)])


def test_mutual_tls_takes_only_cus_with_a_certificate_of_its_ca(pki):
    with service_of(num_clusters=1, tls_ca=str(pki / "ca.pem"), **service_files(pki, "service")) as service:
        address = service.open_round(1, [0], 1)[0]
        for wrong in (None, link_certificates(pki, "stranger")):
            with pytest.raises(LinkError, match=f"decoder at {address.target}"):
                DecoderStream.open(address, wrong)
        with DecoderStream.open(address, link_certificates(pki, "cu", root_certificate=str(pki / "ca.pem"))) as stream:
            train_step(stream, step_id(0), batch_of(0, 3), 1)
        assert service.finish_round().clusters[0].steps == 1


def revocation_list(folder, issuer, *revoked):
    """Write ``crl.pem``."""
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateRevocationListBuilder().issuer_name(issuer[0].subject)
    builder = builder.last_update(now).next_update(now + datetime.timedelta(days=1))
    for one in revoked:
        entry = x509.RevokedCertificateBuilder().serial_number(one.serial_number).revocation_date(now).build()
        builder = builder.add_revoked_certificate(entry)
    made = builder.sign(issuer[1], hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (folder / "crl.pem").write_bytes(made)
    return str(folder / "crl.pem")


def test_a_revoked_certificate_opens_no_stream_from_the_moment_that_the_list_changes(tmp_path):
    ca = certificate(tmp_path, "ca")
    certificate(tmp_path, "service", ca)
    certificate(tmp_path, "cu", ca)
    stolen, _ = certificate(tmp_path, "stolen", ca)
    crl = revocation_list(tmp_path, ca)
    with service_of(
        num_clusters=1, tls_ca=str(tmp_path / "ca.pem"), tls_crl=crl, **service_files(tmp_path, "service")
    ) as service:
        with DecoderStream.open(service.open_round(1, [0], 1)[0], link_certificates(tmp_path, "stolen")) as stream:
            train_step(stream, step_id(0), batch_of(0, 3), 1)
        service.finish_round()
        revocation_list(tmp_path, ca, stolen)
        address = service.open_round(2, [0], 1)[0]
        # The token of the round does not help.
        with pytest.raises(LinkError, match="refused .*: the certificate of this control unit is revoked"):
            DecoderStream.open(address, link_certificates(tmp_path, "stolen"))
        # A list that cannot be read opens nothing.
        (tmp_path / "crl.pem").write_text("")
        with pytest.raises(LinkError, match="cannot tell which certificates are revoked"):
            DecoderStream.open(address, link_certificates(tmp_path, "cu"))
        revocation_list(tmp_path, ca, stolen)
        with DecoderStream.open(address, link_certificates(tmp_path, "cu")) as stream:
            train_step(stream, step_id(0, 1, 2), batch_of(0, 3), 1)
        assert service.finish_round().clusters[0].steps == 1


def test_a_list_of_revoked_certificates_must_be_the_authoritys_own(pki, tmp_path):
    stranger = certificate(tmp_path, "stranger-ca")
    wanted = {"tls_ca": str(pki / "ca.pem"), **service_files(pki, "service")}
    for path, words in (
        (revocation_list(tmp_path, stranger), "expected a list that the authority of decoder.tls-ca signed"),
        (str(tmp_path / "none.pem"), "expected a certificate revocation list"),
    ):
        with pytest.raises(ValueError, match=f"decoder.tls-crl .*{words}"), service_of(tls_crl=path, **wanted):
            pass


def test_a_certificate_file_that_is_missing_or_none_is_named(pki, tmp_path):
    trainer = DecoderTrainer(head_trainer())
    key = str(pki / "service.key")
    missing = DecoderConfig(tls_certificate=str(tmp_path / "none.pem"), tls_key=key)
    with pytest.raises(ValueError, match="decoder.tls-certificate .*none.pem: No such file"):
        DecoderService(missing, trainer, 1)
    (tmp_path / "text.pem").write_text("hello")
    with pytest.raises(ValueError, match="decoder.tls-certificate .*text.pem: expected a PEM file"):
        DecoderService(replace(missing, tls_certificate=str(tmp_path / "text.pem")), trainer, 1)
    with service_of(num_clusters=1, **service_files(pki, "alone")) as service:
        address = service.open_round(1, [0], 1)[0]
        with pytest.raises(ValueError, match="private key .*none.key: No such file"):
            DecoderStream.open(address, LinkCertificates(key=str(tmp_path / "none.key")))


def test_a_certificate_and_key_that_do_not_belong_together_are_refused(pki):
    mixed = {**service_files(pki, "service"), "tls_key": str(pki / "cu.key")}
    with pytest.raises(ValueError, match="decoder.tls-certificate"), service_of(num_clusters=1, **mixed):
        pass


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "192.0.2.1:5000", "decoder.example:5000", "[::]:0"])
def test_a_bind_beyond_loopback_without_tls_is_an_error(bind):
    with pytest.raises(ValueError, match="decoder.bind: .*no TLS; set decoder.tls-certificate and decoder.tls-key"):
        DecoderConfig(bind=bind, advertise="decoder.example")


def test_a_bind_beyond_loopback_with_tls_serves_under_the_advertised_name(pki):
    with service_of(num_clusters=1, bind="0.0.0.0:0", advertise="localhost", **service_files(pki, "alone")) as service:
        address = service.open_round(1, [0], 1)[0]
        assert address.target.startswith("localhost:") and not address.target.endswith(":0")
        train_round(address, [batch_of(0, 3)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bind": "127.0.0.1"}, "decoder.bind: expected host:port, such as 127.0.0.1:0, found '127.0.0.1'"),
        ({"bind": ":50"}, "decoder.bind: expected host:port"),
        ({"bind": "127.0.0.1:99999"}, "decoder.bind: expected host:port"),
        ({"bind": "::1:50"}, "decoder.bind: expected host:port"),
        ({"bind": "0.0.0.0:0", "tls_certificate": "a", "tls_key": "b"}, "decoder.advertise: expected the address"),
        ({"advertise": "host:port"}, "decoder.advertise: expected host:port"),
        ({"join_timeout": 0.0}, "decoder.join-timeout: expected seconds above 0, found 0.0"),
        ({"step_timeout": float("inf")}, "decoder.step-timeout: expected seconds above 0, found inf"),
        ({"max_frame_bytes": 1}, "decoder.max-frame-bytes: expected 65536 to"),
        ({"tls_certificate": "a"}, "decoder.tls-certificate and decoder.tls-key: expected both or none"),
        ({"tls_crl": "a"}, "decoder.tls-crl: a list of revoked certificates also needs decoder.tls-ca"),
        ({"tls_ca": "a"}, "decoder.tls-ca: mutual TLS also needs decoder.tls-certificate"),
    ],
)
def test_a_wrong_configuration_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**values)


@pytest.mark.parametrize(
    ("bind", "advertise", "pattern"),
    [
        ("127.0.0.1:0", "", r"127\.0\.0\.1:\d+"),
        ("127.0.0.1:0", "edge.example", r"edge\.example:\d+"),
        ("127.0.0.1:0", "edge.example:0", r"edge\.example:[1-9]\d*"),
        ("127.0.0.1:0", "edge.example:4433", r"edge\.example:4433"),
    ],
)
def test_cus_are_told_the_advertised_address(bind, advertise, pattern):
    import re

    with service_of(num_clusters=1, bind=bind, advertise=advertise) as service:
        assert re.fullmatch(pattern, service.advertised)


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"decoder.bind: cannot listen on {bind}: the port is in use"):
            with service_of(num_clusters=1, bind=bind):
                pass


def test_two_services_cannot_share_a_port():
    with service_of(num_clusters=1) as service:
        bind = service.advertised
        with pytest.raises(ValueError, match="decoder.bind: cannot listen"), service_of(num_clusters=1, bind=bind):
            pass


def test_a_service_that_stopped_leaves_its_port_and_no_thread_behind():
    import threading

    before = set(threading.enumerate())
    for _ in range(2):
        with service_of(num_clusters=2) as service:
            bind = service.advertised
            addresses = service.open_round(1, [0, 1], 1)
            waiting = DecoderStream.open(addresses[0])
            with pytest.raises(LinkError):
                DecoderStream.open(replace(addresses[1], token="wrong"))
        waiting.abort()
        with service_of(num_clusters=1, bind=bind) as service:
            train_round(service.open_round(1, [0], 1)[0], [batch_of(0, 3)])
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before


def test_a_cu_with_certificates_sends_nothing_without_tls(pki):
    with service_of(num_clusters=1) as service:
        address = service.open_round(1, [0], 1)[0]
        assert not address.tls
        for certificates in (link_certificates(pki, "cu"), LinkCertificates(root_certificate=str(pki / "ca.pem"))):
            refusal = ""
            try:
                DecoderStream.open(address, certificates).abort()
            except ValueError as error:
                refusal = str(error)
            assert "this control unit has certificates" in refusal
        # Without any it is on one machine with the decoder.
        train_round(address, [batch_of(0, 3)])
