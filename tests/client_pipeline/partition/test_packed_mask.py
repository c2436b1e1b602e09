"""Several examples in one sequence: what the mask says, and that models keep them apart."""

import pytest
import torch

from client_pipeline.families.families import build_parts
from client_pipeline.families.hugging_face import SERVER_LAYERS, spec_from_config
from client_pipeline.families.proof import check_packing
from client_pipeline.families.sliceable import check_token_slices
from client_pipeline.partition.packed_mask import PACKED, is_plain, library_mask
from client_pipeline.partition.parts import IGNORED_LABEL
from client_pipeline.partition.spec import CAUSAL_LM
from client_pipeline.partition.token_slices import token_slices
from helpers.tiny_models import tiny_spec

NUMBERS = torch.tensor([[1, 1, 1, 2, 2, 3, 4, 4], [1, 1, 2, 2, 2, 0, 0, 0]], dtype=PACKED)
EXAMPLES = [(0, 0, 3), (0, 3, 5), (0, 5, 6), (0, 6, 8), (1, 0, 2), (1, 2, 5)]


def packed_batch(vocabulary=15):
    ids = torch.randint(3, vocabulary, NUMBERS.shape, generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(NUMBERS == 0, IGNORED_LABEL)
    for row, start, _ in EXAMPLES:
        labels[row, start] = IGNORED_LABEL
    return {"input_ids": ids, "attention_mask": NUMBERS, "labels": labels}


def one_by_one(batch):
    for row, start, end in EXAMPLES:
        piece = {name: tensor[row : row + 1, start:end] for name, tensor in batch.items()}
        yield piece | {"attention_mask": torch.ones(1, end - start, dtype=torch.bool)}


def model(family):
    """Give a small model whose attention tells tokens apart."""
    parts = build_parts(tiny_spec(family, CAUSAL_LM, dropout=0.0), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in parts.all_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return parts


def test_positions_begin_anew_at_each_example():
    arguments = library_mask(NUMBERS)
    assert arguments["attention_mask"] is None
    assert arguments["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 0, 1, 2, 0, 1, 2]]
    assert library_mask(NUMBERS != 0)["attention_mask"].tolist() == (NUMBERS != 0).long().tolist()
    assert is_plain(torch.ones(2, 3, dtype=torch.bool)) and is_plain(torch.ones(2, 3, dtype=PACKED))
    assert not is_plain(NUMBERS) and not is_plain(NUMBERS != 0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "mistral"])
def test_packed_examples_are_computed_as_alone(family):
    parts, batch = model(family), packed_batch()
    logits = parts.logits(batch)
    for (row, start, end), piece in zip(EXAMPLES, one_by_one(batch), strict=True):
        torch.testing.assert_close(logits[row : row + 1, start:end], parts.logits(piece), atol=1e-5, rtol=1e-5)
    parameters = dict(parts.named_parameters())
    found = torch.autograd.grad(parts.loss_sum(batch), list(parameters.values()))
    losses = [parts.loss_sum(piece) for piece in one_by_one(batch) if (piece["labels"] != IGNORED_LABEL).any()]
    expected = torch.autograd.grad(sum(losses), list(parameters.values()))
    for name, one, other in zip(parameters, found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 * max(1, float(other.abs().max())), rtol=1e-5, msg=name)
    # Without their numbers the examples mix.
    mixed = parts.logits(batch | {"attention_mask": NUMBERS != 0})
    assert float((mixed - logits).detach()[NUMBERS > 1].abs().max()) > 1e-2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_sequences_can_be_cut_into_token_slices(family):
    parts, x_BTD = model(family), torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    check_token_slices(parts.spec, "plan")
    block = parts.blocks[0]
    whole = block(x_BTD, parts.mask_form(NUMBERS, x_BTD.dtype))
    cut = [block(x_BTD[:, part.first : part.end], part) for part in token_slices(NUMBERS, 3)]
    torch.testing.assert_close(torch.cat(cut, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_models_that_mix_packed_examples_are_refused_by_name():
    from transformers import BloomConfig

    check_packing(tiny_spec("llama", CAUSAL_LM))
    bloom = spec_from_config(BloomConfig(hidden_size=16, n_layer=3, n_head=2), CAUSAL_LM, **{SERVER_LAYERS: 1})
    with pytest.raises(ValueError, match=r"data\.packing: model type 'bloom' does not keep .* apart: scores differ"):
        check_packing(bloom)
    with pytest.raises(ValueError, match=r"'bart' .*: it is no decoder-only model of the transformers library"):
        check_packing(tiny_spec("bart"))
