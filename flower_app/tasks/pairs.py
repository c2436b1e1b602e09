"""Pairs of texts in a tokenizer's own form, as the transformers library has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from flower_app.tasks.data.texts import in_chunks
from flower_app.tasks.tokenizer import TextTokenizer
from flower_app.tokenizer_files import joined, marks_by_rule

_FEWEST_MARKS = 3
"""Parts of a rule for pairs: before, between and after two texts."""


def with_pair_rule(tokenizer: TextTokenizer) -> TextTokenizer:
    """Return a tokenizer with a rule for pairs of texts: its own, or else BERT's with its marks."""
    backend = _backend(tokenizer)
    if backend.num_special_tokens_to_add(True) >= _FEWEST_MARKS:
        return tokenizer
    return _with_rule(tokenizer, backend, _bert_pair(tokenizer, backend))


def with_single_rule(tokenizer: TextTokenizer) -> TextTokenizer:
    """Return an encoder's tokenizer whose own rule, if it has one, puts the marks of the task around a text.

    Its rule for pairs stays where it has one.
    """
    backend = _backend(tokenizer)
    is_exported = "tokenizer_config.json" in tokenizer.settings.files or backend.post_processor is not None
    if not is_exported or marks_by_rule(backend) == ([tokenizer.bos_id], [tokenizer.eos_id]):
        return tokenizer
    pair = _bert_pair(tokenizer, backend)
    if backend.num_special_tokens_to_add(True) >= _FEWEST_MARKS:
        both = backend.encode("a", "a")
        pair, seen = [], ""
        for token, number, text in zip(both.tokens, both.type_ids, both.sequence_ids, strict=True):
            piece = f"{token}:{number}" if text is None else f"${'AB'[text]}:{number}"
            # A text may be several tokens.
            pair += [piece] if piece != seen or text is None else []
            seen = piece
    return _with_rule(tokenizer, backend, pair)


def _backend(tokenizer: TextTokenizer) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer.vocabulary_json())


def _bert_pair(tokenizer: TextTokenizer, backend: Any) -> list[str]:
    begin, end = (backend.id_to_token(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
    # A classifier on a causal model takes a last token that is the padding for padding.
    last = [] if tokenizer.eos_id == tokenizer.pad_id else [f"{end}:1"]
    return [f"{begin}:0", "$A:0", f"{end}:0", "$B:1", *last]


def _with_rule(tokenizer: TextTokenizer, backend: Any, pair: list[str]) -> TextTokenizer:
    """Return a tokenizer that puts its marks around a text, and those of ``pair`` around two."""
    from tokenizers.processors import TemplateProcessing

    begin, end = (backend.id_to_token(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
    marks = {begin, end, *(piece.rpartition(":")[0] for piece in pair)} - {"$A", "$B"}
    backend.post_processor = TemplateProcessing(
        single=[f"{begin}:0", "$A:0", f"{end}:0"],
        pair=pair,
        special_tokens=[(mark, backend.token_to_id(mark)) for mark in sorted(marks)],
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
