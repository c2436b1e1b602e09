"""A run that has all that its page can show: twelve clusters, faults, changes of plans with long reasons, a log."""

import json

from client_pipeline.link.cluster_news import ClusterNews, LifeSign
from client_pipeline.runtime.faults import FaultRecord
from client_pipeline.system.scenario import parse_scenario
from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import ROUNDS, TIMELINE, write_config
from flower_app.training.live_news import LiveNews
from helpers.planned_run import planned_run

CLUSTERS, ROUND_COUNT = 12, 60
NAMES = ("harbour", "workshop in the north", "depot", "clinic", "school", "library")
SCENARIO = {
    "format": "collapipe-scenario/1",
    "seed": 0,
    "channels": CLUSTERS,
    "device": {
        "flop-per-cycle": {"min": 10.0, "max": 24.0},
        "frequency-ghz": {"min": 0.1, "max": 0.8},
        "memory-gb": 1.5,
    },
    "block": {"memory-gb": 0.375},
    "planner": {"blocks": 4, "batch-size": 32, "local-steps": 4, "gamma-max": 5.0},
    "cluster": [
        {"name": NAMES[n], "devices": 3 + n % 4} if n < len(NAMES) else {"devices": 5} for n in range(CLUSTERS)
    ],
}
REASON = (
    "a TEB on device 3 takes 2.3 times as long; the link after device 1 takes 4.1 times as long; device 3 is left out: "
    "it costs more than it brings; 3:1, 1:2, 0:1 with m = 8 becomes 1:2, 0:2 with m = 8: 3.42 s a round instead of "
    "5.17 s (34% less), moving 2 TEBs takes 1.21 s"
)
LOST = "cluster {n}: step 3: device 1 (10.0.{n}.12:41872) ended: killed by signal 9 while it held micro-batches 2 to 5"


def fault(cluster, device, round_, *, kind="device", recovered=True):
    reason = LOST.format(n=cluster)
    record = FaultRecord(
        kind=kind,
        cluster=cluster,
        device=device,
        round=round_,
        step=3,
        recovered=recovered,
        seconds=1.27,
        reason=reason,
    )
    return record.to_dict()


def busy_run(folder):
    """Write the run directory of a run in its 61st round."""
    run_dir = planned_run(folder, parse_scenario(SCENARIO, "busy"), 1)
    write_config(run_dir, RunConfig(num_rounds=2 * ROUND_COUNT, costs="measured"))
    (run_dir / "summary.json").unlink()
    line = json.loads((run_dir / ROUNDS).read_text())
    (run_dir / ROUNDS).write_text(
        "".join(json.dumps(line | _told_of_round(n)) + "\n" for n in range(1, ROUND_COUNT + 1))
    )
    timeline = json.loads((run_dir / TIMELINE).read_text())
    for cluster in timeline["clusters"]:
        cluster["measured"] = [
            [*event[:3], 1.1 * event[3], 1.1 * event[4]] for event in cluster["modelled"] if event[0] in "FB"
        ]
    (run_dir / TIMELINE).write_text(json.dumps(timeline))
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "run.log").write_text(
        "".join(f"2026-11-23 12:{n // 60:02}:{n % 60:02} round {n}: {REASON}\n" for n in range(ROUND_COUNT))
    )
    return run_dir


def _told_of_round(number):
    spread = 1 + 0.1 * (number % 7)
    times = [{"kind": "device", "place": k, "fixed_s": 0.0021 * spread, "sample_s": 0.00038} for k in range(6)]
    return {
        "round": number,
        "train_loss": 6.0 / number**0.5,
        "metrics": {"bleu": 80 * number / ROUND_COUNT} if number % 4 == 0 else {},
        "round_s": 5.1 * spread,
        "faults": [fault(number % CLUSTERS, 1, number)] if number % 3 == 0 else [],
        "failed": [{"cluster": 5, "reason": "its control unit was lost"}] if number % 11 == 0 else [],
        "plan": {
            "predictions": [{"cluster": 0, "predicted_train_s": 5.0, "measured_train_s": 4.8 * spread}],
            "changes": [
                {"cluster": number % CLUSTERS, "taken": number % 2 == 0, "reason": REASON, "gain_s": 1.0, "move_s": 1.0}
            ]
            if number % 5 == 0
            else [],
            "estimates": [{"cluster": n, "times": times} for n in range(CLUSTERS)],
            "left_out": [],
        },
    }


def trouble(run_dir):
    """Tell of the round under way: three clusters with devices that are lost or silent."""
    with LiveNews(run_dir) as news:
        for n in (1, 4, 7):
            signs = [LifeSign(0, "ended", 2.0), LifeSign(2, "silent", 0.8)]
            faults = [fault(n, 1, ROUND_COUNT + 1, kind="freeze", recovered=False)]
            news.hear(n, ROUND_COUNT + 1, ClusterNews(round=ROUND_COUNT + 1, faults=faults, signs=signs).to_text())
        yield news
