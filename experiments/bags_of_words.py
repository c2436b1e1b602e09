"""Softmax regression on bags of words over clusters of unequal data: a loss that keeps Theorem 1's conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from flower_app.config.run_config import RunConfig
from flower_app.tasks.base import task
from flower_app.tasks.trained_labels import labels_of

_HELD_OUT = 5
"""Examples of a cluster for each one that is held out."""


class BagsOfWords:
    """F(w) = mean over N clusters of F_n(w): cross-entropy of the cluster's own examples, with a ridge.

    Parameters
    ----------
    config : a run's, with a task of one label for a text: ``task``, ``data``, ``batch-size`` and ``seed`` count
    num_clusters : N
    alpha : of the Dirichlet partition by label; 0: IID
    ridge : mu

    Raises
    ------
    ValueError
        For data that cannot be shared out, or a cluster with fewer examples to train on than a batch.
    """

    def __init__(self, config: RunConfig, num_clusters: int, alpha: float, ridge: float) -> None:
        dirichlet = {"partition": "dirichlet", "dirichlet_alpha": alpha}
        data = replace(config.data, **dirichlet) if alpha else config.data  # type: ignore[arg-type]
        chosen = task(config.task)
        prepared = chosen.prepare(data, config.model, config.seed, num_clusters)
        self.batch_size, self.ridge = config.batch_size, ridge
        self._train: list[tuple[Tensor, Tensor]] = []
        """Words of each cluster's training examples, [E, D], and their labels as rows of 0 and 1, [E, C]."""
        self._held_out: list[tuple[Tensor, Tensor]] = []
        for n in range(num_clusters):
            share = chosen.cluster_data(data, prepared.tokenizer_json, n, num_clusters, config.seed)
            batch = share.collate(range(len(share)))
            x_ED = _bags(batch["input_ids"], batch["attention_mask"], config.data.vocab_size)
            y_EC = torch.nn.functional.one_hot(batch["labels"], len(labels_of(prepared.spec))).double()
            order = torch.from_numpy(np.random.default_rng([config.seed, n]).permutation(len(share)))
            train, held_out = order[len(share) // _HELD_OUT :], order[: len(share) // _HELD_OUT]
            if len(train) < config.batch_size or not len(held_out):
                raise ValueError(
                    f"cluster {n} has {len(train)} examples to train on, fewer than batch-size = {config.batch_size}; "
                    "lower batch-size or use more data"
                )
            self._train.append((x_ED[train], y_EC[train]))
            self._held_out.append((x_ED[held_out], y_EC[held_out]))
        # Of softmax the Hessian is at most half the second moments'.
        moments = sum(x_ED.T @ x_ED / len(x_ED) for x_ED, _ in self._train) / num_clusters
        self.smoothness = 0.5 * float(torch.linalg.eigvalsh(torch.as_tensor(moments))[-1]) + ridge
        """beta."""

    def start(self) -> Tensor:
        """Begin at 0, [D, C]."""
        x_ED, y_EC = self._train[0]
        return torch.zeros(x_ED.shape[1], y_EC.shape[1], dtype=torch.float64)

    def objective(self, w_DC: Tensor) -> float:
        """F(w) [nat]."""
        losses = [_cross_entropy(x_ED @ w_DC, y_EC) for x_ED, y_EC in self._train]
        return float(torch.stack(losses).mean() + self.ridge / 2 * w_DC.square().sum())

    def sample(self, w_DC: Tensor, cluster: int, generator: np.random.Generator) -> Tensor:
        """Gradient of F_n over a random batch, [D, C]; a batch holds no example twice."""
        x_ED, y_EC = self._train[cluster]
        chosen = torch.from_numpy(generator.permutation(len(x_ED))[: self.batch_size])
        return _gradient(w_DC, x_ED[chosen], y_EC[chosen]) + self.ridge * w_DC

    def sampling_error(self, w_DC: Tensor) -> float:
        """phi^2 = E|g_n - grad F_n|^2, the mean over the clusters: exact, of batches drawn without replacement."""
        errors = []
        for x_ED, y_EC in self._train:
            residual_EC = torch.softmax(x_ED @ w_DC, dim=1) - y_EC
            squares = (x_ED.square().sum(dim=1) * residual_EC.square().sum(dim=1)).mean()
            spread = squares - (x_ED.T @ residual_EC / len(x_ED)).square().sum()
            rest = (len(x_ED) - self.batch_size) / max(len(x_ED) - 1, 1) / self.batch_size
            errors.append(rest * float(spread))
        return float(np.mean(errors))

    def accuracies(self, w_DC: Tensor) -> list[float]:
        """Share of each cluster's held-out examples whose label is found, (N,)."""
        return [
            float((torch.argmax(x_ED @ w_DC, dim=1) == torch.argmax(y_EC, dim=1)).double().mean())
            for x_ED, y_EC in self._held_out
        ]


def averaged_gradient(
    problem: BagsOfWords, w_DC: Tensor, errors: Mapping[int, float], seed: int, number: int
) -> Tensor:
    """Mean of what arrives of the clusters' gradients in a round, [D, C].

    Parameters
    ----------
    problem, w_DC : whose gradients, and where
    errors : of each cluster that trains, the mean square of its upload's error
    seed, number : of the run and the round. Batches and errors are the same whoever else trains.
    """
    mean_DC = torch.zeros_like(w_DC)
    for n, mean_square in errors.items():
        generator = np.random.default_rng([seed, number, n])
        gradient_DC = problem.sample(w_DC, n, generator)
        mean_DC += (gradient_DC + upload_error(gradient_DC, mean_square, generator)) / len(errors)
    return mean_DC


def upload_error(gradient_DC: Tensor, mean_square: float, generator: np.random.Generator) -> Tensor:
    """Draw a channel's error of a gradient: Gaussian, E|e|^2 = ``mean_square``, the same in every number, [D, C]."""
    drawn = torch.from_numpy(generator.standard_normal(tuple(gradient_DC.shape)))
    return drawn * (mean_square / gradient_DC.numel()) ** 0.5


def _bags(ids_ET: Tensor, mask_ET: Tensor, vocabulary: int) -> Tensor:
    """Return the words of each text as 0 and 1 with a 1 for the intercept, each row scaled to length one, [E, D]."""
    x_ED = torch.zeros(len(ids_ET), vocabulary + 1, dtype=torch.float64)
    x_ED.scatter_(1, torch.where(mask_ET, ids_ET, vocabulary), 1.0)
    x_ED[:, -1] = 1.0
    return x_ED / x_ED.norm(dim=1, keepdim=True)


def _cross_entropy(logits_EC: Tensor, y_EC: Tensor) -> Tensor:
    return -(torch.log_softmax(logits_EC, dim=1) * y_EC).sum(dim=1).mean()


def _gradient(w_DC: Tensor, x_ED: Tensor, y_EC: Tensor) -> Tensor:
    return x_ED.T @ (torch.softmax(x_ED @ w_DC, dim=1) - y_EC) / len(x_ED)
