"""Limits that a page promises are those of the code."""

import pytest

from client_pipeline.link.frame_limits import DEFAULT_MAX_BYTES, MAX_HEADER_BYTES, PULLED_BYTES
from client_pipeline.runtime.stage.memory import STACKS_BYTES
from client_pipeline.system.scenario_table import MOST_COUNT
from helpers.repository import ROOT
from strategies.decoder.config import DecoderConfig
from strategies.decoder.limits import WRONG_HELLOS, WRONG_HELLOS_PER_S
from strategies.decoder.reception import HELLO_TIMEOUT_S, STREAMS_OF_A_CLUSTER

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("page", "promise"),
    [
        ("threat-model-reference", f"frames of at most `decoder.max-frame-bytes` ({DEFAULT_MAX_BYTES / MIB:g} MiB)"),
        ("threat-model-reference", f", headers {MAX_HEADER_BYTES / KIB:g} KiB,"),
        ("threat-model-reference", f"`decoder.frames-per-second` ({DecoderConfig().frames_per_second:g}) a stream"),
        ("threat-model-reference", f"; {WRONG_HELLOS} wrong hellos of a peer, then one a second"),
        ("threat-model-reference", f"; {STREAMS_OF_A_CLUSTER} streams of a cluster at once"),
        ("threat-model-reference", f"; a hello within {HELLO_TIMEOUT_S:g} s,"),
        ("threat-model-reference", f"by digest, at most {PULLED_BYTES / MIB:g} MiB at once"),
        ("threat-model-reference", f" {MOST_COUNT:,} clusters,"),
        ("language-models", f" and {STACKS_BYTES / MIB:g} MiB for 32 later threads"),
    ],
)
def test_a_promised_limit_is_the_codes(page, promise):
    assert promise in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert WRONG_HELLOS_PER_S == 1.0
