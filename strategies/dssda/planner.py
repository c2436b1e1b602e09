"""The certified planner ``dssda``: one round's optimum, with a proof."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from strategies.dssda.answer import Answer, Infeasibility, Match
from strategies.dssda.branching import DeadlineSearch
from strategies.dssda.deadline import Options
from strategies.dssda.evaluation import score
from strategies.dssda.instance import Instance
from strategies.dssda.matching import most_matched
from strategies.dssda.power import Uplinks, uplink_infeasibility
from strategies.dssda.segments import SegmentTable, segment_tables
from strategies.dssda.split_band import plan_split_band


def plan_round(instance: Instance, *, tolerance: float = 1e-6, tables: Sequence[SegmentTable] | None = None) -> Answer:
    """Segments, micro-batches, channels and powers of least cost in one round, with a certificate.

    Parameters
    ----------
    tolerance : relative gap between objective and lower bound at which the answer counts as optimal
    tables : (N,), the clusters' segments, where they are known already

    Returns
    -------
    Status ``optimal``; ``feasible`` if the search gave up before the gap was closed; or ``infeasible``, with all that
    is missing.
    """
    tables = segment_tables(instance) if tables is None else tables
    if instance.band_hz is not None:
        whole = tables

        def plan(part: Instance, matched: Collection[int]) -> Answer:
            # Who has no band in a division cannot be matched in it.
            some = [table if n in matched else SegmentTable({}, None) for n, table in enumerate(whole)]
            return plan_round(part, tolerance=tolerance, tables=some)

        return plan_split_band(instance, [table.offered for table in tables], plan, tolerance)
    uplinks = Uplinks.of(instance)
    if faults := _infeasibilities(instance, tables, uplinks):
        return Answer.without_plan(faults, instance.num_clusters)
    search = DeadlineSearch(instance.V, tolerance)
    search.run(Options.of(instance, [table.offered for table in tables], uplinks))
    taken = search.taken
    assert taken is not None
    matches: list[Match | None] = [None] * instance.num_clusters
    powers = taken.uplinks.power(taken.efficiency(search.deadline))
    for n, j, choice, power in zip(taken.cluster, taken.channel, taken.choices, powers, strict=True):
        matches[n] = Match(choice, int(j), float(power))
    objective = score(instance, matches, "optimal").objective
    assert objective is not None
    bound = min(search.bound, objective)  # both are rounded
    proved = objective - bound <= tolerance * max(abs(objective), 1e-12)
    return score(instance, matches, "optimal" if proved else "feasible", bound)


def _infeasibilities(instance: Instance, tables: Sequence[SegmentTable], uplinks: Uplinks) -> tuple[Infeasibility, ...]:
    """All that keeps min(N, J) clusters from being matched; empty if nothing does."""
    possible = uplinks.feasible & np.array([[bool(table.choices)] for table in tables])
    num_matched = most_matched(possible)
    if num_matched == instance.num_matched:
        return ()
    rows, columns = linear_sum_assignment(~possible)
    faults = [table.infeasible for table in tables if table.infeasible is not None]
    lacking = [uplink_infeasibility(instance, uplinks, n) for n in range(instance.num_clusters)]
    faults += [fault for fault in lacking if fault is not None]
    faults.sort(key=lambda fault: -1 if fault.cluster is None else fault.cluster)
    sound = instance.num_clusters - len({fault.cluster for fault in faults})
    if instance.num_clusters > instance.num_channels or num_matched < sound:
        lonely = [n for n, j in zip(rows, columns, strict=True) if possible[n].any() and not possible[n, j]]
        usable = [f"cluster {n} can use channels {np.flatnonzero(possible[n]).tolist()}" for n in lonely]
        remedy = "; ".join(["repair more clusters or channels", *usable])
        faults.append(Infeasibility(None, "C5", instance.num_matched, num_matched, remedy))
    return tuple(faults)
