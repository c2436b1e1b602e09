"""Begin, end and padding are what a model's files declare; special tokens that a text spells out are tokens."""

import json
from pathlib import Path

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from client_pipeline.partition.parts import IGNORED_LABEL
from flower_app.export import export_run
from flower_app.runs.run_directory import CONFIG
from flower_app.saved_model import load_model
from flower_app.tasks.base import TaskConfig, task
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.tokenizer import TextTokenizer, load_tokenizer
from helpers.task_cases import options, prepare, save


def scripted(parts, next_token):
    """Have a model write the tokens that a function of what it is given returns."""

    def forward(input_ids, **given):
        scores = torch.zeros(*input_ids.shape, parts.reference.config.vocab_size)
        scores[0, -1, next_token(input_ids)] = 1.0
        return CausalLMOutputWithPast(logits=scores, past_key_values=given.get("past_key_values"))

    parts.reference.forward = forward
    return parts


CAUSAL = "causal-lm"
TEXT = "the cat sat on the mat and the dog sat on the log"
CHATML = "<|im_start|>user\nthe cat sat<|im_end|>\n<|im_start|>assistant\nthe dog sat<|im_end|>"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

FAMILIES = {
    # Special tokens; what tokenizer_config.json says; ids of generation_config.json; begin, end, padding and all ends.
    "deepseek": (
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"],
        {
            "bos_token": {"content": "<｜begin▁of▁sentence｜>"},
            "eos_token": "<｜end▁of▁sentence｜>",
            "pad_token": "<｜end▁of▁sentence｜>",
        },
        None,
        (0, 1, 1, (1,)),
    ),
    "chatml": (
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        [2, 0],
        (0, 2, 0, (2, 0)),
    ),
    "llama-3": (
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|finetune_right_pad_id|>"],
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        [1, 2],
        (0, 2, 3, (2, 1)),
    ),
    "names": (["<s>", "</s>", "<pad>"], {}, None, (0, 1, 2, (1,))),
}


def backend_of(special, rule=False):
    """Train a byte-level tokenizer whose first ids are these special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    if rule:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
        )
    return backend


def chat_model(folder, special, settings, ends, rule=False, model_type="llama", **config_changes):
    """Save a tiny causal model with its tokenizer's files, as a hub's folder has them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    backend = backend_of(special, rule)
    folder.mkdir(exist_ok=True)
    config = AutoConfig.for_model(
        model_type,
        # Rows that no token has, as most models have some.
        vocab_size=backend.get_vocab_size() + 8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
        **{"bos_token_id": 0, "eos_token_id": 1, **config_changes},
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    backend.model.save(str(folder))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings})
        )
    if ends is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "top_p": 0.9}))
    return options(family=model_type, pretrained=str(folder))


def texts(folder, *lines, **changes):
    """Write a table of texts, which may hold line feeds."""
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    base = {"train_source": "texts.jsonl", "test_source": "texts.jsonl", "max_length": 120}
    return DataConfig(source="files", path=str(folder), **{**base, **changes})


def sequences(name, data, model):
    """Give the ids of each training sequence, and what was prepared."""
    found = prepare(name, data, model)
    share = task(TaskConfig(name=name)).cluster_data(data, found.tokenizer_json, 0, 1, 0)
    rows = [share.sequences.padded([i], -1)[0].tolist() for i in range(len(share))]
    return rows, share, found


@pytest.mark.parametrize("name", FAMILIES)
def test_the_files_of_a_model_say_where_its_texts_begin_and_end(tmp_path, name):
    special, settings, ends, (begin, end, pad, _) = FAMILIES[name]
    model = chat_model(tmp_path / "model", special, settings, ends)
    rows, share, found = sequences(CAUSAL, texts(tmp_path, TEXT), model)
    tokenizer = TextTokenizer.from_json(found.tokenizer_json)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (begin, end, pad)
    assert (rows[0][0], rows[0][-1], share.pad_id) == (begin, end, pad)
    # No token is added, of which the model would have no trained row.
    assert tokenizer.vocab_size == found.spec.config["vocab_size"] - 8


@pytest.mark.parametrize("place", ["special_tokens_map", "config", "generation", "rule"])
def test_each_file_counts_where_the_one_before_is_silent(tmp_path, place):
    special = ["<begin>", "<finish>", "<fill>"]
    ids = {"bos_token_id": 0, "eos_token_id": [1], "pad_token_id": 2}
    model = chat_model(tmp_path / "model", special, None, None, rule=place == "rule", bos_token_id=2, eos_token_id=0)
    if place == "special_tokens_map":
        tokens = {"bos_token": "<begin>", "eos_token": {"content": "<finish>"}, "pad_token": "<fill>"}
        (tmp_path / "model/special_tokens_map.json").write_text(json.dumps(tokens))
    elif place == "generation":
        (tmp_path / "model/generation_config.json").write_text(json.dumps(ids))
    elif place in ("config", "rule"):
        config = json.loads((tmp_path / "model/config.json").read_text())
        changes = ids if place == "config" else {"eos_token_id": 1, "pad_token_id": 2}
        (tmp_path / "model/config.json").write_text(json.dumps(config | changes))
    rows, share, _ = sequences(CAUSAL, texts(tmp_path, TEXT), model)
    assert (rows[0][0], rows[0][-1], share.pad_id) == (0, 1, 2)


def test_the_text_model_of_a_multi_modal_one_may_have_the_marks_alone(tmp_path):
    marks = {"bos_token_id": 0, "eos_token_id": [1], "pad_token_id": 2}
    backend_of(["<begin>", "<finish>", "<fill>"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": marks}))
    tokenizer = load_tokenizer(str(tmp_path), complete=False)
    assert (tokenizer.bos_id, tokenizer.end_ids, tokenizer.pad_id) == (0, (1,), 2)


@pytest.mark.parametrize("named", [True, False])
def test_padding_may_stand_in_the_vocabularys_file_alone(tmp_path, named):
    backend = backend_of(["<begin>", "<finish>", "<fill>", "<void>"])
    backend.enable_padding(pad_id=2, pad_token="<fill>")
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "<finish>", **({"pad_token": "<void>"} if named else {})}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(str(tmp_path), complete=False).pad_id == (3 if named else 2)


def test_a_token_that_the_settings_declare_alone_is_one(tmp_path):
    from transformers import AutoTokenizer

    backend = backend_of(["<begin>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    size = backend.get_vocab_size()
    token = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    decoder = {str(size + 1): {**token, "content": "<void>"}, str(size): {**token, "content": "<finish>"}}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<finish>", "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer, library = load_tokenizer(str(tmp_path), complete=False), AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.end_ids, tokenizer.vocab_size) == ((size,), size + 2)
    assert (library.eos_token_id, len(library)) == (size, size + 2)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": ["<finish>"]}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: added_tokens_decoder: expected tokens by their num"):
        load_tokenizer(str(tmp_path), complete=False)


def test_a_tokenizer_that_knows_no_letter_has_the_marks_of_its_rule(tmp_path):
    from tokenizers import Tokenizer, models, processors

    backend = Tokenizer(models.WordLevel({str(i): i for i in range(40)}))
    backend.add_special_tokens(["<begin>", "<finish>"])
    marks = [("<begin>", 40), ("<finish>", 41)]
    backend.post_processor = processors.TemplateProcessing(single="<begin> $A <finish>", special_tokens=marks)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path), complete=False)
    assert (tokenizer.bos_id, tokenizer.end_ids, tokenizer.marks) == (40, (41,), ([40], [41]))


def test_an_encoder_is_read_within_the_marks_of_its_own_rule_whatever_its_configuration_says(tmp_path):
    # Of some Chinese BERTs config.json still has RoBERTa's numbers.
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "bos_token_id": 0, "eos_token_id": 2}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (2, 3, 0)


def test_a_tokenizer_that_names_no_end_is_refused_for_a_trained_model(tmp_path):
    model = chat_model(tmp_path / "model", ["<begin>", "<finish>"], None, None, bos_token_id=None, eos_token_id=None)
    with pytest.raises(ValueError, match=r"model\.pretrained: .* names no token for the end .*tokenizer_config\.json"):
        prepare(CAUSAL, texts(tmp_path, TEXT), model)


# Special tokens that a text spells out.


def library_ids(folder, text):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("changes", "read"),
    [({}, True), ({"special_tokens": "tokens"}, True), ({"special_tokens": "text"}, False)],
    ids=["auto", "tokens", "text"],
)
def test_control_tokens_of_a_template_are_tokens(tmp_path, changes, read):
    special, settings, ends, _ = FAMILIES["chatml"]
    model = chat_model(tmp_path / "model", special, settings, ends)
    try:
        data = texts(tmp_path, CHATML, **changes)
    except TypeError:
        pytest.fail(f"no such key: {changes}")
    rows, _, found = sequences(CAUSAL, data, model)
    expected = library_ids(model.pretrained, CHATML)
    assert expected.count(1) == 2 and expected.count(2) == 2
    if read:
        # The text brings its marks: none is put around it once more.
        assert rows == [expected]
    else:
        assert rows[0].count(1) == 0 and rows[0].count(2) == 1
    # predict reads its texts as the run does, from the saved model, too.
    save(tmp_path / "run", CAUSAL, found, found.build(0), data)
    seen = []
    for tokenizer_json in (found.tokenizer_json, load_model(tmp_path / "run").tokenizer_json):
        parts = scripted(found.build(0), lambda ids: seen.append(ids) or 2)
        task(TaskConfig(name=CAUSAL)).predict(parts, tokenizer_json, [CHATML])
    assert [ids[0].tolist() for ids in seen] == [expected if read else rows[0][:-1]] * 2


@pytest.mark.parametrize("changes", [{}, {"special_tokens": "tokens"}], ids=["auto", "tokens"])
def test_text_to_be_classified_spells_out_no_tokens_unless_asked(tmp_path, changes):
    (tmp_path / "words").mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"[]SEPabcdefghij", *(f"w{i}" for i in range(20))]
    (tmp_path / "words/vocab.txt").write_text("\n".join(words), encoding="utf-8")
    (tmp_path / "a.tsv").write_text("text\tlabel\na [SEP] b\tx\nc\ty\n")
    base = {"train_source": "a.tsv", "test_source": "a.tsv", "max_length": 40, "tokenizer": str(tmp_path / "words")}
    data = DataConfig(source="files", path=str(tmp_path), **base, **changes)
    rows, _, _ = sequences("sequence-classification", data, options())
    assert rows[0].count(3) == (2 if changes else 1)


def test_a_run_from_a_run_reads_as_that_one_did(tmp_path):
    special, settings, ends, _ = FAMILIES["chatml"]
    model = chat_model(tmp_path / "model", special, settings, ends)
    data = texts(tmp_path, CHATML)
    rows, _, found = sequences(CAUSAL, data, model)
    run = save(tmp_path / "run", CAUSAL, found, found.build(0), data)
    again, _, _ = sequences(CAUSAL, data, options(family="llama", from_=run))
    assert again == rows and rows[0].count(1) == 2


# Export.


def run_of(folder, data, model):
    """Save a run of the model as it starts."""
    found = prepare(CAUSAL, data, model)
    run = Path(save(folder, CAUSAL, found, found.build(0), data))
    (run / CONFIG).write_text("")
    return run


@pytest.mark.parametrize("template", ["key", "file"])
@pytest.mark.parametrize("through", ["pretrained", "run"])
def test_an_export_has_the_files_of_the_folder_that_the_run_came_from(tmp_path, template, through):
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    special, settings, ends, (*_, all_ends) = FAMILIES["chatml"]
    settings = {**settings, "model_max_length": 77, "padding_side": "left"}
    if template == "key":
        settings["chat_template"] = TEMPLATE
    model = chat_model(tmp_path / "model", special, settings, ends)
    if template == "file":
        (tmp_path / "model/chat_template.jinja").write_text(TEMPLATE)
    data = texts(tmp_path, CHATML)
    run = run_of(tmp_path / "run", data, model)
    if through == "run":
        run = run_of(tmp_path / "second", data, options(family="llama", from_=str(run)))
    export_run(run, tmp_path / "out")
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "model", tmp_path / "out"))
    for name in ("chat_template", "bos_token", "eos_token", "pad_token", "model_max_length", "padding_side"):
        assert getattr(after, name) == getattr(before, name), name
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "model" / name).read_text()
    messages = [{"role": "user", "content": "the cat"}]
    assert after.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nthe cat<|im_end|>\n"
    for text in (TEXT, CHATML, " spaced  out\n", "Ünïcödé 猫"):
        assert after(text)["input_ids"] == before(text)["input_ids"]
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.eos_token_id, generation.top_p) == (list(all_ends), 0.9)
    assert 2 in AutoConfig.from_pretrained(tmp_path / "out").eos_token_id


def test_an_exported_model_stops_where_its_texts_end_although_its_folder_says_otherwise(tmp_path):
    from transformers import GenerationConfig

    special, settings, _, _ = FAMILIES["chatml"]
    model = chat_model(tmp_path / "model", special, settings, [0])
    export_run(run_of(tmp_path / "run", texts(tmp_path, TEXT), model), tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [2, 0]


@pytest.mark.parametrize("text", ["[]", "[" * 5000 + "]" * 5000, '{"eos_token_id": ' + "9" * 400 + "}"])
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_settings.json", "spec.json"])
def test_a_file_of_a_strangers_model_that_holds_no_object_is_named(tmp_path, name, text):
    special, settings, ends, _ = FAMILIES["chatml"]
    run = run_of(tmp_path / "run", texts(tmp_path, TEXT), chat_model(tmp_path / "model", special, settings, ends))
    (run / "model" / name).write_text(text)
    try:
        export_run(run, tmp_path / "out")
    except ValueError as error:
        assert "expected" in str(error)
    except (AttributeError, RecursionError) as error:
        pytest.fail(repr(error))
    else:
        pytest.fail("taken")


def test_a_tokenizer_with_added_marks_is_written_anew(tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "words").mkdir()
    backend_of(["<begin>"]).save(str(tmp_path / "words/tokenizer.json"))
    (tmp_path / "words/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    data = texts(tmp_path, TEXT, tokenizer=str(tmp_path / "words"))
    export_run(run_of(tmp_path / "run", data, options(family="gpt2", max_length=64)), tmp_path / "out")
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (found.pad_token, found.bos_token, found.eos_token) == ("<pad>", "<s>", "</s>")


def test_end_marks_of_a_template_are_no_unknown_tokens(tmp_path, caplog):
    """A tokenizer of bytes knows every text: short turns were refused, for their marks were taken for unknown."""
    special, settings, ends, _ = FAMILIES["chatml"]
    model = chat_model(tmp_path / "model", special, settings, ends)
    prepare(CAUSAL, texts(tmp_path, "<|im_start|>cat<|im_end|>" * 3), model)
    assert "unknown" not in caplog.text


def test_only_the_end_of_a_document_is_learned_as_an_end(tmp_path):
    special, settings, ends, _ = FAMILIES["llama-3"]
    model = chat_model(tmp_path / "model", special, settings, ends, rule=True)
    text = " ".join([TEXT] * 20)
    rows, share, found = sequences(CAUSAL, texts(tmp_path, text, max_length=16), model)
    labels = [i for at in range(len(rows)) for i in share.collate([at])["labels"][0].tolist() if i != IGNORED_LABEL]
    assert len(rows) > 10 and labels.count(2) == 1 and labels[-1] == 2
    assert sum(row.count(0) for row in rows) == 1
    assert labels[:-1] == library_ids(model.pretrained, text)


def test_the_beginning_is_not_marked_twice(tmp_path):
    special, settings, ends, _ = FAMILIES["llama-3"]
    model = chat_model(tmp_path / "model", special, settings, ends, rule=True)
    text = "<|begin_of_text|>the cat<|eot_id|>"
    rows, _, _ = sequences(CAUSAL, texts(tmp_path, text, "the cat"), model)
    assert rows[0] == rows[1] == [0, *library_ids(model.pretrained, "the cat"), 2]


@pytest.mark.parametrize("name", FAMILIES)
def test_writing_stops_at_any_of_the_ends(tmp_path, name):
    special, settings, ends, (*_, all_ends) = FAMILIES[name]
    model = chat_model(tmp_path / "model", special, settings, ends)
    _, _, found = sequences(CAUSAL, texts(tmp_path, TEXT), model)
    tokenizer = TextTokenizer.from_json(found.tokenizer_json)
    (cat,) = tokenizer.encode([" cat"])
    for end in all_ends:
        tokens = iter([*cat, end, *cat * 40])
        parts = scripted(found.build(0), lambda _, tokens=tokens: next(tokens))
        assert task(TaskConfig(name=CAUSAL)).predict(parts, found.tokenizer_json, ["the"]) == ["the cat"]
