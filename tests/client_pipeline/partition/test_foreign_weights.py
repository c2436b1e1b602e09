"""Weights in another form than whole safetensors files are refused by name; they never count as none."""

import json

import pytest
import torch
from typer.testing import CliRunner

from client_pipeline.families.families import read_library_config
from client_pipeline.families.hugging_face import auto_model
from flower_app.cli.main import app
from flower_app.first_config.guess import guess_task
from flower_app.first_config.own_text import OwnText
from flower_app.first_config.recipe import recipe
from flower_app.verify import model_builder
from helpers.tiny_models import library_config

SAFE, INDEX = "model.safetensors", "model.safetensors.index.json"


def model_folder(folder, **changes):
    """Save a tiny BERT as the library does, with changes to its ``config.json``."""
    torch.manual_seed(0)
    auto_model("sequence-classification").from_config(library_config("bert")).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("pytorch_model.bin", r"never read; .*save_pretrained"),
        ("pytorch_model.bin.index.json", r"never read; .*save_pretrained"),
        ("pytorch_model-00001-of-00002.bin", r"never read; .*save_pretrained"),
        ("consolidated.00.pth", "in the transformers library's format"),
        ("original/consolidated.00.pth", "in the transformers library's format"),
        ("consolidated.safetensors", "in the transformers library's format"),
        ("tf_model.h5", "TensorFlow, Flax or Paddle"),
        ("flax_model.msgpack", "TensorFlow, Flax or Paddle"),
        ("bert_model.ckpt.index", "TensorFlow, Flax or Paddle"),
        ("model-Q4_K_M.gguf", "collapipe import-gguf"),
        ("onnx/model.onnx", "model.safetensors"),
        ("model-00001-of-00002.safetensors", INDEX),
        ("model.fp16.safetensors", INDEX),
        ("checkpoint-500/model.safetensors", "give the folder that holds it"),
        ("MODEL.SAFETENSORS", INDEX),
        ("model.safetensors.part", "parts of a checkpoint or of a download"),
        ("global_step5/mp_rank_00_model_states.pt", "parts of a checkpoint or of a download"),
        ("pytorch_model_fsdp_0/__0_0.distcp", "parts of a checkpoint or of a download"),
        ("openvino_model.bin", "this format is not read"),
        ("rust_model.ot", "model.safetensors"),
        ("tf_model/saved_model.pb", "TensorFlow, Flax or Paddle"),
        ("model_state.pdparams", "TensorFlow, Flax or Paddle"),
    ],
)
def test_weights_of_another_format_are_refused_by_name(tmp_path, name, remedy):
    folder = model_folder(tmp_path / "model")
    (folder / SAFE).unlink()
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"weights")
    with pytest.raises(ValueError, match=f"expected safetensors weights, found {name}: .*{remedy}"):
        model_builder(str(folder), seed=0)


def test_weights_of_another_format_beside_the_right_ones_do_no_harm(tmp_path):
    folder = model_folder(tmp_path / "model")
    for name in ("pytorch_model.bin", "tf_model.h5", "model.gguf"):
        (folder / name).write_bytes(b"weights")
    assert model_builder(str(folder), seed=0)().spec.family == "bert"


def test_what_a_trainer_leaves_beside_a_configuration_is_no_weights(tmp_path):
    folder = model_folder(tmp_path / "model")
    (folder / SAFE).unlink()
    (folder / "checkpoint-500").mkdir()
    for name in ("training_args.bin", "checkpoint-500/optimizer.pt"):
        (folder / name).write_bytes(b"arguments")
    assert model_builder(str(folder), seed=0)().spec.family == "bert"


@pytest.mark.parametrize("left", ["half", "pointer", "nothing"])
def test_a_file_that_is_not_whole_is_refused(tmp_path, left):
    folder = model_folder(tmp_path / "model")
    whole = (folder / SAFE).read_bytes()
    parts = {
        "half": whole[: len(whole) // 2],
        "pointer": b"version https://git-lfs.github.com/spec/v1\n",
        "nothing": b"",
    }
    (folder / SAFE).write_bytes(parts[left])
    with pytest.raises(ValueError, match=r"model\.safetensors: expected a safetensors file"):
        read_library_config(str(folder))


@pytest.mark.parametrize("there", [[], ["model-00002-of-00002.safetensors"]])
def test_an_index_without_its_shards_is_refused(tmp_path, there):
    folder = model_folder(tmp_path / "model")
    (folder / SAFE).rename(folder / "model-00002-of-00002.safetensors")
    if not there:
        (folder / "model-00002-of-00002.safetensors").unlink()
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ValueError, match="names model-00001-of-00002.safetensors, which is not there; fetch the whole"):
        model_builder(str(folder), seed=0)


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"\(gptq\)"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"\(awq\)"),
        ({"quantization_config": {"load_in_8bit": True}}, r"\(load_in_8bit\)"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, r"\(bitsandbytes\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"\(fp8\)"),
        ({"quantization": {"group_size": 64, "bits": 4}}, r"\(quantization\)"),
        ({}, "quantize_config.json"),
    ],
    ids=["gptq", "awq", "int8", "bitsandbytes", "fp8", "mlx", "file"],
)
def test_quantised_weights_are_named_with_the_remedy(tmp_path, changes, method):
    folder = model_folder(tmp_path / "model", **changes)
    if not changes:
        (folder / "quantize_config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{method}.*dequantise first") as refused:
        read_library_config(str(folder))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": ["a", "b"]}, r"id2label: expected an object, found \['a', 'b'\]; correct it"),
        ({"id2label": {"x": "a"}}, "id2label: expected the numbers of classes as keys, found 'x'; correct it"),
        ({"label2id": 5}, "label2id: expected an object, found 5; correct it"),
        ({"hidden_size": "64"}, ".*'hidden_size' expected int, got str .*'64'"),
        ({"num_labels": "2"}, "num_labels: expected a whole number, found '2'; correct it"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected a number above 0, found 0; correct it"),
    ],
    ids=["list", "keys", "number", "text", "labels", "zero"],
)
def test_a_configuration_with_a_value_of_another_kind_is_refused_by_file_and_key(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"} | changes))
    with pytest.raises(ValueError, match=f"config.json: ({message})") as refused:
        read_library_config(str(tmp_path))
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="^--pretrained: .*config.json: "):
        recipe(guess_task(OwnText(kind="plain", columns={"train": {"text": ["a b"] * 20}})), "default", str(tmp_path))


@pytest.mark.parametrize("with_config", [False, True])
def test_adapters_name_their_base_model(tmp_path, with_config):
    folder = model_folder(tmp_path / "model")
    (folder / SAFE).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    if not with_config:
        (folder / "config.json").unlink()
    with pytest.raises(
        (ValueError, FileNotFoundError), match=r"adapters of PEFT .* base model some/base; .*merge_and_unload"
    ):
        model_builder(str(folder), seed=0)


@pytest.mark.parametrize(
    "command",
    [["verify", "--model"], ["plan", "--scenario", "default", "--model"], ["profile", "--model"]],
    ids=["verify", "plan", "profile"],
)
def test_each_command_that_opens_a_folder_refuses_in_one_line(tmp_path, command):
    folder = model_folder(tmp_path / "model")
    (folder / SAFE).rename(folder / "pytorch_model.bin")
    done = CliRunner().invoke(app, [*command, str(folder)])
    assert done.exit_code == 2, done.output
    assert len(done.stderr.strip().splitlines()) == 1 and "found pytorch_model.bin" in done.stderr
