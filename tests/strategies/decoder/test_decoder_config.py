"""Safe settings of the decoder's service: each at its limits, and its requirements."""

import pytest

from helpers.decoder_cases import all_at_once, batch_of, head_trainer, train_round
from strategies.decoder.config import DecoderConfig
from strategies.decoder.service import DecoderService
from strategies.decoder.trainer import DecoderTrainer

TLS = {"tls_certificate": "chain.pem", "tls_key": "key.pem"}


def refused(message, **settings):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**settings)


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "localhost:9000", "[::1]:9000"])
def test_on_this_machine_alone_nothing_else_is_needed(bind):
    DecoderConfig(bind=bind)


def test_an_address_for_everyone_is_not_one_that_anybody_can_be_told():
    for bind in ("0.0.0.0:9000", "[::]:9000"):
        refused(r"decoder\.advertise: expected the address that CUs reach", bind=bind, **TLS)
    DecoderConfig(bind="10.0.0.1:9000", **TLS)


def test_what_is_advertised_is_a_host_or_a_host_and_port():
    for advertise in ("box.example", "box.example:9001"):
        DecoderConfig(advertise=advertise)
    for advertise in ("box.example:", ":9001", "box.example:x"):
        refused("decoder.advertise: expected host:port", advertise=advertise)
    refused("decoder.bind: expected host:port", bind="127.0.0.1")


def test_files_of_tls_come_together():
    for one in TLS:
        refused("decoder.tls-certificate and decoder.tls-key: expected both or none", **{one: "x.pem"})
    DecoderConfig(tls_ca="ca.pem", **TLS)
    refused("decoder.tls-ca: mutual TLS also needs decoder.tls-certificate", tls_ca="ca.pem")
    DecoderConfig(tls_ca="ca.pem", tls_crl="revoked.pem", **TLS)
    refused("decoder.tls-crl: a list of revoked certificates also needs decoder.tls-ca", tls_crl="x.pem", **TLS)


def test_a_service_says_at_the_end_of_a_round_what_each_cluster_did():
    service = DecoderService(DecoderConfig(), DecoderTrainer(head_trainer(), "step"), 2)
    with service as entered:
        assert entered is service
        addresses = service.open_round(1, [0, 1], 1)
        all_at_once(*(lambda n=n: train_round(addresses[n], [batch_of(n, 3)]) for n in (0, 1)))
        found = service.end_round()
        assert [(n, found[n].steps, found[n].departure) for n in sorted(found)] == [(0, 1, None), (1, 1, None)]
        assert service.finish_round({0: 1.0, 1: 1.0}).clusters == found


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        *((key, (1e-3, 1e6), (0.0, -1.0, float("inf"), float("nan"))) for key in ("join_timeout", "step_timeout")),
        ("reply_timeout", (1e-3,), (0.0, float("inf"))),
        ("frames_per_second", (1.0, 5000.0), (0.99, 0.0, float("inf"), float("nan"))),
        ("max_frame_bytes", (2**16, 2**31 - 1), (2**16 - 1, 2**31)),
    ],
)
def test_a_limit_is_finite_and_in_its_range(key, good, bad):
    for value in good:
        assert getattr(DecoderConfig(**{key: value}), key) == value
    for value in bad:
        refused(f"decoder.{key.replace('_', '-')}: expected .*, found {value}", **{key: value})
