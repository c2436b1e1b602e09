"""Training of a WordPiece tokenizer: words, their characters, and pieces of text without blanks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from flower_app.tasks.tokenizer import TextTokenizer

WORDPIECE_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens of a trained WordPiece tokenizer, with the ids 0 to 4."""
_LONGEST_WORD = 100
"""Characters: a longer word is unknown to WordPiece."""
_FEWEST_PIECES = 5
"""Occurrences of a token of text without blanks, at least."""
_LONG_WORD, _LONGEST_PIECE = 24, 8
"""Characters of what is hardly a word, and of a token there."""
_SHARE = 0.1
"""Share of the characters in long words from which a text has no blanks."""


def train_wordpiece(texts: Iterable[str], vocab_size: int, pretokenized: bool, lowercase: bool) -> TextTokenizer:
    """Train a WordPiece tokenizer like BERT's: each Chinese character and punctuation mark is a word of its own.

    Parameters
    ----------
    texts : training text
    vocab_size : largest number of tokens, special tokens included; a character that falls outside is unknown
    pretokenized : words are what stands between blanks
    lowercase : fold case; accents stay, as tone and vowel marks tell words of many scripts apart
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import WordPiece as WordPieceDecoder
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import (
        BertPreTokenizer,
        FixedLength,
        PreTokenizer,
        Sequence as InTurn,
        WhitespaceSplit,
    )
    from tokenizers.trainers import WordPieceTrainer

    splitter: PreTokenizer = WhitespaceSplit() if pretokenized else BertPreTokenizer()

    def backend_of(model: Any) -> Any:
        backend = Tokenizer(model)
        backend.normalizer = BertNormalizer(
            lowercase=lowercase, handle_chinese_chars=not pretokenized, strip_accents=False if lowercase else None
        )
        backend.pre_tokenizer = splitter
        backend.decoder = WordPieceDecoder()
        return backend

    learner = backend_of(WordPiece(unk_token="[UNK]"))
    normalized = map(learner.normalizer.normalize_str, texts)
    words = Counter(word for text in normalized for word, _ in splitter.pre_tokenize_str(text))
    if any(len(word) > _LONGEST_WORD for word in words):
        # WordPiece takes a longer word for unknown as a whole.
        splitter = InTurn([splitter, FixedLength(_LONGEST_WORD)])
    # The trainer numbers characters in the order of a hash map, another one in each process. Those that it is given
    # as special tokens have their place, and so have all merges that follow.
    alphabet = _alphabet(words, vocab_size - len(WORDPIECE_TOKENS))
    pieces = _pieces_without_blanks(words)
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*WORDPIECE_TOKENS, *alphabet],
        limit_alphabet=0,
        min_frequency=_FEWEST_PIECES if pieces else 0,
        show_progress=False,
    )
    learner.train_from_iterator((f"{word} " * number for word, number in sorted((pieces or words).items())), trainer)
    # A new backend: in this one the alphabet is special.
    backend = backend_of(WordPiece(learner.get_vocab(), unk_token="[UNK]"))
    backend.add_special_tokens(list(WORDPIECE_TOKENS))
    return TextTokenizer(backend)


def _alphabet(words: Mapping[str, int], size: int) -> list[str]:
    """Return characters as tokens, and as they go on within a word, the most frequent that fit."""
    counts: Counter[str] = Counter()
    inner_characters: set[str] = set()
    for word, number in words.items():
        for character in word:
            counts[character] += number
        inner_characters.update(word[1:])
    alphabet: list[str] = []
    for character in sorted(counts, key=lambda c: (-counts[c], c)):
        forms = [character, f"##{character}"] if character in inner_characters else [character]
        if len(alphabet) + len(forms) > size:
            break
        alphabet += forms
    return sorted(alphabet)


def _pieces_without_blanks(words: Mapping[str, int]) -> Counter[str]:
    """Cut the words of a text without blanks, such as Thai or DNA, so that no whole text becomes a token."""
    long_characters = sum(len(word) * number for word, number in words.items() if len(word) > _LONG_WORD)
    pieces: Counter[str] = Counter()
    if long_characters > _SHARE * sum(len(word) * number for word, number in words.items()):
        for word, number in words.items():
            for start in range(0, len(word), _LONGEST_PIECE):
                pieces[word[start : start + _LONGEST_PIECE]] += number
    return pieces
