"""Proof that a model writes token by token, with keys and values kept, what the library's whole model would write.

Before a model is served, a small copy of its own configuration takes the tokens of two requests one by one, together,
of unequal length and with padding, and its scores are compared with those of the whole.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from client_pipeline.families.families import build_parts
from client_pipeline.families.proof import RELATIVE, small_copy
from client_pipeline.families.small_copies import VOCABULARY, first_line
from client_pipeline.partition.dropout_seed import undisturbed
from client_pipeline.partition.parts import ModelParts
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.stage.answering import AnswerStep, KeptRequests, answer_step

_LENGTHS = (11, 8)
"""Tokens of the two requests."""
_STEPS = 5
"""Tokens that both take together, one by one; what comes before is taken at once."""


def check_answers(spec: ModelSpec) -> None:
    """Refuse a decoder-only model that would write other texts TEB by TEB than as a whole.

    Raises
    ------
    ValueError
        With what differs, or why it cannot be tried.
    """
    if reason := _reason(replace(spec, lora=None, base_dtype="float32").to_json()):
        raise ValueError(f"model type {spec.family!r} does not write token by token what it writes whole: {reason}")


@lru_cache(maxsize=16)
def _reason(spec_json: str) -> str:
    with undisturbed():
        try:
            small, reason = small_copy(ModelSpec.from_json(spec_json))
            return reason if small is None else answers_difference(build_parts(small, seed=0))
        except Exception as error:  # noqa: BLE001 (whatever a model says of steps that it does not take)
            return first_line(error)


def answers_difference(parts: ModelParts) -> str:
    """Compare a small model's scores, token by token over its parts, with those of the library's whole model.

    Parameters
    ----------
    parts : its weights are changed, so that a factor left out shows

    Returns
    -------
    What differs; empty: nothing.
    """
    assert parts.reference is not None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in parts.all_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        for module in (parts.reference, parts.embedding, parts.blocks, parts.head):
            module.eval()
        vocabulary = min(VOCABULARY, int(parts.reference.config.vocab_size))  # type: ignore[union-attr, arg-type]
        rows = [torch.randint(3, vocabulary, (2, length), generator=generator) for length in _LENGTHS]
        masks = [torch.ones_like(ids, dtype=torch.bool) for ids in rows]
        # Padding within a request, beside that of the shorter request.
        masks[0][1, :2] = False
        whole = [_whole(parts.reference, ids, mask) for ids, mask in zip(rows, masks, strict=True)]
        for at, scores in _steps(parts, rows, masks):
            places = [length - _STEPS + at - 1 for length in _LENGTHS]
            expected = torch.cat([logits[:, place] for logits, place in zip(whole, places, strict=True)])
            if (share := float((scores - expected).abs().max() / expected.abs().max())) > RELATIVE:
                return f"scores of token {at} behind the prompt differ by {share:.1e} of the largest"
    return ""


def _whole(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the library's scores at all positions, with the positions that its ``generate`` gives."""
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    takes_them = "position_ids" in inspect.signature(model.forward).parameters
    given = {"position_ids": positions} if takes_them else {}
    logits: Tensor = model(input_ids=ids, attention_mask=mask.long(), **given).logits
    return logits


def _steps(parts: ModelParts, rows: list[Tensor], masks: list[Tensor]) -> list[tuple[int, Tensor]]:
    """Return the scores [R, V] of both requests after their prompts, and after each further token."""
    kept, kept_by_head = KeptRequests(), KeptRequests()
    blocks = dict(enumerate(parts.blocks))
    names = ("first", "second")

    def step(requests: tuple[str, ...], ids: Tensor, mask: Tensor) -> Tensor:
        order = AnswerStep(requests=requests, num_rows=(2,) * len(requests), mask_RK=mask)
        x = answer_step(blocks, kept, order, parts.embedding.step(ids, mask))  # type: ignore[operator]
        scores: Tensor = parts.head.step(x, mask, kept_by_head.of_step(order))[:, -1]  # type: ignore[operator]
        kept_by_head.took(order, ids.shape[1])
        return scores

    prompts = [
        step((name,), ids[:, :-_STEPS], mask[:, :-_STEPS]) for name, ids, mask in zip(names, rows, masks, strict=True)
    ]
    found = [(0, torch.cat(prompts))]
    for at in range(1, _STEPS):
        behind = -_STEPS + at
        new = torch.cat([ids[:, behind - 1 : behind] for ids in rows])
        width = max(_LENGTHS) + behind
        padded = [torch.nn.functional.pad(mask[:, :behind], (width - mask.shape[1] - behind, 0)) for mask in masks]
        found.append((at, step(names, new, torch.cat(padded))))
    return found
