"""Sharing the training examples out over the clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from flower_app.tasks.data.corpus import OWN_FILES, Classes, DataConfig, count_files

IndexArray = npt.NDArray[np.int64]


class Shareable(Protocol):
    """Examples that can be shared out."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def classes(self) -> Classes:
        """Return each example's class: what ``dirichlet``, ``pathological`` and ``natural-id`` go by."""

    def subset(self, indices: IndexArray) -> Self:
        """Return some of the examples."""


S = TypeVar("S", bound=Shareable)


def weighted_split(config: DataConfig, data_shares: Sequence[float]) -> DataConfig:
    """Weigh the even split by what a scenario says of its clusters' data.

    Returns
    -------
    The same where all weigh the same; else ``iid`` has become ``size``, with the weights as its numbers.

    Raises
    ------
    ValueError
        If another partition decides who gets how much.
    """
    if len(set(data_shares)) < 2:
        return config
    if config.partition != "iid":
        unequal = ", ".join([f"{share:g}" for share in data_shares[:6]] + ["..."] * (len(data_shares) > 6))
        raise ValueError(
            f"data.partition = {config.partition}: the scenario gives its clusters the data-share {unequal}, which "
            'weighs data.partition = "iid" alone; expected that, or a scenario without data-share'
        )
    return replace(config, partition="size", partition_sizes=",".join(repr(share) for share in data_shares))


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
    The examples, one share for each file; and each cluster's number of them. Neither, if they are the nodes' alone.

    Raises
    ------
    ValueError
        If a cluster would get no example.
    """
    if num_clusters < 1:
        raise ValueError(f"num-clusters: expected at least 1 cluster to share the data out to, found {num_clusters}")
    if config.partition == "nodes":
        return [], ()
    if config.partition == "files":
        num_files = count_files(config)
        if num_files < num_clusters:
            absent = config.train_source.replace("{cluster}", str(num_files))
            raise ValueError(
                f"data.train-source: expected a file for each of {num_clusters} clusters, found {num_files}: no "
                f"{absent} in {config.path or 'the working directory'}"
            )
        shares = [load(cluster) for cluster in range(num_clusters)]
        return shares, tuple(map(len, shares))
    everything = load(None)
    return [everything], tuple(map(len, split_data(config, everything, num_clusters, seed)))


def training_share(
    config: DataConfig, load: Callable[[int | None], S], cluster: int, num_clusters: int, seed: int
) -> tuple[S, S]:
    """Load one cluster's training examples, and all that were read for them; see :func:`training_shares`."""
    if config.partition in OWN_FILES:
        cluster_text = load(cluster)
        return cluster_text, cluster_text
    everything = load(None)
    return everything.subset(split_data(config, everything, num_clusters, seed)[cluster]), everything


def split_data(config: DataConfig, examples: Shareable, num_clusters: int, seed: int) -> list[IndexArray]:
    """Return the examples of each cluster, as sorted indices into ``examples``; each example falls on one cluster.

    The names and the meaning of the partitions are those of ``flwr-datasets``' partitioners.

    Raises
    ------
    ValueError
        If a cluster would get no example, or the partition does not fit the data; the message names the key.
    """
    rng = np.random.default_rng([seed, num_clusters])
    parts = _SPLITS[config.partition](config, examples, num_clusters, rng)
    for cluster, part in enumerate(parts):
        if not len(part):
            raise ValueError(
                f"data.partition = {config.partition}: cluster {cluster} of {num_clusters} gets none of "
                f"{len(examples)} examples; {_REMEDIES.get(config.partition, '')}use fewer clusters or more data"
            )
    return [np.sort(part) for part in parts]


def _by_size(weights: npt.ArrayLike, examples: Shareable, rng: np.random.Generator) -> list[IndexArray]:
    """Draw at random as many examples for each cluster as its share of the weights says."""
    share = np.cumsum(np.asarray(weights, dtype=np.float64))
    cuts = np.round(share[:-1] / share[-1] * len(examples)).astype(np.int64)
    return list(np.split(rng.permutation(len(examples)), cuts))


def _iid(config: DataConfig, examples: Shareable, num_clusters: int, rng: np.random.Generator) -> list[IndexArray]:
    return list(np.array_split(rng.permutation(len(examples)), num_clusters))


def _size(config: DataConfig, examples: Shareable, num_clusters: int, rng: np.random.Generator) -> list[IndexArray]:
    if config.partition in _WEIGHTS:
        return _by_size(_WEIGHTS[config.partition](np.arange(num_clusters)), examples, rng)
    weights = config.sizes()
    if len(weights) != num_clusters:
        raise ValueError(
            f"data.partition-sizes: expected a number for each of {num_clusters} clusters, found {len(weights)}: "
            f"{config.partition_sizes!r}"
        )
    return _by_size(weights, examples, rng)


def _dirichlet(
    config: DataConfig, examples: Shareable, num_clusters: int, rng: np.random.Generator
) -> list[IndexArray]:
    """Cut each class's examples by proportions drawn from Dirichlet(alpha, ..., alpha)."""
    parts: list[list[IndexArray]] = [[] for _ in range(num_clusters)]
    for members in _members(examples):
        members = rng.permutation(members)
        shares = rng.dirichlet(np.full(num_clusters, config.dirichlet_alpha))
        cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
        for cluster, piece in enumerate(np.split(members, cuts)):
            parts[cluster].append(piece)
    return [np.concatenate(part) for part in parts]


def _pathological(
    config: DataConfig, examples: Shareable, num_clusters: int, rng: np.random.Generator
) -> list[IndexArray]:
    """Deal the classes out, so many to each cluster; clusters with the same class share its examples evenly."""
    classes, classes_each = _members(examples), config.classes_per_cluster
    least = -(-len(classes) // num_clusters)
    if not least <= classes_each <= len(classes):
        raise ValueError(
            f"data.classes-per-cluster: expected between {least} and {len(classes)}, so that {num_clusters} clusters "
            f"hold all of {len(classes)} classes, found {classes_each}"
        )
    dealt = rng.permutation(len(classes))
    owners: list[list[int]] = [[] for _ in classes]
    for slot in range(num_clusters * classes_each):
        owners[dealt[slot % len(classes)]].append(slot // classes_each)
    parts: list[list[IndexArray]] = [[] for _ in range(num_clusters)]
    for members, owner in zip(classes, owners, strict=True):
        for cluster, piece in zip(owner, np.array_split(rng.permutation(members), len(owner)), strict=True):
            parts[cluster].append(piece)
    return [np.concatenate(part) for part in parts]


def _natural_id(
    config: DataConfig, examples: Shareable, num_clusters: int, rng: np.random.Generator
) -> list[IndexArray]:
    """Keep the examples of a class (a domain, a writer) together, on cluster i mod N."""
    classes = _members(examples)
    return [np.concatenate([*classes[cluster::num_clusters], np.zeros(0, np.int64)]) for cluster in range(num_clusters)]


def _members(examples: Shareable) -> list[IndexArray]:
    """Examples of each class, the classes sorted."""
    classes = examples.classes()
    known = classes if isinstance(classes, np.ndarray) else np.array(list(classes))
    numbers, counts = np.unique(known, return_inverse=True, return_counts=True)[1:]
    return list(np.split(np.argsort(numbers, kind="stable").astype(np.int64), np.cumsum(counts)[:-1]))


_SPLITS: dict[str, Callable[[DataConfig, Shareable, int, np.random.Generator], list[IndexArray]]] = {
    "iid": _iid,
    "size": _size,
    "linear": _size,
    "square": _size,
    "exponential": _size,
    "dirichlet": _dirichlet,
    "pathological": _pathological,
    "natural-id": _natural_id,
}
_WEIGHTS: dict[str, Callable[[IndexArray], npt.ArrayLike]] = {
    "linear": lambda n: n + 1,
    "square": lambda n: (n + 1) ** 2,
    "exponential": np.exp,
}
"""Name of a partition -> relative size of cluster n's share."""
_REMEDIES = {
    "dirichlet": "raise data.dirichlet-alpha, change the seed, ",
    "size": "raise its number in data.partition-sizes, ",
}
