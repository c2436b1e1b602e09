"""What the server holds of a round: not the clusters' whole weights, however many they are."""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_exchange_and_average_of_a_large_model_take_one_model_beside_the_rounds_weights(tmp_path):
    """The answer that is put together, then the average. Of six clusters of 64 MB each it once was eight and a half."""
    code = "import sys; from pathlib import Path; from helpers import large_exchange as exchange; "
    call = f"print(exchange.extra_models(6, Path({str(tmp_path)!r})))"
    done = subprocess.run([sys.executable, "-c", code + call], capture_output=True, text=True, check=False, timeout=300)
    assert not done.returncode, done.stderr[-2000:]
    peaks = json.loads(done.stdout.splitlines()[-1])
    # A part is of the one array that is read and added.
    assert len(peaks) == 2 and max(peaks) < 1.25, peaks
    assert list(tmp_path.iterdir()) == []
