"""What the noise on updates and activations guarantees so far: epsilon at a given delta, by opacus's accountant.

Every release is a Gaussian mechanism without any sampling, so that their composition is one, too: of multipliers z_i
it has 1/z^2 = sum 1/z_i^2. Two inputs are neighbours if one is replaced by another; that may turn a vector of norm C
round, and moves it by 2 C at most:

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

import torch
from torch import Tensor

from client_pipeline.link.privacy_config import PrivacyConfig

_ORDERS = [1 + 2.0**-k for k in range(12, 0, -1)] + [2 + x / 10 for x in range(90)] + [2.0**k for k in range(4, 15)]


@dataclass
class Sent:
    """What the server has received of one cluster's activations."""

    examples: int = 0
    tokens: int = 0
    longest: int = 0
    """Tokens of its longest example."""
    repeats: int = 0
    """Steps that were begun again, or broke off: their examples may come once more."""
    step: tuple[int, int] = (0, 0)
    """Round and step of the micro-batch that came last."""
    step_examples: int = 0
    """Examples of that step."""

    def add(self, step: tuple[int, int], micro_batch: int, mask_BT: Tensor) -> bool:
        """Note a micro-batch, whatever the decoder makes of it; returns whether it begins a step again."""
        first = micro_batch == 0
        is_repeat = first and step <= self.step
        self.repeats += is_repeat
        self.step = step
        # The mask is not checked yet: what has no lengths counts as one token each.
        lengths = (
            mask_BT.sum(-1, dtype=torch.int64) if mask_BT.ndim == 2 else mask_BT.new_ones(mask_BT.shape[:1].numel())
        )
        self.step_examples = lengths.numel() + (0 if first else self.step_examples)
        self.examples += lengths.numel()
        self.tokens += int(lengths.sum())
        self.longest = max(self.longest, int(lengths.max()) if lengths.numel() else 0)
        return is_repeat

    def count_repeat(self) -> None:
        """Note a step that broke off: its examples may come once more."""
        self.repeats += 1


class PrivacyAccountant:
    """Keeps count of what was released of each cluster in a run.

    Parameters
    ----------
    config : clips, noise and delta
    num_examples : training examples of each cluster, by its index

    Raises
    ------
    ValueError
        If there is noise to account for, and opacus is not installed.
    """

    def __init__(self, config: PrivacyConfig, num_examples: Mapping[int, int]) -> None:
        self.config = config
        self.num_examples = dict(num_examples)
        self.updates: dict[int, int] = {}
        """Rounds of each cluster that an update was asked for."""
        self.sent: dict[int, Sent] = {}
        if self.on:
            epsilon(1.0, config.delta)

    @property
    def on(self) -> bool:
        """Whether there is noise to account for."""
        return self.config.update_noise > 0 or self.config.activation_noise > 0

    def count_round(self, trained: Iterable[int], failed: Iterable[int], sent_by_cluster: Mapping[int, Sent]) -> None:
        """Note a round: who trained, who was asked to and failed, and what has been received of each so far.

        Who failed may have sent something all the same, and may begin its round again.
        """
        failed = list(failed)
        for cluster in failed:
            if cluster in sent_by_cluster:
                sent_by_cluster[cluster].count_repeat()
        for cluster in (*trained, *failed):
            self.updates[cluster] = self.updates.get(cluster, 0) + 1
        self.sent = dict(sent_by_cluster)

    def record(self) -> dict[str, Any]:
        """What the cluster that has spent most has spent, as JSON values; ``docs/threat-model.md`` says what of."""
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
        if config.activation_noise:
            uses = {cluster: self._uses(cluster) for cluster in clusters}
            longest = {cluster: self._of(cluster).longest for cluster in clusters}
            worst = max(clusters, key=lambda n: uses[n] * longest[n])
            record["activations"] = {
                "unit": "example",
                "releases": uses[worst],
                "longest": longest[worst],
                "epsilon": self._spent(4 * uses[worst] * longest[worst] / config.activation_noise**2),
            }
            for cluster in clusters:
                inverse_squares[cluster] += 4 * self._of(cluster).tokens / config.activation_noise**2
        # A cluster's text is hidden from the server only if all that it is sent of it is noised before.
        hides_all = config.update_noise and config.activation_noise and config.update_mechanism == "local"
        record["together"] = (
            {"unit": "cluster", "epsilon": self._spent(max(inverse_squares.values()))} if hides_all else None
        )
        return record

    def state(self, received: Mapping[int, Sent] | None = None) -> dict[str, Any]:
        """What a continued run must know, as JSON values; with what was ``received`` since the last round, if given."""
        sent = {str(cluster): asdict(seen) for cluster, seen in (received or self.sent).items()}
        return {"updates": {str(n): count for n, count in self.updates.items()}, "sent": sent}

    def restore(self, state: Mapping[str, Any]) -> dict[int, Sent]:
        """Go on from :meth:`state`; returns what had been received, for the service to go on counting."""
        self.updates = {int(n): int(count) for n, count in state["updates"].items()}
        self.sent = {int(n): Sent(**{**seen, "step": tuple(seen["step"])}) for n, seen in state["sent"].items()}
        return self.sent

    def _of(self, cluster: int) -> Sent:
        return self.sent.get(cluster, Sent())

    def _uses(self, cluster: int) -> int:
        """How often an example of a cluster may have been sent: an epoch shows each once."""
        seen = self._of(cluster)
        return math.ceil(seen.examples / self.num_examples[cluster]) + seen.repeats

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
