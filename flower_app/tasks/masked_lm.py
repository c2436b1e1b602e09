"""Masked language modelling: an encoder finds hidden tokens again, as BERT does (Devlin et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from client_pipeline.partition.parts import IGNORED_LABEL, Batch, ModelParts
from client_pipeline.partition.spec import MASKED_LM
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.encoded import EncodedText, SequenceData
from flower_app.tasks.language_model import LanguageModelTask
from flower_app.tasks.tokenizer import TextTokenizer
from flower_app.tasks.word_pieces import train_wordpiece

_MASKED, _REPLACED = 0.8, 0.1
"""Shares of the chosen tokens that become the mask and a random token; the rest stays as it is."""


@dataclass
class MaskedData(SequenceData):
    """Sequences whose tokens are masked anew in every batch."""

    probability: float
    """Share of the tokens that are chosen; in each sequence at least one, so that none is without a loss."""
    mask_id: int
    pad_id: int
    vocab_size: int

    def collate(self, indices: Sequence[int], seed: int = 0) -> Batch:
        """Mask and pad the sequences; labels are the tokens that stood at the chosen places.

        What is chosen in a sequence depends on ``seed`` and the sequence alone, and not on its batch.
        """
        batch = self.sequences.inputs(indices, self.pad_id)
        ids = batch["input_ids"].numpy().copy()
        labels = np.full_like(ids, IGNORED_LABEL)
        lengths = batch["attention_mask"].sum(dim=1).tolist()
        for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            rng = np.random.default_rng([seed, index])
            # The marks of beginning and end are no text.
            inner = np.arange(1, length - 1)
            chosen_places = inner[rng.random(len(inner)) < self.probability]
            if not len(chosen_places):
                chosen_places = rng.choice(inner, 1)
            labels[row, chosen_places] = ids[row, chosen_places]
            kind = rng.random(len(chosen_places))
            ids[row, chosen_places[kind < _MASKED]] = self.mask_id
            replaced = chosen_places[(kind >= _MASKED) & (kind < _MASKED + _REPLACED)]
            ids[row, replaced] = rng.integers(self.vocab_size, size=len(replaced))
        return {**batch, "input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


class MaskedLMTask(LanguageModelTask):
    """Text from files, tables or the hub; the loss counts the chosen tokens alone."""

    name = "masked-lm"
    head = MASKED_LM

    def train_tokenizer(self, texts: Iterable[str], data: DataConfig) -> TextTokenizer:
        """Train a WordPiece tokenizer, which has a token for the mask."""
        return train_wordpiece(texts, data.vocab_size, data.pretokenized, data.lowercase)

    def pieces(self, ids: Sequence[int], tokenizer: TextTokenizer, longest: int) -> Iterator[list[int]]:
        """Put both marks around each piece: an encoder expects them, and never learns to find them again."""
        room = longest - 2
        for start in range(0, len(ids), room):
            yield [tokenizer.bos_id, *ids[start : start + room], tokenizer.eos_id]

    def sequence_data(self, sequences: EncodedText, tokenizer: TextTokenizer) -> MaskedData:
        """Mask with the tokenizer's own token."""
        _, mask_id = tokenizer.mask
        return MaskedData(sequences, self.config.mask_probability, mask_id, tokenizer.pad_id, tokenizer.vocab_size)

    def complete(self, parts: ModelParts, tokenizer: TextTokenizer, text: str) -> str:
        """Put the likeliest token in the place of each mask in a text, such as ``the cat [MASK] on the mat``."""
        mask, mask_id = tokenizer.mask
        pieces = tokenizer.encode(text.split(mask))
        if len(pieces) < 2:
            raise ValueError(f"expected a text with {mask} in it, found {text!r}")
        inner = pieces[0] + [i for piece in pieces[1:] for i in (mask_id, *piece)]
        ids = [tokenizer.bos_id, *inner, tokenizer.eos_id]
        self.fits(parts, ids, text)
        device = next(parts.head.parameters()).device
        input_ids = torch.tensor([ids], device=device)
        logits = parts.logits({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids, dtype=torch.bool)})
        words = tokenizer.decode([[i] for i in logits[0][input_ids[0] == mask_id].argmax(dim=-1).tolist()])
        head, *rest = text.split(mask)
        return head + "".join(word + piece for word, piece in zip(words, rest, strict=True))
