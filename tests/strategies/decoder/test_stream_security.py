"""Admission to the decoder's service over real TLS, and the bounds of an admitted peer."""

import re
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest
import torch

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.link.address import METHOD, SERVICE
from client_pipeline.link.base import LinkError
from client_pipeline.link.reopened_connection import DecoderConnection
from client_pipeline.link.stream import DecoderStream
from helpers.certificates import certificate, link_certificates, service_files
from helpers.decoder_cases import (
    all_at_once,
    assert_still_serves,
    batch_of,
    first_frame,
    service_of,
    train_round,
)
from helpers.patience import eventually
from helpers.raw_streams import call, hello
from strategies.decoder.limits import WRONG_HELLOS, HelloGuard, TooManyHellos, peer_name
from strategies.decoder.step_limits import StepLimits


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")
    ca = certificate(folder, "ca")
    for name in ("service", "cu"):
        certificate(folder, name, ca)
    certificate(folder, "expired", ca, hours=(-2, -1))
    certificate(folder, "early", ca, hours=(1, 2))
    certificate(folder, "stranger", certificate(folder, "stranger-ca"))
    # A stranger may call its own CA and itself as ours are called.
    (folder / "twin").mkdir()
    certificate(folder / "twin", "cu", certificate(folder / "twin", "ca"))
    return folder


@pytest.fixture
def mutual(pki):
    """A service under mutual TLS with one cluster, its address and the CU's own certificate."""
    with service_of(num_clusters=1, tls_ca=str(pki / "ca.pem"), **service_files(pki, "service")) as service:
        yield service, service.open_round(1, [0], 2)[0], link_certificates(pki, "cu")


@pytest.mark.parametrize("name", ["", "stranger", "twin/cu", "expired", "early"])
def test_under_mutual_tls_a_right_token_does_not_make_up_for_a_wrong_certificate(pki, mutual, name):
    service, address, cu = mutual
    with pytest.raises(LinkError, match="cannot be reached"):
        DecoderStream.open(address, link_certificates(pki, name) if name else None)
    # The handshake failed: no hello was read, and the token is still good.
    assert service.hellos.take_refused() == {}
    with DecoderStream.open(address, cu):
        pass


def test_a_service_whose_certificate_has_expired_gets_no_token(pki):
    with service_of(num_clusters=1, tls_ca=str(pki / "ca.pem"), **service_files(pki, "expired")) as service:
        address = service.open_round(1, [0], 1)[0]
        with pytest.raises(LinkError, match="cannot be reached"):
            DecoderStream.open(address, link_certificates(pki, "cu"))
        assert service.hellos.take_refused() == {}


def test_a_peer_that_keeps_guessing_is_refused_unread_and_let_in_again_later():
    now = [0.0]
    with service_of(num_clusters=1) as service:
        service.reception.hellos = HelloGuard(3, clock=lambda: now[0])
        address = service.open_round(1, [0], 1)[0]
        for i in range(WRONG_HELLOS):
            code, _ = call(address, hello(address, token=f"guess {i}"))
            assert code is grpc.StatusCode.UNAUTHENTICATED
        code, details = call(address, hello(address))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "too many wrong hellos" in details
        now[0] += 1.5
        train_round(address, [batch_of(0, 3)])
        assert service.hellos.take_refused() == {"not admitted": WRONG_HELLOS, "too many wrong hellos": 1}
        assert service.finish_round().clusters[0].steps == 1


@contextmanager
def silent_streams(address, number):
    """Streams that are open, and say nothing."""
    with grpc.insecure_channel(address.target) as channel:
        exchange = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        released = threading.Event()
        calls = [exchange(iter(lambda: released.wait() and None, None), timeout=120) for _ in range(number)]
        try:
            yield calls
        finally:
            released.set()
            for one in calls:
                one.cancel()


def test_streams_that_say_nothing_are_few_and_shut_nobody_out(monkeypatch):
    monkeypatch.setattr("strategies.decoder.reception.HELLO_TIMEOUT_S", 2.0)
    with service_of(num_clusters=2) as service:
        addresses = service.open_round(1, [0, 1], 1)
        with silent_streams(addresses[0], 4) as silent:
            eventually(lambda: service.hellos.num_waiting == 4)
            # They have taken all places: the oldest of them give way.
            results = all_at_once(*(lambda n=n: train_round(addresses[n], [batch_of(n, 3)]) for n in (0, 1)))
            assert [type(result) for result in results] == [list, list], results
            # The others are broken off when their time is up.
            for stream in silent:
                with pytest.raises(grpc.RpcError):
                    list(stream)
        assert [s.steps for s in service.finish_round().clusters.values()] == [1, 1]
        eventually(lambda: not service.hellos.num_waiting)
        refused = service.hellos.take_refused()
        assert sum(refused.values()) == 4 and refused["gave way to a newer stream"] >= 1
        assert_still_serves(service, 2)


@pytest.mark.slow
def test_a_first_hello_that_a_busy_decoder_turns_away_is_said_again():
    with service_of(num_clusters=1) as service:
        address = service.open_round(1, [0], 1)[0]
        for _ in range(WRONG_HELLOS + 1):
            service.hellos.wrong("ipv4:127.0.0.1", "not admitted")
        (result,) = all_at_once(lambda: train_round(address, [batch_of(0, 3)]))
        assert isinstance(result, list), result
        assert service.hellos.take_refused()["too many wrong hellos"] >= 1
        # Not for ever: the round's join timeout is all that it has.
        for _ in range(100):
            service.hellos.wrong("ipv4:127.0.0.1", "not admitted")
        service.finish_round()
        address = replace(service.open_round(2, [0], 1)[0], join_timeout_s=0.5)
        with pytest.raises(LinkError, match="resource exhausted.*too many wrong hellos"):
            DecoderStream.open(address)


def test_the_peer_with_most_streams_in_waiting_gives_way_first():
    guard, ended = HelloGuard(4), []
    places = [
        guard.enter(peer, lambda name=name: ended.append(name)) for peer, name in zip("xyyy", "abcd", strict=True)
    ]
    guard.enter("x", ended.clear)
    assert ended == ["b"] and guard.num_waiting == 4
    guard.enter("z", int)
    assert ended == ["b", "a"]
    assert [guard.leave(place) for place in places] == [False, False, True, True]
    assert guard.num_waiting == 2


def test_a_connection_that_never_shakes_hands_is_closed(pki, monkeypatch):
    monkeypatch.setattr("strategies.decoder.service._HANDSHAKE_TIMEOUT_S", 1.0)
    with service_of(num_clusters=1, tls_ca=str(pki / "ca.pem"), **service_files(pki, "service")) as service:
        host, _, port = service.advertised.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=120) as silent:
            assert silent.recv(1) == b""


def test_packed_frames_are_refused_before_they_are_unpacked():
    with service_of(num_clusters=1) as service:
        address = service.open_round(1, [0], 1)[0]
        code, details = call(address, bytes(2**26 - 100), compression=grpc.Compression.Gzip)
        assert code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL), (code, details)
        train_round(address, [batch_of(0, 3)])


def test_a_step_has_no_more_micro_batches_and_examples_than_a_batch():
    with service_of(num_clusters=1) as service:
        service.limits = replace(service.limits, examples=5)
        for round_, (frames, found) in enumerate(
            [
                ([first_frame(num_micro_batches=6)], "5 micro-batches, as examples, found 6"),
                ([first_frame(), first_frame(micro_batch=1, total_weight=None)], "5 examples, found 6"),
            ],
            start=1,
        ):
            address = service.open_round(1, [0], 1)[0]
            code, details = call(address, hello(address), *frames)
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert f"a step has at most {found}" in details, round_
            service.finish_round()
        assert_still_serves(service, 3)


def test_bytes_that_no_row_of_the_codec_has_are_refused_where_the_width_is_not_known():
    with service_of(num_clusters=1) as service:
        codec, limits = service.codec, service.limits
        service.codec = service.reception.codec = ActivationCodec("int8")
        service.limits = StepLimits()
        address = service.open_round(1, [0], 1)[0]
        # A scale, and no number.
        frame = first_frame(hidden=batch_of(0, 3)[0][..., :4].to(torch.uint8))
        code, details = call(address, hello(address, codec="int8"), frame)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "hidden: expected the codec int8, bytes [B, T, row], found torch.uint8" in details
        service.finish_round()
        service.codec = service.reception.codec = codec
        service.limits = limits
        assert_still_serves(service, 2)


def test_frames_that_come_too_fast_wait():
    batch = batch_of(0, 28)
    with service_of(num_clusters=1, frames_per_second=10.0) as service:
        address = service.open_round(1, [0], 1)[0]
        start = time.monotonic()
        train_round(address, [batch], num_micro_batches=28)
        # 30 frames after the hello: 20 at once, the others at 10 a second.
        assert time.monotonic() - start > 0.95
        assert service.finish_round().clusters[0].steps == 1


def test_what_is_remembered_of_peers_is_bounded_and_one_peers_guesses_do_not_count_for_another():
    guard = HelloGuard(2, clock=lambda: 0.0)
    for _ in range(WRONG_HELLOS):
        guard.wrong("a", "not admitted")
    with pytest.raises(TooManyHellos):
        guard.enter("a", int)
    assert guard.leave(guard.enter("b", int))
    for i in range(2000):
        guard.wrong(f"peer {i}", "malformed")
    assert len(guard._wrong) <= 1024


def test_no_token_is_in_a_log_line_an_error_or_a_description(caplog, monkeypatch):
    caplog.set_level("DEBUG")
    said, resume_tokens = [], []
    resume_with = DecoderConnection.resume_with

    def noted(connection, token):
        resume_tokens.append(token)
        resume_with(connection, token)

    monkeypatch.setattr(DecoderConnection, "resume_with", noted)
    with service_of(num_clusters=2) as service:
        addresses = service.open_round(1, [0, 1], 1)
        secret = [address.token for address in addresses.values()]
        said += [repr(addresses), str(addresses), repr(service), repr(service.config), repr(vars(service.hellos))]
        said += [
            str(e) for e in all_at_once(*(lambda c=c: train_round(addresses[c], [batch_of(c, 3)]) for c in (0, 1)))
        ]
        for wrong in (addresses[0], replace(addresses[0], cluster=1), replace(addresses[1], round=9)):
            with pytest.raises(LinkError) as refusal:
                DecoderStream.open(wrong)
            said += [str(refusal.value), repr(refusal.value)]
        said.append(repr(service.finish_round()))
    said.append(caplog.text)
    assert len(resume_tokens) == 2
    for token in secret + resume_tokens:
        assert len(token) >= 43 and not any(re.search(re.escape(token), text) for text in said)


def test_clusters_with_one_certificate_are_told_apart_by_their_addresses():
    names = [peer_name([b"cu"], f"ipv4:10.0.0.{host}:50{host}") for host in (1, 2)]
    assert names[0] != names[1] and names[0] == peer_name([b"cu"], "ipv4:10.0.0.1:7")
    assert peer_name(None, "ipv6:[::1]:7") == "ipv6:[::1]"
