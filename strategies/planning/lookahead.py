"""Lookahead: what the bound is worth now, seen from the end of a window of forecast rounds (model-predictive control).

DSSDA prices Gamma_n of a round by the queue Y_n that the rounds before it left. With the networks of the next H rounds
forecast, the window's own problem is

    minimise  sum over its rounds of (V tau + sum Z_n E_up,n + price of joules)  +  1/2 |Y(after the window)|^2,

with the queues of Eq. (29). H = 1 is the drift itself, its square not bounded away. Given a price of Gamma for each
cluster, the rounds fall apart, and each is planned with its certificate. Prices l >= 0 bound the window from below,

    D(l) = sum over rounds of min(their cost + sum l_n Gamma_n) + l.(Y - H Gamma_max) - 1/2 |l|^2,

because the queue after the window is at least Y + sum(Gamma - Gamma_max), and at least 0. D is strongly concave, and is
climbed with steps 1/2, 1/3, ... towards the queues that the prices lead to. All plans on the way are kept for each
round; of their combinations the one of least cost says which prices the first round is planned with. That round alone
is carried out; the next one looks again (receding horizon).

The round itself stays the certified optimum of its problem, at these prices. The window has a gap of its own, which is
reported: its plans are discrete, and prices that are the same in all rounds do not reach every combination of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from client_pipeline.system.channels import NetworkState
from client_pipeline.system.radio import Array
from client_pipeline.system.scenario import Scenario
from strategies.dssda.answer import Answer
from strategies.dssda.evaluation import Match, score
from strategies.dssda.queues import Queues
from strategies.dssda.round_problem import round_bound, round_instance
from strategies.dssda.split_band import divided

STEPS = 8
"""Prices that are tried, the queues as they are among them."""
_MOST_COMBINATIONS = 20_000
"""Of plans kept for the rounds; beyond, one round after the other is improved."""

PlanAtPrices = Callable[[NetworkState, Queues], Answer]
"""The round's certified plan for a network, with prices in the place of the virtual queues."""


@dataclass(frozen=True, kw_only=True)
class WindowPrices:
    """What a window says of its first round."""

    prices: Array
    """Price of each cluster's Gamma, (N,): in the place of Y."""
    objective: float
    """Of the window's best combination of plans."""
    lower_bound: float
    """No plans of the window cost less."""
    rounds: int
    """H."""

    @property
    def gap(self) -> float:
        """(objective - lower bound) / |objective|."""
        return max(self.objective - self.lower_bound, 0.0) / max(abs(self.objective), 1e-12)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "rounds": self.rounds,
            "prices": self.prices.tolist(),
            "objective": self.objective,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
        }


class _Candidate(NamedTuple):
    """One plan of one round."""

    cost: float
    """V tau + sum Z_n E_up,n, and joules at their price."""
    gamma: Array
    """(N,)."""
    prices: Array
    """That it is the optimum for, (N,)."""


def window_prices(
    scenario: Scenario, networks: Sequence[NetworkState], queues: Queues, plan: PlanAtPrices
) -> WindowPrices | None:
    """Find the prices that the first of some rounds is planned with.

    Parameters
    ----------
    scenario : V, Gamma_max and the bound's constants
    networks : of the round under way and of those after it, forecast, (H,)
    queues : before the window
    plan : makes a round's plan

    Returns
    -------
    None where a round has no plan: then nothing is known of the window.
    """
    gamma_max, num_rounds = scenario.planner.gamma_max, len(networks)
    pools: list[list[_Candidate]] = [[] for _ in networks]
    prices, bound = queues.virtual.copy(), -np.inf
    for step in range(1, STEPS + 1):
        dual = float(prices @ (queues.virtual - num_rounds * gamma_max) - prices @ prices / 2)
        after = queues.virtual - num_rounds * gamma_max
        for network, pool in zip(networks, pools, strict=True):
            answer = plan(network, Queues(prices, queues.energy))
            if answer.status == "infeasible" or answer.objective is None or answer.lower_bound is None:
                return None
            candidate = _candidate(scenario, network, queues, prices, answer)
            # The round's own objective leaves out what is the same for all its plans.
            left_out = candidate.cost + float(prices @ candidate.gamma) - answer.objective
            dual += answer.lower_bound + left_out
            after = after + candidate.gamma
            if not any(np.array_equal(candidate.gamma, c.gamma) and candidate.cost == c.cost for c in pool):
                pool.append(candidate)
        bound = max(bound, dual)
        prices = np.maximum(prices + (after - prices) / (step + 1), 0.0)
    cost, best = _best_combination(pools, queues.virtual, gamma_max)
    return WindowPrices(prices=best[0].prices, objective=cost, lower_bound=min(bound, cost), rounds=num_rounds)


def _candidate(scenario: Scenario, network: NetworkState, queues: Queues, prices: Array, answer: Answer) -> _Candidate:
    free = divided(round_instance(scenario, network, Queues(np.zeros_like(prices), queues.energy)), answer)
    matches = [
        Match(part.choice, part.channel, part.power_w)
        if part.selected and part.choice is not None and part.channel is not None and part.power_w is not None
        else None
        for part in answer.clusters
    ]
    cost = score(free, matches, "feasible").objective
    assert cost is not None
    return _Candidate(cost, round_bound(scenario, network, free, answer), prices)


def window_cost(candidates: Sequence[tuple[float, Array]], queue: Array, gamma_max: float) -> float:
    """Cost of a window: of its rounds, and half of the squared queues after it.

    Parameters
    ----------
    candidates : cost and Gamma of each round, Gamma as (N,)
    queue : Y before the window, (N,)
    gamma_max : Gamma_max
    """
    total = 0.0
    for cost, gamma in candidates:
        total += cost
        queue = np.maximum(queue + gamma - gamma_max, 0.0)
    return total + float(queue @ queue) / 2


def _best_combination(
    pools: Sequence[Sequence[_Candidate]], queue: Array, gamma_max: float
) -> tuple[float, Sequence[_Candidate]]:
    """Return the cheapest combination of the rounds' plans, and its cost."""

    def cost(chosen: Sequence[_Candidate]) -> float:
        return window_cost([candidate[:2] for candidate in chosen], queue, gamma_max)

    if np.prod([len(pool) for pool in pools], dtype=float) <= _MOST_COMBINATIONS:
        best = min(itertools.product(*pools), key=cost)
        return cost(best), best
    chosen = [pool[-1] for pool in pools]
    while True:
        before = cost(chosen)
        for t, pool in enumerate(pools):
            chosen[t] = min(pool, key=lambda c, t=t: cost([*chosen[:t], c, *chosen[t + 1 :]]))  # type: ignore[misc]
        if cost(chosen) >= before:
            return cost(chosen), chosen
