"""lm-eval scores a model through its door as it scores the exported model in one process."""

import json

import pytest

from flower_app.export import export_run
from helpers.served import KEY, chat_run, open_model

pytestmark = pytest.mark.slow
lm_eval = pytest.importorskip("lm_eval")

NOUNS = ("dog", "boy", "king", "cow", "letter", "house", "tree", "girl")


def tasks_of(folder):
    """Two tasks of local files: one by likelihoods, one by written texts."""
    rows = [
        {"question": f"the {noun} sees the", "choices": [f" {other}" for other in NOUNS[:4]], "answer": i % 4}
        for i, noun in enumerate(NOUNS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "metadata": {"version": 1},
    }
    choice = {
        "task": "nouns",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    written = {
        "task": "written",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    return [common | choice, common | written]


def test_scores_and_answers_are_those_of_the_exported_model(tmp_path, monkeypatch):
    run_dir = chat_run(tmp_path, monkeypatch)
    export_run(run_dir, tmp_path / "exported")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    tokenizer = {"tokenizer": str(tmp_path / "exported"), "tokenizer_backend": "huggingface"}

    def scored(model, arguments):
        from lm_eval.api.task import ConfigurableTask

        tasks = [ConfigurableTask(config=dict(each)) for each in tasks_of(tmp_path)]
        found = lm_eval.simple_evaluate(
            model, model_args=arguments, tasks=tasks, batch_size=1, bootstrap_iters=0, log_samples=True
        )
        return {name: [sample["resps"] for sample in samples] for name, samples in found["samples"].items()}, found

    alone, whole = scored("hf", {"pretrained": str(tmp_path / "exported"), "dtype": "float32", "device": "cpu"})
    with open_model(run_dir) as (served, address):
        base = {"model": served.name, "base_url": f"{address}/v1/completions", "num_concurrent": 2, "max_retries": 1}
        through, served_scores = scored("local-completions", {**base, **tokenizer})
    assert through["written"] == alone["written"]
    for mine, theirs in zip(through["nouns"], alone["nouns"], strict=True):
        for ((likelihood, is_greedy),), ((expected, is_best),) in zip(mine, theirs, strict=True):
            assert float(likelihood) == pytest.approx(float(expected), abs=1e-3) and is_greedy == is_best
    assert {n: v for n, v in served_scores["results"].items()} == {n: v for n, v in whole["results"].items()}
