"""A language model is tuned from a multi-modal checkpoint, with adapters over its files, and exported as text alone."""

import json
from dataclasses import replace

import pytest
import torch

from client_pipeline.partition.spec import LoraConfig
from flower_app.export import export_run
from flower_app.first_config.recipe import _pretrained
from flower_app.runs.run_directory import CONFIG
from flower_app.tasks.data.corpus import DataConfig
from helpers.multimodal import save_multimodal
from helpers.task_cases import options, prepare, save
from helpers.tiny_models import evaluation

DATA = DataConfig(num_examples=40, evaluation_examples=12, vocab_size=300, max_length=30)


@pytest.fixture
def folder(tmp_path):
    """A tiny Gemma 3 with its tokenizer."""
    tokenizer_json = prepare("causal-lm", DATA, options(family="llama")).tokenizer_json
    (tmp_path / "gemma3").mkdir()
    (tmp_path / "gemma3/tokenizer.json").write_text(tokenizer_json)
    save_multimodal(tmp_path / "gemma3", "gemma3", vocab_size=300)
    return str(tmp_path / "gemma3")


def test_a_text_model_is_tuned_with_adapters_over_its_files_and_exported(tmp_path, folder):
    from transformers import AutoModelForCausalLM

    found = prepare("causal-lm", DATA, options(family="gemma3_text", pretrained=folder))
    adapted = replace(found, spec=replace(found.spec, lora=LoraConfig(rank=2)))
    assert adapted.base is not None
    assert not any("vision" in name for _, name in adapted.base.places.values())
    parts = evaluation(adapted.build(seed=0))
    plain = evaluation(found.build(seed=0))
    save(tmp_path / "run", "causal-lm", found, plain, DATA)
    (tmp_path / "run" / CONFIG).write_text("")
    assert export_run(tmp_path / "run", tmp_path / "out").model_class == "Gemma3ForCausalLM"
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "gemma3_text"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(3, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
    with torch.no_grad():
        expected = model(ids).logits
        # Fresh adapters change nothing.
        torch.testing.assert_close(parts.logits(batch), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(plain.logits(batch), expected, rtol=1e-4, atol=1e-5)


def test_the_type_of_the_whole_is_refused_with_that_of_the_text_model(folder):
    with pytest.raises(ValueError, match="is of type 'gemma3_text', but model.family = gemma3; change one of them"):
        prepare("causal-lm", DATA, options(family="gemma3", pretrained=folder))


def test_a_first_configuration_names_the_text_model(folder):
    settings = {setting.key: setting.value for setting in _pretrained("causal-lm", folder, 8, "default", 100, 30)}
    assert settings["model.family"] == "gemma3_text"
