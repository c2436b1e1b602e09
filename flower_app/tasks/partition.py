"""Sharing the training examples out over the clusters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from flower_app.tasks.corpus import DataConfig, check_files

Indices = npt.NDArray[np.int64]


class Shareable(Protocol):
    """Examples that can be shared out."""

    def __len__(self) -> int:
        """Return the number of examples."""
        ...

    def classes(self) -> list[Hashable]:
        """Return each example's class: what ``dirichlet`` spreads unevenly."""
        ...

    def subset(self, indices: Sequence[int]) -> Self:
        """Return some of the examples."""
        ...


S = TypeVar("S", bound=Shareable)


def training_shares(
    config: DataConfig, load: Callable[[int | None], S], num_clusters: int, seed: int
) -> tuple[list[S], tuple[int, ...]]:
    """Load the training examples of all clusters.

    Parameters
    ----------
    config : says how they are shared out
    load : reads one cluster's file, or with None all examples
    num_clusters, seed : of the run

    Returns
    -------
    The examples, one share for each file; and each cluster's number of them.

    Raises
    ------
    ValueError
        If a cluster would get no example.
    """
    if num_clusters < 1:
        raise ValueError(f"num-clusters: expected at least 1 cluster to share the data out to, found {num_clusters}")
    if config.partition == "files":
        check_files(config, num_clusters)
        shares = [load(cluster) for cluster in range(num_clusters)]
        return shares, tuple(map(len, shares))
    everything = load(None)
    return [everything], tuple(map(len, partition(config, everything, num_clusters, seed)))


def training_share(
    config: DataConfig, load: Callable[[int | None], S], cluster: int, num_clusters: int, seed: int
) -> tuple[S, S]:
    """Load one cluster's training examples, and all that were read for them; see :func:`training_shares`."""
    if config.partition == "files":
        mine = load(cluster)
        return mine, mine
    everything = load(None)
    return everything.subset(partition(config, everything, num_clusters, seed)[cluster].tolist()), everything


def partition(config: DataConfig, examples: Shareable, num_clusters: int, seed: int) -> list[Indices]:
    """Return the examples of each cluster, as indices into ``examples``; each example falls on one cluster.

    Raises
    ------
    ValueError
        If a cluster would get no example.
    """
    rng = np.random.default_rng([seed, num_clusters])
    if config.partition == "dirichlet":
        parts = _dirichlet(_numbered(examples.classes()), num_clusters, config.dirichlet_alpha, rng)
    else:
        parts = list(np.array_split(rng.permutation(len(examples)), num_clusters))
    for cluster, part in enumerate(parts):
        if not len(part):
            remedy = "raise data.dirichlet-alpha, change the seed, " if config.partition == "dirichlet" else ""
            raise ValueError(
                f"data.partition = {config.partition}: cluster {cluster} of {num_clusters} gets none of "
                f"{len(examples)} examples; {remedy}use fewer clusters or more data"
            )
    return parts


def _numbered(classes: list[Hashable]) -> Indices:
    return np.unique(np.array(classes), return_inverse=True)[1].astype(np.int64)


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
