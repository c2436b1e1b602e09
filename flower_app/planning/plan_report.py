"""A planner's answer as text for people: each cluster's segments to scale, its figures and what binds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from client_pipeline.counted import counted
from strategies.dssda.answer import Answer, ClusterAnswer
from strategies.dssda.evaluation import binding, choice_loads, device_energy, teb_and_link_seconds
from strategies.dssda.instance import Instance

MOST_CLUSTERS = 12
"""Clusters that are printed one by one; of more, the slowest and the fastest."""
_EXTREMES = 3
_MOST_SIZES = 6
_BAR = 36
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


def print_answer(console: Console, instance: Instance, answer: Answer, names: Sequence[str] = ()) -> None:
    """Print the whole answer; of many clusters what they amount to, and the slowest and fastest of them."""

    def name(n: int) -> str:
        return f"cluster {n} ({names[n]})" if names and names[n] else f"cluster {n}"

    numbers = list(range(len(answer.clusters)))
    if len(numbers) > MOST_CLUSTERS:
        numbers = _extremes(instance, answer)
        devices = sum(len(cluster.devices) for cluster in instance.clusters)
        console.print(f"{devices:,} devices; S x m: {sizes_text(answer.clusters)}", highlight=False)
        console.print(f"the slowest and the fastest clusters of the round, {len(numbers)} of them:\n", highlight=False)
    for n in numbers:
        console.print(_cluster(instance, answer, n, name(n)))
    for reason in answer.infeasible:
        console.print(f"infeasible: {reason}", style="red", highlight=False)
    console.print(_summary(answer), highlight=False)


def sizes_text(clusters: Sequence[ClusterAnswer]) -> str:
    """Return one line of cluster counts: those that train, by S and m, and those that wait."""
    choices = [part.choice for part in clusters if part.selected and part.choice is not None]
    counts = Counter(f"{choice.num_segments}x{choice.m}" for choice in choices).most_common()
    words = [f"{times} of {size}" for size, times in counts[:_MOST_SIZES]]
    if rest := sum(times for _, times in counts[_MOST_SIZES:]):
        words.append(f"{rest} of other sizes")
    waiting = len(clusters) - len(choices)
    waiting_words = f"{counted(waiting, 'cluster')} {'waits' if waiting == 1 else 'wait'}"
    return f"{len(choices)} of {len(clusters)} clusters train: {', '.join(words) or 'none'}; {waiting_words}"


def schedules_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Each cluster's schedule, and what the others would take by the event simulator."""
    lines = []
    for row in rows[:MOST_CLUSTERS]:
        times = ", ".join(f"{name} {seconds:.4g} s" for name, seconds in row["step_s"].items())
        lines.append(f"cluster {row['cluster']}: {row['schedule']} (a step by the event simulator: {times})")
        if "slices_s" in row:
            times = ", ".join(f"{number}: {seconds:.4g} s" for number, seconds in row["slices_s"].items())
            lines.append(f"cluster {row['cluster']}: {row['token_slices']} token slices ({times})")
    counts = Counter(row["schedule"] for row in rows)
    if len(rows) > MOST_CLUSTERS:
        lines.append(", ".join(f"{times} of {len(rows)} clusters run {name}" for name, times in counts.most_common()))
    return "\n".join(lines)


def _extremes(instance: Instance, answer: Answer) -> list[int]:
    """Clusters with the longest and the shortest time of steps and upload, slowest first."""
    seconds = {
        n: instance.steps * part.choice.pipeline_s + (part.uplink_s or 0.0)
        for n, part in enumerate(answer.clusters)
        if part.choice is not None and (part.selected or part.uplink_s is None)
    }
    by_time = sorted(seconds, key=lambda n: (-seconds[n], n))
    return by_time if len(by_time) <= 2 * _EXTREMES else by_time[:_EXTREMES] + by_time[-_EXTREMES:]


def _summary(answer: Answer) -> str:
    parts: list[str] = [answer.status]
    if answer.objective is not None:
        parts.append(f"objective {answer.objective:.6g}")
    if answer.gap is not None:
        parts.append(f"lower bound {answer.lower_bound:.6g}, gap {answer.gap:.1e}")
    if answer.latency_s is not None:
        parts.append(f"round latency {answer.latency_s:.4g} s")
    return "; ".join(parts)


def _cluster(instance: Instance, answer: Answer, n: int, name: str) -> Group:
    part = answer.clusters[n]
    choice = part.choice
    if choice is None:
        cost = "" if part.cost is None else f", cost {part.cost:.4g}"
        return Group(Text(f"{name}: {'not selected' if part.status != 'infeasible' else 'no plan'}{cost}"), Text())
    head = [f"{name}: S = {choice.num_segments}, m = {choice.m}, pipeline {choice.pipeline_s:.4g} s"]
    if part.channel is not None:
        band = "" if part.band_hz is None else f", {part.band_hz / 1e6:.4g} MHz"
        head.append(f"channel {part.channel} at {part.power_w:.4g} W{band}")
        head.append(f"uplink {part.uplink_s:.4g} s, {part.uplink_energy_j:.4g} J")
    if part.cost is not None:
        head.append(f"cost {part.cost:.4g}")
    bound = binding(instance, answer, n)
    lines: list[Text | Table] = [Text("; ".join(head), style="bold"), _devices(instance, n, part)]
    if bound:
        lines.append(Text(f"  binds: {', '.join(bound)}"))
    return Group(*lines, Text())


def _devices(instance: Instance, n: int, part: ClusterAnswer) -> Table:
    """One row for each busy device, in pipeline order; its bar stands where its TEBs are among the L."""
    choice = part.choice
    assert choice is not None
    devices = instance.device_arrays(n)
    teb_s, link_s = teb_and_link_seconds(instance, n, choice.m)
    loads = choice_loads(instance, n, choice)
    energy = device_energy(instance, n, loads, choice.m, choice.last)
    table = Table(box=None, padding=(0, 1), pad_edge=True, header_style="dim")
    table.add_column("device", justify="right")
    table.add_column(f"TEBs 0 to {instance.L - 1}", width=_BAR, no_wrap=True)
    for name in ("TEBs", "GFLOP/s", "compute s", "link s", "memory", *([] if instance.energy == "none" else ["J"])):
        table.add_column(name, justify="right")
    first = 0
    for place, k in enumerate(choice.order(devices.phi * devices.f)):
        blocks = choice.delta[k]
        start, end = round(_BAR * first / instance.L), round(_BAR * (first + blocks) / instance.L)
        first += blocks
        pays = not (instance.latency == "flowshop" and k == choice.last)
        cells = [
            f"{blocks}",
            f"{devices.phi[k] * devices.f[k] / 1e9:.2f}",
            f"{loads[k] * teb_s[k]:.3g}",
            f"{link_s[k] if pays else 0:.3g}",
            f"{blocks * instance.gamma0 / devices.mem[k]:.0%}" if devices.mem[k] > 0 else "-",
        ]
        if instance.energy != "none":
            cells.append(f"{energy[k]:.3g} of {devices.Emax[k]:.3g}")
        bar = Text(" " * start + "█" * max(end - start, 1), style=_COLOURS[place % len(_COLOURS)])
        table.add_row(str(k), bar, *cells)
    return table
