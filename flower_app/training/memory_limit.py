"""Check that a model fits the devices' limited memory, before any node is asked."""

from __future__ import annotations

import math

from client_pipeline.partition.plan import micro_batch_sizes
from client_pipeline.system.scenario import Scenario


def check_memory_limit(limit: str, costs: str, scenario: Scenario, schedule: str = "") -> None:
    """Refuse devices whose memory is a hard limit and does not hold the model.

    GPipe keeps the activations of a whole batch. Under another schedule, and where devices compute activations again, a
    TEB is taken to keep those of one micro-batch, of as many as the planner may make: no plan needs less, and a plan
    may need more, which the planner refuses.

    Parameters
    ----------
    limit : ``runtime.memory-limit``
    costs : the run's ``costs``
    scenario : the run's network; without costs of the model, which nobody knows before it is there, less is checked
    schedule : ``planner.schedule``; empty: ``gpipe``
    """
    if limit == "none":
        return
    if costs != "model":
        raise ValueError(
            f"runtime.memory-limit: {limit} stops a device that needs more than was planned, so the plan must go by "
            f'what the model needs: expected costs = "model", found {costs!r}'
        )
    memory, num_blocks, batch_size = scenario.costs.memory, scenario.planner.num_blocks, scenario.planner.batch_size
    if memory is None:
        return
    kept, beside = batch_size, memory.device_memory(batch_size)
    why = "as GPipe keeps them"
    if memory.recompute or schedule not in ("", "gpipe"):
        most = min(scenario.planner.max_micro_batches, batch_size)
        kept = micro_batch_sizes(batch_size, most)[0]
        beside = memory.least_device_memory(batch_size, kept)
        why = f"one micro-batch of {most}" + (", computed again" if memory.recompute else f" under {schedule}")
    block = memory.block_memory(kept)
    for number, devices in enumerate(scenario.clusters):
        held = [max(math.floor((device.memory - beside) / block), 0) for device in devices]
        if sum(held) < num_blocks:
            sizes = ", ".join(f"{device.memory / 1e6:.0f}" for device in devices)
            raise ValueError(
                f"runtime.memory-limit: cluster {number}: its devices of {sizes} MB hold {sum(held)} of the model's "
                f"{num_blocks} TEBs: a TEB needs {block / 1e6:.1f} MB ({memory.held_bytes / 1e6:.1f} of weights and "
                f"states, the rest for the activations of {kept} examples: {why}), and a device "
                f"{beside / 1e6:.1f} MB beside them; lower batch-size or data.max-length, "
                f"{'' if memory.recompute else 'set runtime.recompute = always, '}use fewer bits (model.base-dtype) or "
                "devices with more memory"
            )
