"""Pairs of texts in a tokenizer's own form, as the transformers library has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from flower_app.tasks.data.texts import in_chunks
from flower_app.tasks.tokenizer import TextTokenizer
from flower_app.tokenizer_files import joined

_FEWEST_MARKS = 3
"""Parts of a rule for pairs: before, between and after two texts."""


def with_pair_rule(tokenizer: TextTokenizer) -> TextTokenizer:
    """Return a tokenizer with a rule for pairs of texts: its own, or else BERT's with its marks."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_str(tokenizer.vocabulary_json())
    if backend.num_special_tokens_to_add(True) >= _FEWEST_MARKS:
        return tokenizer
    begin, end = (backend.id_to_token(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
    # A classifier on a causal model takes a last token that is the padding for padding.
    last = "" if tokenizer.eos_id == tokenizer.pad_id else f" {end}:1"
    backend.post_processor = TemplateProcessing(
        single=f"{begin}:0 $A:0 {end}:0",
        pair=f"{begin}:0 $A:0 {end}:0 $B:1{last}",
        special_tokens=[(begin, tokenizer.bos_id), (end, tokenizer.eos_id)],
    )
    # The files that the tokenizer came from have another rule.
    return TextTokenizer.from_json(joined(replace(tokenizer.settings, files={}), str(backend.to_str())))


def encode_pairs(
    tokenizer: TextTokenizer, pairs: Iterable[tuple[str, str]], max_length: int
) -> Iterator[tuple[list[int], int, bool]]:
    """Encode pairs of texts by the tokenizer's rule; of one that is too long, the longer text is cut first.

    Yields
    ------
    The ids, marks included; at which of them token type 1 begins; and whether the pair was cut.
    """
    backend = tokenizer.truncating(max_length)

    def encoded(some: list[tuple[str, str]]) -> Iterator[tuple[list[int], int, bool]]:
        for encoding in backend.encode_batch_fast(some):
            types = encoding.type_ids
            yield encoding.ids, types.index(1) if 1 in types else len(types), bool(encoding.overflowing)

    return in_chunks(encoded, pairs)
