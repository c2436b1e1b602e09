"""End of a translation, in what the model learns from and in what it writes."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from client_pipeline.families.families import build_parts
from flower_app.tasks.beam_search import library_search
from flower_app.tasks.data.corpus import Pairs
from flower_app.tasks.tokenizer import TextTokenizer, train_tokenizer
from flower_app.tasks.translation import TranslationData
from helpers.tiny_models import evaluation, tiny_batch, tiny_spec


@pytest.mark.parametrize("rule", [False, True])
@pytest.mark.parametrize(("words", "ends"), [(1, True), (5, True), (6, False), (9, False)])
def test_a_target_that_is_cut_teaches_no_end_where_it_is_cut(rule, words, ends):
    text = " ".join("abcdefghi"[:words])
    tokenizer = train_tokenizer(["a b c d e f g h i"] * 3, 400, pretokenized=False)
    if rule:
        backend = Tokenizer.from_str(tokenizer.to_json())
        backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
        tokenizer = TextTokenizer(backend)
    begin, _ = tokenizer.marks
    ids = [*begin, *tokenizer.encode([text])[0], tokenizer.eos_id]
    longest = 6 + len(begin)
    data = TranslationData.encode(Pairs([text], [text]), tokenizer, max_length=longest)
    batch = data.collate([0])
    assert batch["labels"][0].tolist() == (ids if ends else ids[:longest])
    # What is read has its end all the same.
    assert batch["input_ids"][0, -1] == tokenizer.eos_id and data.truncated == (0 if ends else 2)


def test_a_translation_stops_at_any_of_the_models_ends():
    spec = tiny_spec("t5")
    parts, batch = evaluation(build_parts(spec, seed=0)), tiny_batch(spec, size=2)
    with torch.no_grad():
        for parameter in parts.head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        memory = parts.encode(batch)
        parts.reference.config.eos_token_id = 39
        plain, _ = library_search(parts, memory, batch["attention_mask"], [8, 8])
        # A token that it writes is an end, too.
        parts.reference.config.eos_token_id = [39, plain[-1]]
        try:
            ended, _ = library_search(parts, memory, batch["attention_mask"], [8, 8])
        except TypeError as error:
            pytest.fail(f"several ends: {error}")
    assert plain and ended == plain[: plain.index(plain[-1])]
