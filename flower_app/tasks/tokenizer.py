"""Text to ids and back. A tokenizer travels to the control units, and is saved with the run, as a JSON text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, EOS, UNK)
"""Of a trained tokenizer, with the ids 0 to 3."""

_NAMES = {
    PAD: (PAD, "[PAD]", "<|pad|>"),
    BOS: (BOS, "[CLS]", "<bos>", "[BOS]"),
    EOS: (EOS, "[SEP]", "<eos>", "[EOS]", "<|endoftext|>"),
}
_FEWEST_TOKENS = 16


class TextTokenizer:
    """Wraps a ``tokenizers`` tokenizer; padding, begin and end are the caller's business."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        # Text that happens to hold "</s>" is text, not the end of the sentence.
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        self.pad_id, self.bos_id, self.eos_id = (self._special(role) for role in (PAD, BOS, EOS))

    def _special(self, role: str) -> int:
        """Find the token for a role under its usual names; add it where there is none."""
        for name in _NAMES[role]:
            found = self._backend.token_to_id(name)
            if found is not None:
                return int(found)
        self._backend.add_special_tokens([role])
        return int(self._backend.token_to_id(role))

    @property
    def vocab_size(self) -> int:
        """Number of ids, special and added tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without begin or end."""
        return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

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
    from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, WhitespaceSplit
    from tokenizers.pre_tokenizers import Sequence as InTurn
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


def load_tokenizer(source: str) -> TextTokenizer:
    """Load a tokenizer from a folder or a hub id.

    Raises
    ------
    ValueError
        If there is none, or only an empty one; the message names the key and the source.
    """
    from tokenizers import Tokenizer

    folder = Path(source)
    try:
        if (folder / "tokenizer.json").is_file():
            backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        elif folder.is_dir() and (folder / "vocab.txt").is_file():
            # A folder of a BERT may hold no more than this. BertTokenizer(vocab_file=...) of transformers 5 would
            # silently give a vocabulary of five words; from_pretrained reads the file.
            from transformers import BertTokenizer

            backend = BertTokenizer.from_pretrained(source).backend_tokenizer
        else:
            from transformers import AutoTokenizer

            backend = AutoTokenizer.from_pretrained(source).backend_tokenizer
    except Exception as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"data.tokenizer: expected a folder with a tokenizer or a hub id, found {source!r} ({first_line}); "
            "leave it empty to train a tokenizer on the task's text"
        ) from error
    if backend.get_vocab_size() < _FEWEST_TOKENS:
        raise ValueError(
            f"data.tokenizer: {source!r} gives a vocabulary of {backend.get_vocab_size()} tokens, expected more; "
            "give the folder that holds tokenizer.json or vocab.txt"
        )
    return TextTokenizer(backend)
