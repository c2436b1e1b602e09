"""The masks of SecAgg+, expanded from all bits of their seeds.

Flower's ``pseudo_rand_gen`` folds a seed into 32 bits for a Mersenne twister: a search of some minutes takes a mask
off. :func:`use_whole_seeds` puts :func:`expand_mask` in its place, at both ends of the protocol and nowhere else.
``tests/strategies/aggregation/test_secure_aggregation.py`` fails if Flower moves or renames what is replaced here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

REPLACED = "pseudo_rand_gen"
"""Name of the function in Flower's modules that expand masks: the clients' end, and the server's."""
_FEWEST_BYTES = 32
_PURPOSE = b"collapipe secagg+ mask\0"


def expand_mask(seed: bytes, num_range: int, dimensions_list: Sequence[tuple[int, ...]]) -> list[NDArray[np.int64]]:
    """Expand a seed into uniform whole numbers: AES-256 in counter mode, under the SHA-256 of the seed.

    Parameters
    ----------
    seed : at least 32 bytes; a private seed, or a key that two clients share
    num_range : the numbers are below it; a power of two up to 2^32
    dimensions_list : shape of each array

    Raises
    ------
    ValueError
        For a seed that is too short to hide anything, or another range.
    """
    if len(seed) < _FEWEST_BYTES:
        raise ValueError(f"SecAgg+: expected a seed of at least {_FEWEST_BYTES} bytes, found {len(seed)}")
    if num_range & (num_range - 1) or not 2 <= num_range <= 2**32:
        raise ValueError(f"SecAgg+: expected a range that is a power of two up to 2^32, found {num_range}")
    stream = Cipher(AES(hashlib.sha256(_PURPOSE + seed).digest()), CTR(bytes(16))).encryptor()
    masks = []
    for shape in dimensions_list:
        words = np.frombuffer(stream.update(bytes(4 * int(np.prod(shape, dtype=np.int64)))), dtype="<u4")
        masks.append((words.astype(np.int64) & (num_range - 1)).reshape(shape))
    return masks


def use_whole_seeds() -> None:
    """Have Flower's mod and workflow expand masks by :func:`expand_mask`; to be called before either runs.

    Raises
    ------
    RuntimeError
        If this version of Flower expands masks elsewhere: they would hide nothing.
    """
    from strategies.flower_internals import secaggplus_mod_module, secaggplus_workflow_module

    for module in (secaggplus_mod_module, secaggplus_workflow_module):
        if not hasattr(module, REPLACED):
            raise RuntimeError(
                f"privacy.secure-aggregation: expected {REPLACED} in {module.__name__}, whose masks are of 32 bits; "
                "this version of flwr has none there: install flwr 1.41, or switch secure aggregation off"
            )
        setattr(module, REPLACED, expand_mask)
