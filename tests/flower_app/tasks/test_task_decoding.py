import itertools

import pytest
import torch

from client_pipeline.families import transformer
from client_pipeline.families.families import build_parts
from flower_app.tasks.beam_search import IncrementalDecoder, beam, greedy


def model(norm="pre", vocab_size=24, seed=0):
    """Random weights, made bold enough that translations differ from each other."""
    spec = transformer.spec(
        vocab_size=vocab_size, width=16, num_heads=2, feed_forward=32, encoder_layers=1, decoder_layers=2, norm=norm
    )
    parts = build_parts(spec, seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in parts.head.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return parts.head.double().eval()


def memory(lengths, seed=0):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(lengths), max(lengths), 16, generator=generator, dtype=torch.float64), mask


def log_probabilities(decoder, memory_BTD, mask_BT, ids_BU):
    """The decoder's own computation over the whole prefix."""
    logits = decoder.scores(decoder.hidden(memory_BTD, mask_BT, ids_BU))
    logits[..., [decoder.config.pad_id, decoder.config.bos_id]] = -torch.inf
    return logits.log_softmax(-1)


def greedy_from_scratch(decoder, memory_BTD, mask_BT, limit):
    ids = [decoder.config.bos_id]
    while len(ids) <= limit:
        token = int(log_probabilities(decoder, memory_BTD, mask_BT, torch.tensor([ids]))[0, -1].argmax())
        if token == decoder.config.eos_id:
            break
        ids.append(token)
    return ids[1:]


@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_one_position_at_a_time_equals_the_whole_prefix(norm):
    decoder = model(norm)
    memory_BTD, mask = memory([5, 2, 7])
    ids = torch.randint(3, 24, (3, 9), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = decoder.config.bos_id
    expected = log_probabilities(decoder, memory_BTD, mask, ids)
    steps = IncrementalDecoder(decoder, memory_BTD, mask)
    for position in range(9):
        torch.testing.assert_close(steps.step(ids[:, position]), expected[:, position])


@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_greedy_equals_full_computation_sentence_by_sentence(norm):
    lengths = [5, 2, 7, 1, 4, 6]
    for seed in range(3):
        decoder = model(norm, seed=seed)
        memory_BTD, mask = memory(lengths, seed)
        limits = [12, 3, 8, 12, 1, 12]
        together = greedy(decoder, memory_BTD, mask, limits)
        alone = [
            greedy_from_scratch(decoder, memory_BTD[i : i + 1, :n], mask[i : i + 1, :n], limits[i])
            for i, n in enumerate(lengths)
        ]
        assert together == alone
        assert all(len(ids) <= limit for ids, limit in zip(together, limits, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.no_grad()
def test_a_beam_as_wide_as_the_language_finds_the_best_translation(penalty, norm):
    limits = [3, 2, 3]
    for seed in range(4):
        decoder = model(norm, vocab_size=6, seed=seed)
        memory_BTD, mask = memory([4, 3, 1], seed)
        found = beam(decoder, memory_BTD, mask, limits, 40, penalty)
        for i, limit in enumerate(limits):
            assert found[i] == best_of_all(decoder, memory_BTD[i : i + 1], mask[i : i + 1], limit, penalty)


def best_of_all(decoder, memory_BTD, mask_BT, limit, penalty):
    """Score every sequence that ends, and every one of full length that does not."""
    bos, eos = decoder.config.bos_id, decoder.config.eos_id
    words = range(3, decoder.config.vocab_size)
    candidates = [(*ids, eos) for n in range(limit) for ids in itertools.product(words, repeat=n)]
    candidates += list(itertools.product(words, repeat=limit))
    scored = []
    for ids in candidates:
        table = log_probabilities(decoder, memory_BTD, mask_BT, torch.tensor([[bos, *ids[:-1]]]))[0]
        total = float(sum(table[position, token] for position, token in enumerate(ids)))
        scored.append((total / len(ids) ** penalty, [token for token in ids if token != eos]))
    return max(scored)[1]
