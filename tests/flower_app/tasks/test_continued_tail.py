"""A run that starts from one whose control units had closing norm and output layer."""

import pytest
import torch

from flower_app.config.sources import load_config
from flower_app.saved_model import load_model
from flower_app.tasks.base import task
from helpers.saved_runs import SMALL, saved_run

LANGUAGE = SMALL | {"task.name": "causal-lm", "model.family": "llama", "model.encoder-layers": 2}


def begun_from(run_dir, **values):
    config = load_config(None, LANGUAGE | {"model.from": str(run_dir)} | values)
    prepared = task(config.task).prepare(config.data, config.model, config.seed, 1)
    return prepared.with_tail(config.returns_states).build(seed=5)


@pytest.mark.parametrize("before", ["cluster", "server"])
@pytest.mark.parametrize("after", ["cluster", "server"])
def test_a_language_model_goes_on_wherever_its_labels_are(before, after, tmp_path):
    run_dir = saved_run(LANGUAGE | {"split.labels": before, "runs-dir": str(tmp_path)})
    parts, old = begun_from(run_dir, **{"split.labels": after}), load_model(run_dir, "llama").parts
    assert bool(parts.spec.config.get("cluster_tail")) == (after == "cluster")
    expected = dict(old.reference.named_parameters())
    for name, parameter in parts.reference.named_parameters():
        assert torch.equal(parameter, expected[name])


def test_a_classifier_takes_the_layers_and_not_the_tail(tmp_path):
    run_dir = saved_run(LANGUAGE | {"split.labels": "cluster", "runs-dir": str(tmp_path)})
    parts = begun_from(run_dir, **{"task.name": "sequence-classification"})
    old = load_model(run_dir, "llama").parts
    assert "cluster_tail" not in parts.spec.config
    assert torch.equal(parts.blocks[1].layer.mlp.up_proj.weight, old.blocks[1].layer.mlp.up_proj.weight)
    assert not any("tail" in name for name, _ in parts.named_parameters())
