"""A round as the system runs it: activations stream up while the pipeline works, gradients stream down.

Eq. (11) adds the time of all activations of a round's local steps to the time of its pipelines, one after the other. In
the system a control unit sends each micro-batch's activations to the server as soon as the last device has made them,
the decoder computes, and the gradient comes down while the next micro-batch goes up::

    device - ... - device -> control unit ~ uplink ~> decoder ~ downlink ~> control unit -> device - ... - device

So the event simulator gets one stage more, the decoder, behind a link whose two directions are the uplink's and the
downlink's rates; the control unit sends while the last device goes on. A local step ends for all clusters together: the
decoder takes its own step after the micro-batches of all. The encoder comes down before the first step and goes up
after the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from client_pipeline.partition.plan import ClusterPlan, micro_batch_sizes
from client_pipeline.system.radio import upload_time
from client_pipeline.timetable.event_simulator import Simulation, simulate_pipeline
from strategies.dssda.answer import ClusterAnswer
from strategies.dssda.instance import Instance
from strategies.planning.plan_demands import plan_times


def streamed_step(instance: Instance, cluster: int, plan: ClusterPlan, uplink_rate: float) -> Simulation:
    """Execute one local step of a cluster, the decoder's part included.

    Parameters
    ----------
    instance : of the round, with ``z_enc_bits`` that go up of a micro-batch or a sample; as many come down
    cluster : of it
    plan : its own
    uplink_rate : of its control unit [bit/s]
    """
    times, last_slice = plan_times(instance, cluster, plan), np.arange(plan.token_slices) == plan.token_slices - 1
    sizes = np.array(micro_batch_sizes(instance.b, plan.m), dtype=np.float64)
    units = (sizes if instance.act_scaling == "sample" else np.ones_like(sizes))[None, :]
    # Token slices are joined before the uplink: a micro-batch's last slice takes the time of all, both ways.
    units = np.kron(units, last_slice)
    bits, nothing = units * instance.z_enc_bits, np.zeros_like(units)
    down_s = bits / instance.downlink_rate if instance.downlink_rate > 0 else nothing
    return simulate_pipeline(
        plan.schedule,
        np.vstack([times.forward_s, units * instance.decoder_s]),
        np.vstack([times.backward_s, nothing]),
        np.vstack([times.forward_link_s, bits / uplink_rate]),
        np.vstack([times.backward_link_s, down_s]),
        np.vstack([times.weight_s, nothing]),
        links=["blocking"] * (len(times.forward_s) - 1) + ["overlapping"],
        answers_at_once=True,
        num_slices=plan.token_slices,
    )


def streamed_latency(
    instance: Instance,
    trained: Mapping[int, tuple[ClusterPlan, ClusterAnswer]],
    shares: Mapping[int, float] = MappingProxyType({}),
) -> float | None:
    """Return the time of a round: encoder down, local steps that end together, encoder up [s].

    Parameters
    ----------
    instance : of the round
    trained : plan and answer of each cluster that trains
    shares : share of a cluster's steps that are worked, by its number; all where it is missing

    Returns
    -------
    None without activations that go up, or without a cluster that has a channel.
    """
    steps, uploads, downloads = [], [], []
    for n, (plan, part) in trained.items():
        if not instance.z_enc_bits or part.power_w is None or part.channel is None:
            return None
        rate, encoder_bits = float(instance.uplink_rate(n, part.power_w, part.channel)), instance.clusters[n].up.t_bits
        steps.append(shares.get(n, 1.0) * streamed_step(instance, n, plan, rate).makespan)
        uploads.append(float(upload_time(encoder_bits, rate)))
        downloads.append(encoder_bits / instance.downlink_rate if instance.downlink_rate > 0 else 0.0)
    return max(downloads) + instance.steps * max(steps) + max(uploads) if steps else None
