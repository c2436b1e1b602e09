"""The attack on updates: which tokens a cluster has trained on, by the update that it sends to be averaged.

The update of one step of SGD is a gradient. That of a matrix of the first TEB is a sum over the tokens t of the batch,
of outer products with x_t, what the matrix reads of them: its rows lie in the span of the x_t. While the batch has
fewer tokens than x has numbers, a token of the vocabulary whose own x lies in that span was there (the method of
arXiv:2405.15586; here with all matrices that read the same x). And the rows of an embedding that is trained change for
the tokens of the batch alone.

Adapters' matrices A that read the same x have r dimensions each: of more tokens than all of these single ones cannot be
told.

Where the head is in the update, too, its output's bias, if it has one, names labels: its gradient is the mean of
p - e_y, which is negative for labels of the batch alone. Except for classifiers, labels are tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from client_pipeline.families.registry import family_named
from client_pipeline.link.privacy import NoiseSource, private_update
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.partition.parts import IGNORED_LABEL, Batch, ModelParts, target_weight, targets
from client_pipeline.partition.spec import CLASSIFIERS, SEQ2SEQ

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
    """Share of the tokens that the span names; 0 where it names more that were not there."""
    by_rows: float
    """The same of the embedding's rows."""
    wrong: float
    """Share of what either names that was not in the batch."""
    labels: float | None
    """Share of the different labels in the batch that the bias of the head's output names, likewise; None where none is
    in the update."""

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
    head: bool = False,
) -> ReadUpdate:
    """Take one step of SGD on a batch, and name the tokens of the batch by the update, which is not compressed.

    Parameters
    ----------
    parts : the model, in evaluation mode; its weights stay as they are
    batch : of the victim
    vocabulary : V
    lr : of the step
    privacy : clip and noise of updates; None: none
    marks : tokens that every example has; they are not counted
    head : the head is in the update, too
    """
    gradient = _gradient(parts, batch)
    start = {name: p.detach() for name, p in parts.named_parameters(head) if name in gradient}
    trained = {name: value - lr * gradient[name] for name, value in start.items()}
    if privacy is not None and privacy.on_updates:
        trained = private_update(start, trained, privacy, NoiseSource(privacy.seed), "victim")
    places = ("embedding.", "blocks.0.", *(("head.",) if head else ()))
    read = [name for name in trained if name.startswith(places)]
    change = {name: (start[name].double() - trained[name].double()) / lr for name in read}
    there = set(batch["input_ids"][batch["attention_mask"] != 0].tolist())
    labels = set(batch["labels"][batch["labels"] != IGNORED_LABEL].tolist())
    named_labels = _named_by_bias(parts, start, change, lr)
    by_rows = _named_by_rows(parts, change, vocabulary)
    if parts.spec.head not in CLASSIFIERS:
        there |= labels
        by_rows |= named_labels or set()
    there, by_rows = there - marks, by_rows - marks
    with parts.on_demand[0].held() if parts.on_demand else nullcontext():
        by_span, rank, width = _named_by_span(parts, start, change, batch, vocabulary, lr)
    by_span -= marks
    named = by_rows | by_span
    return ReadUpdate(
        examples=len(batch["input_ids"]),
        tokens=len(there),
        rank=rank,
        width=width,
        by_span=_share(by_span, there),
        by_rows=_share(by_rows, there),
        wrong=len(named - there) / max(len(named), 1),
        labels=None if named_labels is None else _share(named_labels, labels),
    )


def _named_by_bias(
    parts: ModelParts, start: Mapping[str, Tensor], change: Mapping[str, Tensor], lr: float
) -> set[int] | None:
    """Return the classes, or tokens, that the gradient of the output's bias names; None where none is in the update."""
    config = parts.spec.config
    classes = parts.spec.head in CLASSIFIERS
    size = family_named(parts.spec.family).num_classes(parts.spec) if classes else int(config["vocab_size"])
    last_first = reversed(list(change))
    bias = next((name for name in last_first if name.startswith("head.") and change[name].shape == (size,)), None)
    if bias is None:
        return None
    # Smoothed labels take 1 / size of the smoothing off each. What is left of the others is above zero, but for the
    # rounding of the sent weights; without smoothing that never changes a sign.
    smoothing = config.get("label_smoothing", 0.0)
    rounding = 2 * _ROUNDING * start[bias].abs() / lr if smoothing else 0.0
    return set((change[bias] + smoothing / size < -rounding).nonzero()[:, 0].tolist())


def _share(named: set[int], there: set[int]) -> float:
    """Return the share that is named; 0 where most of what is named was not there."""
    right = len(named & there)
    return right / len(there) if right and right >= len(named - there) else 0.0


def first_examples(batch: Batch, number: int, head: str) -> dict[str, Tensor]:
    """Return the first examples of a batch for a model with a head, without the padding that the others made."""
    mask_BT = batch["attention_mask"]
    used_T = (mask_BT[:number] != 0).any(dim=0).nonzero()[:, 0]
    longest = 1 + max(used_T.tolist(), default=0)
    # A translation's labels have a length of their own.
    own_length = {"labels"} if head == SEQ2SEQ else set()
    return {
        key: value[:number, :longest]
        if key not in own_length and value.ndim > 1 and value.shape[1] == mask_BT.shape[1]
        else value[:number]
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
    named = set[int]()
    for part, whole in (("embedding", parts.embedding), ("head", parts.head)):
        tables = (f"{part}.{name}.weight" for name, module in whole.named_modules() if isinstance(module, nn.Embedding))
        # The first one is of tokens; others may be of places.
        table = next((change[name] for name in tables if name in change and len(change[name]) >= vocabulary), None)
        if table is not None:
            changed = table.abs().amax(dim=1) > 0
            # A matrix that scores the vocabulary, too, changes for all of it.
            named |= set(changed.nonzero()[:, 0].tolist()) if int(changed.sum()) <= vocabulary / 2 else set()
    return named


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
    pad_id = parts.spec.config.get("pad_token_id")
    # A model may look for a text's end by its padding.
    ids = torch.arange(vocabulary)
    ids = ids[ids != (-1 if pad_id is None else pad_id)]
    names, x_BTD = _read_first(parts, change, ids[:1, None].expand(-1, num_places), first_only=False)
    if not names:
        return set(), 0, x_BTD.shape[-1]
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
    for ids_V in ids.split(_CHUNK):
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

    Where the TEB trains none, there are no names, and the activations are the embedding's.

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
    handles = [
        block.get_submodule(_module(name)).register_forward_pre_hook(hook_of(f"blocks.0.{name}")) for name in matrices
    ]
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    try:
        with torch.no_grad():
            x_BTD = parts.embedding({"input_ids": ids_BT, "attention_mask": mask_BT})
            if handles:
                block(x_BTD, parts.mask_form(mask_BT, x_BTD.dtype))
    except _Reached:
        pass
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        return [], x_BTD
    first = seen[0][1]
    same = [name for name, x in seen if x.shape == first.shape and x.data_ptr() == first.data_ptr()]
    return same, first.float()


def _module(name: str) -> str:
    """Return the module of a weight, within its TEB."""
    return name.removeprefix("blocks.0.").rpartition(".")[0]
