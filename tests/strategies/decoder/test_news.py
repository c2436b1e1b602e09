"""News of control units beside their streams: the senders that are heard, and no wait for anything else."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from client_pipeline.link.address import NEWS_METHOD, SERVICE
from client_pipeline.link.cluster_news import ClusterNews
from client_pipeline.link.frames import encode
from client_pipeline.link.stream import DecoderStream
from helpers.decoder_cases import batch_of, service_of, step_id, train_step
from strategies.decoder.limits import WRONG_HELLOS
from strategies.decoder.reception import NEWS_PER_S


@pytest.fixture
def heard():
    return []


@pytest.fixture
def service(heard):
    def hear(cluster, round_, text):
        ClusterNews.from_text(text, cluster, str)
        heard.append((cluster, round_, text))

    with service_of(num_clusters=2) as service:
        service._on_news = hear
        yield service


def send(address, **changes):
    """Send one piece of news as bytes of one's own; returns the code that it ends with."""
    text = ClusterNews(round=address.round).to_text()
    header = {"kind": "news", "token": address.token, "round": address.round, "cluster": address.cluster, "text": text}
    data = changes.pop("data", None) or encode(header | changes)
    with grpc.insecure_channel(address.target) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{NEWS_METHOD}", request_serializer=None, response_deserializer=None)
        try:
            call(data, timeout=120)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


def test_news_come_while_the_stream_waits_for_another_cluster(service, heard):
    addresses = service.open_round(1, [0, 1], 1)
    with ThreadPoolExecutor(2) as threads:
        # Each is welcomed when the other has come.
        first, second = threads.map(DecoderStream.open, addresses.values())
    train_step(first, step_id(0), batch_of(0, 3), 1)
    # Its thread at the decoder waits for the other cluster's step from now on.
    first.tell(ClusterNews(round=1).to_text())
    assert [entry[:2] for entry in heard] == [(0, 1)]
    train_step(second, step_id(1), batch_of(1, 3), 1)
    for stream in (first, second):
        stream.close()
    assert [cluster.steps for cluster in service.finish_round().clusters.values()] == [1, 1]


def test_news_count_nothing_and_change_nothing(service, heard):
    address = service.open_round(1, [0], 1)[0]
    with DecoderStream.open(address) as stream:
        before = stream.bytes_up
        for _ in range(5):
            stream.tell(ClusterNews(round=1).to_text())
        assert (stream.bytes_up, len(heard)) == (before, 5)
        train_step(stream, step_id(0), batch_of(0, 3), 1)
    assert service.finish_round().clusters[0].steps == 1
    # A closed stream tells nothing, and raises nothing.
    stream.tell(ClusterNews(round=1).to_text())
    assert len(heard) == 5


def test_without_the_rounds_own_token_nobody_tells_anything(service, heard):
    addresses = service.open_round(1, [0, 1], 1)
    assert send(addresses[0], token="x") == "UNAUTHENTICATED"
    assert send(addresses[0], cluster=1) == "UNAUTHENTICATED"
    assert send(addresses[0], round=2) == "UNAUTHENTICATED"
    assert send(addresses[0], cluster=7) == "UNAUTHENTICATED"
    service.reception.close_round()
    assert send(addresses[0]) == "UNAUTHENTICATED"
    assert heard == []


@pytest.mark.parametrize(
    "changes", [{"text": "{}"}, {"data": b"\x00" * 100}, {"data": encode({"kind": "bye"})}, {"text": "x" * 20_000}]
)
def test_what_is_no_news_is_refused(service, heard, changes):
    assert send(service.open_round(1, [0], 1)[0], **changes) == "INVALID_ARGUMENT"
    assert heard == []


def test_a_cluster_that_tells_too_much_waits_and_the_other_does_not(service, heard):
    addresses = service.open_round(1, [0, 1], 1)
    codes = [send(addresses[0]) for _ in range(int(2 * NEWS_PER_S) + 60)]
    assert codes[0] == "OK" and "RESOURCE_EXHAUSTED" in codes
    assert send(addresses[1]) == "OK"


def test_a_peer_that_guesses_is_refused_unread(service):
    addresses = service.open_round(1, [0], 1)
    codes = [send(addresses[0], token="x") for _ in range(WRONG_HELLOS + 20)]
    assert codes[0] == "UNAUTHENTICATED" and "RESOURCE_EXHAUSTED" in codes
