"""Clusters whose adapters have ranks of their own, through every real part."""

import json

import pytest
from safetensors.torch import load_file

from helpers.command_line import collapipe, rounds, sets

pytestmark = pytest.mark.slow


def test_clusters_of_two_ranks_train_one_model(tmp_path):
    lora = {"model.trainable": "lora", "lora.rank": 4, "lora.average": "products", "lora.cluster-ranks": "4,2"}
    result = collapipe("run", *sets(scenario="two-clusters", **lora), cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    run_dir = tmp_path / "runs" / "latest"
    lines = rounds(run_dir)
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]
    for line in lines:
        assert not line["failed"]
        whole, half = (cluster["payload_bytes"]["update"] for cluster in line["clusters"])
        assert whole == 2 * half > 0
    # What is kept is of the global rank, and both clusters have taken part in it.
    spec = json.loads((run_dir / "model" / "spec.json").read_text())
    assert spec["lora"]["rank"] == 4
    weights = load_file(run_dir / "model" / "model.safetensors")
    factors = [value for name, value in weights.items() if ".lora_B." in name]
    assert factors and all(value.shape[1] == 4 and value.any() for value in factors)
