import importlib.util
import json
from pathlib import Path

CENTRAL = Path(__file__).parents[1] / "benchmarks" / "central.py"


def test_the_central_baseline_reports_bleu_at_the_asked_sample_counts(monkeypatch, capsys):
    specification = importlib.util.spec_from_file_location("central", CENTRAL)
    central = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(central)
    settings = {
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
    sets = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    arguments = ["--json", "--samples", "60", "--evaluate-at", "20,40", "--batch-size", "16", *sets]
    monkeypatch.setattr("sys.argv", ["central.py", *arguments])
    monkeypatch.setattr(central.torch, "set_num_threads", lambda _: None)
    assert central.main() == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["samples"] for row in rows] == [32, 48, 64]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(0 <= row["bleu"] <= 100 for row in rows)


def test_the_central_baseline_refuses_an_unknown_key(monkeypatch, capsys):
    specification = importlib.util.spec_from_file_location("central", CENTRAL)
    central = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(central)
    monkeypatch.setattr("sys.argv", ["central.py", "--set", "data.sources=files"])
    assert central.main() == 2
    assert "did you mean 'data.source'" in capsys.readouterr().err
