"""A time that grows with the samples of a micro-batch, followed over rounds: a Kalman filter that notices changes.

    seconds(n) = fixed + n * per_sample

The state is (fixed, per_sample) with its covariance. Between two rounds both may drift by the same factor: a random
part, and a trend that follows the deviations (Holt 1957). A round's observations are medians of many actions; what is
left of their noise is relative, and learned from the differences of successive rounds, which a drift hardly touches.

A round that lies more than :data:`CLIP` standard deviations off is an outlier: it is counted, not believed. Two sums of
the normalised deviations, one upwards and one downwards (CUSUM, Page 1954), tell a change from an outlier::

    up <- max(up + min(z, CLIP) - SLACK, 0)        change where up > LIMIT

With SLACK = 1 and LIMIT = 5 Gaussian noise raises an alarm once in 10^5 rounds; a step of more than 4 deviations is
found with its second round, a single outlier never is one. After a change both numbers are scaled to what was seen
since, and the split between them is uncertain again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

CLIP, SLACK, LIMIT = 4.0, 1.0, 5.0
"""Limits in deviations: the most that one round counts, the part that is ignored, the sum that marks a change."""
FIRST_NOISE, LEAST_NOISE, MOST_NOISE = 0.05, 0.003, 0.5
"""Relative standard deviation of a round's observation: before any, and its bounds."""
_LEARNING = 0.05
"""Weight of a round in the noise; of the first rounds more."""
_TREND, _MOST_TREND = 0.12, 0.05
"""Share of a round's correction that becomes trend; and the steepest trend, relative, of a round."""
_DRIFT, _LEAST_DRIFT = 0.3, 0.002
"""Relative drift of a round: a share of the noise, and its lower bound."""
_NEW_SPLIT = 0.3
"""Relative uncertainty of the split between the two numbers after a change."""
_REMEMBERED = 6
"""Rounds that a change is measured by at most."""
_AWAY, _AFTER_AWAY = 5, 1.0
"""Rounds without an observation after which earlier deviations no longer count; and how uncertain the time then is,
relative."""
_TINY = 1e-12
"""Least time [s]: logarithms of it are finite."""

Observation = tuple[float, float, float]
"""Samples, seconds, weight."""


class Change(NamedTuple):
    """Change of a time."""

    round: int
    factor: float
    """Factor by which the time has become longer."""
    rounds: int
    """Rounds until the change was noticed."""


class AffineTime:
    """Estimate of one time.

    Parameters
    ----------
    fixed_s, sample_s : time beside the samples, and of each sample, as believed before any observation [s]
    spread : relative standard deviation of that belief
    split : relative standard deviation of the split between the two
    """

    def __init__(self, fixed_s: float, sample_s: float, *, spread: float = 1.0, split: float = 0.5) -> None:
        self.fixed_s, self.sample_s = max(fixed_s, 0.0), max(sample_s, 0.0)
        f, s = self.fixed_s, self.sample_s
        self._cov = [(spread**2 + split**2) * f * f, spread**2 * f * s, (spread**2 + split**2) * s * s]
        self.noise = FIRST_NOISE
        """Relative standard deviation of a round's observation."""
        self.rounds = 0
        """Rounds with an observation."""
        self.last_round = 0
        self._up = self._down = 0.0
        self._run = 0
        """Rounds since one of the sums left zero."""
        self._noise_before = FIRST_NOISE
        self.trend = 0.0
        """Relative growth from round to round."""
        self._last_ratio: float | None = None
        self._recent: list[list[Observation]] = []

    @classmethod
    def first_seen(cls, observations: Sequence[Observation]) -> AffineTime:
        """Begin without any belief: one tenth of the first observation is fixed, or all of it without samples."""
        samples, seconds, _ = max(observations)
        if not samples:
            return cls(max(seconds, _TINY), 0.0, spread=0.3, split=0.0)
        return cls(0.1 * seconds, 0.9 * seconds / samples, spread=0.3, split=0.6)

    @classmethod
    def like(cls, other: AffineTime, round_: int) -> AffineTime:
        """Begin as if another time had been observed in the round before: a first observation far off is an outlier."""
        time = cls(other.fixed_s, other.sample_s, spread=0.3)
        time.rounds, time.last_round = 1, round_ - 1
        return time

    def seconds(self, samples: float) -> float:
        """Return the expected time [s]."""
        return max(self.fixed_s + samples * self.sample_s, _TINY)

    def deviation(self, samples: float) -> float:
        """Return the relative standard deviation of the expected time."""
        return math.sqrt(max(self._variance(samples), 0.0)) / self.seconds(samples)

    def scale(self, factor: float) -> None:
        """Multiply both numbers, and their deviations, by a factor."""
        self.fixed_s, self.sample_s = self.fixed_s * factor, self.sample_s * factor
        self._cov = [v * factor**2 for v in self._cov]

    def observe(self, round_: int, observations: Sequence[Observation]) -> Change | None:
        """Take a round's observations.

        Parameters
        ----------
        round_ : its number
        observations : samples, seconds and weight of each size of micro-batch

        Returns
        -------
        The change, if this round shows one; else None.
        """
        seen = [(n, max(y, _TINY), w) for n, y, w in observations if w > 0]
        if not seen:
            return None
        gap = max(round_ - self.last_round, 1) if self.rounds else 1
        self.last_round, self.rounds = round_, self.rounds + 1
        if gap > _AWAY:
            self._calm()
            self._widen(_AFTER_AWAY)
        drift = max(_DRIFT * self.noise, _LEAST_DRIFT)
        self._widen(drift * math.sqrt(gap))
        self.scale(math.exp(self.trend))
        ratio = self._log_ratio(seen)
        total = sum(w for *_, w in seen)
        relative = sum(w * self.deviation(n) for n, _, w in seen) / total
        deviation = math.hypot(relative, self.noise)
        z = min(max(ratio / deviation, -CLIP), CLIP)
        self._recent = [*self._recent, list(seen)][-_REMEMBERED:]
        if self._run == 0:
            self._noise_before = self.noise
        self._up, self._down = max(self._up + z - SLACK, 0.0), max(self._down - z - SLACK, 0.0)
        self._run = self._run + 1 if self._up or self._down else 0
        if max(self._up, self._down) > LIMIT:
            return self._changed(round_)
        self._learn_noise(z * deviation)
        if abs(z) < CLIP or self.rounds == 1:
            before = self.seconds(seen[0][0])
            for n, y, w in seen:
                self._update(n, y, self.noise**2 * total / w)
            if self.rounds > _REMEMBERED:
                corrected = math.log(self.seconds(seen[0][0]) / before)
                # The correction of a single round is no trend.
                corrected = min(max(corrected, -2 * self.noise), 2 * self.noise) if gap <= _AWAY else 0.0
                self.trend = min(max(self.trend + _TREND * corrected, -_MOST_TREND), _MOST_TREND)
        return None

    def _learn_noise(self, ratio: float) -> None:
        """Learn from half the squared difference of two successive rounds' deviations."""
        if self._last_ratio is not None:
            weight = max(_LEARNING, 1 / (self.rounds + 1))
            learned = (1 - weight) * self.noise**2 + weight * (ratio - self._last_ratio) ** 2 / 2
            self.noise = min(max(math.sqrt(learned), LEAST_NOISE), MOST_NOISE)
        # The first round corrects a belief: its deviation is no noise.
        self._last_ratio = ratio if self.rounds > 1 else None

    def _log_ratio(self, seen: Sequence[Observation]) -> float:
        total = sum(w for *_, w in seen)
        return sum(w * math.log(y / self.seconds(n)) for n, y, w in seen) / total

    def _changed(self, round_: int) -> Change:
        """Scale both numbers to what was seen since the sums left zero."""
        ratios = [self._log_ratio(seen) for seen in self._recent]
        newest = statistics.mean(ratios[-2:])
        # The sums may have left zero before the change: only rounds that are as far off as the newest are after it.
        after = [i for i, ratio in enumerate(ratios) if ratio / newest > 0.5]
        since = [self._recent[i] for i in after[-max(min(self._run, _REMEMBERED), 2) :]]
        factor = math.exp(statistics.median(self._log_ratio(seen) for seen in since))
        self.scale(factor)
        f, s = self.fixed_s, self.sample_s
        self.noise = self._noise_before
        level = (1.5 * self.noise) ** 2 / len(since) + 0.02**2
        self._cov = [(level + _NEW_SPLIT**2) * f * f, level * f * s, (level + _NEW_SPLIT**2) * s * s]
        change = Change(round_, factor, self._run)
        for seen in since:
            for n, y, _ in seen:
                self._update(n, y, self.noise**2)
        self._calm()
        return change

    def _calm(self) -> None:
        self._up = self._down = self.trend = 0.0
        self._run = 0
        self._recent = []
        self._last_ratio = None

    def _variance(self, samples: float) -> float:
        a, b, c = self._cov
        return a + 2 * samples * b + samples * samples * c

    def _widen(self, relative: float) -> None:
        """Let both numbers drift by the same factor."""
        f, s, q = self.fixed_s, self.sample_s, relative**2
        self._cov = [self._cov[0] + q * f * f, self._cov[1] + q * f * s, self._cov[2] + q * s * s]

    def _update(self, samples: float, seconds: float, noise_sq: float) -> None:
        """Take the Kalman filter's step; neither number falls below zero."""
        a, b, c = self._cov
        expected = self.seconds(samples)
        gain_f, gain_s = a + samples * b, b + samples * c
        total = gain_f + samples * gain_s + noise_sq * expected**2
        if total <= 0:
            return
        error = seconds - expected
        fixed, sample = self.fixed_s + gain_f / total * error, self.sample_s + gain_s / total * error
        if fixed < 0:
            fixed, sample = 0.0, (seconds / samples if samples else self.sample_s)
        elif sample < 0:
            fixed, sample = seconds, 0.0
        self.fixed_s, self.sample_s = fixed, sample
        self._cov = [a - gain_f * gain_f / total, b - gain_f * gain_s / total, c - gain_s * gain_s / total]

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON values; floats survive exactly."""
        return {
            "x": [self.fixed_s, self.sample_s],
            "cov": list(self._cov),
            "noise": [self.noise, self._noise_before],
            "trend": [self.trend, self._last_ratio],
            "rounds": [self.rounds, self.last_round],
            "sums": [self._up, self._down, self._run],
            "recent": [[list(observation) for observation in seen] for seen in self._recent],
        }

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> AffineTime:
        """Read :meth:`to_dict`'s form."""
        time = cls(*raw["x"])
        time._cov = [float(v) for v in raw["cov"]]
        time.noise, time._noise_before = raw["noise"]
        time.trend, time._last_ratio = raw["trend"]
        time.rounds, time.last_round = raw["rounds"]
        time._up, time._down, time._run = raw["sums"]
        time._recent = [[(n, y, w) for n, y, w in seen] for seen in raw["recent"]]
        return time
