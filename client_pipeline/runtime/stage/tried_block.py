"""A TEB whose passes are only timed: its weights are drawn, its input is noise, and nothing is learned."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from client_pipeline.families.families import build_block
from client_pipeline.families.registry import family_named
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import own_parameters
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.runtime.stage.accelerator import HOST
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from client_pipeline.runtime.stage.optimizer import PartOptimizer
from client_pipeline.runtime.stage.stage import Stage, TrainedBlock

_STEP = StepId(seed=0, round=1, step=1, cluster=0)


class TriedBlock:
    """The model's first TEB, with adapters and in as few bits as a run's.

    Parameters
    ----------
    spec : the model
    recompute, precision, accelerator : as a device's
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        recompute: bool = False,
        precision: str = "float32",
        accelerator: torch.device = HOST,
    ) -> None:
        optimizer = OptimizerConfig(name="sgd")
        self._stage = Stage(spec, optimizer, recompute, precision, accelerator)
        family = family_named(spec.family)
        self._shape = family.carried_examples(spec), family.width(spec)
        module = build_block(spec, 0).train().to(accelerator)
        parameters = own_parameters(module)
        self._stage.blocks[0] = TrainedBlock(module, parameters, {}, None, PartOptimizer(parameters, optimizer))

    def times(self, mask_BT: Tensor) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass of one micro-batch, whose padding mask is given (bool)."""
        carried, width = self._shape
        generator = torch.Generator().manual_seed(0)
        x_BTD = torch.randn(len(mask_BT) + carried, mask_BT.shape[1], width, generator=generator)
        start = time.perf_counter()
        y_BTD = self._stage.forward(_STEP, 0, x_BTD, mask_BT)
        gradient_BTD, turned = torch.ones_like(y_BTD), time.perf_counter()
        self._stage.backward(_STEP, 0, gradient_BTD, mask_BT)
        return turned - start, time.perf_counter() - turned
