"""A local step on the whole model in one process, which the pipeline must equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from client_pipeline.partition.dropout_seed import EMBEDDING_UNIT, StepId
from client_pipeline.partition.micro_batches import split_batch
from client_pipeline.partition.parts import Batch, ModelParts, target_weight, targets
from client_pipeline.runtime.stage.accelerator import autocast


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """Result of :func:`whole_step`."""

    output_BTD: Tensor
    """Encoder output of the whole batch."""
    loss_sum: float
    weight: int
    gradients: dict[str, Tensor]
    """Gradient of loss_sum / weight by global parameter name."""


def whole_step(
    parts: ModelParts, step: StepId, batch: Batch, num_micro_batches: int, precision: str = "float32"
) -> WholeStep:
    """Forward and backward of one batch, micro-batch by micro-batch, with the pipeline's dropout seeds.

    Micro-batches are kept because dropout draws one mask for each; the gradient is of the mean over the batch.
    """
    parameters = dict(parts.named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    weight = target_weight(targets(batch))
    outputs: list[Tensor] = []
    loss_sum = 0.0
    for i, piece in enumerate(split_batch(batch, num_micro_batches)):
        mask_BT = piece["attention_mask"]
        with autocast(precision, mask_BT.device):
            with step.dropout(EMBEDDING_UNIT, i):
                x_BTD = parts.embedding(piece).float()
            mask = parts.mask_form(mask_BT, x_BTD.dtype)
            for index, block in enumerate(parts.blocks):
                with step.dropout(index, i):
                    x_BTD = block(x_BTD, mask).float()
            with step.dropout(len(parts.blocks), i):
                loss = parts.head(x_BTD, mask_BT, targets(piece))
        (loss / weight).backward()
        outputs.append(x_BTD.detach())
        loss_sum += float(loss.detach())
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in parameters.items()}
    return WholeStep(output_BTD=torch.cat(outputs), loss_sum=loss_sum, weight=weight, gradients=grads)
