"""Clipping and Gaussian noise for what leaves a cluster: updates, activations, and gradients where labels stay.

Noise is drawn on the control unit, before anything is sent or compressed, so that neither the server nor the network
sees more. It is drawn, scaled and added in float64, and the sum is rounded to the type that is sent::

    update        u = trained - start, all tensors as one vector      u min(1, C / |u|) + N(0, (z C)^2)
    activation    h, one row a token                                  h min(1, C / |h|) + N(0, (z C)^2)
    gradient      of a token's own loss by its states, one row        g min(1, C / |g|) + N(0, (z C)^2)

C is the clip, z the noise multiplier. What that guarantees, and what not: ``docs/threat-model.md``.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray
from torch import Tensor

from client_pipeline.link.base import DecoderLink, ForwardingLink, Gradient, LinkError
from client_pipeline.link.privacy_config import PrivacyConfig
from client_pipeline.partition.dropout_seed import StepId

_PAIRS = 1 << 13
"""Numbers are drawn in parts of so many pairs, which stay in a processor's cache."""


class NoiseSource:
    """Gaussian noise of a cryptographic generator: AES-256 in counter mode, with a new key for every tensor.

    The key is 256 bits of the system's generator for secrets, or for tests the SHA-256 of seed and place. A key of its
    own for each draw lets draws come in any order and from any thread, and no process repeats what another drew.
    """

    def __init__(self, seed: int = -1) -> None:
        self.seed = seed

    def like(self, tensor: Tensor, *place: int | str) -> Tensor:
        """Draw :meth:`normal` noise of a tensor's shape, in float64 whatever its type."""
        return torch.from_numpy(self.normal(tuple(tensor.shape), *place))

    def normal(self, shape: tuple[int, ...], *place: int | str) -> NDArray[np.float64]:
        """Draw standard normal noise.

        Parameters
        ----------
        shape : of the array
        place : names the draw, for those that are to repeat

        Returns
        -------
        float64: noise is to be scaled and added in it, and rounded once, with the sum.
        """
        if self.seed < 0:
            key = secrets.token_bytes(32)
        else:
            key = hashlib.sha256("/".join(map(str, (self.seed, *place))).encode()).digest()
        stream = Cipher(AES(key), CTR(bytes(16))).encryptor()
        number = math.prod(shape)
        values = np.empty(number + number % 2)
        for start in range(0, number, 2 * _PAIRS):
            part = values[start : start + 2 * _PAIRS]
            part[:] = gaussian(stream.update(bytes(8 * len(part))))
        return values[:number].reshape(shape)


def gaussian(random_bytes: bytes) -> NDArray[np.float64]:
    """Box and Muller's transform: of every 16 random bytes two numbers of the standard normal distribution.

    The radius has 64 bits, so that it reaches 9.5 (a normal pair goes beyond with probability 3e-20); the angle has 53.
    """
    pairs = len(random_bytes) // 16
    words = np.frombuffer(random_bytes, dtype="<u8")
    radius = np.sqrt(-2.0 * np.log((words[:pairs].astype(np.float64) + 0.5) * 2.0**-64))
    angle = (words[pairs:] >> np.uint64(11)).astype(np.float64) * (2 * math.pi * 2.0**-53)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])


def clip_tokens(hidden_BTD: Tensor, mask_BT: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Bound each token's activation; padding becomes zero. Returns the rows and their factors [B, T, 1]."""
    hidden_BTD = hidden_BTD * mask_BT[..., None]
    factor_BT1 = (clip / hidden_BTD.norm(dim=-1, keepdim=True).clamp_min(1e-30)).clamp_max(1.0)
    return hidden_BTD * factor_BT1, factor_BT1


def private_activations(
    hidden_BTD: Tensor, mask_BT: Tensor, config: PrivacyConfig, noise: NoiseSource, *place: int | str
) -> Tensor:
    """Clip and noise the activations of a micro-batch as they are sent; padding is zero, as the mask is no secret."""
    return _private_rows(hidden_BTD, mask_BT, config.activation_clip, config.activation_noise, noise, *place)


def private_gradient(
    gradient_BTD: Tensor, mask_BT: Tensor, config: PrivacyConfig, noise: NoiseSource, *place: int | str
) -> Tensor:
    """Clip and noise the gradients of the tokens' losses by their states; also of tokens that have no loss."""
    return _private_rows(gradient_BTD, mask_BT, config.gradient_clip, config.gradient_noise, noise, *place)


def _private_rows(
    rows_BTD: Tensor, mask_BT: Tensor, clip: float, multiplier: float, noise: NoiseSource, *place: int | str
) -> Tensor:
    clipped_BTD, _ = clip_tokens(rows_BTD.double(), mask_BT, clip)
    if multiplier:
        clipped_BTD = clipped_BTD + multiplier * clip * noise.like(clipped_BTD, *place) * mask_BT[..., None]
    return clipped_BTD.to(rows_BTD.dtype)


def clip_gradient(gradient_BTD: Tensor, hidden_BTD: Tensor, factor_BT1: Tensor) -> Tensor:
    """Gradient with respect to activations, given the one with respect to their clipped rows.

    Of y = C h / |h| it is C/|h| (g - h (h.g) / |h|^2); a row that was not clipped keeps its gradient.
    """
    square_BT1 = hidden_BTD.square().sum(-1, keepdim=True).clamp_min(1e-30)
    along_BTD = hidden_BTD * (hidden_BTD * gradient_BTD).sum(-1, keepdim=True) / square_BT1
    return factor_BT1 * torch.where(factor_BT1 < 1, gradient_BTD - along_BTD, gradient_BTD)


def private_update(
    start: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    config: PrivacyConfig,
    noise: NoiseSource,
    *place: int | str,
) -> dict[str, Tensor]:
    """Return the trained weights with their change in the round clipped as one vector, and noised.

    Raises
    ------
    RuntimeError
        If a weight is not finite: its norm says nothing.
    """
    changes = {name: value.double() - start[name].double() for name, value in trained.items()}
    norm = math.sqrt(sum(float(change.square().sum()) for change in changes.values()))
    if not math.isfinite(norm):
        raise RuntimeError("the update holds NaN or Inf: training diverged; lower optimizer.lr")
    factor = min(1.0, config.update_clip / norm) if norm else 1.0
    std = config.update_noise * config.update_clip
    sent = {}
    for name, change in changes.items():
        drawn = std * noise.like(change, *place, name) if std else 0.0
        sent[name] = (start[name].double() + change * factor + drawn).to(trained[name].dtype)
    return sent


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
        self.link.begin_step(step, num_micro_batches, total_weight)

    def send(self, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor, targets: Mapping[str, Tensor]) -> None:
        """Hand over the activations as :func:`private_activations` has them."""
        step = self._step
        place = (step.round, step.step, step.cluster, micro_batch) if step is not None else (micro_batch,)
        # Of a packed mask, too, each token counts once.
        real_BT = mask_BT != 0
        real_BTD = hidden_BTD.detach() * real_BT[..., None]
        self._sent_activations[micro_batch] = (
            real_BTD,
            clip_tokens(real_BTD, real_BT, self.config.activation_clip)[1],
            real_BT,
        )
        private_BTD = private_activations(real_BTD, real_BT, self.config, self.noise, *place)
        self.link.send(micro_batch, private_BTD, mask_BT, targets)

    def receive(self) -> Gradient:
        """Wait for the gradient of the next micro-batch, with respect to its activations before they were clipped."""
        gradient = self.link.receive()
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
        self.link.drop_step()
