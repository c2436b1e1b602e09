"""Times followed over noisy rounds: steps, drifts, outliers, absences, and how seldom nothing becomes an alarm."""

import json
import math

import numpy as np
import pytest

from strategies.estimation.affine_time import AffineTime


def follow(truth, rounds, *, noise=0.02, seed=0, sizes=(4,), start=None, spoiled=()):
    """Returns the time, the changes that were noticed, and the relative error before each round."""
    draw = np.random.default_rng(seed)
    time, changes, errors = start, [], []
    for round_ in rounds:
        fixed_s, sample_s = truth(round_)
        seen = [(n, (fixed_s + n * sample_s) * math.exp(noise * draw.standard_normal()), 8) for n in sizes]
        if round_ in spoiled:
            seen = [(n, 3 * seconds, weight) for n, seconds, weight in seen]
        time = time or AffineTime.first_seen(seen)
        errors.append(abs(time.seconds(sizes[0]) / (fixed_s + sizes[0] * sample_s) - 1))
        change = time.observe(round_, seen)
        changes += [change] if change else []
    return time, changes, errors


def steady(round_):
    return 0.01, 0.02


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
def test_steady_noise_of_220_rounds_raises_no_alarm(noise):
    runs = [follow(steady, range(1, 221), noise=noise, seed=seed) for seed in range(40)]
    # 8,800 rounds; the bound of the sums allows one alarm in 100,000 of Gaussian noise.
    assert sum(len(changes) for _, changes, _ in runs) <= 1
    assert np.mean([errors[20:] for *_, errors in runs]) < 0.5 * noise


@pytest.mark.parametrize("factor", [0.3, 0.8, 1.25, 3.0])
def test_a_step_is_known_after_two_rounds(factor):
    def truth(round_):
        scale = factor if round_ > 50 else 1.0
        return 0.01 * scale, 0.02 * scale

    for seed in range(20):
        time, changes, errors = follow(truth, range(1, 61), seed=seed)
        assert [change.round for change in changes] in ([52], [53])
        assert changes[0].factor == pytest.approx(factor, rel=0.06)
        assert max(errors[53:]) < 0.06
        assert time.deviation(4) < 0.05


def test_two_outliers_in_a_row_are_a_change_and_their_end_another():
    _, changes, _ = follow(steady, range(1, 60), noise=0.01, spoiled=(20, 21))
    assert [change.round for change in changes] == [21, 23]
    assert changes[0].factor * changes[1].factor == pytest.approx(1.0, rel=0.05)


def test_a_slow_drift_is_followed_without_an_alarm():
    def truth(round_):
        return 0.01 * 1.01**round_, 0.02 * 1.01**round_

    for seed in range(10):
        _, changes, errors = follow(truth, range(1, 121), noise=0.01, seed=seed)
        assert changes == []
        # Without a trend it would lag by the drift over the filter's gain, 4 %.
        assert np.mean(errors[30:]) < 0.02


def test_who_was_away_and_comes_back_slower_is_known_after_two_rounds():
    time, _, _ = follow(steady, range(1, 31), noise=0.01)
    known = time.deviation(4)
    time, changes, errors = follow(lambda _: (0.03, 0.06), range(80, 90), noise=0.01, start=time, seed=1)
    assert time.rounds == 40 and known < 0.01
    assert len(changes) <= 1 and max(errors[2:]) < 0.03


def test_what_is_read_back_goes_on_as_what_was_written():
    def truth(round_):
        return (0.01, 0.02) if round_ <= 20 else (0.03, 0.05)

    # In the middle of a suspicion: the sums are not zero.
    time, _, _ = follow(truth, range(1, 22), seed=3)
    again = AffineTime.from_dict(json.loads(json.dumps(time.to_dict())))
    both = [follow(truth, range(22, 60), start=t, seed=4) for t in (time, again)]
    assert both[0][0].to_dict() == both[1][0].to_dict()
    assert both[0][1] == both[1][1] and len(both[0][1]) == 1
