"""The baseline ``vanilla-fl``: every device trains the whole model on its share of the batch; federated averaging.

In the run a cluster takes one whole-model step on b, which gives the same gradient as K devices with b/K each.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.system.energy import block_energy
from client_pipeline.system.latency import micro_batch_work, teb_time
from client_pipeline.timetable.event_simulator import StageTimes
from strategies.dssda.answer import SegmentChoice
from strategies.dssda.instance import Instance
from strategies.planned_strategy import PlannedStrategy
from strategies.planning.costs import StepWork
from strategies.planning.plan_demands import plan_times
from strategies.planning.policy import RoundPolicy
from strategies.planning.ranked import RankedSelection, random_rank


def whole_model_work(instance: Instance, cluster: int, plan: ClusterPlan) -> StepWork:
    """Return the work of a step in which each of the K devices trains the L TEBs on b / K samples.

        D = max_k L ((b/K) o_f + o_b) / (phi_k f_k)          energy_k = kappa_k L ((b/K) o_f + o_b) f_k^2 / phi_k

    Nothing goes over the links within the cluster.
    """
    del plan
    devices = instance.device_arrays(cluster)
    num_devices, num_tebs = len(devices.phi), sum(instance.teb_shares) or instance.L
    work = micro_batch_work(instance.o_f, instance.o_b, instance.b / num_devices, instance.o_b_scaling)
    device_s = num_tebs * teb_time(work, devices.phi, devices.f, instance.t0 + devices.t0)
    seconds = float(np.max(device_s))
    return StepWork(
        pipeline_s=seconds,
        pipeline_fused_s=seconds,
        pipeline_eq15_s=seconds,
        device_s=device_s,
        device_energy_j=num_tebs * block_energy(work, devices.phi, devices.f, devices.kappa),
        link_bytes=np.zeros(num_devices),
        device_memory_bytes=np.full(num_devices, instance.L * instance.gamma0),
    )


def whole_model_times(instance: Instance, cluster: int, plan: ClusterPlan) -> StageTimes:
    """Return the times of the one stage that runs, scaled to D, the time of the model's K devices."""
    times = plan_times(instance, cluster, plan)
    scale = whole_model_work(instance, cluster, plan).pipeline_s / float(times.forward_s.sum() + times.backward_s.sum())
    return times._replace(
        forward_s=scale * times.forward_s, backward_s=scale * times.backward_s, weight_s=scale * times.weight_s
    )


class VanillaFL(PlannedStrategy):
    """The whole model on every device: memory (C7) and device energy (C9) are waived, and marked so."""

    work = staticmethod(whole_model_work)
    times = staticmethod(whole_model_times)
    traits = replace(PlannedStrategy.traits, waives=("C7", "C9"))

    @classmethod
    def own_policy(cls, seed: int) -> RoundPolicy:
        """Return the policy: clusters drawn if channels are too few, channels by upload time, all allowed power."""
        return RankedSelection("vanilla-fl", random_rank(seed), _choice)


def _choice(instance: Instance, cluster: int) -> SegmentChoice:
    """Return all TEBs on the fastest device, as the run executes them."""
    devices = instance.device_arrays(cluster)
    fastest = int(np.argmax(devices.phi * devices.f))
    delta = tuple(instance.L if k == fastest else 0 for k in range(len(devices.phi)))
    plan = ClusterPlan(delta=delta, order=(fastest,), m=1)
    return SegmentChoice(delta, 1, fastest, whole_model_work(instance, cluster, plan).pipeline_s)
