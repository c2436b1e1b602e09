"""Addresses of hosts and of the decoder: what is read, what is refused, and how a channel is opened."""

import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
import pytest

from client_pipeline.link.address import DecoderAddress, LinkCertificates, open_channel, read_pem
from client_pipeline.link.hosts import HostPort, check_ipv4_host, is_here, is_loopback, split_address
from client_pipeline.link.keepalive import channel_options

ADDRESS = DecoderAddress(target="10.0.0.1:50", token="secret", round=3, cluster=1)
PEM = b"-----BEGIN CERTIFICATE-----\n"


@pytest.mark.parametrize(
    ("text", "host", "bare", "port"),
    [
        ("127.0.0.1:0", "127.0.0.1", "127.0.0.1", 0),
        ("box.example:65535", "box.example", "box.example", 65535),
        ("[::1]:80", "[::1]", "::1", 80),
    ],
)
def test_a_host_and_its_port_are_read(text, host, bare, port):
    found = split_address("here", text)
    assert found == HostPort(host, port) and found.bare_host == bare and str(found) == text


@pytest.mark.parametrize("text", ["", ":80", "host", "host:", "host:-1", "host:1.5", "host:x", "host:65536", "::1:80"])
def test_what_is_no_host_and_port_is_refused(text):
    with pytest.raises(ValueError, match="here: expected host:port, such as .*found"):
        split_address("here", text)


def test_a_port_may_be_left_out_where_there_is_a_usual_one():
    assert split_address("here", "box", 92) == HostPort("box", 92)
    assert split_address("here", "box:1", 92) == HostPort("box", 1)
    for text in ("", "box:0", "box:", ":92", "::1"):
        with pytest.raises(ValueError, match="here: expected HOST or HOST:PORT, found"):
            split_address("here", text, 92)


def test_a_deployments_hosts_are_names_and_ipv4_addresses():
    for host in ("box", "box.example", "10.0.0.1"):
        check_ipv4_host("here", host)
    for host in ("::1", "[::1]", "box::x"):
        with pytest.raises(ValueError, match="a deployment speaks no IPv6 yet"):
            check_ipv4_host("here", host)
    for host in ("", "a box", "https//box"):
        with pytest.raises(ValueError, match="here: expected a name or an IPv4 address, found '.*'$"):
            check_ipv4_host("here", host)


@pytest.mark.parametrize(
    ("host", "is_here"),
    [("127.0.0.1", True), ("127.8.0.9", True), ("localhost", True), ("[::1]", True), ("::1", True)]
    + [(host, False) for host in ("10.0.0.1", "0.0.0.0", "[::]", "box", "localhost.example")],
)
def test_this_machine_alone_reaches_its_loopback(host, is_here):
    assert is_loopback(host) is is_here


@pytest.fixture
def outer_address():
    """An address of this machine that others reach."""
    addresses = [one.address for ones in psutil.net_if_addrs().values() for one in ones if one.family == socket.AF_INET]
    if not (outer := [address for address in addresses if not is_loopback(address)]):
        pytest.skip("this machine has no address but its loopback's")
    return outer[0]


def test_an_address_of_another_machine_is_told_from_those_of_this_one(outer_address):
    assert all(map(is_here, ("127.0.0.1", "localhost", outer_address)))
    # Addresses that documents use, and no machine.
    assert not any(map(is_here, ("192.0.2.1", "[2001:db8::1]", "no-such-host.invalid")))


# The decoder's.


def test_no_proxy_stands_before_a_decoder_of_this_machine(monkeypatch, outer_address):
    """With `decoder.bind` at the machine's outer address the stream went to `https_proxy`."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port(f"{outer_address}:0")
    server.start()
    address = DecoderAddress(target=f"{outer_address}:{port}", token="secret", round=3, cluster=1)
    try:
        with open_channel(address, LinkCertificates()) as channel:
            grpc.channel_ready_future(channel).result(60)
    finally:
        server.stop(None)


def test_an_address_survives_the_trip_and_says_no_secret():
    assert DecoderAddress.from_dict(ADDRESS.to_dict()) == ADDRESS
    assert "secret" not in repr(ADDRESS)
    assert all(type(value) in (str, int, float, bool) for value in ADDRESS.to_dict().values())


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"round": 1.0}, "round"),
        ({"round": True}, "round"),
        ({"tls": 1}, "tls"),
        ({"join_timeout_s": 1}, "join_timeout_s"),
        ({"more": 1}, "more"),
        ({"more": 1, "cluster": "0"}, "more, cluster"),
    ],
)
def test_an_address_that_was_changed_is_refused_by_its_values(change, names):
    with pytest.raises(ValueError, match=f"missing, unknown or of another type: {names}$"):
        DecoderAddress.from_dict(ADDRESS.to_dict() | change)
    short = {name: value for name, value in ADDRESS.to_dict().items() if name != "token"}
    with pytest.raises(ValueError, match="another type: token$"):
        DecoderAddress.from_dict(short)


@pytest.fixture
def opened(monkeypatch):
    """Return the arguments of gRPC's channel."""
    seen = []
    monkeypatch.setattr(grpc, "insecure_channel", lambda target, options: seen.append((target, None, dict(options))))
    monkeypatch.setattr(
        grpc, "secure_channel", lambda target, credentials, options: seen.append((target, credentials, dict(options)))
    )
    monkeypatch.setattr(grpc, "ssl_channel_credentials", lambda **files: files)
    return seen


def test_without_tls_a_channel_is_plain_and_takes_frames_of_the_agreed_size(opened):
    open_channel(ADDRESS, LinkCertificates())
    [(target, credentials, options)] = opened
    assert (target, credentials) == ("10.0.0.1:50", None)
    for way in ("send", "receive"):
        assert options[f"grpc.max_{way}_message_length"] == ADDRESS.max_frame_bytes
    # Streams do not share a connection: one that is cut must not take another with it.
    assert options["grpc.use_local_subchannel_pool"] == 1
    assert "grpc.enable_http_proxy" not in options
    assert set(channel_options(ADDRESS.max_frame_bytes)) <= set(options.items())


def test_under_tls_an_own_root_comes_before_the_one_that_was_sent(opened, tmp_path):
    files = {}
    for name in ("certificate", "key", "root_certificate"):
        path = tmp_path / name
        path.write_bytes(PEM + name.encode())
        files[name] = str(path)
    secure = DecoderAddress.from_dict(ADDRESS.to_dict() | {"tls": True, "root_certificate": "sent"})
    open_channel(secure, LinkCertificates(**files))
    open_channel(secure, LinkCertificates())
    open_channel(DecoderAddress.from_dict(ADDRESS.to_dict() | {"tls": True}), LinkCertificates())
    assert [credentials for _, credentials, _ in opened] == [
        {
            "root_certificates": PEM + b"root_certificate",
            "private_key": PEM + b"key",
            "certificate_chain": PEM + b"certificate",
        },
        {"root_certificates": b"sent", "private_key": None, "certificate_chain": None},
        # The roots of the system.
        {"root_certificates": None, "private_key": None, "certificate_chain": None},
    ]


def test_a_file_that_is_no_pem_is_named(tmp_path):
    assert read_pem("", "private key") is None
    with pytest.raises(ValueError, match="private key .*none.pem: No such file or directory; give the path"):
        read_pem(str(tmp_path / "none.pem"), "private key")
    (tmp_path / "other.pem").write_bytes(b"PK\x03")
    with pytest.raises(ValueError, match="private key .*other.pem: expected a PEM file"):
        read_pem(str(tmp_path / "other.pem"), "private key")
