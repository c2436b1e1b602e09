"""``collapipe quote``: what a run will take, before anything runs; what holds it up; what a change would do.

Every figure is of the planner's own rounds, on the scenario's network: a run that trains them has the same virtual
seconds and joules. A change is planned anew, round by round, and not estimated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from client_pipeline.counted import counted
from client_pipeline.near_names import did_you_mean
from client_pipeline.partition.spec import ModelSpec
from client_pipeline.system.radio import Array
from client_pipeline.system.scenario import Scenario
from flower_app.compare.columns import four_digits
from flower_app.config.run_config import RunConfig
from flower_app.config.strategy_choice import make_planner, work_of
from flower_app.tasks.data.data_split import weighted_split
from flower_app.training.network import training_scenario
from strategies.decoder.kept_activations import LEAST_ENTRY
from strategies.dssda.instance import Instance
from strategies.dssda.round_problem import round_instance
from strategies.dssda.shadow_prices import Plan, Price, shadow_prices
from strategies.dssda.unequal_tebs import counted_tebs
from strategies.planned_strategy import PlannedStrategy
from strategies.planning.costs import costs_record, round_costs
from strategies.planning.dry_run import LossTrace
from strategies.planning.pipeline_choices import PipelineChoices
from strategies.planning.planner import Decision, InfeasibleRound, RoundPlanner
from strategies.planning.policies import DSSDA
from strategies.planning.policy import Round
from strategies.planning.schedule_choice import ScheduledPolicy
from strategies.registry import COLLAPIPE, strategy_class

MOST_COMPARED = 40
"""Rounds, the first ones, over which changes are compared."""
MOST_PRICED = 10
"""Likewise, over which shadow prices are means."""
_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("planner.schedule", "auto"),
    ("planner.bandwidth", "split"),
    ("compression.update", "int8"),
    ("compression.activations", "int8"),
    ("compression.stream", "int8"),
)
"""Settings that change what a round takes; those of compression also change what is learnt."""
_DEVICE_KEYS = {
    "memory-gb": ("memory", 1e9),
    "frequency-ghz": ("frequency", 1e9),
    "link-bandwidth-mhz": ("link_bandwidth_hz", 1e6),
}
_CLUSTER_KEYS = {"bandwidth-mhz": ("bandwidth_hz", 1e6), "max-power-w": ("max_power_w", 1.0)}
"""Key of a change -> field of the profile, and its unit in SI."""
_NOTABLE = 1e-3
"""Least share of the seconds that a change saves to be told."""


_MOST_TOLD = 8
"""Prices in the text."""
_MORE = {
    "memory": "device {cluster}.{device}, 1 GB more",
    "link": "device {cluster}.{device}, 1 MHz more for its link",
    "replaced": "device {cluster}.{device}, another of the network's fastest",
    "device": "cluster {cluster}, one more of its fastest device",
    "uplink": "cluster {cluster}, 1 MHz more for its uplink",
    "band": "1 MHz more for all uplinks together",
    "channel": "one more channel",
}
"""Resource of a price -> its words."""


class Change(NamedTuple):
    """A change of the network, in words and as a function."""

    text: str
    of: Callable[[Scenario], Scenario]


def quote(config: RunConfig, changes: Sequence[Change] = (), with_prices: bool = False) -> dict[str, Any]:
    """Plan all rounds of a configuration, and those of changes of it; as JSON values.

    Parameters
    ----------
    config : of a run
    changes : of the network, beside those that are tried anyway
    with_prices : whether to add shadow prices

    Returns
    -------
    ``rounds``, ``seconds``, ``joules``, ``uplink_bytes``, ``link_bytes`` (sums over the rounds), ``round_s`` (mean, and
    5th and 95th percentile over the rounds), ``objective`` and ``lower_bound`` (sums; None where nothing is certified),
    ``boxes``, ``bottlenecks``, ``what_if``, and ``settings`` and ``hardware``: the changes that save the most. And
    ``prices``: :class:`~strategies.dssda.shadow_prices.Price` as means over the first rounds, with None for what is
    infinite.

    Raises
    ------
    ValueError
        For a strategy that plans nothing, prices of another policy than ``dssda``, or a mistake in the configuration.
    InfeasibleRound
        If no cluster can train in a round.
    """
    cls = strategy_class(config.strategy)
    if not issubclass(cls, PlannedStrategy):
        raise ValueError(f"quote: strategy = {config.strategy} plans nothing; leave it out, or name a baseline")
    if config.costs == "measured":
        raise ValueError(
            "quote: costs = measured follows a run's own times; run a few rounds and quote the rest with --after RUN, "
            "or set it to model"
        )
    if with_prices and (config.strategy != COLLAPIPE or config.policy != DSSDA.name or config.plan):
        raise ValueError(
            f"--prices: expected the certified planner (strategy = collapipe, policy = dssda, no plan), found strategy "
            f"= {config.strategy}, policy = {config.policy}, plan = {config.plan!r}; leave --prices or these keys out"
        )
    # Costs that the scenario prints need no data, no task, and no torch.
    spec, sizes = None, list[int]()
    if config.costs == "model" or config.compression.cache_gb:
        from flower_app.training.prepared_run import prepare_task

        run_task, prepared, num_clusters = prepare_task(config)
        spec = prepared.spec if config.costs == "model" else None
    scenario = network_of(config, spec)
    if config.compression.cache_gb:
        data = weighted_split(config.data, scenario.data_shares)
        tokenizer = prepared.tokenizer_json
        sizes = [len(run_task.cluster_data(data, tokenizer, n, num_clusters, config.seed)) for n in range(num_clusters)]
    rounds = _rounds(config, scenario, config.num_rounds, sizes)
    document = _sums(rounds) | {"boxes": boxes_of_rounds(rounds, scenario), "bottlenecks": _bottlenecks(config, rounds)}
    # The same powers as by convex programs, in a fraction of the time.
    exact = replace(config, planner=replace(config.planner, power_control="exact"))
    compared = rounds[:MOST_COMPARED]
    before = sum(record["latency_s"] for _, record in compared)

    def effect(text: str, changed: RunConfig, network: Scenario) -> dict[str, Any]:
        try:
            seconds = sum(record["latency_s"] for _, record in _rounds(changed, network, len(compared), sizes))
        except InfeasibleRound as error:
            return {"change": text, "saves": None, "reason": str(error)}
        return {"change": text, "saves": 1 - seconds / before}

    document["compared_rounds"] = len(compared)
    document["what_if"] = [effect(change.text, exact, change.of(scenario)) for change in changes]
    settings = []
    for key, value in _SETTINGS:
        flat = exact.to_flat()
        if flat[key] == value:
            continue
        try:
            changed = RunConfig.from_flat(flat | {key: value})
            settings.append(effect(f"{key} = {value}", changed, network_of(changed, spec)))
        except ValueError:
            # It does not go with the others.
            continue
    document["settings"] = _best(settings)
    first = document["bottlenecks"][0]
    tried = _of_hardware(first["cluster"], len(scenario.clusters[first["cluster"]]))
    document["hardware"] = _best([effect(change.text, exact, change.of(scenario)) for change in tried])
    if with_prices:
        choices = PipelineChoices.of(config.planner.schedule, config.planner.token_slices)
        document["prices"] = _prices([decision for decision, _ in rounds[:MOST_PRICED]], scenario, choices)
    return document


def read_changes(config: RunConfig, texts: Sequence[str]) -> list[Change]:
    """Read changes of a configuration's network; see :func:`read_change`."""
    scenario = network_of(config, None)
    return [read_change(text, scenario) for text in texts]


def read_change(text: str, scenario: Scenario) -> Change:
    """Read a change of the network: ``device=0.4,memory-gb=2`` (cluster 0, device 4), ``cluster=1,bandwidth-mhz=x2``.

    Raises
    ------
    ValueError
        For a place or key that there is not, or no number.
    """
    parts = [part.partition("=")[::2] for part in text.split(",")]
    (kind, place), settings = parts[0], parts[1:]
    numbers = place.split(".")
    if kind not in ("device", "cluster") or not all(n.isdecimal() for n in numbers) or not settings:
        raise ValueError(
            f"--what-if: expected device=CLUSTER.DEVICE,KEY=VALUE or cluster=CLUSTER,KEY=VALUE, found {text!r}"
        )
    indices = [int(n) for n in numbers]
    if kind == "device" and len(indices) == 1 and scenario.num_clusters == 1:
        indices.insert(0, 0)
    if len(indices) != (2 if kind == "device" else 1):
        raise ValueError(f"--what-if: {kind}: expected such as {'0.4' if kind == 'device' else '0'}, found {place!r}")
    if indices[0] >= scenario.num_clusters or (kind == "device" and indices[1] >= len(scenario.clusters[indices[0]])):
        raise ValueError(f"--what-if: the network has no {kind} {place}, found {text!r}")
    keys = _DEVICE_KEYS if kind == "device" else _CLUSTER_KEYS
    read: list[tuple[str, float, bool]] = []
    for key, value in settings:
        if key not in keys:
            raise ValueError(f"--what-if: expected one of {', '.join(keys)}, found {key!r}{did_you_mean(key, keys)}")
        try:
            number = float(value.removeprefix("x"))
        except ValueError:
            number = -1.0
        if not 0 < number < float("inf"):
            raise ValueError(f"--what-if: {key}: expected a number above 0, or x2 for twice as much, found {value!r}")
        field, unit = keys[key]
        read.append((field, number if value.startswith("x") else number * unit, value.startswith("x")))
    return Change(text, lambda network: _changed(network, kind, indices, read))


def _changed(
    scenario: Scenario, kind: str, indices: Sequence[int], settings: Sequence[tuple[str, float, bool]]
) -> Scenario:
    def of(profile: Any) -> Any:
        return replace(profile, **{f: getattr(profile, f) * v if times else v for f, v, times in settings})

    n = indices[0]
    if kind == "cluster":
        uplinks = list(scenario.uplinks)
        uplinks[n] = of(uplinks[n])
        return replace(scenario, uplinks=tuple(uplinks))
    clusters, chosen = list(scenario.clusters), set(indices[1:])
    clusters[n] = tuple(of(device) if k in chosen else device for k, device in enumerate(clusters[n]))
    return replace(scenario, clusters=tuple(clusters))


def _of_hardware(cluster: int, num_devices: int) -> list[Change]:
    """Return changes of the cluster that rounds wait for most: twice as much of each."""

    def change(text: str, kind: str, indices: Sequence[int], field: str) -> Change:
        return Change(text, lambda network: _changed(network, kind, indices, [(field, 2.0, True)]))

    devices = range(num_devices)
    return [
        change(f"cluster {cluster}: twice the bandwidth of the uplink", "cluster", [cluster], "bandwidth_hz"),
        change(f"cluster {cluster}: twice the memory of every device", "device", [cluster, *devices], "memory"),
        *(change(f"cluster {cluster}: device {k} twice as fast", "device", [cluster, k], "frequency") for k in devices),
    ]


def _best(effects: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [effect for effect in effects if (effect["saves"] or 0.0) > _NOTABLE]
    return sorted(found, key=lambda effect: -effect["saves"])[:3]


def network_of(config: RunConfig, spec: ModelSpec | None) -> Scenario:
    """Return the scenario of a run, with as many clusters as it has."""
    scenario = training_scenario(config, spec)
    return scenario.first(config.num_clusters or scenario.num_clusters)


def _rounds(
    config: RunConfig, scenario: Scenario, num_rounds: int, sizes: Sequence[int] = ()
) -> list[tuple[Decision, dict[str, Any]]]:
    """Plan rounds; returns each one's decision, and its costs as a run records them.

    Of a cluster with so many examples the first epoch's activations alone are computed and sent, if the server has room
    for all; without sizes, those of every step.
    """
    planner, work = make_planner(config, scenario), work_of(config)
    assert planner is not None
    losses, found = LossTrace(scenario.num_clusters, scenario.seed), []
    each = config.batch_size * config.gradient_accumulation
    new_steps = [size / each if _fits(config, scenario, size) else math.inf for size in sizes]
    for number in range(1, num_rounds + 1):
        decision, gamma = plan_and_settle(planner, number, losses.round(number))
        computed = {n: min(steps, config.local_steps) for n, steps in enumerate(new_steps) if decision.selected[n]}
        for n, steps in computed.items():
            new_steps[n] -= steps
        costs = round_costs(decision, work, computed=computed)
        found.append((decision, costs_record(decision, costs, gamma, scenario)))
    return found


def _fits(config: RunConfig, scenario: Scenario, size: int) -> bool:
    """Return whether the server has room for what so many examples send, as the costs count it."""
    costs = scenario.costs
    examples = config.local_steps * config.batch_size * config.gradient_accumulation
    sent = (costs.upload_time_bits - costs.upload_energy_bits) / 8 / examples
    return size * max(sent, LEAST_ENTRY) <= config.compression.cache_gb * 2**30


def plan_and_settle(planner: RoundPlanner, number: int, losses: list[float]) -> tuple[Decision, Array]:
    """Plan a round and move its queues; returns its decision and Gamma, (N,).

    Raises
    ------
    InfeasibleRound
        If no cluster can train.
    """
    decision = planner.plan(number, losses)
    if not any(decision.selected):
        raise InfeasibleRound(number, decision.left_out)
    return decision, planner.settle(decision)


def _prices(decisions: Sequence[Decision], scenario: Scenario, choices: PipelineChoices) -> list[dict[str, Any]]:
    """Return the shadow prices of the problems that rounds were planned by, as means over the rounds that have each."""
    found: dict[tuple[str, int | None, int | None], list[Price]] = {}
    for decision in decisions:
        instance, _ = counted_tebs(round_instance(scenario, decision.network, decision.queues))
        able = [n for n in range(instance.num_clusters) if n not in decision.left_out]
        of_able = replace(instance, clusters=tuple(instance.clusters[n] for n in able))
        for price in shadow_prices(of_able, _scheduled(decision.number, instance, choices)):
            cluster = None if price.cluster is None else able[price.cluster]
            found.setdefault((price.resource, cluster, price.device), []).append(price)
    columns = ("objective", "least", "most", "seconds")
    return [
        dict(zip(("resource", "cluster", "device"), place, strict=True))
        | {"rounds": len(prices)}
        | {name: _finite(np.mean([getattr(price, name) for price in prices])) for name in columns}
        for place, prices in found.items()
    ]


def _scheduled(number: int, instance: Instance, choices: PipelineChoices) -> Plan | None:
    """Return how a round is planned where schedules keep less than GPipe; None: as it stands."""
    if not (choices.any or instance.recomputes):
        return None
    policy = ScheduledPolicy(DSSDA(), choices)
    return lambda part: policy.plan(Round(number=number, instance=part, losses=[math.inf] * part.num_clusters))


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _sums(rounds: Sequence[tuple[Decision, dict[str, Any]]]) -> dict[str, Any]:
    seconds = [record["latency_s"] for _, record in rounds]
    trained = [c for _, record in rounds for c in record["clusters"] if c["selected"]]
    answers = [decision.answer for decision, _ in rounds]
    bounds = [answer.lower_bound for answer in answers]
    certified = all(bound is not None and np.isfinite(bound) for bound in bounds)
    return {
        "rounds": len(rounds),
        "seconds": sum(seconds),
        "round_s": spread(seconds),
        "joules": sum(record["energy_j"] for _, record in rounds),
        "uplink_bytes": sum(c["uplink_bytes"] for c in trained),
        "link_bytes": sum(sum(c["link_bytes"]) for c in trained),
        "objective": sum(a.objective for a in answers if a.objective is not None) if certified else None,
        "lower_bound": sum(bound for bound in bounds if bound is not None) if certified else None,
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the mean, and the 5th and 95th percentile."""
    low, high = np.percentile(seconds, [5, 95])
    return {"mean": float(np.mean(seconds)), "p5": float(low), "p95": float(high)}


def boxes_of_rounds(rounds: Sequence[tuple[Decision, dict[str, Any]]], scenario: Scenario) -> list[dict[str, Any]]:
    """Return each device's share of the rounds, what it takes in all of them, and the most memory that a plan needs.

    ``seconds`` are those in which it computes, ``link_bytes`` those of the link after it, both ways.
    """
    boxes = []
    for n, devices in enumerate(scenario.clusters):
        trained = [record["clusters"][n] for _, record in rounds if record["clusters"][n]["selected"]]
        for k, device in enumerate(devices):
            boxes.append(
                {
                    "cluster": n,
                    "device": k,
                    "share": sum(c["delta"][k] > 0 for c in trained) / len(rounds),
                    "seconds": sum(c["device_s"][k] for c in trained),
                    "joules": sum(c["device_energy_j"][k] for c in trained),
                    "link_bytes": sum(c["link_bytes"][k] for c in trained),
                    "memory_bytes": max((c["device_memory_bytes"][k] for c in trained), default=0.0),
                    "has_bytes": device.memory,
                }
            )
    return boxes


def _bottlenecks(config: RunConfig, rounds: Sequence[tuple[Decision, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return what rounds waited for, most often first: the slowest cluster's upload, device or link."""
    times = strategy_class(config.strategy).times  # type: ignore[attr-defined]
    counted: Counter[tuple[int, str]] = Counter()
    for decision, record in rounds:
        last = min((c for c in record["clusters"] if c["selected"]), key=lambda c: c["waiting_s"])
        n = last["cluster"]
        if last["uplink_s"] > last["train_s"]:
            counted[n, "upload"] += 1
            continue
        plan = decision.plans[n]
        stages = times(decision.instance, n, plan)
        computing = (stages.forward_s + stages.backward_s).sum(axis=1)
        sending = (stages.forward_link_s + stages.backward_link_s).sum(axis=1)
        slowest = int(np.argmax(computing))
        if len(sending) and sending.max() > computing[slowest]:
            counted[n, f"link after device {plan.devices[int(np.argmax(sending))]}"] += 1
        else:
            counted[n, f"device {plan.devices[slowest]}"] += 1
    return [
        {"cluster": n, "what": what, "share": times_seen / len(rounds)}
        for (n, what), times_seen in counted.most_common()
    ]


def quote_text(document: dict[str, Any]) -> str:
    """Write a quote without its boxes as lines."""
    per_round, measured = document["round_s"], "first_round" in document
    if measured:
        beside = f" of local steps and uploads, and {four_digits(document['start_s'])} s more to start"
    else:
        beside = f", {four_digits(document['joules'])} J"
    draws = "rounds" if measured else "draws of channels and speeds"
    lines = [
        f"{counted(document['rounds'], 'round')}: {four_digits(document['seconds'])} s{beside}; "
        f"uploads {four_digits(document['uplink_bytes'] / 1e6)} MB, links {four_digits(document['link_bytes'] / 1e6)} "
        "MB",
        f"a round: {four_digits(per_round['mean'])} s, from {four_digits(per_round['p5'])} to "
        f"{four_digits(per_round['p95'])} s in nine of ten {draws}",
    ]
    if measured:
        lines.append("seconds, energy, links and memory of a device are its model's, not measured")
    if document.get("lower_bound") is not None:
        lines.append(
            f"objective {document['objective']:.6g}; no plan has less than {document['lower_bound']:.6g} (certified)"
        )
    lines += [f"waits for cluster {b['cluster']}, {b['what']}: {b['share']:.0%}" for b in document["bottlenecks"][:3]]
    for name, title in (("what_if", "what if"), ("settings", "settings"), ("hardware", "hardware")):
        for effect in document.get(name, ()):
            saves = effect["saves"]
            outcome = effect["reason"] if saves is None else f"{-saves:+.1%} of the seconds"
            lines.append(f"{title}: {effect['change']}: {outcome}")
    priced = [price for price in document.get("prices", ()) if (price["objective"] or 0.0) < 0]
    for price in sorted(priced, key=lambda price: price["objective"])[:_MOST_TOLD]:
        resource = "band" if price["resource"] == "uplink" and price["cluster"] is None else price["resource"]
        lines.append(
            f"{_MORE[resource].format(**price)}: objective {price['objective']:+.4g} ({_limits(price)}), "
            f"{price['seconds']:+.4g} s a round"
        )
    return "\n".join(lines)


def _limits(price: dict[str, Any]) -> str:
    if price["least"] is None or price["most"] is None:
        return "not certified"
    return f"{price['least']:+.4g} to {price['most']:+.4g}"


def boxes_table(document: dict[str, Any]) -> Table:
    """One row a device."""
    table = Table(box=None)
    for name in ("cluster", "device", "trains in", "computes s", "energy J", "link MB", "memory GB", "of GB"):
        table.add_column(name, justify="right")
    for box in document["boxes"]:
        table.add_row(
            str(box["cluster"]),
            str(box["device"]),
            f"{box['share']:.0%}",
            four_digits(box["seconds"]),
            four_digits(box["joules"]),
            four_digits(box["link_bytes"] / 1e6),
            four_digits(box["memory_bytes"] / 1e9),
            four_digits(box["has_bytes"] / 1e9),
        )
    return table
