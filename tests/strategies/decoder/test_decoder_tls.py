"""Addresses, ports and certificates of the decoder's service."""

import datetime
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from client_pipeline.link.address import LinkCertificates
from client_pipeline.link.base import LinkError
from client_pipeline.link.stream import DecoderStream
from helpers.certificates import certificate, link_certificates, service_files
from helpers.decoder_cases import batch_of, head_trainer, service_of, step_id, train_round, train_step
from helpers.running_programs import taken_port
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
        ({"bind": ":50"}, "decoder.bind: expected host:port"),
        ({"bind": "127.0.0.1:99999"}, "decoder.bind: expected host:port"),
        ({"bind": "::1:50"}, "decoder.bind: expected host:port"),
        ({"join_timeout": 0.0}, "decoder.join-timeout: expected seconds above 0, found 0.0"),
        ({"step_timeout": float("inf")}, "decoder.step-timeout: expected seconds above 0, found inf"),
        ({"max_frame_bytes": 1}, "decoder.max-frame-bytes: expected 65536 to"),
        ({"frames_per_second": 0.0}, "decoder.frames-per-second: expected at least 1, found 0.0"),
        ({"tls_certificate": "a"}, "decoder.tls-certificate and decoder.tls-key: expected both or none"),
        ({"tls_crl": "a"}, "decoder.tls-crl: a list of revoked certificates also needs decoder.tls-ca"),
        ({"tls_ca": "a"}, "decoder.tls-ca: mutual TLS also needs decoder.tls-certificate"),
    ],
)
def test_a_wrong_configuration_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**values)


def test_a_port_in_use_is_named():
    with taken_port() as port:
        bind = f"127.0.0.1:{port}"
        with pytest.raises(ValueError, match=f"decoder.bind: cannot listen on {bind}: the port is in use"):
            with service_of(num_clusters=1, bind=bind):
                pass


def test_a_cu_with_certificates_sends_nothing_without_tls(pki):
    with service_of(num_clusters=1) as service:
        address = service.open_round(1, [0], 1)[0]
        assert not address.tls
        for certificates in (link_certificates(pki, "cu"), LinkCertificates(root_certificate=str(pki / "ca.pem"))):
            with pytest.raises(ValueError, match="this control unit has certificates"):
                DecoderStream.open(address, certificates).abort()
        # Without any it is on one machine with the decoder.
        train_round(address, [batch_of(0, 3)])
