"""Epsilon at a given delta of the noise on updates and activations so far, by opacus's accountant.

Every release is a Gaussian mechanism without sampling. Their composition is one, too: multipliers z_i give
1/z^2 = sum 1/z_i^2. Two inputs are neighbours if one is replaced by another. That may reverse a vector of norm C, and
moves it by 2 C at most:

    update           all of a cluster's text of the round       2 C             z / 2
    one example      of T tokens, each row at most C            2 C sqrt(T)     z / (2 sqrt T)
    one cluster      of its N tokens sent so far, each          2 C sqrt(N)     z / (2 sqrt N)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from client_pipeline.link.privacy_config import PrivacyConfig

_ORDERS = [1 + 2.0**-k for k in range(12, 0, -1)] + [2 + x / 10 for x in range(90)] + [2.0**k for k in range(4, 15)]


@dataclass
class Sent:
    """Activations that the server has received of one cluster."""

    examples: int = 0
    recalled: int = 0
    """Examples whose activations were here already (``compression.cache-gb``): no further release."""
    tokens: int = 0
    longest: int = 0
    """Tokens of its longest example."""
    repeats: int = 0
    """Steps that were begun again, or broke off: their examples may come once more."""
    step: tuple[int, int] = (0, 0)
    """Round and step of the micro-batch that came last."""
    step_examples: int = 0
    """Examples of that step."""
    micro_batch: int = 0
    """Number of that micro-batch."""

    def add(self, step: tuple[int, int], micro_batch: int, mask_BT: Tensor) -> bool:
        """Note a micro-batch, whatever the decoder makes of it; returns whether it begins a step again."""
        # A step may begin with micro-batches whose activations are here already.
        is_repeat = step < self.step or (step == self.step and micro_batch <= self.micro_batch)
        self.repeats += is_repeat
        self.step, self.micro_batch = step, micro_batch
        # The mask is not checked yet: examples without lengths count as one token each.
        lengths = (mask_BT != 0).sum(-1) if mask_BT.ndim == 2 else mask_BT.new_ones(mask_BT.shape[:1].numel())
        self.count_step(micro_batch, lengths.numel())
        self.examples += lengths.numel()
        self.tokens += int(lengths.sum())
        self.longest = max(self.longest, int(lengths.max()) if lengths.numel() else 0)
        return is_repeat

    def count_step(self, micro_batch: int, examples: int) -> None:
        """Count examples of a micro-batch to those of its step, whose first one begins the count anew."""
        self.step_examples = examples + (0 if micro_batch == 0 else self.step_examples)

    def count_repeat(self) -> None:
        """Note a step that broke off: its examples may come once more."""
        self.repeats += 1


class PrivacyAccountant:
    """Account of each cluster's releases in a run.

    Parameters
    ----------
    config : clips, noise and delta
    num_examples : training examples of each cluster, by its index
    returns_gradients : whether clusters whose labels stay send gradients that say them

    Raises
    ------
    ValueError
        If there is noise to account for, and opacus is not installed.
    """

    def __init__(self, config: PrivacyConfig, num_examples: Mapping[int, int], returns_gradients: bool = False) -> None:
        self.config, self._returns_gradients = config, returns_gradients
        self.num_examples = dict(num_examples)
        self.updates: dict[int, int] = {}
        """Rounds in which an update was requested, by cluster."""
        self.sent: dict[int, Sent] = {}
        if self.on:
            epsilon(1.0, config.delta)

    @property
    def on(self) -> bool:
        """True if there is noise to account for."""
        return max(self.config.update_noise, self.config.activation_noise, self.config.gradient_noise) > 0

    def count_round(self, trained: Iterable[int], failed: Iterable[int], sent_by_cluster: Mapping[int, Sent]) -> None:
        """Note a round: the clusters that trained or failed, and the activations received of each so far.

        A cluster that failed may still have sent activations, and may begin its round again.
        """
        failed = list(failed)
        for cluster in failed:
            if cluster in sent_by_cluster:
                sent_by_cluster[cluster].count_repeat()
        for cluster in (*trained, *failed):
            self.updates[cluster] = self.updates.get(cluster, 0) + 1
        self.sent = dict(sent_by_cluster)

    def record(self) -> dict[str, Any]:
        """Return the largest privacy loss of any cluster, as JSON values; ``docs/threat-model.md`` explains them."""
        config = self.config
        record: dict[str, Any] = {"delta": config.delta, "seeded": config.seed >= 0}
        clusters = sorted(self.num_examples)
        inverse_squares = dict.fromkeys(clusters, 0.0)
        if config.update_noise:
            releases = max(self.updates.values(), default=0)
            record["updates"] = {
                "unit": "cluster",
                "mechanism": config.update_mechanism,
                "releases": releases,
                "epsilon": self._updates(releases),
            }
            for cluster in clusters:
                inverse_squares[cluster] += 4 * self.updates.get(cluster, 0) / config.update_noise**2
        # Each activation that was sent has one gradient, where these are sent.
        for name, noise in (("activations", config.activation_noise), ("gradients", config.gradient_noise)):
            if not noise:
                continue
            uses = {cluster: self._uses(cluster) for cluster in clusters}
            longest = {cluster: self._of(cluster).longest for cluster in clusters}
            worst = max(clusters, key=lambda n: uses[n] * longest[n])
            record[name] = {
                "unit": "example",
                "releases": uses[worst],
                "longest": longest[worst],
                "epsilon": self._spent(4 * uses[worst] * longest[worst] / noise**2),
            }
            for cluster in clusters:
                inverse_squares[cluster] += 4 * self._of(cluster).tokens / noise**2
        # A cluster's text is hidden from the server only if all that leaves the cluster has noise.
        hides_all = config.update_noise and config.activation_noise and config.update_mechanism == "local"
        hides_all = hides_all and (config.gradient_noise or not self._returns_gradients)
        record["together"] = (
            {"unit": "cluster", "epsilon": self._spent(max(inverse_squares.values()))} if hides_all else None
        )
        return record

    def state(self, received: Mapping[int, Sent] | None = None) -> dict[str, Any]:
        """Return the account as JSON values, for a resumed run; ``received``, if given, holds newer counts."""
        sent = {str(cluster): asdict(seen) for cluster, seen in (received or self.sent).items()}
        return {"updates": {str(n): count for n, count in self.updates.items()}, "sent": sent}

    def restore(self, state: Mapping[str, Any]) -> dict[int, Sent]:
        """Go on from :meth:`state`; returns the counts by cluster, which the service continues."""
        self.updates = {int(n): int(count) for n, count in state["updates"].items()}
        self.sent = {int(n): Sent(**{**seen, "step": tuple(seen["step"])}) for n, seen in state["sent"].items()}
        return self.sent

    def _of(self, cluster: int) -> Sent:
        return self.sent.get(cluster, Sent())

    def _uses(self, cluster: int) -> int:
        """Return how often an example of a cluster may have been sent: an epoch shows each once.

        Of examples that are kept, others may have had no room, and come again in each epoch.
        """
        seen, num_examples = self._of(cluster), self.num_examples[cluster]
        epochs = math.ceil((seen.examples + seen.recalled) / num_examples)
        return min(epochs, max(seen.examples - num_examples, 0) + 1) + seen.repeats

    def _updates(self, releases: int) -> float:
        return self._spent(4 * releases / self.config.update_noise**2)

    def _spent(self, inverse_square: float) -> float:
        return epsilon(inverse_square**-0.5, self.config.delta) if inverse_square else 0.0


def epsilon(multiplier: float, delta: float) -> float:
    """Epsilon of one Gaussian mechanism without sampling, by its Renyi divergences (an upper bound).

    Raises
    ------
    ValueError
        If opacus is not installed.
    """
    try:
        from opacus.accountants.analysis import rdp
    except ImportError:
        raise ValueError(
            "privacy: noise is accounted for by opacus, which is not installed; pip install 'collapipe[privacy]'"
        ) from None
    divergences = rdp.compute_rdp(q=1.0, noise_multiplier=multiplier, steps=1, orders=_ORDERS)
    with warnings.catch_warnings():
        # With next to no noise the best order is the smallest there is: the bound is loose where it means nothing.
        warnings.simplefilter("ignore")
        spent, _ = rdp.get_privacy_spent(orders=_ORDERS, rdp=divergences, delta=delta)
    return float(spent)
