"""Replies with hostile pieces, drawn at random from their structure, in a process whose memory is limited."""

import subprocess
import sys

import pytest

from helpers.repository import ROOT

pytestmark = pytest.mark.slow

NUMBER = 2_500
FUZZ = ROOT / "benchmarks" / "fuzz_replies.py"


@pytest.mark.timeout(600)
def test_whatever_is_wrong_with_replies_fails_their_cluster_alone_and_takes_no_memory():
    command = [sys.executable, str(FUZZ), "--number", str(NUMBER), "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"{NUMBER} replies" in done.stdout
