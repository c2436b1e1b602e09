"""Code that lies beside a model, a tokenizer or a data set is not run: their folders are somebody else's."""

import ast
import json

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, dynamic_module_utils

from client_pipeline.families.hugging_face import auto_model
from client_pipeline.families.pretrained import load_pretrained
from flower_app.tasks.data.tables import read_hub
from flower_app.tasks.tokenizer import load_tokenizer
from helpers.repository import ROOT
from helpers.tiny_models import FIRST_CASES, NUM_LABELS, library_config

TRAP = """
from pathlib import Path

Path({proof!r}).write_text("it ran")
raise SystemExit("it ran")
"""


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """Give what lays code into a folder, and the file that this code would write."""
    # Where somebody answers the question whether the code is to be run, the answer is yes.
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    proof = tmp_path / "proof"

    def lay(folder, name="trap"):
        (folder / f"{name}.py").write_text(TRAP.format(proof=str(proof)))
        return proof

    return lay


def add(path, **entries):
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | entries))


def save(folder, family, head):
    torch.manual_seed(0)
    model = auto_model(head).from_config(library_config(family))
    model.save_pretrained(folder)
    classes = ("AutoConfig", "AutoModel", auto_model(head).__name__)
    add(folder / "config.json", auto_map={name: "trap.Trap" for name in classes})
    return model


@pytest.mark.parametrize(("family", "head"), [case for case in FIRST_CASES if case[0] != "transformer"])
def test_a_model_with_code_of_its_own_is_loaded_without_it(tmp_path, trap, family, head):
    folder = tmp_path / "model"
    model = save(folder, family, head)
    proof = trap(folder)
    loaded = load_pretrained(str(folder), head, NUM_LABELS if "classification" in head else 0)
    assert not proof.exists()
    assert type(loaded.reference) is type(model)


def tokenizer_folder(folder):
    folder.mkdir()
    add(folder / "tokenizer_config.json", tokenizer_class="Trap", auto_map={"AutoTokenizer": ["trap.Trap", None]})
    add(folder / "config.json", model_type="trap", auto_map={"AutoConfig": "trap.Trap"})
    return folder


def test_a_tokenizer_that_is_code_is_refused_whatever_somebody_answers(tmp_path, trap):
    """Without a word of ours the library asks at the terminal, and runs the code after a yes."""
    folder = tokenizer_folder(tmp_path / "tokenizer")
    proof = trap(folder)
    with pytest.raises(ValueError, match="data.tokenizer: expected a folder with a tokenizer or a hub id"):
        load_tokenizer(str(folder))
    assert not proof.exists()


def test_a_data_set_that_is_a_script_is_refused(tmp_path, trap):
    folder = tmp_path / "corpus"
    folder.mkdir()
    proof = trap(folder, "corpus")
    for source in (folder, folder / "corpus.py"):
        with pytest.raises((ValueError, FileNotFoundError), match="data.hub-id"):
            read_hub(str(source), "")
    assert not proof.exists()


@pytest.mark.parametrize("load", [AutoConfig.from_pretrained, AutoTokenizer.from_pretrained])
def test_the_trap_would_have_worked(tmp_path, trap, load):
    """Otherwise the tests above would prove nothing."""
    folder = tokenizer_folder(tmp_path / "tokenizer")
    proof = trap(folder)
    with pytest.raises(SystemExit, match="it ran"):
        load(str(folder), trust_remote_code=True)
    assert proof.exists()


def test_every_loader_of_the_library_is_told_so():
    calls = [
        (path.name, node)
        for package in ("client_pipeline", "strategies", "flower_app")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained")
    ]
    assert len(calls) >= 4
    for name, call in calls:
        told = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert told.get("trust_remote_code") == "False", f"{name}, line {call.lineno}"
