"""Table ``[privacy]``: clipping and noise of updates and activations."""

from __future__ import annotations

import math
from dataclasses import dataclass

UPDATE_MECHANISMS = ("local", "server-fixed", "server-adaptive", "client-fixed", "client-adaptive")


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """Table ``[privacy]``. Equal on all clusters and on the server."""

    update_clip: float = 0.0
    """Largest L2 norm of a cluster's update in a round, over all its tensors; 0: any."""
    update_noise: float = 0.0
    """Noise multiplier of the updates: standard deviation over ``update-clip``; 0: none."""
    update_mechanism: str = "local"
    """Place of clipping and noise of updates. ``local``: each control unit its own. The others are Flower's: they noise
    the mean of the updates on the server. ``server-fixed`` and ``server-adaptive`` clip there, too; ``client-fixed``
    and ``client-adaptive`` clip on the clusters. An adaptive clip begins with ``update-clip``."""
    activation_clip: float = 0.0
    """Largest L2 norm of a token's activation that goes to the server; 0: any."""
    activation_noise: float = 0.0
    """Noise multiplier of the activations: standard deviation over ``activation-clip``; 0: none."""
    gradient_clip: float = 0.0
    """Where ``split.labels`` = ``cluster``: largest L2 norm of the gradient of a token's loss that goes to the server;
    0: any."""
    gradient_noise: float = 0.0
    """Noise multiplier of these gradients: standard deviation over ``gradient-clip``; 0: none."""
    max_readable: float = 0.0
    """Largest share of the tokens that an attack may read from activations; ``collapipe leakage --choose`` finds
    settings for it, the run itself obeys those. 0: not said."""
    delta: float = 1e-5
    """Delta that the epsilon spent is reported at."""
    seed: int = -1
    """-1: noise is keyed by the operating system's generator for secrets. From 0 on: the same noise on every run, for
    tests; whoever knows the seed can take it off, so that nothing is guaranteed."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning, or no bound."""
        for target in ("update", "activation", "gradient"):
            clip, noise = getattr(self, f"{target}_clip"), getattr(self, f"{target}_noise")
            for kind, value in (("clip", clip), ("noise", noise)):
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"privacy.{target}-{kind}: expected a number of at least 0, found {value}")
            if noise and not clip:
                raise ValueError(
                    f"privacy.{target}-noise: {noise:g} needs a bound, which the noise is a multiple of; set "
                    f"privacy.{target}-clip above 0"
                )
        if not 0 <= self.max_readable < 1:
            raise ValueError(f"privacy.max-readable: expected a share in [0, 1), found {self.max_readable}")
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
        """True if activations are changed before they are sent."""
        return self.activation_clip > 0

    @property
    def on_gradients(self) -> bool:
        """True if gradients of states are changed before they are sent."""
        return self.gradient_clip > 0

    @property
    def on_updates(self) -> bool:
        """True if a control unit changes updates before it sends them."""
        return self.update_clip > 0 and self.update_mechanism == "local"
