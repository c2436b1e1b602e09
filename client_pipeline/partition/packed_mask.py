"""Several examples in one sequence: their numbers take the place of the padding mask.

A packed mask numbers the examples of each row from 1 on, and has 0 at padding. The tokens of an example see each other
alone, and their positions begin anew::

    mask        1 1 1 2 2 0
    positions   0 1 2 0 1 0
"""

from __future__ import annotations

import torch
from torch import Tensor

PACKED = torch.int16
"""Type of a packed mask; one of padding alone is bool."""


def is_plain(mask_BT: Tensor) -> bool:
    """Return whether nothing is padded and each row is one example."""
    return bool((mask_BT == 1).all())


def library_mask(mask_BT: Tensor | None) -> dict[str, Tensor | None]:
    """Return a mask as the library's decoder-only models take it: of a packed one the positions."""
    if mask_BT is None or mask_BT.dtype != PACKED:
        return {"attention_mask": None if mask_BT is None else mask_BT.long()}
    places = torch.arange(mask_BT.shape[1], device=mask_BT.device).expand_as(mask_BT)
    begins = torch.ones_like(mask_BT, dtype=torch.bool)
    begins[:, 1:] = mask_BT[:, 1:] != mask_BT[:, :-1]
    first_places = (places * begins).cummax(dim=1).values
    return {"attention_mask": None, "position_ids": places - first_places}
