"""The decoder's weights and optimizers: one decoder for all clusters, and in mode ``round`` a copy for each."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from client_pipeline.link.base import Gradient
from client_pipeline.partition.parts import load_parameters
from client_pipeline.runtime.stage.accelerator import on_host
from client_pipeline.runtime.stage.decoder_update import Contribution, HeadTrainer
from strategies.decoder.member import ClusterSummary, MicroBatch, NotFiniteRefusal, Refusal, is_finite


@contextmanager
def _refusing(micro_batch: int) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
        raise Refusal(f"the decoder cannot take micro-batch {micro_batch}: {error}"[:500]) from error


def _checked(
    trainer: HeadTrainer, cluster: int, micro_batch: int, tensor: Tensor, loss_sum: float, is_last: bool
) -> Gradient:
    """Return the answer to a micro-batch, with the norm of the decoder's gradient after a step's last."""
    norm_sq = trainer.gradient_norm_sq(cluster) if is_last else None
    if not (math.isfinite(loss_sum) and is_finite(tensor) and math.isfinite(norm_sq or 0.0)):
        raise NotFiniteRefusal(
            f"loss or gradient of micro-batch {micro_batch} is not finite: training diverged; "
            "lower optimizer.lr or set optimizer.clip-norm"
        )
    return Gradient(micro_batch=micro_batch, tensor=tensor, loss_sum=loss_sum, norm_sq=norm_sq)


class DecoderCopies:
    """The decoder of a run, and each cluster's copy of it.

    ``lock`` guards all of it. Callers of a method marked *held* hold it; the other methods take it themselves.

    Parameters
    ----------
    shared : the decoder with its optimizer
    """

    def __init__(self, shared: HeadTrainer) -> None:
        self.shared = shared
        self.by_cluster: dict[int, HeadTrainer] = {}
        """Copies, made when their cluster first needs one. They keep their optimizer's state over the rounds."""
        self.lock = threading.Lock()

    def of(self, cluster: int, sync: str) -> HeadTrainer:
        """Return the decoder that a cluster trains in a mode; held."""
        if sync == "step":
            return self.shared
        if cluster not in self.by_cluster:
            self.by_cluster[cluster] = self.shared.copy()
        return self.by_cluster[cluster]

    def state(self) -> dict[str, Tensor]:
        """Optimizer state, for a checkpoint: ``decoder/...``, and ``copy-n/...`` for each copy."""
        with self.lock:
            trainers = {"decoder": self.shared} | {f"copy-{n}": copy for n, copy in sorted(self.by_cluster.items())}
            return {
                f"{part}/{key}": value
                for part, trainer in trainers.items()
                for key, value in trainer.optimizer.state().items()
            }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from :meth:`state`."""
        by_part: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            part, _, name = key.partition("/")
            by_part.setdefault(part, {})[name] = value
        with self.lock:
            self.shared.optimizer.load_state(by_part.pop("decoder", {}))
            for part, values in by_part.items():
                copy = self.by_cluster[int(part.removeprefix("copy-"))] = self.shared.copy()
                copy.optimizer.load_state(values)

    def hand_out(self) -> None:
        """Give every copy the decoder's weights; held."""
        weights = {name: p.detach() for name, p in self.shared.parameters.items()}
        for copy in self.by_cluster.values():
            load_parameters(copy.parameters, weights, "decoder")

    def gradient(
        self, cluster: int, sync: str, batch: MicroBatch, total_weight: float, tied: Mapping[str, Tensor]
    ) -> Gradient:
        """Run a cluster's decoder forward and backward on one micro-batch; held.

        Raises
        ------
        Refusal
            If the decoder cannot take it, or something of it is not finite.
        """
        trainer = self.of(cluster, sync)
        with _refusing(batch.micro_batch):
            tensor, loss_sum = trainer.gradient(
                batch.step, batch.micro_batch, batch.hidden_BTD, batch.mask_BT, batch.targets, total_weight, tied
            )
        is_last = batch.micro_batch == batch.num_micro_batches - 1
        return _checked(trainer, cluster, batch.micro_batch, tensor, loss_sum, is_last)

    def states(self, cluster: int, sync: str, batch: MicroBatch) -> Tensor:
        """Run a cluster's blocks forward on a micro-batch whose labels stay there; held. Errors are those above."""
        with _refusing(batch.micro_batch):
            states = self.of(cluster, sync).states(batch.step, batch.micro_batch, batch.hidden_BTD, batch.mask_BT)
        if not is_finite(states):
            raise NotFiniteRefusal(f"states of micro-batch {batch.micro_batch} are not finite: training diverged")
        return states

    def backward(self, cluster: int, sync: str, micro_batch: int, gradient_BTD: Tensor, *, is_last: bool) -> Gradient:
        """Run a cluster's blocks backward on the gradient of their states; held. Errors are those above.

        The answer's loss is 0: the cluster keeps its own.
        """
        trainer = self.of(cluster, sync)
        with _refusing(micro_batch):
            tensor = trainer.backward(cluster, micro_batch, gradient_BTD)
        return _checked(trainer, cluster, micro_batch, tensor, 0.0, is_last)

    def apply(self, shares: Sequence[Contribution], sync: str, number: int) -> None:
        """Take a step, Eq. (7), on the gradients of ``shares``; held. ``number``: of the step in the whole run."""
        self.of(shares[0].cluster, sync).apply(shares, number)

    def finish(
        self, clusters: Mapping[int, ClusterSummary], sync: str, weights: Mapping[int, float] | None
    ) -> dict[str, Tensor]:
        """Forget the gradients of unclosed steps, and return the decoder's weights, which are not copied.

        Parameters
        ----------
        clusters : of the round
        sync : its mode; in ``round`` the clusters' copies are averaged into the decoder
        weights : see :meth:`strategies.decoder.trainer.DecoderTrainer.finish_round`

        Raises
        ------
        ValueError
            If ``weights`` names a cluster that trained no step.
        """
        with self.lock:
            self._discard(clusters)
            if sync == "round":
                self._average(clusters, weights)
            return on_host({name: p.detach() for name, p in self.shared.parameters.items()})

    def _discard(self, clusters: Iterable[int]) -> None:
        for cluster in clusters:
            self.shared.discard(cluster)
            if cluster in self.by_cluster:
                self.by_cluster[cluster].discard(cluster)

    def _average(self, clusters: Mapping[int, ClusterSummary], weights: Mapping[int, float] | None) -> None:
        """Average the clusters' copies into the decoder, in cluster order."""
        if weights is None:
            weights = {cluster: s.weight for cluster, s in clusters.items() if s.steps and s.departure is None}
        idle = sorted(c for c in weights if c not in clusters or not clusters[c].steps)
        if idle:
            raise ValueError(f"average of the decoder: clusters {idle} have a weight but trained no step of it")
        total = sum(weights.values())
        if not total > 0:
            return  # no cluster trained: the decoder stays as it is
        with torch.no_grad():
            for name, parameter in self.shared.parameters.items():
                mean = torch.zeros_like(parameter)
                for cluster in sorted(weights):
                    mean.add_(self.by_cluster[cluster].parameters[name], alpha=weights[cluster] / total)
                parameter.copy_(mean)
