"""An exported run is a folder that the transformers library loads, with the same outputs."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from client_pipeline.families.families import build_parts
from client_pipeline.families.hugging_face import auto_model
from client_pipeline.families.pretrained import load_pretrained
from flower_app.cli.main import app
from flower_app.export import export_run
from flower_app.runs.run_directory import CONFIG
from flower_app.saved_model import save_model
from flower_app.tokenizer_files import TokenizerSettings, joined
from helpers.tiny_models import CASES, CONFIGS, evaluation, tiny_batch, tiny_spec

WORDS = ["the", "cat", "sat", "##s", "on", "mat"]
LABELS = ["zero", "one", "two", "three"]


def tokenizer_json(style="[{}]"):
    """Give a small tokenizer with a classifier's special tokens, written as BERT or (``<{}>``) as RoBERTa do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    if style == "[{}]":
        pad, unk, cls, sep, mask = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
    else:
        pad, unk, cls, sep, mask = "<pad>", "<unk>", "<s>", "</s>", "<mask>"
    vocabulary = {word: i for i, word in enumerate([pad, unk, cls, sep, mask, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([pad, unk, cls, sep, mask])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", special_tokens=[(cls, vocabulary[cls]), (sep, vocabulary[sep])]
    )
    return tokenizer.to_str()


def save_run(folder, spec, tokenizer, task):
    """Make a finished run of random weights; returns its model."""
    folder.mkdir()
    (folder / CONFIG).write_text("")
    parts = build_parts(spec, seed=3)
    with torch.no_grad():
        for name, value in parts.named_parameters():
            if name.endswith("bias") or "lm_head" in name:
                value.uniform_(-0.1, 0.1)  # of a new model they are zero, and equal to the embedding
    save_model(folder, spec, parts.weights(), tokenizer, task)
    return parts


@pytest.mark.parametrize(("name", "head"), CASES)
def test_the_library_loads_an_exported_model_with_equal_outputs(tmp_path, name, head):
    spec = tiny_spec(name, head)
    if "final_logits_bias" in evaluation(build_parts(spec, 0)).head.state_dict():
        spec = replace(spec, config={**spec.config, "trained_logits_bias": True})
    if "classification" in head:
        spec = replace(spec, config={**spec.config, "id2label": {str(i): name for i, name in enumerate(LABELS)}})
    parts = evaluation(save_run(tmp_path / "run", spec, tokenizer_json(), {}))
    export_run(tmp_path / "run", tmp_path / "out")
    model = auto_model(head).from_pretrained(tmp_path / "out").eval()
    batch = tiny_batch(spec)
    inputs = {key: value for key, value in batch.items() if key != "labels" or head == "seq2seq"}
    with torch.no_grad():
        expected = parts.logits(batch)
        found = model(**{**inputs, "attention_mask": batch["attention_mask"].long()}).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * max(1.0, float(expected.abs().max())))
    if "classification" in head:
        assert model.config.id2label == dict(enumerate(LABELS))
        assert model.config.label2id == {label: i for i, label in enumerate(LABELS)}
    assert type(model).__name__ in json.loads((tmp_path / "out/config.json").read_text())["architectures"]
    # And the way back: the same weights, bit for bit.
    again = load_pretrained(str(tmp_path / "out"), head, server_layers=spec.config.get("server_layers", 0))
    weights = again.weights()
    for key, value in parts.weights().items():
        assert torch.equal(weights[key], value), key


@pytest.mark.parametrize(("family", "style"), [(f, "[{}]") for f in sorted(CONFIGS)] + [("roberta", "<{}>")])
def test_the_library_loads_the_exported_tokenizer(tmp_path, family, style):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    text = tokenizer_json(style)
    save_run(tmp_path / "run", tiny_spec(family), text, {})
    exported = export_run(tmp_path / "run", tmp_path / "out")
    files = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert files <= set(exported.files) <= files | {"generation_config.json"}
    # For its type qwen2 the library takes Qwen's own way to split words, whatever the folder says.
    loader = PreTrainedTokenizerFast if family == "qwen2" else AutoTokenizer
    tokenizer = loader.from_pretrained(tmp_path / "out")
    for sentence in ("the cats sat on the mat", "a dog sat"):
        assert tokenizer(sentence)["input_ids"] == Tokenizer.from_str(text).encode(sentence).ids
    assert tokenizer.pad_token_id == 0
    assert tokenizer.mask_token_id == 4
    padded = tokenizer(["the cat", "the cat sat on the mat"], padding=True)
    assert padded["attention_mask"][0] == [1, 1, 1, 1, 0, 0, 0, 0]
    longest = dict.fromkeys(("camembert", "data2vec-text", "roberta", "xlm-roberta"), 30)
    longest |= {"t5": int(1e30), "mt5": int(1e30), "gpt2": 64}
    assert tokenizer.model_max_length == longest.get(family, CONFIGS[family].get("max_position_embeddings"))


@pytest.mark.parametrize(("family", "expected"), [("bert", [2, 5, 6, 3]), ("gpt2", [2, 5, 6]), ("t5", [5, 6, 3])])
def test_an_exported_tokenizer_puts_the_marks_that_the_task_put(tmp_path, family, expected):
    from transformers import AutoTokenizer

    text = json.loads(tokenizer_json())
    text["post_processor"] = None
    save_run(tmp_path / "run", tiny_spec(family), json.dumps(text), {})
    export_run(tmp_path / "run", tmp_path / "out")
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported("the cat")["input_ids"] == expected
    if family == "bert":
        assert exported("the cat", "on")["input_ids"] == [*expected, 9, 3]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"), (0, 1, 2)),
        (("<|endoftext|>",), (0, 0, 0)),
        (("<pad>", "<s>", "</s>"), (1, 2, 0)),
    ],
    ids=["llama-3", "gpt2", "trained"],
)
def test_an_exported_tokenizer_knows_begin_end_and_padding_by_the_models_names(tmp_path, names, expected):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*names, *WORDS])}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(names))
    save_run(tmp_path / "run", tiny_spec("llama"), tokenizer.to_str(), {})
    export_run(tmp_path / "run", tmp_path / "out")
    found = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == expected
    assert found.decode(found("the cat sat")["input_ids"], skip_special_tokens=True) == "the cat sat"
    # What it writes ends where the texts ended that it was trained with.
    generation, config = (kind.from_pretrained(tmp_path / "out") for kind in (GenerationConfig, AutoConfig))
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == expected
    assert (config.bos_token_id, config.eos_token_id) == expected[:2]


def test_an_exported_encoder_knows_its_marks_whatever_their_names(tmp_path):
    from transformers import AutoTokenizer

    text = json.loads(tokenizer_json().replace("[CLS]", "<open>").replace("[SEP]", "<shut>").replace("[MASK]", "<gap>"))
    text["post_processor"] = None
    settings = TokenizerSettings(begin=2, ends=(3,), pad=0, mask="<gap>")
    save_run(tmp_path / "run", tiny_spec("bert"), joined(settings, json.dumps(text)), {})
    export_run(tmp_path / "run", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    marks = (tokenizer.cls_token, tokenizer.sep_token, tokenizer.pad_token, tokenizer.mask_token)
    assert marks == ("<open>", "<shut>", "[PAD]", "<gap>")
    assert tokenizer("the cat")["input_ids"] == [2, 5, 6, 3]


def test_an_exported_model_stops_at_all_ends_of_its_run_and_keeps_the_bases_other_settings(tmp_path):
    from transformers import GenerationConfig

    files = {"generation_config.json": '{"eos_token_id": 3, "top_p": 0.9, "do_sample": true}'}
    tokenizer = joined(TokenizerSettings(begin=2, ends=(3, 4), pad=0, files=files), tokenizer_json())
    save_run(tmp_path / "run", tiny_spec("llama"), tokenizer, {})
    export_run(tmp_path / "run", tmp_path / "out")
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.eos_token_id, generation.top_p, generation.do_sample) == ([3, 4], 0.9, True)


def test_a_folder_that_no_other_can_replace_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    save_run(tmp_path / "run", tiny_spec("bert", "token-classification"), "", {})
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path / "empty")
    for folder, reason in (
        (".", ".: is the working directory or a mounted disk, which no other folder can replace; give one that does "),
        ("../file/x", "../file: File exists; check the path, or give another"),
    ):
        done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), folder])
        assert done.exit_code == 2 and done.stderr.startswith(f"error: {reason}"), done.stderr
    assert not any((tmp_path / "empty").iterdir())


def test_a_run_that_saved_no_model_is_told(tmp_path):
    (tmp_path / CONFIG).write_text("")
    with pytest.raises(FileNotFoundError, match="the run has not saved a model"):
        export_run(tmp_path, tmp_path / "out")


def test_a_clusters_own_model_is_exported_where_each_has_one(tmp_path):
    spec = tiny_spec("bert", "sequence-classification")
    save_run(tmp_path / "run", spec, tokenizer_json(), {})
    with pytest.raises(ValueError, match="has saved one model alone, found --cluster 1; correct it, or leave it out"):
        export_run(tmp_path / "run", tmp_path / "out", cluster=1)
    own = [build_parts(spec, seed=n).weights() for n in range(2)]
    save_model(tmp_path / "run", spec, own[0], tokenizer_json(), {}, 1, others=own[1:])
    for options, n in (([], 0), (["--cluster", "1"], 1)):
        folder = tmp_path / f"out-{n}"
        done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(folder), *options])
        assert done.exit_code == 0, done.output
        weights = load_pretrained(str(folder), "sequence-classification").weights()
        assert ("# run, cluster 1" in (folder / "README.md").read_text()) == (n == 1)
        assert all(torch.equal(weights[key], value) for key, value in own[n].items())
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "more"), "--cluster", "2"])
    assert done.exit_code != 0 and "found --cluster 2" in done.stderr and not (tmp_path / "more").exists()
