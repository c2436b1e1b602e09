"""Causal language modelling: a decoder foretells each token from those before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from client_pipeline.partition.families import max_length
from client_pipeline.partition.parts import IGNORED_LABEL, Batch, ModelParts
from client_pipeline.partition.spec import CAUSAL_LM
from flower_app.tasks.corpus import DataConfig
from flower_app.tasks.encoded import EncodedText
from flower_app.tasks.language_model import LanguageModelTask
from flower_app.tasks.tokenizer import TextTokenizer, train_tokenizer


@dataclass
class CausalData:
    """Sequences whose labels are their own tokens. Plain data: it travels into the control unit's actor."""

    sequences: EncodedText
    pad_id: int

    @property
    def truncated(self) -> int:
        """Sequences that were cut: none."""
        return self.sequences.truncated

    def __len__(self) -> int:
        return len(self.sequences)

    def collate(self, indices: Sequence[int], seed: int = 0) -> Batch:
        """Pad the sequences; labels stand where their tokens do, and the first token, which is given, has none."""
        del seed
        labels = self.sequences.padded(indices, IGNORED_LABEL)
        labels[:, 0] = IGNORED_LABEL
        return {**self.sequences.inputs(indices, self.pad_id), "labels": labels}


class CausalLMTask(LanguageModelTask):
    """Text from files, tables or the hub; the server keeps the last ``model.decoder-layers`` blocks."""

    name = "causal-lm"
    head = CAUSAL_LM

    def train_tokenizer(self, texts: Iterable[str], data: DataConfig) -> TextTokenizer:
        """Train a byte-level BPE, to which no text is unknown."""
        return train_tokenizer(texts, data.vocab_size, data.pretokenized)

    def sequence_data(self, sequences: EncodedText, tokenizer: TextTokenizer) -> CausalData:
        """Take the sequences as they are."""
        return CausalData(sequences, tokenizer.pad_id)

    def complete(self, parts: ModelParts, tokenizer: TextTokenizer, text: str) -> str:
        """Continue a text with the likeliest token at each position, up to the end mark or ``task.max-new-tokens``."""
        ids = [tokenizer.bos_id, *tokenizer.encode([text])[0]]
        self.fits(parts, ids, text)
        limit = len(ids) + (self.config.max_new_tokens or 2 * len(ids) + 10)
        longest = max_length(parts.spec)
        limit = limit if longest is None else min(limit, longest)
        device = next(parts.head.parameters()).device
        while len(ids) < limit:
            input_ids = torch.tensor([ids], device=device)
            batch = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids, dtype=torch.bool)}
            token = int(parts.logits(batch)[0, -1].argmax())
            if token == tokenizer.eos_id:
                break
            ids.append(token)
        return tokenizer.decode([ids[1:]])[0]
