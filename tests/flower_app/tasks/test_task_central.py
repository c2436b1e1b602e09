import importlib.util
import json

import pytest
import torch

from client_pipeline.partition.families import build_parts
from client_pipeline.runtime.optimizer_config import OptimizerConfig
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


def central_steps(central, batch_size, **more):
    parts = build_parts(tiny_spec("bert", "sequence-classification", dropout=0.0), seed=0)
    sgd = OptimizerConfig(name="sgd", lr=0.5, clip_norm=1.0)
    training = central.CentralTraining(parts, [Tokens()], sgd, batch_size, seed=0, **more)
    return [training.train_step() for _ in range(3)], parts.weights()


def test_accumulated_batches_of_the_central_baseline_are_one_large_step(central):
    losses, weights = central_steps(central, 8)
    found_losses, found = central_steps(central, 2, gradient_accumulation=4)
    assert found_losses == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    alone, _ = central_steps(central, 2)
    assert alone != pytest.approx(losses, rel=1e-3)


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


def test_the_central_baseline_refuses_shares_that_do_not_divide_the_joint_batch(run_central):
    code, found = run_central("--batch-size", "16", "--shares", "3")
    assert code == 2 and "--shares: expected a divisor of the joint batch of 16, found 3" in found.err


def test_the_central_baseline_computes_in_the_runs_precision_and_keeps_float32(central):
    losses, _ = central_steps(central, 8)
    found, weights = central_steps(central, 8, precision="bfloat16")
    assert found != losses and found == pytest.approx(losses, rel=0.02)
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_the_central_baseline_follows_the_runs_accumulation_and_precision(run_central, central, monkeypatch):
    seen = []

    class Watched(central.CentralTraining):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            seen.append((self.gradient_accumulation, self.precision))

    monkeypatch.setattr(central, "CentralTraining", Watched)
    keys = {"gradient-accumulation": 2, "runtime.precision": "bfloat16"}
    code, found = run_central("--json", "--samples", "60", "--batch-size", "16", **keys)
    assert code == 0 and seen == [(2, "bfloat16")]
    assert [(row["samples"], row["steps"]) for row in json.loads(found.out)] == [(64, 2)]


def test_the_central_baseline_refuses_an_unknown_key(run_central):
    code, found = run_central(**{"data.sources": "files"})
    assert code == 2
    assert "did you mean 'data.source'" in found.err
