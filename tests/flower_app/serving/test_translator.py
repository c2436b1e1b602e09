"""Translations at the door: those of ``predict``, and of the library's ``generate`` with the exported model."""

from dataclasses import replace

import openai
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, GenerationConfig

from client_pipeline.partition.parts import target_weight, targets
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.optimizer import PartOptimizer
from flower_app.export import export_run
from flower_app.runs.run_directory import read_run_config
from flower_app.saved_model import load_model, save_model
from flower_app.tasks.base import task
from helpers.saved_runs import SMALL, saved_run
from helpers.served import KEY, open_model

pytestmark = pytest.mark.slow

SIZES = {
    "model.width": 32,
    "model.feed-forward": 64,
    "model.encoder-layers": 2,
    "data.max-length": 64,
    "model.max-length": 64,
    "task.max-new-tokens": 0,
}
BEAMS = {"task.decode": "beam", "task.beam-size": 3, "task.length-penalty": 0.6}


def translation_run(folder, monkeypatch, family, **more):
    """Make a run with an untrained model; returns its directory, its task and the model."""
    monkeypatch.chdir(folder)
    run_dir = saved_run({**SMALL, **SIZES, "model.family": family, **more})
    return run_dir, read_run_config(run_dir), load_model(run_dir, family, "translation")


def learn(run_dir, config, model, num_steps):
    """Train on the run's four pairs of validation, and save the model; returns the pairs."""
    evaluator = task(config.task).evaluator(config.data, model.tokenizer_json)
    data = evaluator._encoded["validation"]
    optimizer = PartOptimizer(dict(model.parts.named_parameters()), OptimizerConfig(lr=5e-3))
    batch = data.collate(range(len(data)))
    for step in range(1, num_steps + 1):
        (model.parts.loss_sum(batch) / target_weight(targets(batch))).backward()
        optimizer.apply(step)
    save_model(run_dir, model.spec, model.parts.weights(), model.tokenizer_json, model.task, round_=1)
    return evaluator._pairs["validation"]


def client_of(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)


def ask(client, **asked):
    (model,) = (each.id for each in client.models.list())
    return client.completions.create(model=model, **asked)


@pytest.mark.parametrize("family", ["t5", "bart", "transformer"])
def test_beams_at_the_door_are_those_of_the_exported_model(tmp_path, monkeypatch, family):
    run_dir, config, model = translation_run(tmp_path, monkeypatch, family, **BEAMS)
    sentences = list(learn(run_dir, config, model, 80).sources)
    with open_model(run_dir, task=config.task) as (served, address):
        found = ask(client_of(address), prompt=sentences, temperature=0, max_tokens=12).choices
        sources = [served.text_prompt(text) for text in sentences]
    assert [choice.index for choice in found] == [0, 1, 2, 3]
    texts = [choice.text for choice in found]
    asked = replace(config.task, max_new_tokens=12)
    assert texts == task(asked).predict(model.parts, model.tokenizer_json, sentences)
    assert len(set(texts)) > 2 and all(texts)
    if family == "transformer":
        return
    exported = AutoModelForSeq2SeqLM.from_pretrained(export_run(run_dir, tmp_path / "exported").folder)
    options = GenerationConfig(
        max_new_tokens=12,
        num_beams=3,
        length_penalty=0.6,
        decoder_start_token_id=exported.config.decoder_start_token_id,
        pad_token_id=served.tokenizer.pad_id,
        eos_token_id=list(served.tokenizer.end_ids),
    )
    for ids, choice in zip(sources, found, strict=True):
        with torch.no_grad():
            (row,) = exported.generate(torch.tensor([ids]), generation_config=options).tolist()
        assert choice.text == served.tokenizer.decode([row[1:]])[0]
        assert choice.finish_reason == ("stop" if row[-1] in served.tokenizer.end_ids else "length")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The client of a run that has learned four pairs by heart, and these pairs."""
    with pytest.MonkeyPatch.context() as patch:
        run_dir, config, model = translation_run(tmp_path_factory.mktemp("trained"), patch, "transformer")
        pairs = learn(run_dir, config, model, 120)
        with open_model(run_dir, task=config.task) as opened:
            yield client_of(opened[1]), pairs


def test_the_client_gets_the_translations_that_were_learned(trained):
    client, pairs = trained
    found = ask(client, prompt=list(pairs.sources))
    assert [choice.text for choice in found.choices] == list(pairs.targets)
    assert {choice.finish_reason for choice in found.choices} == {"stop"}
    assert found.usage.completion_tokens > found.usage.prompt_tokens / 4
    source, target = pairs.sources[0], pairs.targets[0]
    events = list(ask(client, prompt=source, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events if event.choices) == target
    short = ask(client, prompt=source, max_tokens=2).choices[0]
    assert short.finish_reason == "length" and target.startswith(short.text)
    stop = target.split()[1]
    found = ask(client, prompt=source, stop=["never", stop]).choices[0]
    assert (found.text, found.finish_reason) == (target[: target.index(stop)], "stop")


@pytest.mark.parametrize(
    ("key", "asked"),
    [
        ("temperature", {"temperature": 0.7}),
        ("top_p", {"top_p": 0.5}),
        ("n", {"n": 2}),
        ("echo", {"echo": True}),
        ("logprobs", {"logprobs": 1}),
        ("the source has", {"prompt": "the dog " * 60}),
    ],
)
def test_what_a_translation_has_not_is_refused_by_name(trained, key, asked):
    with pytest.raises(openai.BadRequestError, match=f"{key}.*(leave it out|split it)"):
        ask(trained[0], **{"prompt": "the dog", **asked})


def test_a_conversation_is_refused_with_the_place_to_ask(trained):
    (model,) = (each.id for each in trained[0].models.list())
    with pytest.raises(openai.BadRequestError, match="translates.*/v1/completions"):
        trained[0].chat.completions.create(model=model, messages=[{"role": "user", "content": "the dog"}])
