"""Adapters in a folder of peft, and merged shard by shard: the same logits as the run's in plain transformers."""

import hashlib
import json
import re
import shutil
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from typer.testing import CliRunner

from client_pipeline.families.families import build_parts
from client_pipeline.families.hugging_face import LibraryFamily, auto_model
from client_pipeline.families.pretrained import load_pretrained_weights
from client_pipeline.partition.spec import LoraConfig
from flower_app.cli.main import app
from flower_app.config.run_config import RunConfig
from flower_app.export import export_run, push_folder
from flower_app.exported import adapter_folder, library_folder
from flower_app.runs.run_directory import write_config, write_summary
from flower_app.saved_model import load_model, save_model
from flower_app.tasks.base import Prepared
from helpers.decoder_only import small_spec
from helpers.tiny_models import NUM_BLOCKS, evaluation, tiny_batch, tiny_spec

LORA = LoraConfig(rank=2, alpha=6.0)
HEAD_ADAPTERS = replace(LORA, head="adapters")


def trained_run(tmp_path, spec, lora=LORA, base_dtype="float32", dtype=torch.float32, pretrained=True):
    """Make a run as its training leaves it: adapters that are not zero, over a base model's folder or fresh weights."""
    run, base, weights = tmp_path / "run", tmp_path / "base", {}
    run.mkdir()
    write_config(run, RunConfig.as_sent({"model.pretrained": str(base)} if pretrained else {}))
    if pretrained:
        plain = build_parts(spec, seed=3)
        with torch.no_grad():
            for _, value in plain.named_parameters():
                if value.dim() == 1:
                    value.add_(0.1 * torch.randn_like(value))
        plain.reference.to(dtype).save_pretrained(base)
        server_layers = spec.config.get("server_layers", 0)
        spec, weights = load_pretrained_weights(str(base), spec.head, server_layers=server_layers)
    spec = replace(spec, lora=lora, base_dtype=base_dtype)
    prepared = Prepared(spec=spec, tokenizer_json="", evaluator=None, cluster_sizes=(1,), weights=weights)
    parts = prepared.build(seed=5)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in parts.named_parameters():
            if ".lora_A." not in name:
                value.add_(0.1 * torch.randn(value.shape, generator=generator))
    frozen = parts.frozen_weights() if parts.base is None else {}
    save_model(run, spec, {**parts.weights(), **frozen}, "", {}, 1, parts.base)
    return run


def logits(model, batch, head):
    inputs = {key: value for key, value in batch.items() if key != "labels" or head == "seq2seq"}
    with torch.no_grad():
        return model(**{**inputs, "attention_mask": batch["attention_mask"].long()}).logits


def run_logits(run, batch):
    parts = evaluation(load_model(run).parts)
    with torch.no_grad():
        return parts.logits(batch)


def with_adapters(folder, spec):
    """Load a PEFT folder as its card says: the base that it names, then the adapters."""
    from peft import PeftModel
    from transformers import AutoConfig

    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    config = {"config": AutoConfig.from_pretrained(folder)} if "num_labels" in spec.config else {}
    model = auto_model(spec.head).from_pretrained(base, dtype=torch.float32, **config)
    return PeftModel.from_pretrained(model, folder).eval()


def spec_of(name, head):
    return small_spec(name) if name in ("gemma3_text", "granite") else tiny_spec(name, head, dropout=0.0)


@pytest.mark.parametrize(
    ("name", "head", "lora"),
    [
        ("gpt2", "causal-lm", LORA),
        ("llama", "causal-lm", HEAD_ADAPTERS),
        ("qwen3-tied", "causal-lm", LORA),
        ("bert", "sequence-classification", LORA),
        ("llama", "causal-lm", replace(HEAD_ADAPTERS, first_block=3)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gpt2", "causal-lm", replace(HEAD_ADAPTERS, targets="c_attn,mlp.c_proj")),
                ("llama", "causal-lm", replace(LORA, targets="all-linear")),
                ("gemma3_text", "causal-lm", LORA),
                ("granite", "causal-lm", HEAD_ADAPTERS),
                ("gpt2", "token-classification", LORA),
                ("qwen3", "sequence-classification", LORA),
                ("distilbert", "sequence-classification", LORA),
                ("roberta", "masked-lm", LORA),
                ("deberta-v2", "masked-lm", LORA),
                ("bart", "seq2seq", LORA),
                ("marian", "seq2seq", LORA),
                ("t5", "seq2seq", LORA),
            )
        ),
    ],
)
def test_peft_and_the_library_compute_what_the_run_does(tmp_path, monkeypatch, name, head, lora):
    run = trained_run(tmp_path, spec_of(name, head), lora)
    spec = load_model(run).spec
    batch = tiny_batch(spec, padded="causal" not in spec.head)
    expected = run_logits(run, batch)
    # Of a few kilobytes each, as a large model has several files.
    monkeypatch.setattr(library_folder, "SHARD_BYTES", 8_000)
    merged = export_run(run, tmp_path / "merged")
    assert "model.safetensors.index.json" in merged.files and "model.safetensors" not in merged.files
    model = auto_model(spec.head).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(model, batch, spec.head), expected, rtol=1e-5, atol=1e-5)
    exported = export_run(run, tmp_path / "adapters", adapter=True)
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= set(exported.files)
    assert not exported.rounding
    model = with_adapters(tmp_path / "adapters", spec)
    torch.testing.assert_close(logits(model, batch, spec.head), expected, rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        assert not torch.allclose(logits(model, batch, spec.head), expected, atol=1e-3)


@pytest.mark.parametrize(("base_dtype", "dtype"), [("int8", torch.float32), ("nf4", torch.bfloat16)])
def test_a_rounded_base_is_said_beside_its_adapters_and_merged_as_it_was_trained(tmp_path, base_dtype, dtype):
    spec = tiny_spec("llama", "causal-lm", dropout=0.0)
    run = trained_run(tmp_path, spec, HEAD_ADAPTERS, base_dtype, dtype)
    batch = tiny_batch(spec)
    expected = run_logits(run, batch)
    export_run(run, tmp_path / "merged")
    model = auto_model(spec.head).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(model, batch, spec.head), expected, rtol=1e-5, atol=1e-5)
    assert f"rounded to {base_dtype} here" in (tmp_path / "merged/README.md").read_text()
    exported = export_run(run, tmp_path / "adapters", adapter=True)
    assert f"rounded to {base_dtype}. Over the matrices as the base model's files have them" in exported.rounding
    assert exported.rounding in (tmp_path / "adapters/README.md").read_text()
    # The sentence is true: peft's base is not the run's.
    difference = (logits(with_adapters(tmp_path / "adapters", spec), batch, spec.head) - expected).abs().max()
    assert 1e-4 < float(difference) < 1


def test_a_base_that_its_files_have_in_the_same_bits_is_not_called_rounded(tmp_path):
    spec = tiny_spec("llama", "causal-lm", dropout=0.0)
    run = trained_run(tmp_path, spec, LORA, "bfloat16", torch.bfloat16)
    assert not export_run(run, tmp_path / "adapters", adapter=True).rounding
    batch = tiny_batch(spec)
    found = logits(with_adapters(tmp_path / "adapters", spec), batch, spec.head)
    torch.testing.assert_close(found, run_logits(run, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base_dtype", ["float32", "int8"])
def test_fresh_weights_are_merged_and_have_no_folder_for_peft(tmp_path, base_dtype):
    spec = tiny_spec("llama", "causal-lm", dropout=0.0)
    run = trained_run(tmp_path, spec, HEAD_ADAPTERS, base_dtype, pretrained=False)
    batch = tiny_batch(spec)
    export_run(run, tmp_path / "merged")
    model = auto_model(spec.head).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(model, batch, spec.head), run_logits(run, batch), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="--adapter: .* over random weights, and peft loads adapters over a model's"):
        export_run(run, tmp_path / "adapters", adapter=True)


def test_a_run_without_adapters_has_none_to_take_away(tmp_path):
    run = trained_run(tmp_path, tiny_spec("llama", "causal-lm"), lora=None, pretrained=False)
    with pytest.raises(ValueError, match="--adapter: .* all weights were trained, there are no adapters; leave it out"):
        export_run(run, tmp_path / "adapters", adapter=True)
    with pytest.raises(ValueError, match="--base: .* began with no pretrained model, found 'elsewhere'"):
        export_run(run, tmp_path / "merged", base="elsewhere")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_whose_head_alone_was_trained_has_no_adapters_either(tmp_path):
    run = trained_run(tmp_path, tiny_spec("llama", "causal-lm", dropout=0.0), replace(LORA, first_block=NUM_BLOCKS))
    with pytest.raises(ValueError, match=f"--adapter: the run has no adapters, found lora.first-block = {NUM_BLOCKS}"):
        export_run(run, tmp_path / "adapters", adapter=True)
    assert not (tmp_path / "adapters").exists()


def test_a_base_that_is_gone_or_another_one_is_refused_and_may_be_named(tmp_path):
    run = trained_run(tmp_path, tiny_spec("llama", "causal-lm", dropout=0.0))
    base, moved = tmp_path / "base", tmp_path / "moved"
    base.rename(moved)
    for adapter in (False, True):
        with pytest.raises(ValueError, match=r"base is no folder with safetensors files .* name its folder: --base"):
            export_run(run, tmp_path / "out", adapter=adapter)
    export_run(run, tmp_path / "merged", base=str(moved))
    export_run(run, tmp_path / "adapters", adapter=True, base=str(moved))
    named = json.loads((tmp_path / "adapters/adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(moved)
    weights = moved / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for adapter in (False, True):
        with pytest.raises(ValueError, match=r"model.safetensors .* has \d+ bytes with SHA-256 .*; expected "):
            export_run(run, tmp_path / "out", adapter=adapter, base=str(moved))
    assert not (tmp_path / "out").exists()


def test_adapters_of_a_multi_modal_models_text_model_are_refused(tmp_path):
    run = trained_run(tmp_path, tiny_spec("llama", "causal-lm", dropout=0.0))
    file = tmp_path / "base/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "llava"}))
    with pytest.raises(ValueError, match=r"base is of type llava, of which the run has trained the text model alone"):
        export_run(run, tmp_path / "out", adapter=True)


@pytest.mark.parametrize("adapter", [False, True])
def test_an_export_that_is_cut_off_leaves_nothing_that_looks_complete(tmp_path, monkeypatch, adapter):
    """A process that is killed clears nothing up: what is aside then lacks the file that a model is known by."""
    run = trained_run(tmp_path, tiny_spec("llama", "causal-lm", dropout=0.0))
    monkeypatch.setattr(library_folder, "SHARD_BYTES", 8_000)
    written = []

    def cut_off(tensors, path, metadata):
        assert not (tmp_path / "out").exists() and path.parent.name.startswith(".out-")
        assert not any((path.parent / name).exists() for name in ("config.json", "adapter_config.json"))
        written.append(path)
        if adapter or len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(adapter_folder if adapter else library_folder, "save_file", cut_off)
    with pytest.raises(KeyboardInterrupt):
        export_run(run, tmp_path / "out", adapter=adapter)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


def test_no_export_builds_the_whole_model_or_holds_more_than_a_shard(tmp_path, monkeypatch):
    run = trained_run(tmp_path, tiny_spec("llama", "causal-lm", dropout=0.0), HEAD_ADAPTERS, "int8")
    layer = 16_000
    sizes = []

    def built(*_):
        raise AssertionError("the whole model was built")

    def write(tensors, path, metadata):
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        path.touch()

    monkeypatch.setattr(LibraryFamily, "build_parts", built)
    monkeypatch.setattr(library_folder, "SHARD_BYTES", layer)
    monkeypatch.setattr(library_folder, "save_file", write)
    export_run(run, tmp_path / "merged")
    assert len(sizes) > 5 and max(sizes) <= layer


def test_experts_are_written_as_their_files_have_them(tmp_path, monkeypatch):
    spec = small_spec("mixtral")
    run = trained_run(tmp_path, spec, lora=None, pretrained=False)
    monkeypatch.setattr(library_folder, "SHARD_BYTES", 1)
    export_run(run, tmp_path / "merged")
    names = json.loads((tmp_path / "merged/model.safetensors.index.json").read_text())["weight_map"]
    assert any(re.fullmatch(r"model\.layers\.0\..*experts\.1\.w2\.weight", name) for name in names)
    batch = tiny_batch(spec, padded=False)
    model = auto_model(spec.head).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(model, batch, spec.head), run_logits(run, batch), rtol=1e-5, atol=1e-5)


def test_the_card_names_base_licence_data_rounds_and_scores(tmp_path):
    run = trained_run(tmp_path, tiny_spec("llama", "causal-lm", dropout=0.0), HEAD_ADAPTERS)
    settings = {"task.name": "causal-lm", "data.source": "files", "data.path": "/home/anna/secret"}
    settings |= {"data.train-source": "/home/anna/secret/letters.txt", "data.test-source": "test.txt"}
    write_config(run, replace(RunConfig.as_sent({**settings, "model.family": "llama"}), num_rounds=7))
    write_summary(run, "finished", rounds=7, scored_round=5, metrics={"loss": 1.25, "perplexity": 3.490343})
    (tmp_path / "base/README.md").write_text("---\nlicense: apache-2.0\n---\n# A base\n")
    export_run(run, tmp_path / "adapters", adapter=True)
    text = (tmp_path / "adapters/README.md").read_text()
    card = ModelCard(text)
    assert (card.data.license, card.data.library_name, card.data.pipeline_tag) == (
        "apache-2.0",
        "peft",
        "text-generation",
    )
    digest = hashlib.sha256((tmp_path / "base/model.safetensors").read_bytes()).hexdigest()
    for said in (
        "Its licence: apache-2.0.",
        f"| model.safetensors | {digest} |",
        "| data | letters.txt |",
        "| rounds | 7 |",
        "| round of this model | 5 |",
        "| adapters | r = 2, alpha = 6, in query and value |",
        "| server's part | adapters in its blocks |",
        "| loss | 1.25 |",
        "| perplexity | 3.49034 |",
    ):
        assert said in text
    assert "secret" not in text and str(tmp_path) not in text
    (tmp_path / "base/README.md").unlink()
    export_run(run, tmp_path / "merged")
    assert "Its licence is not known here" in (tmp_path / "merged/README.md").read_text()


def test_a_card_names_the_base_of_the_run_that_the_run_began_with(tmp_path):
    first = trained_run(tmp_path, tiny_spec("llama", "causal-lm"), lora=None)
    (tmp_path / "base/README.md").write_text("---\nlicense: apache-2.0\n---\n# A base\n")
    for before, after in (("run", "second"), ("second", "third")):
        shutil.copytree(first, tmp_path / after, symlinks=True)
        write_config(tmp_path / after, RunConfig.as_sent({"model.from": str(tmp_path / before)}))
    export_run(tmp_path / "third", tmp_path / "out")
    text = (tmp_path / "out/README.md").read_text()
    assert ModelCard(text).data.license == "apache-2.0" and "`base`, of type `llama`. Training began with the" in text
    shutil.rmtree(first)
    export_run(tmp_path / "third", tmp_path / "again")
    assert "None is known here. Training began with the run second." in (tmp_path / "again/README.md").read_text()


def test_a_push_names_no_folder_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = trained_run(tmp_path, tiny_spec("llama", "causal-lm"), lora=None)
    command = ["export", str(run), str(tmp_path / "out"), "--push-to", "anna/tuned"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and f"error: --push-to: the base model is {tmp_path / 'base'}, a folder" in done.stderr
    assert "does not answer from here" in CliRunner().invoke(app, [*command, "--base", "anna/base"]).stderr
    assert not (tmp_path / "out").exists()
    export_run(run, tmp_path / "out", base="anna/base")
    assert ModelCard((tmp_path / "out/README.md").read_text()).data.base_model == "anna/base"
    export_run(run, tmp_path / "local")
    for file in (*(tmp_path / "out").iterdir(), *(tmp_path / "local").iterdir()):
        assert str(tmp_path).encode() not in file.read_bytes(), file


@pytest.mark.parametrize("adapter", [False, True])
def test_the_files_of_an_export_have_the_permissions_that_new_files_have(tmp_path, adapter):
    run = trained_run(tmp_path, tiny_spec("llama", "causal-lm"))
    export_run(run, tmp_path / "out", adapter=adapter)
    (tmp_path / "new").touch()
    assert {file.stat().st_mode for file in (tmp_path / "out").iterdir()} == {(tmp_path / "new").stat().st_mode}


class Hub(BaseHTTPRequestHandler):
    """Answers of a hub that keeps the names of small files; every answer is JSON."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, body))
        address = f"http://127.0.0.1:{self.server.server_port}/anna/tuned"
        answers = {
            "/api/repos/create": {"url": address},
            "/api/validate-yaml": {"errors": [], "warnings": []},
            "/api/models/anna/tuned/commit/main": {"commitUrl": f"{address}/commit/1", "commitOid": "1"},
        }
        if self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            answer = {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        else:
            answer = answers.get(self.path, {"commitUrl": f"{address}/commit/1", "commitOid": "1"})
        self._send(answer)

    def do_GET(self):
        self.server.requests.append((self.path, b""))
        self._send({"id": "anna/tuned", "sha": "0" * 40, "siblings": [], "private": True})

    def _send(self, answer):
        content = json.dumps(answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.requests, server.status = [], 200
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_folder_is_pushed_to_a_private_model_by_the_hubs_client(tmp_path, monkeypatch, hub):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (tmp_path / "README.md").write_text("# Tuned")
    (tmp_path / "adapter_config.json").write_text("{}")
    client = HfApi(endpoint=f"http://127.0.0.1:{hub.server_port}", token="hf_none")
    assert push_folder(tmp_path, "anna/tuned", client).endswith("anna/tuned")
    asked = dict(hub.requests)
    created = json.loads(asked["/api/repos/create"])
    assert (created["name"], created["organization"], created["visibility"]) == ("tuned", "anna", "private")
    committed = b"".join(body for path, body in hub.requests if "/commit/" in path)
    assert b"README.md" in committed and b"adapter_config.json" in committed
    hub.status = 401
    with pytest.raises(ValueError, match=r"--push-to: .* is written, but anna/tuned did not take it: .*hf auth login"):
        push_folder(tmp_path, "anna/tuned", client)


def test_an_id_that_no_hub_takes_is_refused_before_anything_is_written(tmp_path):
    run = trained_run(tmp_path, tiny_spec("llama", "causal-lm"), lora=None, pretrained=False)
    done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out"), "--push-to", "a/b/c"])
    assert done.exit_code == 2 and "error: --push-to: expected a hub id such as organisation/name" in done.stderr
    assert not (tmp_path / "out").exists()
