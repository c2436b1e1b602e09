"""Memory of the server in a round: not the clusters' whole weights, however many there are."""

import json
import subprocess
import sys

import pytest


def answer_of_process(function, num_clusters, folder):
    """Call a helper in a process of its own."""
    module = function.partition(".")[0]
    code = f"import json; from pathlib import Path; from helpers import {module}; "
    call = f"print(json.dumps({function}({num_clusters}, Path({str(folder)!r}))))"
    done = subprocess.run([sys.executable, "-c", code + call], capture_output=True, text=True, check=False, timeout=600)
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_exchange_and_average_of_a_large_model_take_one_model_beside_the_rounds_weights(tmp_path):
    """One array of one answer at a time, then the average: of six clusters as of one."""
    peaks = answer_of_process("large_exchange.extra_models", 6, tmp_path)
    # A part is of the one array that is read and added.
    assert len(peaks) == 2 and max(peaks) < 1.2, peaks
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_two_hundred_replies_of_the_largest_allowed_size_leave_the_server_small(tmp_path):
    """Three gigabytes: each has twice the order's bytes in small arrays, and as many of text as are taken."""
    growth, reason = answer_of_process("largest_replies.peak_growth", 200, tmp_path)
    # Not for their size, which would be a reply that cannot be put together.
    assert reason.count("expected one record each of arrays, metrics, report, found") == 200
    assert growth < 300_000_000
    assert list(tmp_path.iterdir()) == []
