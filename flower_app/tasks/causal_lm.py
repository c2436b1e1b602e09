"""Causal language modelling: a decoder foretells each token from those before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from client_pipeline.families.families import max_length
from client_pipeline.partition.parts import IGNORED_LABEL, Batch, ModelParts
from client_pipeline.partition.spec import CAUSAL_LM
from flower_app.tasks.continued import continued
from flower_app.tasks.data.corpus import DataConfig
from flower_app.tasks.encoded import EncodedText, SequenceData
from flower_app.tasks.language_model import LanguageModelTask
from flower_app.tasks.tokenizer import TextTokenizer, train_tokenizer


@dataclass
class CausalData(SequenceData):
    """Sequences whose labels are their own tokens."""

    pad_id: int

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

    def pieces(self, ids: Sequence[int], tokenizer: TextTokenizer, longest: int) -> Iterator[list[int]]:
        """Cut a text within its marks; a piece goes on with the last token of the one before, which has its loss there.

        So each token but the first has a loss once, and only the text's own end is learned as an end.
        """
        document = tokenizer.ended(tokenizer.begun(ids)) if ids else []
        for start in range(0, len(document) - 1, longest - 1):
            yield document[start : start + longest]

    def sequence_data(self, sequences: EncodedText, tokenizer: TextTokenizer) -> CausalData:
        """Take the sequences as they are."""
        return CausalData(sequences, tokenizer.pad_id)

    def complete(self, parts: ModelParts, tokenizer: TextTokenizer, text: str) -> str:
        """Continue a text with the likeliest token at each position, up to an end mark or ``task.max-new-tokens``."""
        text_ids = tokenizer.encode([text])[0]
        ids = tokenizer.begun(text_ids)
        self.fits(parts, ids, text)
        longest = max_length(parts.spec)
        if longest is not None and len(ids) == longest:
            return tokenizer.decode([text_ids])[0]
        written = continued(parts, tokenizer, [ids], self.config)
        if written is None:
            written = [self._continued_by_parts(parts, tokenizer, ids, longest)]
        return tokenizer.decode([[*text_ids, *written[0]]])[0]

    def _continued_by_parts(
        self, parts: ModelParts, tokenizer: TextTokenizer, prompt: Sequence[int], longest: int | None
    ) -> list[int]:
        """Continue with a model that the library does not have, from the beginning for each token."""
        limit = len(prompt) + (self.config.max_new_tokens or 2 * len(prompt) + 10)
        ids = list(prompt)
        device = next(parts.head.parameters()).device
        while len(ids) < min(limit, longest or limit):
            input_ids = torch.tensor([ids], device=device)
            batch = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids, dtype=torch.bool)}
            token = int(parts.logits(batch)[0, -1].argmax())
            if token in tokenizer.end_ids:
                break
            ids.append(token)
        return ids[len(prompt) :]
