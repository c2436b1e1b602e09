"""Tokens that count, one by one, beside those of TRL's SFTTrainer."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from flower_app.tasks import chat_template
from flower_app.tasks.chat_template import ChatTemplate
from flower_app.tasks.tokenizer import load_tokenizer
from helpers.chat_cases import MARKED, TALKS, TEMPLATES, chat_tokenizer, dated, rendered_here

pytestmark = pytest.mark.slow


@pytest.fixture
def labels_of_trl(tmp_path):
    """Give labels as SFTTrainer's own collator makes them, with the ids."""
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from trl import SFTConfig, SFTTrainer

    def labels(tokenizer, rows, **options):
        size = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size))
        args = SFTConfig(str(tmp_path / "trl"), use_cpu=True, report_to="none", max_length=None, **options)
        dataset = datasets.Dataset.from_list(rows)
        trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
        batches = [trainer.data_collator([row]) for row in trainer.train_dataset]
        return [(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in batches]

    return labels


@pytest.fixture
def labels_of_ours(tmp_path, monkeypatch):
    """Give labels as the task makes them, with the ids."""
    monkeypatch.setattr(chat_template, "answering_program", rendered_here)

    def labels(tokenizer, talks, loss_on):
        tokenizer.save_pretrained(tmp_path / "own")
        chat = ChatTemplate.chosen(load_tokenizer(str(tmp_path / "own"), complete=False), "", "2026-01-31")
        with chat.renderer() as render:
            chat = chat.checked(render, gets_marks=False, needs_marks=False)
            counted = [chat.counted(render, talk, loss_on) for talk in talks]
        return [
            (each.ids, [i if yes else -100 for i, yes in zip(each.ids, each.is_counted, strict=True)])
            for each in counted
        ]

    return labels


@pytest.mark.parametrize("name", TEMPLATES)
def test_last_answers_count_as_trls_completions(labels_of_trl, labels_of_ours, name):
    tokenizer = chat_tokenizer(name, dated(TEMPLATES[name]))
    rows = [{"prompt": talk[:-1], "completion": talk[-1:]} for talk in TALKS]
    ours = labels_of_ours(tokenizer, TALKS, "last-answer")
    assert ours == labels_of_trl(tokenizer, rows, completion_only_loss=True)


@pytest.mark.parametrize("name", MARKED)
def test_marked_answers_count_as_trls_assistant_tokens(labels_of_trl, labels_of_ours, name):
    tokenizer = chat_tokenizer(name, dated(MARKED[name]))
    ours = labels_of_ours(tokenizer, TALKS, "assistant")
    assert ours == labels_of_trl(tokenizer, [{"messages": talk} for talk in TALKS], assistant_only_loss=True)


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_all_tokens_count_as_in_trls_language_modelling_but_the_first(labels_of_trl, labels_of_ours, name):
    tokenizer = chat_tokenizer(name, dated(TEMPLATES[name]))
    theirs = labels_of_trl(tokenizer, [{"messages": talk} for talk in TALKS])
    # The first has no loss there, either: nothing comes before it.
    assert labels_of_ours(tokenizer, TALKS, "all") == [(ids, [-100, *labels[1:]]) for ids, labels in theirs]


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_without_marks_the_answers_count_that_marks_would_show_and_what_stands_behind_them(labels_of_ours, name):
    plain = labels_of_ours(chat_tokenizer(name, TEMPLATES[name]), TALKS, "assistant")
    marked = labels_of_ours(chat_tokenizer(name, MARKED[name]), TALKS, "assistant")
    for (ids, found), (_, expected) in zip(plain, marked, strict=True):
        # Of chatml's turns the marks leave out the line feed behind the end.
        more = [i for i, yes, no in zip(ids, found, expected, strict=True) if yes != no]
        assert len(set(more)) == (name == "chatml") and all(i != -100 for i in found if i in more)
