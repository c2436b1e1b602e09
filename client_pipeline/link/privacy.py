"""What leaves a cluster, clipped and with Gaussian noise: the updates of the encoder, and the activations.

Noise is drawn on the control unit, before anything is sent or compressed, so that neither the server nor the network
sees more. It is drawn, scaled and added in float64, and the sum is rounded to the type that is sent::

    update        u = trained - start, all tensors as one vector      u min(1, C / |u|) + N(0, (z C)^2)
    activation    h, one row a token                                  h min(1, C / |h|) + N(0, (z C)^2)

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

from client_pipeline.link.privacy_config import PrivacyConfig

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
    rows_BTD, _ = clip_tokens(hidden_BTD.double(), mask_BT, config.activation_clip)
    if config.activation_noise:
        std = config.activation_noise * config.activation_clip
        rows_BTD = rows_BTD + std * noise.like(rows_BTD, *place) * mask_BT[..., None]
    return rows_BTD.to(hidden_BTD.dtype)


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
