"""The plain model of a run over its files: the tensors, and what they compute, of the one that is merged in memory."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from client_pipeline.families.families import build_parts, merged
from client_pipeline.partition.spec import LoraConfig
from flower_app.saved_model import load_model, load_plain_model, save_model
from helpers.tiny_models import CLASSIC, CONFIGS, VARIANTS, tiny_batch, tiny_spec

pytestmark = pytest.mark.slow
NAMES = [*CONFIGS, *VARIANTS]


def saved(run_dir, spec):
    parts = build_parts(spec, seed=1)
    with torch.no_grad():
        for _, parameter in parts.named_parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    save_model(run_dir, spec, parts.weights() | parts.frozen_weights(), "{}", {})
    return parts


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["whole", "adapters"])
@pytest.mark.parametrize("name", ["classic", *NAMES])
def test_it_computes_what_the_merged_one_computes(name, lora, tmp_path):
    spec = CLASSIC if name == "classic" else tiny_spec(name, dropout=0.0)
    parts = saved(tmp_path, replace(spec, lora=lora))
    expected, found = merged(parts), load_plain_model(tmp_path).parts
    for module in (expected.embedding, expected.blocks, expected.head):
        module.eval()
    batch = tiny_batch(spec, length=7, seed=3)
    assert torch.allclose(found.logits(batch), expected.logits(batch), atol=1e-6)
    assert dict(found.named_parameters()).keys() == dict(expected.named_parameters()).keys()
    if expected.reference is not None:
        of_library = dict(found.reference.named_parameters())
        for library_name, parameter in expected.reference.named_parameters():
            # A common table that nobody reads is zeros where encoder and decoder have their own.
            is_unread = name.endswith("-untied") and "shared" in library_name
            assert is_unread or torch.allclose(of_library[library_name], parameter, atol=1e-6), library_name


def test_a_missing_tensor_is_named(tmp_path):
    saved(tmp_path, tiny_spec("llama", dropout=0.0))
    file = (tmp_path / "model").resolve() / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.startswith("blocks.1."))
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"{name} is missing"):
        load_plain_model(tmp_path)
    with pytest.raises(ValueError, match="do not fit"):
        load_model(tmp_path)
