"""Contents of the report, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from flower_app.report.cluster_figures import draw_energy, draw_memory, draw_queues, draw_selection
from flower_app.report.data import RunData
from flower_app.report.figures import draw_bytes, draw_latency, draw_loss, draw_wall
from flower_app.report.timeline_figure import draw_timeline


@dataclass(frozen=True, kw_only=True)
class FigureSpec:
    """One figure of the report."""

    id: str
    """Id of the HTML element."""
    title: str
    caption: str
    several: str
    """Caption where several runs are beside each other."""
    draw: Callable[[Sequence[RunData]], Figure]
    """Raises :class:`NoData`."""
    modelled: bool = True
    """The figure shows the network as the system model has it, and is folded away."""


FIGURES = (
    FigureSpec(
        id="loss",
        title="Loss and metric",
        caption="Training loss of each round and what the evaluations found on held-out data, over rounds and over "
        "the virtual time that the system model gives them.",
        several="Training loss of each round and what the evaluations found on held-out data, one curve per run, over "
        "rounds and over the virtual time that the system model gives them.",
        draw=draw_loss,
        modelled=False,
    ),
    FigureSpec(
        id="latency",
        title="Latency of a round",
        caption="Virtual seconds are those of the scenario's devices and radio, by the paper's formulas; they have "
        "nothing to do with how long this machine took. What a round's latency is made of: local steps of the pipeline "
        "and upload of the slowest cluster, which sets it; the line is how long the selected clusters wait for the "
        'slowest, on average. On the right, with costs = "measured": what was predicted of the local steps, and what '
        "they took.",
        several="Left: virtual latency of each round. Right: its mean by parts, those of each round's slowest "
        "cluster, and the mean waiting of the selected clusters.",
        draw=draw_latency,
    ),
    FigureSpec(
        id="wall",
        title="Wall clock and faults",
        caption="Wall seconds are those of the machine that ran this. Left: what a round's went to: the local steps of "
        "the slowest cluster (computing, and waiting for the decoder in them), its weights' way to and from the "
        "devices, messages and waiting for others, and the server's planning, averaging, scoring and checkpoint. "
        "Right: faults at the end of the round in which they were recorded, by kind.",
        several="Wall seconds are those of the machines that ran these. Left: the mean of a round by what it went to. "
        "Right: faults at the end of the round in which they were recorded, by run and kind.",
        draw=draw_wall,
        modelled=False,
    ),
    FigureSpec(
        id="queues",
        title="Virtual queues and convergence bound",
        caption="Left: the virtual queue Y of each cluster, which grows while its bound exceeds Γmax. Right: the "
        "bound Γ of each cluster beside its long-term limit Γmax.",
        several="Left: the largest virtual queue Y of each round. Right: the bound Γ, mean over the clusters, beside "
        "its long-term limit Γmax.",
        draw=draw_queues,
    ),
    FigureSpec(
        id="selection",
        title="Who trained",
        caption="State of each cluster in each round; on the right the share of the rounds in which it trained.",
        several="State of each cluster in each round, by run; on the right the share of the rounds in which it "
        "trained.",
        draw=draw_selection,
    ),
    FigureSpec(
        id="energy",
        title="Energy",
        caption="Modelled energy of devices and uploads: of each round on the left, of each cluster over the whole "
        "run on the right.",
        several="Modelled energy: of each round on the left, by devices and uploads over the whole run on the right.",
        draw=draw_energy,
    ),
    FigureSpec(
        id="memory",
        title="Memory of the devices",
        caption="The most that each device held in any round. Modelled is what the scenario says that a TEB needs, of "
        "the planned devices' size; measured are the tensors of the model that was really trained, which may be far "
        "smaller (costs = model counts that model instead). The line is the whole model on one device. The scale is "
        "logarithmic where the values differ widely.",
        several="The most that any device of a run held: as the model counts it and as measured above an idle "
        "process, beside the whole model on one device. The scale is logarithmic where the values differ "
        "widely.",
        draw=draw_memory,
    ),
    FigureSpec(
        id="bytes",
        title="Bytes moved",
        caption="Bytes of each round: Flower's messages to and from the clusters as counted, and the activations and "
        "gradients between devices as modelled.",
        several="Bytes of each round, one curve per run: Flower's messages to and from the clusters as counted, and "
        "the activations and gradients between devices as modelled.",
        draw=draw_bytes,
    ),
    FigureSpec(
        id="timeline",
        title="The last step's pipelines",
        caption="One step of each cluster in the last round: above as modelled (virtual time), below as measured on "
        "this run's processes; numbers are micro-batches.",
        several="One step of each cluster in each run's last round: above as modelled (virtual time), below as "
        "measured; numbers are micro-batches.",
        draw=draw_timeline,
    ),
)
