"""The attack on membership: whether an example was trained on, by the loss of the final model.

Whoever has the model and an example can do it: an example that was learnt by heart has a smaller loss than one of the
same kind that was not. No noise on activations hides it; noise on updates, or fewer passes, do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.stats import rankdata
from torch import Tensor

from client_pipeline.partition.parts import Batch, ModelParts, target_weight, targets
from client_pipeline.runtime.control_unit.round_order import TrainingData
from flower_app.leakage.updates import first_examples

EXAMPLES = 128
"""Examples of either kind that are tried."""


@dataclass(frozen=True)
class Membership:
    """Outcome of the attack."""

    auc: float
    """Probability that a training example has a smaller loss than another one: 0.5, nothing is told; 1, all is."""
    members: int
    """Training examples that were tried."""
    others: int
    """Held-out examples that were tried."""


def tell_members(
    parts: ModelParts, clusters: Sequence[TrainingData], others: Sequence[Batch], seed: int = 0
) -> Membership:
    """Compare the losses of training examples with those of held-out ones.

    Parameters
    ----------
    parts : the final model
    clusters : training data of each cluster
    others : batches of held-out examples
    seed : draws the training examples
    """
    draw = random.Random(seed)
    places = [(data, index) for data in clusters for index in range(len(data))]
    drawn = draw.sample(places, min(EXAMPLES, len(places)))
    members = [_loss(parts, data.collate([index], seed)) for data, index in drawn]
    held_out = [_loss(parts, example) for batch in others for example in _singles(batch, parts.spec.head)]
    ranks = rankdata([*members, *held_out])
    # Mann and Whitney: ties count half.
    above = float(ranks[: len(members)].sum()) - len(members) * (len(members) + 1) / 2
    return Membership(1 - above / (len(members) * len(held_out)), len(members), len(held_out))


def _singles(batch: Batch, head: str) -> list[dict[str, Tensor]]:
    rows = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(len(batch["input_ids"]))]
    return [first_examples(row, 1, head) for row in rows]


def _loss(parts: ModelParts, example: Batch) -> float:
    with torch.no_grad():
        return float(parts.loss_sum(example)) / max(target_weight(targets(example)), 1)
