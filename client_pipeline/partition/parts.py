"""The three parts of a split Transformer.

Shape legend, here and in the adapters: B examples of a micro-batch, T source positions, U target
positions, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from client_pipeline.partition.spec import SEQ2SEQ, ModelSpec
from client_pipeline.weights.base_weights import FrozenBase
from client_pipeline.weights.on_demand import OnDemand

IGNORED_LABEL = -100
"""Label of a position that has no loss (padding, sub-words that carry no tag)."""

Batch = dict[str, Tensor]
"""``input_ids`` [B, T] int64, ``attention_mask`` [B, T] bool (True: a real token) or of
:mod:`client_pipeline.partition.packed_mask`, ``labels`` [B] or [B, U] int64 with :data:`IGNORED_LABEL` where there is
no loss, and what else the embedding takes."""

MaskForm = Any
"""Second argument of a family's blocks, which its ``mask_form`` makes of the padding mask: a tensor, None where nothing
is masked, or an object where layers differ. Each stage builds it, so it is not sent and carries no gradient. Every
block takes None."""


@dataclass(frozen=True)
class ModelParts:
    """A model cut where CollaPipe cuts it.

    Parameters are named ``embedding.*``, ``blocks.<i>.*`` and ``head.*``; each appears once, tied ones too: a matrix
    that the head reads from the embedding is the embedding's.
    """

    spec: ModelSpec
    embedding: nn.Module
    """On the control unit: ``embedding(batch) -> x_BTD``."""
    blocks: nn.ModuleList
    """The L TEBs: ``block(x_BTD, mask_form) -> x_BTD``."""
    head: nn.Module
    """On the server: ``head(x_BTD, mask_BT, targets) -> sum of the losses`` (a scalar); ``head.logits`` as in
    :meth:`logits`."""
    mask_form: Callable[[Tensor, torch.dtype], MaskForm]
    """Builds what the blocks take from the mask [B, T] that travels."""
    reference: nn.Module | None = None
    """The library's own model over the same parameters, where there is one."""
    base: FrozenBase | None = None
    """The frozen weights by global name where each part is had alone, and the TEBs have them while they run alone."""
    on_demand: tuple[OnDemand, ...] = ()
    """For each TEB then: fills and empties it."""

    def part(self, name: str) -> nn.Module:
        """Return the part of a name: ``embedding``, ``blocks.<i>`` or ``head``."""
        kind, _, index = name.partition(".")
        if kind == "blocks":
            return self.blocks[int(index)]
        return self.embedding if kind == "embedding" else self.head

    @property
    def tied(self) -> dict[str, str]:
        """The matrices that the head reads from the embedding: the head's name and the embedding's of each."""
        return tied_names(self.head)

    @property
    def head_on_server(self) -> nn.Module:
        """The head; where the control unit has its tail and the labels, without that."""
        tail = getattr(self.embedding, "tail", None)
        return self.head if tail is None else cast(Any, self.head).without_tail()

    def named_parameters(self, head: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Every trainable floating-point parameter under its global name, tied ones once."""
        return ((name, parameter) for name, parameter in self.all_parameters(head) if parameter.requires_grad)

    def all_parameters(self, head: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter, trained or not, under its global name, tied ones once."""
        parameter_ids: set[int] = set()
        parts = [("embedding", self.embedding), ("blocks", self.blocks)]
        for prefix, part in [*parts, ("head", self.head)] if head else parts:
            for name, parameter in part.named_parameters(prefix=prefix):
                if id(parameter) not in parameter_ids:
                    parameter_ids.add(id(parameter))
                    yield name, parameter

    def weights(self, head: bool = True) -> dict[str, Tensor]:
        """Detached copies of the parameters by global name."""
        return {name: p.detach().clone() for name, p in self.named_parameters(head)}

    def frozen_weights(self) -> dict[str, Tensor]:
        """Return the weights that adapters are added to, by global name, not copied; none where everything is trained.

        In full training a parameter that is not trained is computed by whoever builds it (Marian's positions).
        """
        if self.spec.lora is None:
            return {}
        assert self.base is None, "its frozen weights are not in memory"
        return {name: p.detach() for name, p in self.all_parameters() if not p.requires_grad}

    def load(self, weights: Mapping[str, Tensor], head: bool = True) -> None:
        """Copy ``weights`` in place; see :func:`load_parameters`."""
        load_parameters(dict(self.named_parameters(head)), weights, "model")

    def load_frozen(self, weights: Mapping[str, Tensor]) -> None:
        """Copy what :meth:`frozen_weights` gave in place; see :func:`load_parameters`."""
        load_parameters(self.frozen_weights(), weights, "frozen model")

    def encode(self, batch: Batch) -> Tensor:
        """Run embedding and TEBs in one process, [B, T, D]."""
        return self.encode_each([batch])[0]

    def encode_each(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Run embedding and TEBs over several batches, TEB by TEB: one that has its weights on demand fills once."""
        states = [self.embedding(batch) for batch in batches]
        masks = [self.mask_form(batch["attention_mask"], x.dtype) for batch, x in zip(batches, states, strict=True)]
        for index, block in enumerate(self.blocks):
            with self.on_demand[index].held() if self.on_demand else nullcontext():
                states = [block(x_BTD, mask) for x_BTD, mask in zip(states, masks, strict=True)]
        return states

    def logits(self, batch: Batch) -> Tensor:
        """Scores of the head: [B, classes] of sequences, else of each position; of a decoder, given its labels."""
        given = (batch["labels"],) if self.spec.head == SEQ2SEQ else ()
        head = cast(Any, self.head)
        return cast(Tensor, head.logits(self.encode(batch), batch["attention_mask"], *given))

    def loss_sum(self, batch: Batch) -> Tensor:
        """Sum of the losses over the batch's targets; divide by :func:`target_weight` for the mean."""
        return self.head(self.encode(batch), batch["attention_mask"], targets(batch))


def padding_mask(mask_BT: Tensor) -> Tensor | None:
    """Bool mask [B, 1, 1, T] for attention to the real tokens; None when nothing is padded."""
    return None if bool(mask_BT.all()) else mask_BT[:, None, None, :]


def targets(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of a batch that the server needs for the loss."""
    return {"labels": batch["labels"]}


def target_weight(target: Mapping[str, Tensor]) -> int:
    """Number of positions (or samples) that carry a loss: the weight of a micro-batch."""
    return int((target["labels"] != IGNORED_LABEL).sum())


def load_parameters(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor], owner: str) -> None:
    """Copy ``weights`` into ``parameters``, cast to the receiver's dtype.

    Raises
    ------
    ValueError
        If a parameter is missing, unknown or of another shape; the message names it.
    """
    missing = sorted(parameters.keys() - weights.keys())
    unknown = sorted(weights.keys() - parameters.keys())
    if missing or unknown:
        raise ValueError(
            f"weights of the {owner} do not fit: missing {missing[:3]}, unknown {unknown[:3]} "
            f"({len(missing)} missing, {len(unknown)} unknown); load weights of the same architecture"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            value = weights[name]
            if value.shape != parameter.shape:
                raise ValueError(
                    f"weights of the {owner}: {name} has shape {list(value.shape)}, expected "
                    f"{list(parameter.shape)}; load weights of the same architecture"
                )
            parameter.copy_(value)


def block_weights(weights: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Slice one TEB's tensors out of global weights, under its own names."""
    return part_weights(weights, f"blocks.{index}")


def part_weights(weights: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Slice the tensors of ``embedding`` or ``head`` out of global weights, under the part's own names."""
    prefix = f"{part}."
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def join_weights(
    embedding: Mapping[str, Tensor],
    blocks: Mapping[int, Mapping[str, Tensor]],
    head: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Join slices into global weights: the inverse of :func:`block_weights` and :func:`part_weights`."""
    joined = {f"embedding.{name}": value for name, value in embedding.items()}
    for index in sorted(blocks):
        joined.update({f"blocks.{index}.{name}": value for name, value in blocks[index].items()})
    joined.update({f"head.{name}": value for name, value in (head or {}).items()})
    return joined


def tied_names(head: nn.Module) -> dict[str, str]:
    """Return the matrices that a head reads from the embedding: its own name and the embedding's of each.

    A head that does so carries this as its attribute ``tied``.
    """
    return dict(getattr(head, "tied", {}))


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters of one part under the part's own names, tied ones once, and not those of the embedding."""
    tied = tied_names(module)
    return {name: p for name, p in module.named_parameters() if p.requires_grad and name not in tied}


def frozen_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of one part that are not trained, under the part's own names, and not those of the embedding."""
    tied = tied_names(module)
    return {name: p for name, p in module.named_parameters() if not p.requires_grad and name not in tied}
