"""A checkpoint of text and images gives its text model: same scores, and no weight of the images is read."""

import pytest
import torch

from client_pipeline.families.families import head_of, read_library_config
from client_pipeline.families.pretrained import load_pretrained, load_pretrained_weights
from client_pipeline.families.proof import cut_reason
from client_pipeline.weights.weight_files import MappedFile
from helpers.multimodal import MULTIMODAL, save_multimodal
from helpers.tiny_models import evaluation


@pytest.mark.parametrize(
    "model_type", [name if name == "gemma3" else pytest.param(name, marks=pytest.mark.slow) for name in MULTIMODAL]
)
def test_the_text_model_of_a_multimodal_checkpoint_is_loaded_alone(tmp_path, monkeypatch, model_type):
    model = save_multimodal(tmp_path, model_type)
    tensors_read = set()
    plain = MappedFile.tensor
    config = read_library_config(str(tmp_path))
    assert head_of(config) == "causal-lm"
    ids = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    monkeypatch.setattr(MappedFile, "tensor", lambda file, name: tensors_read.add(name) or plain(file, name))
    parts = evaluation(load_pretrained(str(tmp_path), "causal-lm", server_layers=1))
    spec, weights = load_pretrained_weights(str(tmp_path), "causal-lm", server_layers=1)
    assert tensors_read and not any("vision" in name or "visual" in name for name in tensors_read)
    torch.testing.assert_close(parts.logits(batch).detach(), expected, rtol=1e-4, atol=1e-5)
    assert spec == parts.spec and spec.family == config.model_type
    assert weights.base is not None and set(weights.base) < set(weights)
    for name, value in parts.weights().items():
        assert torch.equal(weights[name], value), name
    assert cut_reason(spec) == ""


def test_a_text_model_that_the_library_has_no_language_model_of_is_refused(tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model("qwen2_vl").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model type 'qwen2_vl' has a text model of type 'qwen2_vl_text', of which"):
        read_library_config(str(tmp_path))
