"""Greedy and beam search over the decoder, one new position at a time.

Models of the transformers library are decoded by the library. For the classic one, keys and values of earlier
positions are kept, so a step costs one position instead of the whole prefix; a test holds the result to the decoder's
own full computation. The library's ``generate`` over the same decoder computes sentences that are done until all are:
evaluation of the default run takes 1.2 times as long by it, and with four beams 2.7 times; a half-trained model's beams
differ there in a sixth of the sentences. Shapes: B sentences (times beams), T source positions, U target positions so
far, H heads, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from client_pipeline.families.seq2seq import Seq2SeqHead
from client_pipeline.families.transformer import DecoderBlock, TransformerDecoder
from client_pipeline.partition.parts import ModelParts, padding_mask


class IncrementalDecoder:
    """A decoder with the memory of what it has already decoded, for evaluation (no dropout)."""

    def __init__(self, decoder: TransformerDecoder, memory_BTD: Tensor, mask_BT: Tensor) -> None:
        self.decoder = decoder
        self.position = 0
        self._blocks: list[DecoderBlock] = list(decoder.blocks)  # type: ignore[arg-type]
        memory_BTD = decoder.memory(memory_BTD)
        self._mask = padding_mask(mask_BT)
        self._memory = [block.cross_attention.keys_values(memory_BTD) for block in self._blocks]
        self._past: dict[int, tuple[Tensor, Tensor]] = {}

    def step(self, ids_B: Tensor) -> Tensor:
        """Take the token at the next position, return the log-probabilities of its successor, [B, V]."""
        x = self.decoder.embedding.embed(ids_B[:, None], offset=self.position)
        self.position += 1
        for i, block in enumerate(self._blocks):
            x = block(x, self._memory[i], self._mask, partial(self._keep, i))
        config = self.decoder.config
        logits = self.decoder.scores(self.decoder.norm(x)[:, 0])
        # A tokenizer may lend its end to the other two.
        logits[:, [i for i in (config.pad_id, config.bos_id) if i != config.eos_id]] = -torch.inf
        return F.log_softmax(logits, dim=-1)

    def _keep(self, i: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.position > 1:
            earlier = self._past[i]
            key, value = torch.cat([earlier[0], key], dim=2), torch.cat([earlier[1], value], dim=2)
        self._past[i] = key, value
        return key, value

    def select(self, rows: Tensor, memory: bool = True) -> None:
        """Keep these rows in this order, with repeats; ``memory`` False where rows stay within their sentence."""
        self._past = {i: (k[rows], v[rows]) for i, (k, v) in self._past.items()}
        if memory:
            self._memory = [(k[rows], v[rows]) for k, v in self._memory]
            self._mask = None if self._mask is None else self._mask[rows]


def library_search(
    parts: ModelParts,
    memory_BTD: Tensor,
    mask_BT: Tensor,
    limits: list[int],
    beam_size: int = 1,
    length_penalty: float = 1.0,
    end_ids: Sequence[int] = (),
) -> list[list[int]]:
    """Let the transformers library decode with the decoder of one of its models; 1 beam is greedy search.

    Arguments and result are those of :func:`greedy` and :func:`beam`; all marks stay out. A translation ends at any of
    ``end_ids`` and of the ends that the model's configuration names.
    """
    from transformers import GenerationConfig
    from transformers.modeling_outputs import BaseModelOutput

    head, model = cast(Seq2SeqHead, parts.head), cast(Any, parts.reference)
    config = model.config
    begin_id = getattr(config, "bos_token_id", None)  # T5 has none
    model_ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = list(dict.fromkeys(i for i in [*model_ends, *end_ids] if i is not None))
    ids_BU = model.generate(
        encoder_outputs=BaseModelOutput(last_hidden_state=head.memory(memory_BTD)),
        attention_mask=mask_BT.long(),
        # One of our own: what a pretrained model was saved with (sampling, more beams) is not what was asked for.
        generation_config=GenerationConfig(
            max_new_tokens=max(limits),
            num_beams=beam_size,
            length_penalty=length_penalty,
            decoder_start_token_id=head.start_id,
            pad_token_id=head.pad_id,
            bos_token_id=begin_id,
            eos_token_id=ends or None,
        ),
    )
    marks = {head.start_id, head.pad_id, begin_id, *ends}
    return [
        [i for i in row[1 : limit + 1] if i not in marks] for row, limit in zip(ids_BU.tolist(), limits, strict=True)
    ]


def greedy(decoder: TransformerDecoder, memory_BTD: Tensor, mask_BT: Tensor, limits: list[int]) -> list[list[int]]:
    """Take the likeliest token at each position.

    Parameters
    ----------
    memory_BTD : raw output of the encoder
    mask_BT : True at real source tokens
    limits : longest translation of each sentence, in tokens with the end of sentence

    Returns
    -------
    Ids of each translation, without begin and end.
    """
    steps = IncrementalDecoder(decoder, memory_BTD, mask_BT)
    outputs: list[list[int]] = [[] for _ in limits]
    active = list(range(len(limits)))
    ids = torch.full((len(active),), decoder.config.bos_id, device=memory_BTD.device)
    while active:
        ids = steps.step(ids).argmax(dim=-1)
        going = []
        for row, token in enumerate(ids.tolist()):
            sentence = active[row]
            if token != decoder.config.eos_id:
                outputs[sentence].append(token)
                if len(outputs[sentence]) < limits[sentence]:
                    going.append(row)
        if len(going) < len(active):
            active = [active[row] for row in going]
            rows = torch.tensor(going, dtype=torch.long, device=ids.device)
            ids = ids[rows]
            steps.select(rows)
    return outputs


def plain_greedy(
    head: Seq2SeqHead, memory_BTD: Tensor, mask_BT: Tensor, limits: list[int], end_id: int
) -> list[list[int]]:
    """Take the likeliest token at each position with any decoder, which reads the whole prefix each time.

    Arguments and result are those of :func:`greedy`.
    """
    ids_BU = torch.full((len(limits), 1), head.start_id, device=memory_BTD.device)
    while ids_BU.shape[1] <= max(limits) and not bool((ids_BU == end_id).any(dim=1).all()):
        scores_BV = head.scores(head.hidden(memory_BTD, mask_BT, ids_BU)[:, -1])
        ids_BU = torch.cat([ids_BU, scores_BV.argmax(dim=-1, keepdim=True)], dim=1)
    rows = zip(ids_BU[:, 1:].tolist(), limits, strict=True)
    return [row[: row.index(end_id) if end_id in row else len(row)][:limit] for row, limit in rows]


def beam(
    decoder: TransformerDecoder,
    memory_BTD: Tensor,
    mask_BT: Tensor,
    limits: list[int],
    beam_size: int,
    length_penalty: float = 1.0,
) -> list[list[int]]:
    """Keep the ``beam_size`` likeliest prefixes; rank ends by log-probability / tokens ** ``length_penalty``.

    A sentence is done when no prefix that goes on can still win: at its limit, its score is at most
    log-probability / limit ** ``length_penalty``. Arguments and result are those of :func:`greedy`.
    """
    K, V, eos = beam_size, decoder.config.vocab_size, decoder.config.eos_id
    device = memory_BTD.device
    best: list[tuple[float, list[int]]] = [(-float("inf"), []) for _ in limits]
    active = list(range(len(limits)))
    steps = IncrementalDecoder(decoder, memory_BTD.repeat_interleave(K, 0), mask_BT.repeat_interleave(K, 0))
    ids = torch.full((len(active) * K,), decoder.config.bos_id, device=device)
    # All beams of a sentence start alike: only the first may be extended.
    scores = torch.full((len(active), K), -torch.inf, device=device)
    scores[:, 0] = 0.0
    prefixes: list[list[list[int]]] = [[[] for _ in range(K)] for _ in active]
    while active:
        total = (scores[..., None] + steps.step(ids).view(len(active), K, V)).flatten(1)
        # At most one end per beam, so 2K candidates hold K that go on.
        values, flat_index = total.topk(min(2 * K, total.shape[1]), dim=1)
        kept_rows: list[int] = []
        kept_ids: list[int] = []
        kept_scores: list[list[float]] = []
        kept_prefixes: list[list[list[int]]] = []
        kept_active: list[int] = []
        length = steps.position
        for row, sentence in enumerate(active):
            going: list[tuple[float, int, int]] = []
            for value, index in zip(values[row].tolist(), flat_index[row].tolist(), strict=True):
                origin, token = divmod(index, V)
                last = length == limits[sentence]
                if token == eos or last:
                    score = value / length**length_penalty
                    if score > best[sentence][0]:
                        end = [] if token == eos else [token]
                        best[sentence] = (score, prefixes[row][origin] + end)
                elif len(going) < K and value > -float("inf"):
                    going.append((value, origin, token))
            if not going or going[0][0] / limits[sentence] ** length_penalty <= best[sentence][0]:
                continue
            going += [(-float("inf"), going[0][1], going[0][2])] * (K - len(going))
            kept_active.append(sentence)
            kept_scores.append([value for value, _, _ in going])
            kept_rows += [row * K + origin for _, origin, _ in going]
            kept_ids += [token for _, _, token in going]
            kept_prefixes.append([[*prefixes[row][origin], token] for _, origin, token in going])
        steps.select(torch.tensor(kept_rows, dtype=torch.long, device=device), memory=len(kept_active) < len(active))
        active, prefixes = kept_active, kept_prefixes
        ids = torch.tensor(kept_ids, dtype=torch.long, device=device)
        scores = torch.tensor(kept_scores, device=device)
    return [tokens for _, tokens in best]
