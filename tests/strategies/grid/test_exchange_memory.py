"""Memory of the server in a round: not the clusters' whole weights, however many there are."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_exchange_and_average_of_a_large_model_take_one_model_beside_the_rounds_weights(tmp_path):
    """One array of one answer at a time, then the average: of six clusters as of one."""
    code = "import sys; from pathlib import Path; from helpers import large_exchange as exchange; "
    call = f"print(exchange.extra_models(6, Path({str(tmp_path)!r})))"
    done = subprocess.run([sys.executable, "-c", code + call], capture_output=True, text=True, check=False, timeout=300)
    assert not done.returncode, done.stderr[-2000:]
    peaks = json.loads(done.stdout.splitlines()[-1])
    # A part is of the one array that is read and added.
    assert len(peaks) == 2 and max(peaks) < 1.2, peaks
    assert list(tmp_path.iterdir()) == []
