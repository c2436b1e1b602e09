"""All TEBs of a model that answers in this process; those of devices are in the runtime's package."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack

from torch import Tensor

from client_pipeline.partition.parts import ModelParts
from client_pipeline.partition.spec import SEQ2SEQ
from client_pipeline.runtime.stage.answering import AnswerStep, KeptRequests, answer_step


class LocalStages:
    """All TEBs in this process."""

    num_stages = 1
    """This process."""

    def __init__(self, parts: ModelParts) -> None:
        self._blocks = dict(enumerate(parts.blocks))
        self._mask_form = parts.mask_form if parts.spec.head == SEQ2SEQ else None
        self._kept = KeptRequests()
        self._held = ExitStack()
        # Weights that are read where they run stay for all steps.
        for on_demand in parts.on_demand:
            self._held.enter_context(on_demand.held())

    def run(self, step: AnswerStep, x_RTD: Tensor) -> Future[Tensor]:
        """Compute at once."""
        future: Future[Tensor] = Future()
        future.set_result(answer_step(self._blocks, self._kept, step, x_RTD, self._mask_form))
        return future

    def drop(self, requests: Sequence[str]) -> None:
        """Forget the keys and values of requests."""
        self._kept.drop(requests)

    def bring_up(self) -> None:
        """Raise ``RuntimeError``: what fails here fails again."""
        raise RuntimeError("the model failed in this process")

    def close(self) -> None:
        """Let go of weights that are read where they run."""
        self._held.close()
