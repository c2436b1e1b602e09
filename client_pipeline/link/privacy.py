"""What leaves a cluster, clipped and with Gaussian noise: the updates of the encoder, and the activations.

Noise is drawn on the control unit, before anything is sent or compressed, so that neither the server nor the network
sees more::

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

import torch
from torch import Tensor

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
    """-1: noise is seeded by the operating system's generator for secrets. From 0 on: the same noise on every run, for
    tests; whoever knows the seed can take it off, so that nothing is guaranteed."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning, or no bound."""
        for what in ("update", "activation"):
            clip, noise = getattr(self, f"{what}_clip"), getattr(self, f"{what}_noise")
            for kind, value in (("clip", clip), ("noise", noise)):
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"privacy.{what}-{kind}: expected a number of at least 0, found {value}")
            if noise and not clip:
                raise ValueError(
                    f"privacy.{what}-noise: {noise:g} times what? Noise hides only what is bounded: set "
                    f"privacy.{what}-clip above 0"
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
            raise ValueError(f"privacy.seed: expected -1, or a number from 0 on, found {self.seed}")

    @property
    def on_activations(self) -> bool:
        """Whether activations are changed before they are sent."""
        return self.activation_clip > 0

    @property
    def on_updates(self) -> bool:
        """Whether a control unit changes updates before it sends them."""
        return self.update_clip > 0 and self.update_mechanism == "local"


class NoiseSource:
    """Gaussian noise, seeded anew for every tensor: by the system's generator for secrets, or for tests by a seed."""

    def __init__(self, seed: int = -1) -> None:
        self.seed = seed

    def like(self, tensor: Tensor, *place: int | str) -> Tensor:
        """Draw standard normal noise of a tensor's shape; ``place`` names the draw, for those that are to repeat."""
        if self.seed < 0:
            seed = secrets.randbits(63)
        else:
            text = "/".join(map(str, (self.seed, *place)))
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


def clip_tokens(hidden_BTD: Tensor, mask_BT: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Bound each token's activation; padding becomes zero. Returns the rows and their factors [B, T, 1]."""
    hidden_BTD = hidden_BTD * mask_BT[..., None]
    factor_BT1 = (clip / hidden_BTD.norm(dim=-1, keepdim=True).clamp_min(1e-30)).clamp_max(1.0)
    return hidden_BTD * factor_BT1, factor_BT1


def private_activations(
    hidden_BTD: Tensor, mask_BT: Tensor, config: PrivacyConfig, noise: NoiseSource, *place: int | str
) -> Tensor:
    """Clip and noise the activations of a micro-batch as they are sent; padding is zero, as the mask is no secret."""
    rows_BTD, _ = clip_tokens(hidden_BTD, mask_BT, config.activation_clip)
    if not config.activation_noise:
        return rows_BTD
    std = config.activation_noise * config.activation_clip
    return rows_BTD + std * noise.like(rows_BTD, *place) * mask_BT[..., None]


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
    changes = {name: value - start[name].to(value.dtype) for name, value in trained.items()}
    norm = math.sqrt(sum(float(change.double().square().sum()) for change in changes.values()))
    if not math.isfinite(norm):
        raise RuntimeError("the update holds NaN or Inf: training diverged; lower optimizer.lr")
    factor = min(1.0, config.update_clip / norm) if norm else 1.0
    std = config.update_noise * config.update_clip
    sent = {}
    for name, change in changes.items():
        drawn = std * noise.like(change, *place, name) if std else 0.0
        sent[name] = start[name].to(change.dtype) + change * factor + drawn
    return sent
