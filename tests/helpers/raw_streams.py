"""Streams to the decoder's service without the client's own code."""

import grpc

from client_pipeline.link.address import METHOD, SERVICE
from client_pipeline.link.frames import PROTOCOL_VERSION, encode


def call(address, *frames, **options):
    """Send frames on a stream of one's own; returns status and details."""
    with grpc.insecure_channel(address.target) as channel:
        try:
            list(channel.stream_stream(f"/{SERVICE}/{METHOD}")(iter(frames), timeout=120, **options))
        except grpc.RpcError as error:
            return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def hello(address, **change):
    header = {
        "version": PROTOCOL_VERSION,
        "token": address.token,
        "round": address.round,
        "cluster": address.cluster,
        **change,
    }
    return encode({"kind": "hello", **header})
