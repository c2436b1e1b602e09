"""The proof on real Ray actors that the segmented model computes what the whole model computes in one process."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from client_pipeline.families.registry import family_named
from client_pipeline.link.base import DecoderLink, Gradient, States
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import (
    IGNORED_LABEL,
    Batch,
    ModelParts,
    block_weights,
    join_weights,
    own_parameters,
)
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.partition.spec import CAUSAL_LM, MASKED_LM, SEQ2SEQ, TOKEN_CLASSIFICATION, ModelSpec
from client_pipeline.runtime.config import RuntimeConfig
from client_pipeline.runtime.control_unit.local_decoder import LocalDecoder
from client_pipeline.runtime.control_unit.own_labels import OwnLabels
from client_pipeline.runtime.devices.pipeline import Pipeline
from client_pipeline.runtime.ray.arrangement import Arrangement
from client_pipeline.runtime.ray.machine import usable_cores
from client_pipeline.runtime.ray.private_ray import private_ray
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.optimizer import gradients
from client_pipeline.runtime.stage.whole import whole_step

SPLIT_TOLERANCE = 1e-4
"""Largest relative difference that passes in float32."""

SMALLEST_SCALE = 1e-5
"""Tensors below this share of the model's largest gradient are compared at that scale: some gradients are zero in
theory (an attention's key bias) and pure rounding in practice."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Relative differences between the split and the whole model: max|a - b| / max|b|."""

    output: float
    """Difference of the encoder's output."""
    loss: float
    gradients: dict[str, float]
    """Difference of each gradient, by global parameter name."""
    reference: float | None
    """Difference of encoder and head in evaluation mode from the library's own model; None without one."""

    @property
    def worst(self) -> float:
        """The largest of all; NaN if any is NaN."""
        return float(torch.tensor([self.output, self.loss, self.reference or 0.0, *self.gradients.values()]).max())

    @property
    def passed(self) -> bool:
        """True if all are within :data:`SPLIT_TOLERANCE`; false for NaN."""
        return self.worst <= SPLIT_TOLERANCE


class _Recorder(LocalDecoder):
    """A local decoder that keeps the activations that it was sent."""

    def __init__(self, trainer: HeadTrainer, timeout_s: float) -> None:
        super().__init__(trainer, local_steps=1, timeout_s=timeout_s)
        self.outputs: list[Tensor] = []
        self._answers: queue.SimpleQueue[States | Gradient] = queue.SimpleQueue()

    def send(self, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor, targets: Mapping[str, Tensor]) -> None:
        self.outputs.append(hidden_BTD)
        super().send(micro_batch, hidden_BTD, mask_BT, targets)


class _LocalBlocks(_Recorder):
    """The same where labels stay: it returns the states of its blocks, and takes their gradient."""

    def send_forward(self, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor, weight: float) -> None:
        del weight
        self.outputs.append(hidden_BTD)
        assert self._step is not None
        states = self.trainer.states(self._step, micro_batch, hidden_BTD, mask_BT)
        self._answers.put(States(micro_batch=micro_batch, tensor=states))

    def send_states_gradient(self, micro_batch: int, gradient_BTD: Tensor) -> None:
        assert self._step is not None
        tensor = self.trainer.backward(self._step.cluster, micro_batch, gradient_BTD)
        self._answers.put(Gradient(micro_batch=micro_batch, tensor=tensor, loss_sum=0.0, norm_sq=0.0))

    def receive_next(self) -> States | Gradient:
        return self._answers.get(timeout=self.timeout_s)


def verify_split(
    build: Callable[[], ModelParts], plan: ClusterPlan, batch: Batch, *, seed: int = 0, timeout_s: float = 600.0
) -> Verification:
    """Run one training step both ways, dropout included, and compare.

    It uses the Ray that runs in this process, or else one of its own that it ends. The devices are members of shared
    actors, one for each processor at most: these stay for a while, and the next verification need not start them.

    Parameters
    ----------
    build : gives the model; called twice, with equal weights each time
    plan : cuts it
    batch : one cluster's batch
    seed : of the dropout
    timeout_s : longest wait for a device
    """
    step = StepId(seed=seed, round=1, step=1, cluster=0)
    parts = build()
    num_blocks = len(parts.blocks)
    plan.check(num_blocks=num_blocks, batch_size=len(batch["input_ids"]))
    reference = _against_reference(parts, batch)
    weights = parts.weights()
    for part in (parts.embedding, parts.blocks, parts.head):
        part.train()
    runtime = RuntimeConfig(timeout=timeout_s)
    # Threads decide in which order products are summed: as many as on the devices, or rounding would be compared.
    own_threads = torch.get_num_threads()
    torch.set_num_threads(runtime.threads)
    try:
        from_whole = whole_step(parts, step, batch, plan.m)
    finally:
        torch.set_num_threads(own_threads)
    del parts

    split = build()
    split.embedding.train()
    optimizer = OptimizerConfig(name="sgd")
    trainer = HeadTrainer(split.head_on_server, optimizer, unit=num_blocks)
    tail = getattr(split.embedding, "tail", None)
    recorder = _Recorder(trainer, timeout_s) if tail is None else _LocalBlocks(trainer, timeout_s)
    link: DecoderLink = recorder
    if isinstance(recorder, _LocalBlocks) and tail is not None:
        link = OwnLabels(recorder, tail, runtime.precision)
    with private_ray():
        pipeline = Pipeline(
            name=f"collapipe/verify-{secrets.token_hex(4)}/cluster-0",
            spec=split.spec,
            optimizer=optimizer,
            runtime=runtime,
            placement=Arrangement(device_actors=min(len(plan.delta), usable_cores())).placement(0, len(plan.delta)),
            frozen=split.frozen_weights() if split.base is None else split.base,
        )
        try:
            pipeline.apply_plan(plan)
            pipeline.load({i: block_weights(weights, i) for i in range(num_blocks)})
            outcome = pipeline.run_step(step, [batch], split.embedding, link)
            embedding = gradients(own_parameters(split.embedding))
            from_split = join_weights(embedding, pipeline.gradients(), trainer.gradients(0))
        finally:
            link.close()
            pipeline.close()
    largest = float(torch.stack([g.abs().max() for g in from_whole.gradients.values()]).max())
    return Verification(
        output=_difference(torch.cat(recorder.outputs), from_whole.output_BTD),
        loss=abs(outcome.loss_sum - from_whole.loss_sum) / max(abs(from_whole.loss_sum), 1e-12),
        gradients={n: _difference(from_split[n], g, SMALLEST_SCALE * largest) for n, g in from_whole.gradients.items()},
        reference=reference,
    )


def _difference(actual: Tensor, expected: Tensor, smallest: float = 1e-12) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(smallest))


@torch.no_grad()
def _against_reference(parts: ModelParts, batch: Batch) -> float | None:
    if parts.reference is None:
        return None
    # An adapter's own modules have dropout, too.
    for part in (parts.reference, parts.embedding, parts.blocks, parts.head):
        part.eval()
    # The library makes the decoder's input of the labels, too.
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels" or parts.spec.head == SEQ2SEQ}
    expected = parts.reference(**{**inputs, "attention_mask": batch["attention_mask"].long()}).logits
    return _difference(parts.logits(batch), expected)


def random_batch(spec: ModelSpec, batch_size: int, length: int, seed: int = 0) -> Batch:
    """Draw a batch that fits a model: random ids, padding of unequal length, labels of its head."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    vocabulary = int(spec.config["vocab_size"])
    mask_BT = torch.arange(length) < draw(length + 1, batch_size, 1, low=max(1, length // 2))
    batch = {"input_ids": draw(vocabulary, batch_size, length, low=min(3, vocabulary - 1)), "attention_mask": mask_BT}
    if spec.head == SEQ2SEQ:
        batch["labels"] = draw(vocabulary, batch_size, length).masked_fill(~mask_BT, IGNORED_LABEL)
    elif spec.head == MASKED_LM:
        chosen = (draw(5, batch_size, length) == 0) & mask_BT
        chosen[:, 0] = True
        batch["labels"] = draw(vocabulary, batch_size, length).masked_fill(~chosen, IGNORED_LABEL)
    elif spec.head == CAUSAL_LM:
        batch["labels"] = batch["input_ids"].masked_fill(~mask_BT, IGNORED_LABEL)
        # Nothing comes before the first token that would foretell it.
        batch["labels"][:, 0] = IGNORED_LABEL
    elif spec.head == TOKEN_CLASSIFICATION:
        batch["labels"] = draw(int(spec.config["num_labels"]), batch_size, length).masked_fill(~mask_BT, IGNORED_LABEL)
    else:
        batch["labels"] = draw(int(spec.config["num_labels"]), batch_size)
        if (pad := family_named(spec.family).settings(spec).get("pad_token_id")) is not None:
            # A classifier on a causal model finds a text's last token by the padding's id.
            ids = batch["input_ids"]
            batch["input_ids"] = ids.masked_fill(ids == pad, (pad + 1) % vocabulary).masked_fill(~mask_BT, pad)
    return batch
