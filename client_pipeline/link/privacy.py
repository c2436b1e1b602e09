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
from dataclasses import dataclass

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray
from torch import Tensor

_PAIRS = 1 << 13
"""Numbers are drawn in parts of so many pairs, which stay in a processor's cache."""
UPDATE_MECHANISMS = ("local", "server-fixed", "server-adaptive", "client-fixed", "client-adaptive")


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """Table ``[privacy]``. Equal on all clusters and on the server."""

    update_clip: float = 0.0
    """Largest L2 norm of a cluster's update in a round, over all its tensors; 0: any."""
    update_noise: float = 0.0
    """Noise multiplier of the updates: standard deviation over ``update-clip``; 0: none."""
    update_mechanism: str = "local"
    """Who clips and noises updates. ``local``: each control unit its own. The others are Flower's, which noise the mean
    of the updates on the server: ``server-fixed`` and ``server-adaptive`` clip there, too, ``client-fixed`` and
    ``client-adaptive`` on the clusters; an adaptive clip begins with ``update-clip``."""
    activation_clip: float = 0.0
    """Largest L2 norm of a token's activation that goes to the server; 0: any."""
    activation_noise: float = 0.0
    """Noise multiplier of the activations: standard deviation over ``activation-clip``; 0: none."""
    secure_aggregation: bool = False
    """Whether the server learns the mean of the updates alone, by SecAgg+. It still sees all activations."""
    delta: float = 1e-5
    """Delta that the epsilon spent is reported at."""
    seed: int = -1
    """-1: noise is keyed by the operating system's generator for secrets. From 0 on: the same noise on every run, for
    tests; whoever knows the seed can take it off, so that nothing is guaranteed."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning, or no bound."""
        for target in ("update", "activation"):
            clip, noise = getattr(self, f"{target}_clip"), getattr(self, f"{target}_noise")
            for kind, value in (("clip", clip), ("noise", noise)):
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"privacy.{target}-{kind}: expected a number of at least 0, found {value}")
            if noise and not clip:
                raise ValueError(
                    f"privacy.{target}-noise: {noise:g} needs a bound, which the noise is a multiple of; set "
                    f"privacy.{target}-clip above 0"
                )
        if self.update_mechanism not in UPDATE_MECHANISMS:
            raise ValueError(
                f"privacy.update-mechanism: expected one of {', '.join(UPDATE_MECHANISMS)}, found "
                f"{self.update_mechanism!r}"
            )
        if self.update_mechanism != "local" and not self.update_clip:
            raise ValueError(f"privacy.update-mechanism: {self.update_mechanism} needs privacy.update-clip above 0")
        if self.update_mechanism != "local" and self.seed >= 0:
            raise ValueError(
                f"privacy.seed: the noise of {self.update_mechanism} is Flower's, which takes no seed; leave it -1"
            )
        if not 0 < self.delta < 1:
            raise ValueError(f"privacy.delta: expected a number in (0, 1), found {self.delta}")
        if self.seed < -1:
            raise ValueError(f"privacy.seed: expected -1 or a number of at least 0, found {self.seed}")

    @property
    def on_activations(self) -> bool:
        """Whether activations are changed before they are sent."""
        return self.activation_clip > 0

    @property
    def on_updates(self) -> bool:
        """Whether a control unit changes updates before it sends them."""
        return self.update_clip > 0 and self.update_mechanism == "local"


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
