import importlib.util
import json

import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from helpers.repository import ROOT
from helpers.tiny_models import tiny_batch, tiny_spec

CENTRAL = ROOT / "benchmarks" / "central.py"


SMALL = {
    "data.num-examples": 100,
    "data.evaluation-examples": 10,
    "data.vocab-size": 400,
    "model.width": 16,
    "model.feed-forward": 32,
    "model.encoder-layers": 1,
    "model.decoder-layers": 1,
    "optimizer.clip-norm": 1.0,
    "optimizer.warmup-steps": 0,
}


@pytest.fixture
def central():
    specification = importlib.util.spec_from_file_location("central", CENTRAL)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def run_central(central, monkeypatch, capsys):
    monkeypatch.setattr(central.torch, "set_num_threads", lambda _: None)

    def run(*arguments, **settings):
        sets = [text for key, value in (SMALL | settings).items() for text in ("--set", f"{key}={value}")]
        monkeypatch.setattr("sys.argv", ["central.py", *arguments, *sets])
        return central.main(), capsys.readouterr()

    return run


def test_the_central_baseline_reports_bleu_at_the_asked_sample_counts(run_central):
    code, found = run_central("--json", "--samples", "60", "--evaluate-at", "20,40", "--batch-size", "16")
    assert code == 0
    rows = json.loads(found.out)
    assert [row["samples"] for row in rows] == [32, 48, 64]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(0 <= row["bleu"] <= 100 for row in rows)


def test_the_central_baseline_goes_on_from_a_model_that_it_saved(run_central, tmp_path):
    options = ("--json", "--samples", "48", "--batch-size", "16")
    bert = {"model.family": "bert"}
    code, found = run_central(*options, "--save", str(tmp_path / "first"), **bert, **{"task.name": "masked-lm"})
    assert code == 0 and "perplexity" in json.loads(found.out)[-1]
    tags = bert | {"task.name": "token-classification"}
    code, found = run_central(*options, **tags, **{"model.from": str(tmp_path / "first")})
    continued = json.loads(found.out)[-1]
    assert code == 0 and "f1" in continued
    code, found = run_central(*options, **tags)
    assert continued["loss"] != json.loads(found.out)[-1]["loss"]


class Tokens:
    """Sixteen examples of one length."""

    def __len__(self):
        return 16

    def collate(self, indices, seed=0):
        batch = tiny_batch(tiny_spec("bert", "sequence-classification"), size=16, padded=False)
        return {name: tensor[indices] for name, tensor in batch.items()}


def test_each_share_of_the_data_gives_its_batch_to_the_joint_step(central):
    drawn = []

    class Share(Tokens):
        def __init__(self, first):
            self.first = first

        def __len__(self):
            return 8

        def collate(self, indices, seed=0):
            drawn.append([self.first + index for index in indices])
            return super().collate(drawn[-1], seed)

    parts = build_parts(tiny_spec("bert", "sequence-classification", dropout=0.0), seed=0)
    sgd = OptimizerConfig(name="sgd", lr=0.5)
    central.CentralTraining(parts, [Share(0), Share(8)], sgd, 4, seed=0).train_step()
    assert [len(batch) for batch in drawn] == [4, 4]
    assert max(drawn[0]) < 8 <= min(drawn[1]) and sorted(drawn[0]) != sorted(i - 8 for i in drawn[1])
    # The gradient is that of the joint batch's mean.
    expected = build_parts(tiny_spec("bert", "sequence-classification", dropout=0.0), seed=0)

    class Joint(Tokens):
        def collate(self, indices, seed=0):
            return super().collate(drawn[0] + drawn[1], seed)

    central.CentralTraining(expected, [Joint()], sgd, 8, seed=0).train_step()
    weights = parts.weights()
    for name, value in expected.weights().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


def test_the_central_baseline_refuses_an_unknown_key(run_central):
    code, found = run_central(**{"data.sources": "files"})
    assert code == 2
    assert "did you mean 'data.source'" in found.err
