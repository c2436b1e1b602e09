"""The attack on updates: which tokens a cluster has trained on, by the update that it sends to be averaged.

The update of one step of SGD is a gradient. That of a matrix of the first TEB is a sum over the tokens t of the batch,
of outer products with x_t, what the matrix reads of them: its rows lie in the span of the x_t. While the batch has
fewer tokens than x has numbers, a token of the vocabulary whose own x lies in that span was there (the method of
arXiv:2405.15586; here with all matrices that read the same x). And the rows of an embedding that is trained change for
the tokens of the batch alone.

Adapters' matrices A that read the same x have r dimensions each: of more tokens than all of these single ones cannot be
told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from client_pipeline.link.privacy import NoiseSource, private_update
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.partition.parts import Batch, ModelParts, target_weight, targets

_CHUNK = 512
_NEAR = 0.1
"""Largest part of a token's vector outside the span, relative, with which it counts as inside."""
_ROUNDING = 2.0**-24
"""Relative rounding of a weight that is sent in float32."""


@dataclass(frozen=True)
class ReadUpdate:
    """Outcome of the attack on one update."""

    examples: int
    """Of the batch whose step it is."""
    tokens: int
    """Different tokens in it."""
    rank: int
    """Dimensions of the span of the first matrices' rows; ``width`` of them tell nothing."""
    width: int
    by_span: float
    """Share of the tokens that the span names."""
    by_rows: float
    """Share of the tokens that the embedding's rows name; 0 where it is not trained, or all of its rows change."""
    wrong: float
    """Share of what either names that was not in the batch."""

    @property
    def read(self) -> float:
        """Share of the tokens by the better of both."""
        return max(self.by_span, self.by_rows)


def read_update(
    parts: ModelParts,
    batch: Batch,
    vocabulary: int,
    lr: float,
    privacy: PrivacyConfig | None = None,
    marks: frozenset[int] = frozenset(),
) -> ReadUpdate:
    """Take one step of SGD on a batch, send its update as a cluster does, and name the tokens of the batch by it.

    Parameters
    ----------
    parts : the model, in evaluation mode; its weights stay as they are
    batch : of the victim
    vocabulary : V
    lr : of the step
    privacy : clip and noise of updates; None: none
    marks : tokens that every example has; they are not counted
    """
    start = {name: p.detach() for name, p in parts.named_parameters()}
    gradient = _gradient(parts, batch)
    trained = {name: start[name] - lr * gradient[name] for name in gradient}
    if privacy is not None and privacy.on_updates:
        trained = private_update(start, trained, privacy, NoiseSource(privacy.seed), "victim")
    change = {name: (start[name].double() - value.double()) / lr for name, value in trained.items()}
    there = set(batch["input_ids"][batch["attention_mask"].bool()].tolist()) - marks
    by_rows = _named_by_rows(parts, change, vocabulary) - marks
    by_span, rank, width = _named_by_span(parts, start, change, batch, vocabulary, lr)
    by_span -= marks
    named = by_rows | by_span
    return ReadUpdate(
        examples=len(batch["input_ids"]),
        tokens=len(there),
        rank=rank,
        width=width,
        by_span=len(by_span & there) / max(len(there), 1),
        by_rows=len(by_rows & there) / max(len(there), 1),
        wrong=len(named - there) / max(len(named), 1),
    )


def first_examples(batch: Batch, number: int) -> dict[str, Tensor]:
    """Return the first examples of a batch, without the padding that the others made."""
    positions = batch["attention_mask"].shape[1]
    longest = int(batch["attention_mask"][:number].sum(dim=1).max())
    return {
        key: value[:number, :longest] if value.ndim > 1 and value.shape[1] == positions else value[:number]
        for key, value in batch.items()
    }


def _gradient(parts: ModelParts, batch: Batch) -> dict[str, Tensor]:
    """Return the gradient of the mean loss, by global name."""
    parameters = dict(parts.named_parameters())
    with torch.enable_grad(), ExitStack() as held:
        for block in parts.on_demand:
            held.enter_context(block.held())
        loss = parts.loss_sum(batch) / max(target_weight(targets(batch)), 1)
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: value for name, value in zip(parameters, found, strict=True) if value is not None}


def _named_by_rows(parts: ModelParts, change: Mapping[str, Tensor], vocabulary: int) -> set[int]:
    for name, module in parts.embedding.named_modules():
        table = change.get(f"embedding.{name}.weight")
        if isinstance(module, nn.Embedding) and table is not None and len(table) >= vocabulary:
            changed = table.abs().amax(dim=1) > 0
            return set() if bool(changed[:vocabulary].all()) else set(changed.nonzero()[:, 0].tolist())
    return set()


def _named_by_span(
    parts: ModelParts,
    start: Mapping[str, Tensor],
    change: Mapping[str, Tensor],
    batch: Batch,
    vocabulary: int,
    lr: float,
) -> tuple[set[int], int, int]:
    """Return the tokens, the rank of the span, and the width."""
    num_places = batch["input_ids"].shape[1]
    names, x_BTD = _read_first(parts, change, torch.zeros(1, num_places, dtype=torch.int64), first_only=False)
    # GPT-2's layers have their matrices the other way round.
    turned = not isinstance(parts.blocks[0].get_submodule(_module(names[0])), nn.Linear)
    rows_ND, weights = (
        torch.cat([values[name].T if turned else values[name] for name in names]).double() for values in (change, start)
    )
    width, named = x_BTD.shape[-1], set[int]()
    _, strengths, directions = torch.linalg.svd(rows_ND, full_matrices=False)
    # What rounding of the sent weights makes of nothing.
    noise = _ROUNDING * float(weights.square().mean().sqrt()) / lr
    floor = 2 * noise * (rows_ND.shape[0] ** 0.5 + rows_ND.shape[1] ** 0.5)
    rank = int((strengths > max(floor, float(strengths[0]) * 1e-9)).sum())
    if rank == 0 or rank >= width:
        return named, rank, width
    span_RD = directions[:rank].to(torch.float32)
    if bool((x_BTD == x_BTD[:, :1]).all()):
        # Places come in later: one stands for all.
        num_places = 1
    for ids_V in torch.arange(vocabulary).split(_CHUNK):
        _, x_VTD = _read_first(parts, change, ids_V[:, None].expand(-1, num_places), first_only=True)
        whole_VT = x_VTD.square().sum(dim=-1).clamp_min(1e-30)
        outside_VT = (1 - (x_VTD @ span_RD.T).square().sum(dim=-1) / whole_VT).clamp_min(0).sqrt()
        named |= set(ids_V[(outside_VT < _NEAR).any(dim=1)].tolist())
    # A norm takes a dimension off all vectors: a span that holds most of the vocabulary tells nothing, either.
    return named if len(named) <= vocabulary / 2 else set(), rank, width


class _Reached(Exception):  # noqa: N818
    """Ends a pass at the first matrix."""


def _read_first(
    parts: ModelParts, change: Mapping[str, Tensor], ids_BT: Tensor, *, first_only: bool
) -> tuple[list[str], Tensor]:
    """Return the trained matrices that read what the first TEB's first one reads of tokens, and what that is.

    Parameters
    ----------
    parts, change : the model, and the update by global name
    ids_BT : tokens
    first_only : end at the first matrix, for the sake of time
    """
    block, seen = parts.blocks[0], list[tuple[str, Tensor]]()

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            seen.append((name, inputs[0]))
            if first_only:
                raise _Reached

        return hook

    matrices = [n for n, p in block.named_parameters() if p.ndim == 2 and f"blocks.0.{n}" in change]
    if not matrices:
        raise ValueError("leakage: the first TEB trains no matrix; there is no update of it to read")
    handles = [
        block.get_submodule(_module(name)).register_forward_pre_hook(hook_of(f"blocks.0.{name}")) for name in matrices
    ]
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    try:
        with torch.no_grad():
            x_BTD = parts.embedding({"input_ids": ids_BT, "attention_mask": mask_BT})
            block(x_BTD, parts.mask_form(mask_BT, x_BTD.dtype))
    except _Reached:
        pass
    finally:
        for handle in handles:
            handle.remove()
    first = seen[0][1]
    same = [name for name, x in seen if x.shape == first.shape and x.data_ptr() == first.data_ptr()]
    return same, first.float()


def _module(name: str) -> str:
    """Return the module of a weight, within its TEB."""
    return name.removeprefix("blocks.0.").rpartition(".")[0]
