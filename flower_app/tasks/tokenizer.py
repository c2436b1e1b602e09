"""Text to ids and back. A tokenizer travels to the control units, and is saved with the run, as a JSON text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from client_pipeline.weights.hub_ids import check_source, is_offline, offline_remedy
from flower_app.tasks.data.texts import in_chunks
from flower_app.tokenizer_files import (
    GENERATION,
    SETTINGS_FILE,
    TOKENIZER_FILES,
    TokenizerSettings,
    add_declared,
    declared_marks,
    file_object,
    joined,
    marks_by_rule,
    named_tokens,
    parted,
    read_files,
    sentencepiece_alone,
)

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, EOS, UNK)
"""Special tokens of a trained tokenizer, with the ids 0 to 3."""

_NAMES = {
    # Tokenizers without a token of their own for padding or the beginning (GPT-2's, LLaMA's) lend another one.
    PAD: (PAD, "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|endoftext|>", UNK),
    BOS: (BOS, "[CLS]", "<bos>", "[BOS]", "<|begin_of_text|>", "<|endoftext|>"),
    EOS: (EOS, "[SEP]", "<eos>", "[EOS]", "<|end_of_text|>", "<|endoftext|>"),
    UNK: (UNK, "[UNK]", "<|unk|>"),
}
_MASKS = ("[MASK]", "<mask>")
_FEWEST_TOKENS = 16
_NO_TOKENIZER = "put its tokenizer.json or vocab.txt beside the weights, or name its folder in data.tokenizer"


class TextTokenizer:
    """Wraps a ``tokenizers`` tokenizer; padding, begin and end are the caller's business.

    Without a token for padding or the beginning, the end stands for it, as with the causal models that have none:
    padding is masked everywhere, and one more token might be more than the model has rows.
    """

    def __init__(self, backend: Any, settings: TokenizerSettings | None = None) -> None:
        self._backend = backend
        self.settings = settings = settings or TokenizerSettings()
        # Else text that happens to hold "</s>" is text, not the end of the sentence.
        backend.encode_special_tokens = not settings.reads_special
        backend.no_padding()
        backend.no_truncation()
        end = settings.ends[0] if settings.ends else _token_id(backend, EOS)
        self.eos_id = _added(backend, EOS) if end is None else end
        self.end_ids = settings.ends or (self.eos_id,)
        self.pad_id, self.bos_id, self._unk_id = (
            next(i for i in (declared, _token_id(backend, role), self.eos_id) if i is not None)
            for role, declared in ((PAD, settings.pad), (BOS, settings.begin), (UNK, None))
        )

    def with_settings(self, **changes: Any) -> TextTokenizer:
        """Return this tokenizer with other settings."""
        return TextTokenizer(self._backend, replace(self.settings, **changes))

    @property
    def mask(self) -> tuple[str, int]:
        """The token that hides another one, and its id.

        Raises
        ------
        ValueError
            If there is none.
        """
        for name in (self.settings.mask, *_MASKS):
            token_id = self._backend.token_to_id(name)
            if token_id is not None:
                return name, int(token_id)
        raise ValueError(f"data.tokenizer: expected a token {' or '.join(_MASKS)} to mask others with, found none")

    @property
    def marks(self) -> tuple[list[int], list[int]]:
        """Ids before and after a text: what the tokenizer puts there by itself; where it has no rule, its end."""
        before, after = marks_by_rule(self._backend)
        return before, after or [self.eos_id]

    @property
    def label_marks(self) -> tuple[list[int], list[int]]:
        """Ids before and after a text that is classified."""
        if self.settings.by_rule:
            if "tokenizer_config.json" in self.settings.files or self._backend.post_processor is not None:
                return marks_by_rule(self._backend)
            if self.eos_id == self.pad_id:
                return [self.bos_id], []
        return [self.bos_id], [self.eos_id]

    def begun(self, ids: Sequence[int]) -> list[int]:
        """Return a document's ids after the mark of its beginning; one that the text spells out is not repeated.

        Nor does a tokenizer that puts no mark there by itself get one before a template's first control token.
        """
        brings_mark = (
            self.settings.reads_special
            and bool(ids)
            and ids[0] in self.special_ids
            and (ids[0] == self.bos_id or not marks_by_rule(self._backend)[0])
        )
        return list(ids) if brings_mark else [self.bos_id, *ids]

    def ended(self, ids: Sequence[int]) -> list[int]:
        """Return a document's ids before the mark of its end; one that the text spells out is not repeated."""
        if self.settings.reads_special:
            last = next(
                (i for i in reversed(ids) if self._backend.decode([i], skip_special_tokens=False).strip()), None
            )
            if last in self.end_ids and last in self.special_ids:
                return list(ids)
        return [*ids, self.eos_id]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    def without_rule(self) -> TextTokenizer:
        """Return this tokenizer without a rule of its own for the marks: nothing before a text, the end after it."""
        state = json.loads(self.vocabulary_json()) | {"post_processor": None}
        return self.from_json(joined(replace(self.settings, files={}), json.dumps(state)))

    def truncating(self, max_length: int) -> Any:
        """Return the ``tokenizers`` tokenizer; it cuts what is too long, of pairs of texts the longer one first."""
        backend = self.from_json(self.to_json())._backend
        backend.enable_truncation(max_length, strategy="longest_first")
        return backend

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

    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return a chat template's text as ids, and where each token stands in it; special tokens are read as such."""
        self._backend.encode_special_tokens = False
        encoding = self._backend.encode(text, add_special_tokens=False)
        self._backend.encode_special_tokens = not self.settings.reads_special
        return encoding.ids, encoding.offsets

    def token(self, token_id: int) -> str:
        """Return the token of an id."""
        return str(self._backend.id_to_token(token_id))

    def with_tokens(self, tokens: Sequence[str]) -> TextTokenizer:
        """Return this tokenizer with more special tokens."""
        added = self.from_json(self.to_json())
        added._backend.add_special_tokens(list(tokens))
        return added

    def encode_each(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yield what :meth:`encode` gives, of texts that may be too many to be in memory at once."""
        return in_chunks(self.encode, texts)

    def unknown(self, texts: Sequence[str]) -> tuple[float, str]:
        """Return the share of unknown tokens, and the beginning of a text with one."""
        name = getattr(self._backend.model, "unk_token", None)
        unknown_id = self._backend.token_to_id(name) if name else _token_id(self._backend, UNK)
        if unknown_id is None:
            return 0.0, ""
        counts = [(ids.count(unknown_id), len(ids)) for ids in self.encode(texts)]
        example = next((text[:40] for text, (number, _) in zip(texts, counts, strict=True) if number), "")
        return sum(number for number, _ in counts) / max(1, sum(length for _, length in counts)), example

    def encode_words(self, sentences: Sequence[Sequence[str]]) -> list[tuple[list[int], list[int]]]:
        """Return the ids of each sentence, and for each id the index of its word.

        Every word has an id: one of which the tokenizer leaves nothing (a zero-width space, say) is unknown. Where the
        tokenizer takes a space before a word for part of it (RoBERTa's byte-level BPE), every word has one, the first
        too, as with ``add_prefix_space`` in the transformers library.
        """
        splitter, space = self._backend.pre_tokenizer, ""
        if splitter is not None:
            with_space, without = ([piece for piece, _ in splitter.pre_tokenize_str(text)] for text in (" a", "a"))
            space = " " if with_space != without else ""
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

    def shown(self, token_id: int) -> str:
        """Return a token as text, special ones too."""
        return str(self._backend.decode([token_id], skip_special_tokens=False))

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of ids with all of its blanks; special tokens are left out."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def vocabulary_json(self) -> str:
        """Return the tokenizer in the JSON form of ``tokenizers``, without its settings."""
        return str(self._backend.to_str())

    def to_json(self) -> str:
        """Return the tokenizer in the JSON form of ``tokenizers``, its settings in front where it has some."""
        return joined(self.settings, self.vocabulary_json())

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
            settings, vocabulary_json = parted(text)
            return cls(Tokenizer.from_str(vocabulary_json), settings)
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


def load_tokenizer(source: str, key: str = "data.tokenizer", complete: bool = True, model: str = "") -> TextTokenizer:
    """Load a tokenizer from a folder or a hub id.

    Parameters
    ----------
    source : folder or hub id
    key : the configuration key that names it
    complete : add the tokens for padding, beginning and end that it lacks: for a model that is not there yet
    model : folder or hub id of the model that it is for, whose files say where texts end; empty: ``source`` alone

    Raises
    ------
    ValueError
        If there is none, or only an empty one, or nothing says how a text ends; the message names key and source.
    """
    from tokenizers import Tokenizer

    check_source(source, key)
    folder, missing_package = Path(source), sentencepiece_alone(source)
    try:
        if missing_package and find_spec("sentencepiece") is None:
            raise ModuleNotFoundError(missing_package)
        files = read_files(source, TOKENIZER_FILES)
        tokens = named_tokens(files)
        # The library's error names no file.
        file_object(files, "added_tokens.json")
        if vocabulary := read_files(source, ["tokenizer.json"]):
            saved_settings, vocabulary_json = parted(vocabulary["tokenizer.json"])
            backend = Tokenizer.from_str(vocabulary_json)
            add_declared(backend, files)
        else:
            from transformers import AutoTokenizer, BertTokenizer

            # A folder of a BERT may hold no more than vocab.txt. BertTokenizer(vocab_file=...) of transformers 5 would
            # silently give a vocabulary of five words; from_pretrained reads the file.
            vocabulary_alone = folder.is_dir() and (folder / "vocab.txt").is_file()
            kind = BertTokenizer if vocabulary_alone else AutoTokenizer
            library_tokenizer = kind.from_pretrained(source, trust_remote_code=False, local_files_only=is_offline())
            saved_settings, backend = TokenizerSettings(), library_tokenizer.backend_tokenizer
            tokens = {**library_tokenizer.special_tokens_map, **tokens}
        if (own := read_files(source, [SETTINGS_FILE])) and not saved_settings.ends:
            saved_settings = TokenizerSettings.from_json(own[SETTINGS_FILE])
        model_files = read_files(model or source, [GENERATION, "config.json"])
        marks = saved_settings if saved_settings.ends else declared_marks(backend, tokens, model_files)
    except Exception as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        # What the library says then is of another format, tiktoken's, which it tries last.
        first_line = missing_package or first_line
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
        declared = ((PAD, marks.pad), (BOS, marks.begin), (EOS, marks.ends[0] if marks.ends else None))
        for role, token_id in declared:
            if token_id is None and _token_id(backend, role) is None:
                _added(backend, role)
                files = {}
    elif not marks.ends and _token_id(backend, EOS) is None:
        raise ValueError(
            f"{key}: the tokenizer of {source} names no token for the end of a text; name one of its tokens as "
            "eos_token in tokenizer_config.json"
        )
    if model and files and GENERATION in model_files:
        files = {**files, GENERATION: model_files[GENERATION]}
    place = str(folder.absolute()) if folder.is_dir() else source
    return TextTokenizer(
        backend, replace(marks, reads_special=False, by_rule=False, classes=(), files=files, source=place)
    )
