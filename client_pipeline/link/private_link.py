"""A link to the decoder on which activations are clipped and noised before they leave the control unit."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from client_pipeline.link.base import DecoderLink, ForwardingLink, Gradient, LinkError
from client_pipeline.link.privacy import NoiseSource, clip_gradient, clip_tokens, private_activations
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.partition.micro_batches import StepId


class PrivateLink(ForwardingLink):
    """A link to the decoder on which activations are clipped and noised.

    The gradient that comes back is taken through the clipping, so that training minimises the loss of what was sent.
    """

    def __init__(self, link: DecoderLink, config: PrivacyConfig, noise: NoiseSource) -> None:
        super().__init__(link)
        self.config = config
        self.noise = noise
        self._step: StepId | None = None
        self._sent_activations: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def begin_step(self, step: StepId, num_micro_batches: int, total_weight: float) -> None:
        """See :class:`DecoderLink`."""
        self._step = step
        self._sent_activations.clear()
        super().begin_step(step, num_micro_batches, total_weight)

    def send(self, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor, targets: Mapping[str, Tensor]) -> None:
        """Hand over the activations as :func:`private_activations` has them."""
        step = self._step
        place = (step.round, step.step, step.cluster, micro_batch) if step is not None else (micro_batch,)
        real_BTD = hidden_BTD.detach() * mask_BT[..., None]
        self._sent_activations[micro_batch] = (
            real_BTD,
            clip_tokens(real_BTD, mask_BT, self.config.activation_clip)[1],
            mask_BT,
        )
        private_BTD = private_activations(real_BTD, mask_BT, self.config, self.noise, *place)
        super().send(micro_batch, private_BTD, mask_BT, targets)

    def receive(self) -> Gradient:
        """Wait for the gradient of the next micro-batch, with respect to its activations before they were clipped."""
        gradient = super().receive()
        sent = self._sent_activations.pop(gradient.micro_batch, None)
        if sent is None:
            raise LinkError(f"the step of micro-batch {gradient.micro_batch} was dropped before its gradient came")
        real_BTD, factor_BT1, mask_BT = sent
        if gradient.tensor.shape != real_BTD.shape:
            return gradient  # the pipeline refuses it, and says why
        return Gradient(
            micro_batch=gradient.micro_batch,
            tensor=clip_gradient(gradient.tensor, real_BTD, factor_BT1) * mask_BT[..., None],
            loss_sum=gradient.loss_sum,
            norm_sq=gradient.norm_sq,
        )

    def drop_step(self) -> None:
        """See :class:`DecoderLink`."""
        self._sent_activations.clear()
        super().drop_step()
