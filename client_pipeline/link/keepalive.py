"""gRPC options of both ends of the decoder's stream: keepalive and message sizes."""

from __future__ import annotations


def channel_options(max_frame_bytes: int) -> list[tuple[str, int]]:
    """Return the options that both ends share."""
    return [
        ("grpc.max_send_message_length", max_frame_bytes),
        ("grpc.max_receive_message_length", max_frame_bytes),
        # Activations of a MiB in one HTTP/2 frame, not in 64 of the default size.
        ("grpc.http2.max_frame_size", 2**24 - 1),
        # A peer that vanishes silently is noticed within about a minute.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 30_000),
        # gRPC ends a connection only after this timeout, too; its default is a minute.
        ("grpc.http2.ping_timeout_ms", 30_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]
