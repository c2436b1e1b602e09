"""The order in which a control unit goes through its examples: shuffled each epoch, the same on every run."""

from __future__ import annotations

import numpy as np


class DataOrder:
    """Endless batches of example indices; an epoch's last batch goes on with the next epoch's first examples.

    Raises
    ------
    ValueError
        If there are fewer examples than a batch holds.
    """

    def __init__(self, num_examples: int, batch_size: int, seed: int, cluster: int) -> None:
        if num_examples < batch_size:
            raise ValueError(
                f"cluster {cluster} has {num_examples} training examples, fewer than batch-size = {batch_size}; "
                "lower batch-size, use fewer clusters or give it more data"
            )
        self.num_examples = num_examples
        self.batch_size = batch_size
        self._key = (seed, cluster)
        self._drawn = 0
        self._permuted: tuple[int, np.ndarray] | None = None
        """Epoch, and its examples in their order."""

    @property
    def drawn(self) -> int:
        """Examples drawn so far: all the state there is."""
        return self._drawn

    def go_to(self, drawn: int) -> None:
        """Go on as if so many examples had been drawn."""
        self._drawn = drawn

    def next_batch(self) -> list[int]:
        """Indices of the next b examples."""
        batch: list[int] = []
        while len(batch) < self.batch_size:
            epoch, position = divmod(self._drawn, self.num_examples)
            piece = self._permutation(epoch)[position : position + self.batch_size - len(batch)]
            batch.extend(int(i) for i in piece)
            self._drawn += len(piece)
        return batch

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._permuted is None or self._permuted[0] != epoch:
            self._permuted = epoch, np.random.default_rng([*self._key, epoch]).permutation(self.num_examples)
        return self._permuted[1]
