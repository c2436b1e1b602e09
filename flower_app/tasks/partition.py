"""Sharing the training examples out over the clusters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flower_app.tasks.corpus import DataConfig, Pairs

Indices = npt.NDArray[np.int64]
LENGTH_CLASSES = 5


def partition(config: DataConfig, pairs: Pairs, num_clusters: int, seed: int) -> list[Indices]:
    """Return the examples of each cluster, as indices into ``pairs``; each example falls on one cluster.

    Raises
    ------
    ValueError
        If a cluster would get no example.
    """
    rng = np.random.default_rng([seed, num_clusters])
    if config.partition == "dirichlet":
        parts = _dirichlet(_labels(pairs), num_clusters, config.dirichlet_alpha, rng)
    else:
        parts = list(np.array_split(rng.permutation(len(pairs)), num_clusters))
    for cluster, part in enumerate(parts):
        if not len(part):
            remedy = "raise data.dirichlet-alpha, change the seed, " if config.partition == "dirichlet" else ""
            raise ValueError(
                f"data.partition = {config.partition}: cluster {cluster} of {num_clusters} gets none of {len(pairs)} "
                f"examples; {remedy}use fewer clusters or more data"
            )
    return parts


def _labels(pairs: Pairs) -> npt.NDArray[np.int64]:
    """Classes to be spread: the label column, or the source length in classes of (nearly) equal size."""
    if pairs.labels is not None:
        return np.unique(np.array(pairs.labels), return_inverse=True)[1].astype(np.int64)
    lengths = np.array([len(source.split()) for source in pairs.sources])
    borders = np.quantile(lengths, np.linspace(0, 1, LENGTH_CLASSES + 1)[1:-1])
    return np.searchsorted(borders, lengths).astype(np.int64)


def _dirichlet(
    labels: npt.NDArray[np.int64], num_clusters: int, alpha: float, rng: np.random.Generator
) -> list[Indices]:
    """Cut each label's examples by proportions drawn from Dirichlet(alpha, ..., alpha)."""
    parts: list[list[Indices]] = [[] for _ in range(num_clusters)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(num_clusters, alpha))
        cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for cluster, piece in enumerate(np.split(members, cuts)):
            parts[cluster].append(piece)
    return [rng.permutation(np.concatenate(part)) for part in parts]
