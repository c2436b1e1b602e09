"""Growth of the planner's time, and the saving of the exact segment scheduler over a MILP.

1. One cluster (K = 6, L = 12, m up to 64, Eq. (15), budgets on) by the segment scheduler and by SciPy's MILP solver
   (HiGHS) on the same problem: a program for each m with S among its variables. Both must find the same optimum. They
   take turns; the figure is the median ratio of their times.
2. One round of N = 100 clusters of K = 50 devices, L = 48, J = 40, certified to 1e-6; and one of N = 1000, K = 100,
   L = 96, J = 400.
3. The segments of one cluster of K = 50 devices, L = 48, under the flow shop.
4. Rounds under Eq. (15) and under the flow shop that double N, J, K and L one at a time, twice: seconds, and the factor
   of each doubling.

All on one thread. Seconds are the processor's, which other programs on the machine hardly change; medians over seeds.

    python benchmarks/planner_scaling.py                       tables
    python benchmarks/planner_scaling.py --json                {"milp_over_ours": .., "huge_round_s": .., "growth": ..}
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from strategies.dssda.evaluation import teb_and_link_seconds
from strategies.dssda.instance import Instance
from strategies.dssda.instance_file import parse_instance
from strategies.dssda.limits import Limits
from strategies.dssda.planner import plan_round
from strategies.dssda.segments import solve_segments

LARGE = {"N": 100, "J": 40, "K": 50, "L": 48}
HUGE = {"N": 1000, "J": 400, "K": 100, "L": 96}
FLOW_SHOP = {"N": 1, "J": 1, "K": 50, "L": 48}
BASES = {"eq15": LARGE, "flowshop": {"N": 4, "J": 2, "K": 25, "L": 24}}
"""Start of the growth."""


def network(*, N: int, J: int, K: int, L: int, latency: str = "eq15", seed: int = 0) -> Instance:  # noqa: N803
    """A round of the calibrated network of Table II, at another size; memory for twice the TEBs, at least four each."""
    draw = np.random.default_rng(seed)

    def cluster() -> dict[str, Any]:
        queue, bandwidth = draw.uniform(0, 3), draw.uniform(0.4e6, 0.6e6)
        return {
            "wS2": queue / L,
            "wG": queue,
            "skip": queue * 0.2 / 0.07,
            "devices": [
                {
                    "phi": draw.uniform(10, 24),
                    "f": draw.uniform(0.1e9, 0.8e9) * draw.uniform(0.7, 1),
                    "kappa": 1e-27,
                    "p": draw.uniform(0.07, 0.1),
                    "B": 0.5e6,
                    "h": 1e-3,
                    "I": 5e-10,
                    "mem": max(4, -(-2 * L // K)) * 0.375e9,
                    "Emax": max(5.0, 10.0 * L / K),
                }
                for _ in range(K)
            ],
            "up": {
                "t_bits": 19e6,
                "e_bits": 19e6,
                "Pmax": 0.5,
                "Emax": 10.0,
                "eps_mode": "paper",
                "C": 0.2,
                "eps_max": None,
            },
            "h": list(10 ** (draw.uniform(-0.12, -0.08, J) / 10) * (0.2 + 0.8 * draw.exponential(1.0, J))),
            "I": list(draw.uniform(0.06, 0.08, J)),
            "B": [bandwidth] * J,
        }

    raw = {
        "format": "collapipe-instance/1",
        "L": L,
        "b": 64,
        "m_set": list(range(1, 65)),
        "V": 1.0,
        "latency": latency,
        "tail": "last",
        "energy": "c9p",
        "work": {"o_f": 2e9, "o_b": 2e9, "o_b_scaling": "microbatch"},
        "act": {"z_bits": 1.25e6, "g_bits": 1.25e6, "scaling": "microbatch"},
        "gamma0": 0.375e9,
        "N0": 10**-20.4,
        "clusters": [cluster() for _ in range(N)],
    }
    return parse_instance(raw, "benchmark")


def by_milp(instance: Instance) -> float:
    """Least V steps D + wS S + wS2 S^2 of the first cluster: the best of one program for each m.

    Variables: x_k (device used), delta_k, u_k (its link is the one subtracted), y_S, T, and P_S = T if y_S else 0,
    which makes (S + m - 1) T linear.
    """
    limits, cluster = Limits.of(instance, 0), instance.clusters[0]
    sizes = np.array(instance.segment_range(0))
    num_devices, num_sizes = len(cluster.devices), len(sizes)
    width = 3 * num_devices + 2 * num_sizes + 1
    x, delta, u = (np.arange(num_devices) + i * num_devices for i in range(3))
    y, p, t = 3 * num_devices + np.arange(num_sizes), 3 * num_devices + num_sizes + np.arange(num_sizes), width - 1
    best = np.inf
    for row, m in enumerate(instance.m_set):
        teb, link = teb_and_link_seconds(instance, 0, m)
        cap = limits.cap[row]
        most = float(np.max(cap * teb + link))
        rows: list[tuple[dict[int, float], float, float]] = []

        def add(terms: dict[int, float], low: float, high: float, rows: list[Any] = rows) -> None:
            rows.append((terms, low, high))

        for k in range(num_devices):
            add({t: 1, delta[k]: -teb[k], x[k]: -link[k]}, 0, np.inf)
            add({delta[k]: 1, x[k]: -cap[k]}, -np.inf, 0)
            add({delta[k]: 1, x[k]: -1}, 0, np.inf)
            add({u[k]: 1, x[k]: -1}, -np.inf, 0)
        add(dict.fromkeys(delta, 1.0), instance.L, instance.L)
        add(dict.fromkeys(u, 1.0), 1, 1)
        add(dict.fromkeys(y, 1.0), 1, 1)
        add(dict.fromkeys(x, 1.0) | {y[i]: -float(s) for i, s in enumerate(sizes)}, 0, 0)
        for i in range(num_sizes):
            add({p[i]: 1, t: -1, y[i]: -most}, -most, np.inf)
        cost = np.zeros(width)
        weight = instance.V * instance.steps
        cost[p] = weight * (sizes + m - 1)
        cost[u] = -weight * link
        cost[y] = [cluster.size_cost(int(s)) for s in sizes]
        table = np.zeros((len(rows), width))
        for i, (terms, _, _) in enumerate(rows):
            table[i, list(terms)] = list(terms.values())
        upper = np.ones(width)
        upper[delta], upper[p], upper[t] = instance.L, most, most
        whole = np.ones(width)
        whole[p], whole[t] = 0, 0
        found = milp(
            cost,
            constraints=LinearConstraint(table, [r[1] for r in rows], [r[2] for r in rows]),
            bounds=Bounds(0, upper),
            integrality=whole,
            options={"mip_rel_gap": 1e-9},
        )
        if found.success:
            best = min(best, float(found.fun))
    return best


def seconds(work: Callable[[], Any]) -> float:
    """Processor seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def against_milp(rounds: int) -> dict[str, float]:
    """Times of both on the same clusters, in turns, and the largest relative difference of their optima."""
    ours, theirs, difference = [], [], 0.0
    for seed in range(rounds):
        instance = network(N=1, J=1, K=6, L=12, seed=seed)
        solve_segments(instance)  # warm
        ours.append(statistics.median(seconds(lambda i=instance: solve_segments(i)) for _ in range(5)))
        start = time.process_time()
        optimum = by_milp(instance)
        theirs.append(time.process_time() - start)
        found = solve_segments(instance).objective
        assert found is not None
        difference = max(difference, abs(found - optimum) / abs(optimum))
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    return {
        "ours_s": statistics.median(ours),
        "milp_s": statistics.median(theirs),
        "milp_over_ours": ratio,
        "largest_difference": difference,
    }


def segments_seconds(repeats: int, latency: str, **size: int) -> float:
    """Median time of the segments of all clusters of this size."""
    instances = [network(**size, latency=latency, seed=seed) for seed in range(repeats)]
    return statistics.median(seconds(lambda i=instance: solve_segments(i)) for instance in instances)


def round_row(repeats: int, latency: str = "eq15", **size: int) -> dict[str, Any]:
    """Median time of a certified round of this size."""
    times, answers = [], []
    for seed in range(repeats):
        instance = network(**size, latency=latency, seed=seed)
        start = time.process_time()
        answers.append(plan_round(instance))
        times.append(time.process_time() - start)
    status = "optimal" if all(a.status == "optimal" for a in answers) else "not optimal"
    gaps = [a.gap for a in answers]
    row = {"latency": latency, **size, "seconds": statistics.median(times), "status": status}
    return {**row, "largest_gap": max(gaps)}  # type: ignore[type-var]


def growth_rows(repeats: int, latency: str) -> Iterator[dict[str, Any]]:
    """Rounds that double one size at a time, with the factor of their time over the size before."""
    size = BASES[latency]
    base = round_row(repeats, latency, **size)
    yield {**base, "doubled": None, "growth": None}
    for name in size:
        before = base["seconds"]
        for factor in (2, 4):
            row = round_row(repeats, latency, **(size | {name: factor * size[name]}))
            yield {**row, "doubled": name, "growth": row["seconds"] / before}
            before = row["seconds"]


def main() -> int:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON on standard output, all else on standard error")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each measurement")
    given = parser.parse_args()
    out = sys.stderr if given.json else sys.stdout

    one = against_milp(given.rounds)
    print(
        f"one cluster, K = 6, L = 12, m <= 64: ours {1e3 * one['ours_s']:.2f} ms, MILP {one['milp_s']:.3f} s, ratio "
        f"{one['milp_over_ours']:.0f}; optima differ by at most {one['largest_difference']:.1e}",
        file=out,
        flush=True,
    )
    flow_shop = segments_seconds(given.rounds, "flowshop", **FLOW_SHOP)
    print(f"one cluster, K = 50, L = 48, flow shop: {flow_shop:.3f} s", file=out, flush=True)
    print(f"{'':>8} {'N':>4} {'J':>3} {'K':>3} {'L':>3} {'seconds':>9} {'growth':>7}  status", file=out)
    large, huge = (round_row(given.rounds, **size) for size in (LARGE, HUGE))
    rows = []
    for row in chain((large, huge), growth_rows(given.rounds, "eq15"), growth_rows(given.rounds, "flowshop")):
        print(_line(row), file=out, flush=True)
        rows.append(row)
    if given.json:
        figures = {"large_round_s": large["seconds"], "huge_round_s": huge["seconds"], "flow_shop_s": flow_shop}
        print(json.dumps({**one, **figures, "large_round": large, "huge_round": huge, "growth": rows[2:]}))
    certified = all(row["status"] == "optimal" and row["largest_gap"] <= 1e-6 for row in rows)
    return 0 if one["largest_difference"] < 1e-6 and certified else 1


def _line(row: dict[str, Any]) -> str:
    size = f"{row['latency']:>8} {row['N']:>4} {row['J']:>3} {row['K']:>3} {row['L']:>3}"
    growth = f"{row['growth']:>7.2f}" if row.get("growth") else " " * 7
    return f"{size} {row['seconds']:>9.4f} {growth}  {row['status']}, gap {row['largest_gap']:.1e}"


if __name__ == "__main__":
    sys.exit(main())
