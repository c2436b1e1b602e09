"""A run directory of rounds that were planned and never trained: what a report of a large network has to show."""

import json

from client_pipeline.system.scenario import load_scenario
from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import write_config
from flower_app.training.round_closer import timeline_of
from strategies.planning.costs import costs_record
from strategies.planning.dry_run import plan_rounds
from strategies.planning.policies import make_policy


def planned_run(folder, scenario, num_rounds, policy="dssda"):
    """Write what a training of these rounds would have left, losses and measured figures made up."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f'name = "planned"\nnum-rounds = {num_rounds}\nscenario = "{scenario.name}"\n')
    lines = []
    for planned in plan_rounds(scenario, make_policy(policy), num_rounds):
        virtual = costs_record(planned, planned.costs, planned.gamma, scenario)
        plans = {n: plan for n, plan in enumerate(planned.plans) if planned.selected[n]}
        spent = {"blocks": 1, "busy_s": 0.1, "idle_bytes": 2e8, "peak_bytes": 2.6e8}
        reports = [
            {
                "cluster": n,
                "loss": 1.0,
                "plan": plan.to_dict(),
                "devices": {str(k): spent for k, d in enumerate(plan.delta) if d},
            }
            for n, plan in plans.items()
        ]
        lines.append(
            {
                "round": planned.number,
                "train_loss": 4.0 / planned.number,
                "bytes_down": 1_000_000,
                "bytes_up": 900_000,
                "clusters": reports,
                "failed": [],
                "metrics": {},
                "round_s": 3.0,
                "wall_s": 3.0 * planned.number,
                "plan": {"policy": policy, "status": planned.answer.status, "left_out": []},
                "virtual": virtual,
            }
        )
    (folder / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    trained = [{"cluster": n, "plan": plan.to_dict(), "timeline": []} for n, plan in plans.items()]
    (folder / "timeline.json").write_text(json.dumps(timeline_of(scenario, num_rounds, trained)))
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "wall_s": 3.0 * num_rounds}))
    return folder


def unfinished_run(folder, num_rounds, scenario="unequal", planned=4):
    """Write a run that has trained some of its rounds and goes on."""
    planned_run(folder, load_scenario(scenario), planned)
    write_config(folder, RunConfig(scenario=scenario, num_rounds=num_rounds))
    (folder / "summary.json").unlink()
    return folder
