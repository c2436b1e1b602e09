"""Text to ids and back. A tokenizer travels to the control units, and is saved with the run, as a JSON text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from client_pipeline.partition.hub_ids import check_source
from client_pipeline.partition.hub_reach import offline_remedy
from flower_app.tasks.texts import in_chunks

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, EOS, UNK)
"""Of a trained tokenizer, with the ids 0 to 3."""

_NAMES = {
    # Tokenizers without a token of their own for padding or the beginning (GPT-2's, LLaMA's) lend another one.
    PAD: (PAD, "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>", UNK),
    BOS: (BOS, "[CLS]", "<bos>", "[BOS]", "<|begin_of_text|>", "<|endoftext|>"),
    EOS: (EOS, "[SEP]", "<eos>", "[EOS]", "<|end_of_text|>", "<|endoftext|>"),
    UNK: (UNK, "[UNK]", "<|unk|>"),
}
_MASKS = ("[MASK]", "<mask>")
WORDPIECE_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Of a trained WordPiece tokenizer, with the ids 0 to 4."""
_FEWEST_TOKENS = 16
_NO_TOKENIZER = "put its tokenizer.json or vocab.txt beside the weights, or name its folder in data.tokenizer"


class TextTokenizer:
    """Wraps a ``tokenizers`` tokenizer; padding, begin and end are the caller's business.

    Without a token for padding or the beginning, the end stands for it, as with the causal models that have none:
    padding is masked everywhere, and one more token might be more than the model has rows.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        # Text that happens to hold "</s>" is text, not the end of the sentence.
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        end = _token_id(backend, EOS)
        self.eos_id = _added(backend, EOS) if end is None else end
        self.pad_id, self.bos_id, self._unk_id = (
            self.eos_id if (token_id := _token_id(backend, role)) is None else token_id for role in (PAD, BOS, UNK)
        )

    @property
    def mask(self) -> tuple[str, int]:
        """The token that hides another one, and its id.

        Raises
        ------
        ValueError
            If there is none.
        """
        for name in _MASKS:
            token_id = self._backend.token_to_id(name)
            if token_id is not None:
                return name, int(token_id)
        raise ValueError(f"data.tokenizer: expected a token {' or '.join(_MASKS)} to mask others with, found none")

    @property
    def marks(self) -> tuple[list[int], list[int]]:
        """Ids before and after a text: what the tokenizer puts there by itself; where it has no rule, its end."""
        plain, marked = (self._backend.encode("a", add_special_tokens=special).ids for special in (False, True))
        at = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
        return marked[:at], marked[at + len(plain) :] or [self.eos_id]

    def without_rule(self) -> TextTokenizer:
        """Return this tokenizer without a rule of its own for the marks: nothing before a text, the end after it."""
        state = json.loads(self.to_json()) | {"post_processor": None}
        return self.from_json(json.dumps(state))

    @property
    def vocab_size(self) -> int:
        """Number of ids, special and added tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token, special and added tokens included."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without begin or end."""
        return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_each(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yield what :meth:`encode` gives, of texts that may be too many to be in memory at once."""
        return in_chunks(self.encode, texts)

    def encode_words(self, sentences: Sequence[Sequence[str]]) -> list[tuple[list[int], list[int]]]:
        """Return the ids of each sentence, and for each id the index of its word.

        Every word has an id: one of which the tokenizer leaves nothing (a zero-width space, say) is unknown. Where the
        tokenizer takes a space before a word for part of it (RoBERTa's byte-level BPE), every word has one, the first
        too, as with ``add_prefix_space`` in the transformers library.
        """
        space = " " if self._space_counts() else ""
        aligned: list[tuple[list[int], list[int]]] = []
        # encode_batch_fast would leave out which word a piece belongs to.
        for encoding in self._backend.encode_batch(
            [[space + word for word in words] for words in sentences], is_pretokenized=True, add_special_tokens=False
        ):
            ids: list[int] = []
            owners: list[int] = []
            words = sentences[len(aligned)]
            pieces = [(word, i) for word, i in zip(encoding.word_ids, encoding.ids, strict=True) if word is not None]
            at = 0
            for word in range(len(words)):
                start = at
                while at < len(pieces) and pieces[at][0] == word:
                    at += 1
                word_ids = [i for _, i in pieces[start:at]] or [self._unk_id]
                ids += word_ids
                owners += [word] * len(word_ids)
            aligned.append((ids, owners))
        return aligned

    def _space_counts(self) -> bool:
        """Whether a word is read otherwise with a space before it than without."""
        splitter = self._backend.pre_tokenizer
        if splitter is None:
            return False
        with_space, without = ([piece for piece, _ in splitter.pre_tokenize_str(text)] for text in (" a", "a"))
        return bool(with_space != without)

    def words(self, text: str) -> list[str]:
        """Split a text where the tokenizer does: at blanks, at punctuation, at each Chinese character."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        ends: dict[int, tuple[int, int]] = {}
        for word, (start, end) in zip(encoding.word_ids, encoding.offsets, strict=True):
            if word is not None:
                ends[word] = (ends.get(word, (start, end))[0], end)
        return [word for start, end in ends.values() if (word := text[start:end].strip())]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of ids; special tokens are left out."""
        return [text.strip() for text in self._backend.decode_batch([list(i) for i in ids], skip_special_tokens=True)]

    def to_json(self) -> str:
        """Return the tokenizer in the JSON form of ``tokenizers``."""
        return str(self._backend.to_str())

    @classmethod
    def from_json(cls, text: str) -> TextTokenizer:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        ValueError
            If the text is no tokenizer.
        """
        from tokenizers import Tokenizer

        try:
            return cls(Tokenizer.from_str(text))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"tokenizer: expected the JSON form of tokenizers, found {text[:60]!r}") from error


def _token_id(backend: Any, role: str) -> int | None:
    """Find the token for a role under its usual names."""
    ids = (backend.token_to_id(name) for name in _NAMES[role])
    return next((int(i) for i in ids if i is not None), None)


def _added(backend: Any, role: str) -> int:
    backend.add_special_tokens([role])
    return int(backend.token_to_id(role))


def train_tokenizer(texts: Iterable[str], vocab_size: int, pretokenized: bool) -> TextTokenizer:
    """Train a joint byte-level BPE: no text is unknown to it, and decoding restores the text exactly.

    Parameters
    ----------
    texts : source and target sentences
    vocab_size : largest number of tokens, special tokens and the 256 bytes included
    pretokenized : words are what stands between blanks, so that "&apos;s" is one word; else punctuation is split off
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence as InTurn, WhitespaceSplit
    from tokenizers.trainers import BpeTrainer

    backend = Tokenizer(BPE(unk_token=UNK))
    split: PreTokenizer = ByteLevel(add_prefix_space=True, use_regex=not pretokenized)
    backend.pre_tokenizer = InTurn([WhitespaceSplit(), split]) if pretokenized else split
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return TextTokenizer(backend)


def train_wordpiece(texts: Iterable[str], vocab_size: int, pretokenized: bool, lowercase: bool) -> TextTokenizer:
    """Train a WordPiece tokenizer like BERT's: each Chinese character and punctuation mark is a word of its own.

    Parameters
    ----------
    texts : training text
    vocab_size : largest number of tokens, special tokens included; a character that falls outside is unknown
    pretokenized : words are what stands between blanks
    lowercase : fold case and accents
    """
    from tokenizers import Tokenizer
    from tokenizers.decoders import WordPiece as WordPieceDecoder
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer, WhitespaceSplit
    from tokenizers.trainers import WordPieceTrainer

    def backend_of(model: Any) -> Any:
        backend = Tokenizer(model)
        backend.normalizer = BertNormalizer(lowercase=lowercase, handle_chinese_chars=not pretokenized)
        backend.pre_tokenizer = WhitespaceSplit() if pretokenized else BertPreTokenizer()
        backend.decoder = WordPieceDecoder()
        return backend

    learner = backend_of(WordPiece(unk_token="[UNK]"))
    words: Counter[str] = Counter()
    for text in texts:
        words.update(w for w, _ in learner.pre_tokenizer.pre_tokenize_str(learner.normalizer.normalize_str(text)))
    # The trainer numbers characters in the order of a hash map, another one in each process. Those that it is given
    # as special tokens have their place, and so have all merges that follow.
    alphabet = _alphabet(words, vocab_size - len(WORDPIECE_TOKENS))
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*WORDPIECE_TOKENS, *alphabet],
        limit_alphabet=0,
        show_progress=False,
    )
    learner.train_from_iterator((f"{word} " * number for word, number in sorted(words.items())), trainer)
    # A new backend: in this one the alphabet is special.
    backend = backend_of(WordPiece(learner.get_vocab(), unk_token="[UNK]"))
    backend.add_special_tokens(list(WORDPIECE_TOKENS))
    return TextTokenizer(backend)


def _alphabet(words: Mapping[str, int], size: int) -> list[str]:
    """Characters as tokens, and as they go on within a word, the most frequent that fit."""
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


def load_tokenizer(source: str, key: str = "data.tokenizer", complete: bool = True) -> TextTokenizer:
    """Load a tokenizer from a folder or a hub id.

    Parameters
    ----------
    source : folder or hub id
    key : the configuration key that names it
    complete : add the tokens for padding, beginning and end that it lacks: for a model that is not there yet

    Raises
    ------
    ValueError
        If there is none, or only an empty one; the message names the key and the source.
    """
    from tokenizers import Tokenizer

    check_source(source, key)
    folder = Path(source)
    try:
        if (folder / "tokenizer.json").is_file():
            backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        elif folder.is_dir() and (folder / "vocab.txt").is_file():
            # A folder of a BERT may hold no more than this. BertTokenizer(vocab_file=...) of transformers 5 would
            # silently give a vocabulary of five words; from_pretrained reads the file.
            from transformers import BertTokenizer

            backend = BertTokenizer.from_pretrained(source, trust_remote_code=False).backend_tokenizer
        else:
            from transformers import AutoTokenizer

            backend = AutoTokenizer.from_pretrained(source, trust_remote_code=False).backend_tokenizer
    except Exception as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{key}: expected a folder with a tokenizer or a hub id, found {source!r} ({first_line}); "
            + ("leave it empty to train a tokenizer on the task's text" if key == "data.tokenizer" else _NO_TOKENIZER)
            + ("" if folder.is_dir() else offline_remedy())
        ) from error
    if backend.get_vocab_size() < _FEWEST_TOKENS:
        raise ValueError(
            f"{key}: {source!r} gives a vocabulary of {backend.get_vocab_size()} tokens, expected more; "
            "give the folder that holds tokenizer.json or vocab.txt"
        )
    if complete:
        for role in (PAD, BOS, EOS):
            if _token_id(backend, role) is None:
                _added(backend, role)
    return TextTokenizer(backend)
