"""Compression of the traffic: updates of the control plane, activations and gradients of the data plane."""

from __future__ import annotations

import math
from dataclasses import dataclass

UPDATES = ("none", "fp16", "int8", "int4", "top-k")
ACTIVATIONS = ("none", "fp16", "int8", "int4", "int2")


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Table ``[compression]``. Equal on all clusters and on the server."""

    update: str = "none"
    """Answer of a control unit: ``none``, the trained weights; or their change in the round, as ``fp16`` or ``int8``
    numbers with a scale for each tensor, as ``int4`` ones with a scale for each 32 numbers, too, or as ``top-k``, the
    largest changes alone. What is lost is added to the next round's (error feedback)."""
    density: float = 0.01
    """``top-k``: share of each tensor's numbers that is sent."""
    activations: str = "none"
    """Activations and their gradients, between devices and on the decoder's stream: ``none``, float32; ``fp16`` or
    ``int8`` numbers with a scale for each token; ``int4`` or ``int2`` ones with a scale for each 32 numbers, too."""
    stream: str = ""
    """The same of the decoder's stream alone; empty: as ``activations``."""
    cache_gb: float = 0.0
    """Room for activations on the server's disk, for each cluster, whose TEBs are all frozen (``lora.first-block``):
    each example's are sent once, and kept until the run ends. 0: they are sent in every step [GiB]."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for name, known in (("update", UPDATES), ("activations", ACTIVATIONS)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"compression.{name}: expected one of {', '.join(known)}, found {value!r}")
        if self.stream and self.stream not in ACTIVATIONS:
            raise ValueError(f"compression.stream: expected one of {', '.join(ACTIVATIONS)}, found {self.stream!r}")
        if not (math.isfinite(self.cache_gb) and self.cache_gb >= 0):
            raise ValueError(f"compression.cache-gb: expected a number of 0 or more, found {self.cache_gb}")
        if not 0 < self.density <= 1:
            raise ValueError(f"compression.density: expected a number in (0, 1], found {self.density}")

    @property
    def of_stream(self) -> str:
        """Form of activations and gradients on the decoder's stream: one of :data:`ACTIVATIONS`."""
        return self.stream or self.activations
