"""Demands of a plan on a cluster: seconds of its stages and links, and memory of its devices under its schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from client_pipeline.partition.plan import ClusterPlan, micro_batch_sizes
from client_pipeline.system.device_memory import TebMemory
from client_pipeline.system.radio import Array
from client_pipeline.timetable.event_simulator import Simulation, StageTimes, simulate_pipeline, stage_times
from client_pipeline.timetable.schedules import held_at_backward
from strategies.dssda.evaluation import exceeds
from strategies.dssda.instance import Device, Instance


def plan_times(instance: Instance, cluster: int, plan: ClusterPlan) -> StageTimes:
    """Return each stage's and link's seconds for each real micro-batch, as ``simulate_pipeline`` takes them.

    If the plan cuts micro-batches into token slices, each slice has its own time.
    """
    devices = instance.device_arrays(cluster)
    order = plan.devices
    loads = instance.loads(plan.delta, order)
    return stage_times(
        num_blocks=[loads[k] for k in order],
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
    """Return the memory of each device under a plan, as the device itself counts it, (K,) [byte].

    gamma_0 has a batch's activations as GPipe keeps them; under another schedule stage s keeps those of the largest
    micro-batches that it holds at once. Token slices keep keys and values more than once. See
    :meth:`client_pipeline.system.device_memory.TebMemory.stage_held`.
    """
    return _each_stage(instance, plan, _teb_memory(instance).stage_held)


def _each_stage(instance: Instance, plan: ClusterPlan, stage_bytes: Callable[..., float]) -> Array:
    sizes = micro_batch_sizes(instance.b, plan.m)
    memory = np.zeros(len(plan.delta))
    for stage, device in enumerate(order := plan.devices):
        moments = held_at_backward(plan.schedule, stage, len(order), plan.m)
        memory[device] = stage_bytes(plan.delta[device], moments, sizes, plan.token_slices)
    return memory


def _teb_memory(instance: Instance) -> TebMemory:
    """Return the memory of TEBs; without a model by gamma_0, where a waiting micro-batch counts as a whole one."""
    if instance.memory is not None:
        return instance.memory
    return TebMemory(
        held_bytes=instance.gamma0 - instance.gamma_act,
        saved_sample_bytes=instance.gamma_act / instance.b,
        kept_keys_sample_bytes=instance.kept_keys_share * instance.gamma_act / instance.b,
        activation_sample_bytes=0.0,
        pass_bytes=0.0,
        pass_sample_bytes=0.0,
    )


def lean_instance(instance: Instance) -> Instance:
    """Return the problem with the least memory that any schedule takes: that of one smallest micro-batch.

    A plan that is made with it may fit no schedule; :func:`memory_violations` checks it.
    """
    smallest = _smallest_micro_batch(instance)
    gamma0 = instance.gamma0 - instance.gamma_act * (1 - smallest / instance.b)
    lean = replace(instance, gamma0=gamma0, gamma_act=0.0, memory=None)
    if instance.memory is None:
        return lean
    spared = instance.memory.device_memory(instance.b) - instance.memory.least_device_memory(instance.b, smallest)
    return replace(lean, clusters=tuple(replace(c, devices=_with_room(c.devices, spared)) for c in lean.clusters))


def _with_room(devices: Sequence[Device], spared: float) -> tuple[Device, ...]:
    # A device without any memory cannot be used.
    return tuple(replace(device, mem=device.mem + spared) if device.mem > 0 else device for device in devices)


def _smallest_micro_batch(instance: Instance) -> int:
    """Return the largest micro-batch of a batch that is cut into the most parts allowed [samples]."""
    return max(micro_batch_sizes(instance.b, max(m for m in instance.m_set if m <= instance.b)))


def memory_violations(instance: Instance, cluster: int, plan: ClusterPlan) -> list[str]:
    """Return a text for each device that lacks a plan's memory (C7); empty if none does."""
    needed_bytes, memory = device_memory(instance, plan), instance.device_arrays(cluster).mem
    if instance.memory is not None:
        # The need beside TEBs was subtracted as of one micro-batch; the plan's own may be less.
        beside = _each_stage(instance, plan, instance.memory.stage_peak) - needed_bytes
        spared = np.maximum(instance.memory.device_memory(instance.b) - beside, 0.0)
        memory = np.where(memory > 0, memory + spared, memory)
    return [
        f"C7: device {k} needs {needed:.6g} byte, has {has:.6g}"
        for k, (needed, has) in enumerate(zip(needed_bytes, memory, strict=True))
        if exceeds(float(needed), float(has))
    ]
