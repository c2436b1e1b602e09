"""A planner's answer as text for people: each cluster's segments to scale, its figures and what binds."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from strategies.dssda.answer import Answer, ClusterAnswer
from strategies.dssda.evaluation import binding, device_energy, teb_and_link_seconds
from strategies.dssda.instance import Instance

_BAR = 36
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


def print_answer(console: Console, instance: Instance, answer: Answer) -> None:
    """Print the whole answer."""
    for n, part in enumerate(answer.clusters):
        console.print(_cluster(instance, answer, n, part))
    for reason in answer.infeasible:
        console.print(f"infeasible: {reason}", style="red", highlight=False)
    console.print(_summary(answer), highlight=False)


def _summary(answer: Answer) -> str:
    parts: list[str] = [answer.status]
    if answer.objective is not None:
        parts.append(f"objective {answer.objective:.6g}")
    if answer.gap is not None:
        parts.append(f"lower bound {answer.lower_bound:.6g}, gap {answer.gap:.1e}")
    if answer.latency_s is not None:
        parts.append(f"round latency {answer.latency_s:.4g} s")
    return "; ".join(parts)


def _cluster(instance: Instance, answer: Answer, n: int, part: ClusterAnswer) -> Group:
    choice = part.choice
    if choice is None:
        cost = "" if part.cost is None else f", cost {part.cost:.4g}"
        return Group(Text(f"cluster {n}: {'not selected' if part.status != 'infeasible' else 'no plan'}{cost}"), Text())
    head = [f"cluster {n}: S = {choice.num_segments}, m = {choice.m}, pipeline {choice.pipeline_s:.4g} s"]
    if part.channel is not None:
        head.append(f"channel {part.channel} at {part.power_w:.4g} W")
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
    energy = device_energy(instance, n, choice.delta, choice.m, choice.last)
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
            f"{blocks * teb_s[k]:.3g}",
            f"{link_s[k] if pays else 0:.3g}",
            f"{blocks * instance.gamma0 / devices.mem[k]:.0%}" if devices.mem[k] > 0 else "-",
        ]
        if instance.energy != "none":
            cells.append(f"{energy[k]:.3g} of {devices.Emax[k]:.3g}")
        bar = Text(" " * start + "█" * max(end - start, 1), style=_COLOURS[place % len(_COLOURS)])
        table.add_row(str(k), bar, *cells)
    return table
