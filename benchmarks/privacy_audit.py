"""Does the noise hide what the accountant says? Canaries attack the mechanisms, and bound epsilon from below.

Each trial releases one of two neighbours through the code that a control unit or the server runs: a canary of the
largest norm, or its opposite. The attacker knows both, projects what is released on the canary (the likelihood ratio of
Gaussian noise), and guesses which it was. Its threshold is chosen on one half of the trials; on the other half its
rates of false guesses get Clopper-Pearson bounds of 95 % together, and from these follow

    plain       log((1 - delta - false negatives) / false positives), of any mechanism
    Gaussian    epsilon of the Gaussian mechanism whose noise gives such rates: sharper, if noise is Gaussian

A mechanism that keeps its promise has both below the exact epsilon, and the accountant's above that. The last rows are
mechanisms that are broken on purpose: the audit has to find them out.

    python benchmarks/privacy_audit.py                      # some seconds
    python benchmarks/privacy_audit.py --trials 2000 --json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betaincinv, log_ndtr, ndtr, ndtri

from client_pipeline.link.privacy import NoiseSource, private_activations, private_update
from client_pipeline.link.privacy_config import PrivacyConfig
from strategies.aggregation.accountant import PrivacyAccountant, Sent
from strategies.aggregation.central_privacy import with_central_noise

WIDTH, TOKENS, CLUSTERS = 64, 12, 3
CLIP, CONFIDENCE = 2.0, 0.95
Projections = NDArray[np.float64]


class Mechanism(NamedTuple):
    """Target of the attack."""

    name: str
    release: Callable[[PrivacyConfig, float, int], Projections]
    """Releases the canary of sign +1 or -1 so many times; returns projections of what came out."""
    config: Callable[[float], PrivacyConfig]
    what: str
    """The accountant's entry."""
    scale: float = 1.0
    """Noise that is drawn, as a share of what the accountant is told; below 1: broken on purpose."""


def update(config: PrivacyConfig, sign: float, trials: int) -> Projections:
    """A control unit's update, ten times as long as its clip."""
    start, noise = {"w": torch.zeros(WIDTH)}, NoiseSource()
    trained = {"w": torch.full((WIDTH,), sign * 10 * CLIP / WIDTH**0.5)}
    sent = [private_update(start, trained, config, noise)["w"] for _ in range(trials)]
    return torch.stack(sent).double().sum(1).numpy() / WIDTH**0.5


def activations(config: PrivacyConfig, sign: float, trials: int) -> Projections:
    """Examples, each with tokens ten times as long as their clip."""
    hidden = torch.full((trials, TOKENS, WIDTH), sign * 10 * CLIP / WIDTH**0.5)
    mask = torch.ones(trials, TOKENS, dtype=torch.bool)
    return private_activations(hidden, mask, config, NoiseSource()).double().sum((1, 2)).numpy() / WIDTH**0.5


def mean(config: PrivacyConfig, sign: float, trials: int) -> Projections:
    """The server's mean of three clusters, one of which is the canary, and the others known."""
    aggregator: Any = with_central_noise(config, CLUSTERS)
    value = np.full(WIDTH, sign * CLIP / WIDTH**0.5 / CLUSTERS, dtype=np.float32)
    arrays = ArrayRecord({"w": Array(value)})
    noised = [aggregator._add_noise_to_aggregated_arrays(arrays)["w"].numpy() for _ in range(trials)]
    return np.stack(noised).sum(1, dtype=np.float64) / WIDTH**0.5


def update_config(noise: float) -> PrivacyConfig:
    """Noise on updates, on the control unit."""
    return PrivacyConfig(update_clip=CLIP, update_noise=noise)


def activation_config(noise: float) -> PrivacyConfig:
    """Noise on activations."""
    return PrivacyConfig(activation_clip=CLIP, activation_noise=noise)


def mean_config(noise: float) -> PrivacyConfig:
    """Noise on the mean."""
    return PrivacyConfig(update_clip=CLIP, update_noise=noise, update_mechanism="server-fixed")


MECHANISMS = (
    Mechanism("update", update, update_config, "updates"),
    Mechanism("mean of 3 clusters", mean, mean_config, "updates"),
    Mechanism(f"example of {TOKENS} tokens", activations, activation_config, "activations"),
    Mechanism("update, half the noise", update, update_config, "updates", 0.5),
    Mechanism("example, half the noise", activations, activation_config, "activations", 0.5),
)


def promised(mechanism: Mechanism, noise: float, releases: int) -> float:
    """Epsilon by the accountant of a run."""
    accountant = PrivacyAccountant(mechanism.config(noise), {0: 1})
    sent = Sent(examples=releases, tokens=releases * TOKENS, longest=TOKENS)
    for _ in range(releases):
        accountant.count_round([0], [], {0: sent})
    return float(accountant.record()[mechanism.what]["epsilon"])


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Exact epsilon of a Gaussian mechanism of sensitivity mu and noise 1: Theorem 8 of arXiv:1805.06530."""
    if mu <= 0:
        return 0.0

    def excess(eps: float) -> float:
        return float(ndtr(mu / 2 - eps / mu) - math.exp(min(eps + log_ndtr(-mu / 2 - eps / mu), 700.0)) - delta)

    return float(brentq(excess, 0.0, 10 * mu * mu + 50 * mu + 10)) if excess(0.0) > 0 else 0.0


def bounds(positive: NDArray[Any], negative: NDArray[Any], delta: float) -> tuple[float, float]:
    """Lower bounds on epsilon from the projections of both neighbours: of any mechanism, and of a Gaussian one."""

    def rates(threshold: float, part: slice) -> tuple[float, float]:
        """Upper bounds of the shares of false positives and false negatives."""
        yes, no = positive[part], negative[part]
        return _most(int((no > threshold).sum()), len(no)), _most(int((yes <= threshold).sum()), len(yes))

    def plain(threshold: float, part: slice) -> float:
        one, other = rates(threshold, part)
        return max(math.log(max(1 - delta - a, 1e-300) / b) for a, b in ((one, other), (other, one)))

    def mu(threshold: float, part: slice) -> float:
        one, other = rates(threshold, part)
        return float(-ndtri(one) - ndtri(other))

    half = len(positive) // 2
    first, second = slice(None, half), slice(half, None)
    thresholds = np.quantile(np.concatenate([positive[first], negative[first]]), np.linspace(0.02, 0.98, 33)).tolist()
    best_plain, best_mu = (max(thresholds, key=lambda t, rate=rate: rate(t, first)) for rate in (plain, mu))
    return max(plain(best_plain, second), 0.0), gaussian_epsilon(mu(best_mu, second), delta)


def _most(wrong: int, trials: int) -> float:
    """Clopper and Pearson's upper bound; each of two rates gets half of what may fail."""
    return float(betaincinv(wrong + 1, trials - wrong, 1 - (1 - CONFIDENCE) / 2)) if wrong < trials else 1.0


def audit(mechanism: Mechanism, noise: float, releases: int, trials: int) -> dict[str, Any]:
    """Attack one mechanism: its row."""
    config = mechanism.config(noise * mechanism.scale)
    positive, negative = (
        np.sum([mechanism.release(config, sign, trials) for _ in range(releases)], axis=0) for sign in (1.0, -1.0)
    )
    plain, gaussian = bounds(positive, negative, config.delta)
    rows = TOKENS if mechanism.what == "activations" else 1
    return {
        "mechanism": mechanism.name,
        "noise": noise,
        "releases": releases,
        "trials": trials,
        "measured_plain": plain,
        "measured_gaussian": gaussian,
        "exact": gaussian_epsilon(2 * math.sqrt(rows * releases) / noise, config.delta),
        "accountant": promised(mechanism, noise, releases),
        "broken": mechanism.scale < 1,
    }


def rows_of(trials: int) -> list[dict[str, Any]]:
    """Every mechanism, with noise that leaves the attacker some doubt."""
    levels = {"updates": ((1.0, 1), (2.0, 2)), "activations": ((4.0, 1), (5.0, 2))}
    return [
        audit(mechanism, noise, releases, trials)
        for mechanism in MECHANISMS
        for noise, releases in levels[mechanism.what]
    ]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows of Markdown."""
    lines = [
        "| mechanism | noise | releases | measured, any mechanism | measured, Gaussian | exact | accountant |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        figures = [row[key] for key in ("measured_plain", "measured_gaussian", "exact", "accountant")]
        told = " | ".join(f"{figure:.2f}" for figure in figures)
        lines.append(f"| {row['mechanism']} | {row['noise']:g} | {row['releases']} | {told} |")
    return lines


def main() -> int:
    """Audit all mechanisms, print the table; fail if one that is not broken is found out, or a broken one is not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=50_000, help="of each neighbour")
    parser.add_argument("--json", action="store_true", help="print one list to standard output and nothing else")
    args = parser.parse_args()
    if args.trials < 100:
        parser.error(f"--trials: expected at least 100, found {args.trials}")
    # Tensors of some hundred numbers: more threads only wait for each other.
    torch.set_num_threads(1)
    rows = rows_of(args.trials)
    print("\n".join(table(rows)), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(rows))
    caught = [max(row["measured_plain"], row["measured_gaussian"]) > row["accountant"] for row in rows]
    return int(caught != [row["broken"] for row in rows])


if __name__ == "__main__":
    sys.exit(main())
