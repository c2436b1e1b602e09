import importlib.util
import json
from pathlib import Path

import pytest

CENTRAL = Path(__file__).parents[1] / "benchmarks" / "central.py"


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
def run_central(monkeypatch, capsys):
    specification = importlib.util.spec_from_file_location("central", CENTRAL)
    central = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(central)
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


def test_the_central_baseline_refuses_an_unknown_key(run_central):
    code, found = run_central(**{"data.sources": "files"})
    assert code == 2
    assert "did you mean 'data.source'" in found.err
