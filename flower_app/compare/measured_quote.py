"""``collapipe quote --after RUN``: what the rest of a run takes on the machines that it runs on.

Seconds are those that its planner predicts by the measured times, as many times as long as its rounds took over what
was predicted of them: the predictions know nothing of processes that share cores. Bytes are what its rounds have
counted, for as many links as the plans have, since batches are as long as their texts. What a box takes (its memory,
too) is by the run's own model, under the same plans.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from client_pipeline.counted import counted
from flower_app.compare.quote import boxes_of_rounds, network_of, plan_and_settle, spread
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import make_planner, work_of
from flower_app.runs import run_checkpoints
from flower_app.runs.run_directory import read_rounds
from flower_app.training.prepared_run import prepare_task
from strategies.dssda.round_problem import round_instance
from strategies.planning.costs import costs_record, round_costs


def measured_quote(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Plan the rounds that a run has not had yet, by the times that it has measured; as JSON values.

    Parameters
    ----------
    config : of the run that goes on, with all its rounds
    run_dir : its folder

    Returns
    -------
    ``rounds`` and ``first_round``; ``seconds``, local steps and uploads of the slowest cluster, sums over the rounds,
    and ``train_s``, local steps alone; ``start_s``, what the first round after a start takes beside these seconds;
    ``round_s`` (mean, 5th and 95th percentile); ``uplink_bytes`` and ``link_bytes``, sums; ``bottlenecks``, clusters
    that rounds wait for; and ``boxes``. Evaluations, moves of TEBs and what the server takes between the rounds are not
    in the seconds.

    Raises
    ------
    ValueError
        If the run does not measure, or has had all its rounds.
    InfeasibleRound
        If no cluster can train in a round.
    """
    if config.costs != "measured":
        raise ValueError(
            f"--after: expected a run that measures, found costs = {config.costs}; run a few rounds with --set "
            "costs=measured, or quote without --after"
        )
    newest = run_checkpoints.newest(run_dir, config)
    if newest.round >= config.num_rounds:
        raise ValueError(
            f"--after: {run_dir} has had its {counted(newest.round, 'round')}; say how many it is to have with --set "
            f"num-rounds={2 * newest.round}"
        )
    state, spec = newest.state["strategy"], prepare_task(config)[1].spec
    losses = [math.inf if loss is None else loss for loss in state["losses"]]
    modelled = network_of(replace(config, costs="model"), spec)
    planner, work = make_planner(config, network_of(config, spec)), work_of(config)
    assert planner is not None and planner.adaptation is not None
    planner.restore(state["queues"])
    # An idle device's trial tells what nobody knows yet.
    planner.adaptation.tries = False
    records = read_rounds(run_dir)[0]
    train_ratio, upload_ratio = (_taken_over_predicted(records, part) for part in ("train", "upload"))
    rounds, seconds, training, waited = [], [], [], Counter[tuple[int, str]]()
    for number in range(newest.round + 1, config.num_rounds + 1):
        decision, gamma = plan_and_settle(planner, number, losses)
        selected = {n: part for n, part in enumerate(decision.answer.clusters) if part.selected}
        uploads = {n: (part.uplink_s or 0.0) * upload_ratio.get(n, 1.0) for n, part in selected.items()}
        steps = {n: planner.adaptation.predictions[n].train_s * train_ratio.get(n, 1.0) for n in selected}
        planner.adaptation.assume({n: decision.plans[n] for n in uploads})
        slowest = max(uploads, key=lambda n: steps[n] + uploads[n])
        seconds.append(steps[slowest] + uploads[slowest])
        training.append(max(steps.values()))
        waited[slowest, "local steps" if steps[slowest] >= uploads[slowest] else "upload"] += 1
        instance = round_instance(modelled, decision.network, decision.queues)
        of_model = replace(decision, instance=instance, declared=instance)
        rounds.append((of_model, costs_record(of_model, round_costs(of_model, work), gamma, modelled)))
    trained = [c for _, record in rounds for c in record["clusters"] if c["selected"]]
    usual = _usual_bytes(records)
    return {
        "first_round": newest.round + 1,
        "rounds": len(rounds),
        "seconds": sum(seconds),
        "train_s": sum(training),
        "start_s": _start_seconds(records),
        "round_s": spread(seconds),
        "uplink_bytes": sum(usual[n].uplink if (n := c["cluster"]) in usual else c["uplink_bytes"] for c in trained),
        "link_bytes": sum(
            (c["segments"] - 1) * link
            if (n := c["cluster"]) in usual and (link := usual[n].link) is not None
            else sum(c["link_bytes"])
            for c in trained
        ),
        "bottlenecks": [
            {"cluster": n, "what": what, "share": times / len(rounds)} for (n, what), times in waited.most_common()
        ],
        "boxes": boxes_of_rounds(rounds, modelled),
    }


class _UsualBytes(NamedTuple):
    """What a cluster sends in a round, as medians over those that it had."""

    uplink: float
    """Activations and update."""
    link: float | None
    """Of one link, both directions; None if it had none."""


def _usual_bytes(records: Sequence[Mapping[str, Any]]) -> dict[int, _UsualBytes]:
    """Return what each cluster sends that has reported."""
    uplinks, links = dict[int, list[float]](), dict[int, list[float]]()
    for report in (report for record in records for report in record["clusters"]):
        n, payload = report["cluster"], report["payload_bytes"]
        uplinks.setdefault(n, []).append(payload["up"] + payload["update"])
        if num_links := sum(d > 0 for d in report["plan"]["delta"]) - 1:
            links.setdefault(n, []).append(report["link_bytes"] / num_links)
    return {
        n: _UsualBytes(statistics.median(values), statistics.median(links[n]) if n in links else None)
        for n, values in uplinks.items()
    }


def _taken_over_predicted(records: Sequence[Mapping[str, Any]], part: str) -> dict[int, float]:
    """Return what each cluster's ``train`` or ``upload`` took over what was predicted, a median.

    It is of the newer half of its rounds; where there is one round alone, nothing had been measured before it.
    """
    ratios = dict[int, list[float]]()
    for p in (p for record in records for p in (record.get("plan") or {}).get("predictions") or ()):
        predicted_s, measured_s = p[f"predicted_{part}_s"], p[f"measured_{part}_s"]
        if predicted_s and measured_s:
            ratios.setdefault(p["cluster"], []).append(measured_s / predicted_s)
    return {n: statistics.median(values[len(values) // 2 :]) for n, values in ratios.items() if len(values) > 1}


def _start_seconds(records: Sequence[Mapping[str, Any]]) -> float:
    """Return what the first round has taken over the usual one; 0 where only one is known."""
    slowest = [
        max((p["measured_train_s"] + (p["measured_upload_s"] or 0.0) for p in predictions), default=0.0)
        for record in records
        if (predictions := (record.get("plan") or {}).get("predictions"))
    ]
    return max(slowest[0] - statistics.median(slowest[1:]), 0.0) if len(slowest) > 1 else 0.0
