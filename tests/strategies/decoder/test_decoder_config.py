"""What can be served, and safely: each setting at its limits, and what it needs beside it."""

import math

import pytest

from helpers.decoder_cases import all_at_once, batch_of, head_trainer, train_round
from strategies.decoder.config import DecoderConfig
from strategies.decoder.service import DecoderService
from strategies.decoder.trainer import DecoderTrainer

TLS = {"tls_certificate": "chain.pem", "tls_key": "key.pem"}


def refused(message, **settings):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**settings)


@pytest.mark.parametrize("name", ["join_timeout", "step_timeout", "reply_timeout"])
def test_every_wait_has_an_end_and_some_time(name):
    DecoderConfig(**{name: 1e-3})
    for value in (0.0, -1.0, math.inf, math.nan):
        refused(rf"decoder\.{name.replace('_', '-')}: expected seconds above 0, found {value}", **{name: value})


def test_frames_come_at_least_once_a_second():
    DecoderConfig(frames_per_second=1.0)
    for value in (0.99, math.inf, math.nan):
        refused("decoder.frames-per-second: expected at least 1, found", frames_per_second=value)


def test_a_frame_holds_64_kib_at_least_and_no_more_than_grpc_counts():
    for size in (65_536, 2_147_483_647):
        assert DecoderConfig(max_frame_bytes=size).max_frame_bytes == size
    for size in (65_535, 2_147_483_648):
        refused(f"expected 65536 to 2147483647, found {size}", max_frame_bytes=size)


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "localhost:9000", "[::1]:9000"])
def test_on_this_machine_alone_nothing_else_is_needed(bind):
    DecoderConfig(bind=bind)


@pytest.mark.parametrize("bind", ["10.0.0.1:9000", "box.example:9000", "0.0.0.0:9000", "[::]:9000"])
def test_where_others_can_come_there_is_tls(bind):
    refused("can be reached from other machines and there is no TLS", bind=bind, advertise="box.example")
    DecoderConfig(bind=bind, advertise="box.example", **TLS)


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
