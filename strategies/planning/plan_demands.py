"""What a plan asks of a cluster: seconds of its stages and links, and memory of its devices under its schedule."""

from __future__ import annotations

import numpy as np

from client_pipeline.partition.plan import ClusterPlan, micro_batch_sizes
from client_pipeline.runtime.event_simulator import Simulation, StageTimes, simulate_pipeline, stage_times
from client_pipeline.runtime.schedules import held_micro_batches
from client_pipeline.system.radio import Array
from strategies.dssda.evaluation import exceeds
from strategies.dssda.instance import Instance


def plan_times(instance: Instance, cluster: int, plan: ClusterPlan) -> StageTimes:
    """Seconds of each stage and link of a plan for each real micro-batch, as ``simulate_pipeline`` takes them.

    For each token slice where the plan cuts micro-batches into some.
    """
    devices = instance.device_arrays(cluster)
    order = [segment.device for segment in plan.segments()]
    return stage_times(
        num_blocks=[plan.delta[k] for k in order],
        speed=list((devices.phi * devices.f)[order]),
        link_rate=list(devices.rate[order]),
        micro_batches=micro_batch_sizes(instance.b, plan.m),
        o_f=instance.o_f,
        o_b=instance.o_b,
        o_b_scaling=instance.o_b_scaling,
        t0=(instance.t0 + devices.t0)[order],
        z_bits=instance.z_bits,
        g_bits=instance.g_bits,
        act_scaling=instance.act_scaling,
        lat=(instance.lat + devices.lat)[order],
        weight_share=instance.weight_share,
        num_slices=plan.token_slices,
        attention_share=instance.attention_share,
    )


def pipeline_of(instance: Instance, cluster: int, plan: ClusterPlan) -> Simulation:
    """Execute a step of a plan on the event simulator."""
    times = plan_times(instance, cluster, plan)
    return simulate_pipeline(plan.schedule, *times, num_slices=plan.token_slices)


def device_memory(instance: Instance, plan: ClusterPlan) -> Array:
    """Memory of each device under a plan, (K,) [byte].

    gamma_0 has a batch's activations as GPipe keeps them; under another schedule stage s keeps those of the largest
    micro-batches that it holds at once. A micro-batch whose weight gradients wait counts as a whole one. Token slices
    keep keys and values more than once: slice q has those of all slices up to its own in its attention, and for later
    slices its own.
    """
    sizes = micro_batch_sizes(instance.b, plan.m)
    memory = np.zeros(len(plan.delta))
    for stage, device in enumerate(order := plan.devices):
        held = sum(sizes[: held_micro_batches(plan.schedule, stage, len(order), plan.m)])
        kept = 1 + instance.kept_keys_share * extra_keys(plan.token_slices)
        teb = instance.gamma0 - instance.gamma_act * (1 - kept * held / instance.b)
        memory[device] = plan.delta[device] * teb
    return memory


def extra_keys(num_slices: int) -> float:
    """How often Q slices keep the keys and values of a micro-batch beside the once that it keeps them whole.

    In the attentions (Q + 1) / 2 times; and once, but for the last slice, which nobody comes after. Once for Q = 2.
    """
    return (num_slices - 1) / 2 + (num_slices - 1) / num_slices


def least_block_memory(instance: Instance) -> float:
    """Memory of a TEB that any schedule takes at least: with the activations of one micro-batch [byte]."""
    smallest = min(micro_batch_sizes(instance.b, max(m for m in instance.m_set if m <= instance.b)))
    return instance.gamma0 - instance.gamma_act * (1 - smallest / instance.b)


def memory_violations(instance: Instance, cluster: int, plan: ClusterPlan) -> list[str]:
    """Devices that lack the memory that a plan takes (C7), in words; empty if none does."""
    available = instance.device_arrays(cluster).mem
    return [
        f"C7: device {k} needs {needed:.6g} byte, has {has:.6g}"
        for k, (needed, has) in enumerate(zip(device_memory(instance, plan), available, strict=True))
        if exceeds(float(needed), float(has))
    ]
