"""Segments for answers, against all possible ones."""

import itertools
import random

import pytest

from strategies.dssda.serving_segments import TokenCosts, least_latency, most_tokens


def possible(costs, num_blocks):
    ranges = [range(most + 1) for most in costs.capacity]
    return [delta for delta in itertools.product(*ranges) if sum(delta) == num_blocks]


def drawn(seed):
    draw = random.Random(seed)
    devices = draw.randint(1, 4)
    return (
        TokenCosts(
            teb_s=tuple(draw.uniform(0.1, 2.0) for _ in range(devices)),
            link_s=tuple(draw.choice((0.0, draw.uniform(0.0, 3.0))) for _ in range(devices)),
            capacity=tuple(draw.randint(0, 5) for _ in range(devices)),
        ),
        draw.randint(1, 7),
        draw.randint(1, 6),
    )


@pytest.mark.parametrize("seed", range(200))
def test_no_other_segments_are_better(seed):
    costs, num_blocks, requests = drawn(seed)
    all_of_them = possible(costs, num_blocks)
    fastest, most = least_latency(costs, num_blocks), most_tokens(costs, num_blocks, requests)
    if not all_of_them:
        assert fastest is None and most is None
        return
    assert sum(fastest) == sum(most) == num_blocks
    assert costs.latency_s(fastest) == pytest.approx(min(map(costs.latency_s, all_of_them)))
    best = max(costs.tokens_per_s(delta, requests) for delta in all_of_them)
    assert costs.tokens_per_s(most, requests) == pytest.approx(best)


def test_one_request_wants_the_fastest_device_and_several_want_more():
    costs = TokenCosts(teb_s=(1.0, 1.5, 1.5), link_s=(0.1, 0.1, 0.1), capacity=(6, 6, 6))
    assert least_latency(costs, 6) == (6, 0, 0)
    assert most_tokens(costs, 6, 1) == (6, 0, 0)
    spread = most_tokens(costs, 6, 4)
    assert all(spread)
    # The slowest device takes three seconds a token, with (3, 1, 2) TEBs as with (2, 2, 2).
    assert costs.tokens_per_s(spread, 4) == pytest.approx(1 / 3)
    assert costs.tokens_per_s((6, 0, 0), 4) == pytest.approx(1 / 6)
