"""Texts that a language model writes behind prompts, by the transformers library's ``generate``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from client_pipeline.families.families import max_length, merged
from client_pipeline.partition.parts import ModelParts
from flower_app.tasks.base import TaskConfig
from flower_app.tasks.encoded import batches_by_length, evaluating
from flower_app.tasks.tokenizer import TextTokenizer


def continued(
    parts: ModelParts,
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    config: TaskConfig,
    drawn: bool = False,
) -> list[list[int]] | None:
    """Write behind prompts with the library's own model, up to one of the tokenizer's ends.

    Parameters
    ----------
    parts : the model; one with adapters is merged into a plain one for the time
    tokenizer : of the model
    prompts : ids, fewer than the model has positions
    config : has the longest text and the batch size; with ``drawn`` the temperature and the share of ``top-p``
    drawn : whether tokens are drawn; else the likeliest one follows

    Returns
    -------
    What follows each prompt, without the end; None: the library has no such model.
    """
    from transformers import GenerationConfig

    model: Any = merged(parts).reference
    if model is None:
        return None
    longest = max_length(parts.spec) or sys.maxsize
    texts: list[list[int]] = [[] for _ in prompts]
    lengths = np.array([len(prompt) for prompt in prompts])
    draws = drawn and config.temperature > 0
    sampling = {"temperature": config.temperature, "top_p": config.top_p, "top_k": 0} if draws else {}
    with evaluating(parts) as device:
        model.eval().to(device)
        for indices in batches_by_length(lengths, config.evaluate_batch_size):
            rows = [list(prompts[i]) for i in indices]
            width = max(map(len, rows))
            # A text begins where the prompt ends: the padding stands before it.
            ids = torch.tensor([[tokenizer.pad_id] * (width - len(row)) + row for row in rows], device=device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
            # By a text's own prompt, so that its batch does not change it.
            rooms = [config.max_new_tokens or 2 * len(row) + 10 for row in rows]
            generation = GenerationConfig(
                max_new_tokens=min(max(rooms), longest - width),
                do_sample=draws,
                eos_token_id=list(tokenizer.end_ids),
                pad_token_id=tokenizer.pad_id,
                bos_token_id=tokenizer.bos_id,
                use_cache=True,
                **sampling,
            )
            written = model.generate(input_ids=ids, attention_mask=mask, generation_config=generation)
            for i, row, room in zip(indices, written[:, width:].tolist(), rooms, strict=True):
                until = next((at for at, token in enumerate(row[:room]) if token in tokenizer.end_ids), room)
                texts[i] = row[:until]
    return texts
