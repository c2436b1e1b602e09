"""The task of instructions: its data, its scores, its answers."""

import json
import logging
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from client_pipeline.partition.parts import IGNORED_LABEL
from client_pipeline.partition.spec import LoraConfig
from flower_app.saved_model import load_model
from flower_app.tasks import chat_renderer, chat_template
from flower_app.tasks.base import TaskConfig, task
from flower_app.tasks.chat_template import CHATML
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.tokenizer import TextTokenizer
from helpers.chat_cases import rendered_here, save_chat_model
from helpers.task_cases import options, prepare, save, train

NAME = "instruction"
ROWS = [{"prompt": f"the dog {i}?", "completion": "yes" if i % 2 else "no"} for i in range(40)]
LONG = {"messages": [m for i in range(4) for m in (
    {"role": "user", "content": f"word {i}"}, {"role": "assistant", "content": "a dog barks"})]}  # fmt: skip

PROGRAM = chat_template.answering_program


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Render in this process."""
    monkeypatch.setattr(chat_template, "answering_program", rendered_here)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny models, by template."""
    return {name: save_chat_model(tmp_path_factory.mktemp(name), name) for name in ("chatml", "mistral")}


def data(folder, rows=ROWS, **changes):
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    values = {"train_source": "train.jsonl", "test_source": "train.jsonl", "max_length": 40} | changes
    return DataConfig(source="files", path=str(folder), **values)


def model(models, name="chatml", **changes):
    return options(family="llama", pretrained=models[name], **changes)


def share(found, own, num_clusters=1, **changes):
    return task(TaskConfig(name=NAME, **changes)).cluster_data(own, found.tokenizer_json, 0, num_clusters, 0)


def test_labels_are_the_answers_and_their_ends(tmp_path, models):
    own = data(tmp_path, ROWS[:3])
    found = prepare(NAME, own, model(models))
    tokenizer, encoded = TextTokenizer.from_json(found.tokenizer_json), share(found, own)
    batch = encoded.collate([0, 1, 2])
    for i, row in enumerate(ROWS[:3]):
        counted = batch["labels"][i] != IGNORED_LABEL
        assert torch.equal(batch["labels"][i][counted], batch["input_ids"][i][counted])
        ids = batch["labels"][i][counted].tolist()
        assert tokenizer.decode([ids]) == [row["completion"]] and tokenizer.eos_id in ids
    assert found.cluster_sizes == (3,) and encoded.truncated == 0


def test_clusters_share_the_conversations(tmp_path, models):
    rows = [{**row, "skill": "ab"[i % 2]} for i, row in enumerate(ROWS)]
    own = data(tmp_path, rows, partition="natural-id", label_column="skill")
    found = prepare(NAME, own, model(models), num_clusters=2)
    assert found.cluster_sizes == (20, 20) and len(share(found, own, 2)) == 20


def test_a_long_conversation_is_cut_between_turns_and_counted(tmp_path, models, caplog):
    own = data(tmp_path, [LONG, {"messages": LONG["messages"][:2]}])
    found = prepare(NAME, own, model(models))
    with caplog.at_level(logging.WARNING):
        encoded = share(found, own)
    length = encoded.sequences.lengths().tolist()[0]
    text = TextTokenizer.from_json(found.tokenizer_json)._backend.decode(
        encoded.sequences.ids[:length].tolist(), skip_special_tokens=False
    )
    assert length <= 40 and text.rstrip("\n").endswith("a dog barks<|im_end|>") and encoded.truncated == 1
    assert "1 of 2 conversations of the train data are longer than data.max-length = 40: the last 6" in caplog.text


def test_a_long_conversation_is_cut_by_bisection(tmp_path, models, monkeypatch):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    own = data(tmp_path, [{"messages": turns * 200}])
    found, messages = prepare(NAME, own, model(models)), []

    @contextmanager
    def noted(header):
        with rendered_here(header) as render:

            def counting(jobs):
                messages.extend(len(job["messages"]) for job in jobs)
                return render(jobs)

            yield counting

    monkeypatch.setattr(chat_template, "answering_program", noted)
    encoded = share(found, own)
    assert 30 < encoded.sequences.lengths().tolist()[0] <= 40
    # The whole, half of it, and so on; the prompts of what fits.
    assert len(messages) < 20 and sum(messages) < 1000


@pytest.mark.parametrize("loss_on", ["assistant", "last-answer"])
def test_a_question_without_an_answer_at_the_end_is_left_out_and_counted(tmp_path, caplog, loss_on):
    folder = save_chat_model(tmp_path / "qwen3", "qwen3")
    own = data(tmp_path, [{"messages": LONG["messages"][:3]}, {"messages": LONG["messages"][:2]}], max_length=60)
    found = prepare(NAME, own, options(family="llama", pretrained=folder), loss_on=loss_on)
    with caplog.at_level(logging.WARNING):
        encoded = share(found, own, loss_on=loss_on)
    assert "1 of 2 conversations of the train data go on behind their last answer" in caplog.text
    assert encoded.truncated == 0 and "are longer than" not in caplog.text
    # Both are the same question and answer.
    assert len(set(encoded.sequences.lengths().tolist())) == 1


@pytest.mark.slow
def test_a_conversation_that_runs_out_of_the_bounds_is_named(tmp_path, models, monkeypatch):
    own = data(tmp_path, [ROWS[0], {"prompt": "the king", "completion": "endless"}])
    script = tmp_path / "quick.py"
    script.write_text(open(chat_renderer.__file__).read().replace("PROCESSOR_S = 10", "PROCESSOR_S = 2"))
    monkeypatch.setattr(chat_renderer, "__file__", str(script))
    monkeypatch.setattr(chat_template, "answering_program", PROGRAM)
    endless = "{% if messages[-1].content == 'endless' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    (tmp_path / "own.jinja").write_text(CHATML + endless + "{% endfor %}{% endfor %}{% endif %}")
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2: the chat template refuses .* was ended by the system"):
        prepare(NAME, own, model(models), chat_template=str(tmp_path / "own.jinja"))


def test_a_conversation_of_which_nothing_is_left_is_refused_with_its_line(tmp_path, models):
    long = {"prompt": "why " * 60, "completion": "so"}
    own = data(tmp_path, [ROWS[0], long, long])
    with pytest.raises(ValueError, match=r"data\.max-length: .*line 2: the first answer ends after \d+ tokens.*"
                                         r"2 of 3 conversations are so long; raise it to \d+"):  # fmt: skip
        prepare(NAME, own, model(models))


def test_what_is_checked_needs_no_model_to_be_built(tmp_path, models):
    task(TaskConfig(name=NAME)).check(data(tmp_path), model(models), 0, 2)
    with pytest.raises(ValueError, match="rouge|bleu"):
        task(TaskConfig(name=NAME, evaluate_generate="bleu"))


def test_text_of_strangers_spells_no_special_token(tmp_path, models):
    rows = [ROWS[0], {"prompt": "a<|im_end|>b", "completion": "no"}]
    found = prepare(NAME, data(tmp_path, rows), model(models))
    own = data(tmp_path, rows, special_tokens="text")
    with pytest.raises(ValueError, match=r"line 2, message 1: the text spells the special token <\|im_end\|>"):
        prepare(NAME, own, model(models))
    thought = {"role": "assistant", "content": "no", "reasoning_content": "a<|im_end|>b"}
    rows = [{"messages": [{"role": "user", "content": "a"}, thought]}]
    with pytest.raises(ValueError, match=r"line 1, message 2: the text spells the special token <\|im_end\|>"):
        prepare(NAME, data(tmp_path, rows, special_tokens="text"), model(models))
    found = prepare(NAME, data(tmp_path, ROWS, special_tokens="text"), model(models))
    with pytest.raises(ValueError, match="predict, message 1: the text spells the special token"):
        task(TaskConfig(name=NAME)).predict(found.build(0), found.tokenizer_json, ["a<|im_start|>b"])


def test_adapters_need_a_template_whose_marks_are_known(tmp_path, models):
    with pytest.raises(ValueError, match=r"task\.chat-template: the template writes <\|im_end\|>"):
        prepare(NAME, data(tmp_path), model(models, "mistral", trainable="lora"), chat_template="chatml")
    prepare(NAME, data(tmp_path, max_length=80), model(models, "mistral"), chat_template="chatml")


def test_a_fresh_model_learns_with_a_tokenizer_that_has_the_marks(tmp_path):
    found = prepare(NAME, data(tmp_path, vocab_size=400), options(family="gpt2"), chat_template="chatml")
    tokenizer = TextTokenizer.from_json(found.tokenizer_json)
    assert "<|im_end|>" in [tokenizer.token(i) for i in tokenizer.end_ids]
    assert found.spec.config["vocab_size"] == tokenizer.vocab_size


def test_the_run_keeps_template_date_and_ends(tmp_path, models):
    own = data(tmp_path)
    found = prepare(NAME, own, model(models), date="2026-01-31")
    run = save(tmp_path / "run", NAME, found, found.build(0), own)
    again = TextTokenizer.from_json(load_model(tmp_path / "run").tokenizer_json).settings
    settings = TextTokenizer.from_json(found.tokenizer_json).settings
    assert (again.date, again.ends, again.turn_end) == (settings.date, settings.ends, settings.turn_end)
    assert again.files["chat_template.jinja"] == settings.files["chat_template.jinja"]
    # What goes on from it has the same template.
    later = prepare(NAME, own, options(family="llama", from_=run))
    assert TextTokenizer.from_json(later.tokenizer_json).settings.date == "2026-01-31"


def test_answers_are_the_librarys_own(tmp_path, models):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = prepare(NAME, data(tmp_path), model(models), max_new_tokens=7)
    library, words = (
        AutoModelForCausalLM.from_pretrained(models["chatml"]),
        AutoTokenizer.from_pretrained(models["chatml"]),
    )
    questions = ["the dog 1?", "who reads a very long book about dogs?", "no"]
    expected = []
    for question in questions:
        asked = [{"role": "user", "content": question}]
        ids = words.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        written = library.generate(ids, max_new_tokens=7, do_sample=False, pad_token_id=words.pad_token_id)
        expected.append(words.decode(written[0, ids.shape[1] :], skip_special_tokens=True).strip())
    parts, config = found.build(0), TaskConfig(name=NAME, max_new_tokens=7)
    assert task(config).predict(parts, found.tokenizer_json, questions) == expected
    talk = [{"role": "user", "content": questions[0]}]
    assert task(config).predict(parts, found.tokenizer_json, [talk, json.dumps(talk)]) == [expected[0]] * 2
    with pytest.raises(ValueError, match="leaves no room for an answer in the model's 128 positions"):
        task(config).predict(parts, found.tokenizer_json, ["why " * 150])


def test_an_answer_is_as_long_alone_as_beside_a_longer_question(tmp_path, models):
    found = prepare(NAME, data(tmp_path), model(models))
    parts, own = found.build(0), task(TaskConfig(name=NAME, evaluate_batch_size=2))
    questions = ["a", "who reads a long book?"]
    alone = [own.predict(parts, found.tokenizer_json, [question])[0] for question in questions]
    assert own.predict(parts, found.tokenizer_json, questions) == alone


def test_drawn_answers_follow_temperature_and_top_p(tmp_path, models):
    found = prepare(NAME, data(tmp_path), model(models))
    parts = found.build(0)

    def written(**changes):
        chosen = task(TaskConfig(name=NAME, max_new_tokens=12, **changes))
        return chosen.predict(parts, found.tokenizer_json, ["the dog 1?"])[0]

    likeliest = written()
    # So small a share of the probability has the likeliest token alone.
    assert written(temperature=1.0, top_p=1e-6) == likeliest == written(temperature=1e-4)
    torch.manual_seed(0)
    assert len({written(temperature=5.0) for _ in range(3)} | {likeliest}) == 4


def test_a_model_with_adapters_answers_as_the_merged_one(tmp_path, models):
    own = data(tmp_path)
    found = prepare(NAME, own, model(models, trainable="lora"))
    plain = task(TaskConfig(name=NAME, max_new_tokens=5)).predict(found.build(0), found.tokenizer_json, ["a dog"])
    adapted = replace(found, spec=replace(found.spec, lora=LoraConfig(rank=2))).build(0)
    # Adapters begin at zero.
    assert task(TaskConfig(name=NAME, max_new_tokens=5)).predict(adapted, found.tokenizer_json, ["a dog"]) == plain


@pytest.mark.slow
def test_answers_are_learned_and_scored(tmp_path, models):
    rows = [{"prompt": f"{a} or {b}?", "completion": a} for a in ("dog", "king", "cow") for b in ("boy", "letter")]
    own = data(tmp_path, rows * 6)
    found = prepare(NAME, own, model(models), evaluate_generate="exact-match", max_new_tokens=6)
    before = found.evaluator.evaluate(found.build(0), "test")
    parts = train(NAME, found, own, steps=80, lr=5e-3, batch_size=12)
    after = found.evaluator.evaluate(parts, "test")
    assert before.metrics["exact_match"] < 0.2 < 0.9 < after.metrics["exact_match"]
    assert after.metrics["perplexity"] < 1.2
    assert after.predictions[0] == after.references[0] == "dog" and after.sources[0] == "dog or boy?"
    examples = found.evaluator.examples(parts)
    assert len(examples) == 10 and examples[0] == {"question": "dog or boy?", "reference": "dog", "answer": "dog"}
    assert "exact_match of 36 answers" in after.signature


def test_without_generation_no_answer_is_written(tmp_path, models):
    found = prepare(NAME, data(tmp_path), model(models))
    score = found.evaluator.evaluate(found.build(0), "validation")
    assert set(score.metrics) == {"loss", "perplexity"} and score.predictions == []
    assert found.evaluator.examples(found.build(0)) == []
    counted = sum(len(row["completion"]) > 0 for row in ROWS)
    assert score.examples == counted == 40
